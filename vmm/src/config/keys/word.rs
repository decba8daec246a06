//! Enums of option words.

use serde_json::Value;

use super::{JsonError, Walk, one_of};

/// A variant's names.
#[derive(Debug)]
pub(crate) struct Word<T: 'static> {
    /// Variant.
    pub value: T,
    /// Name in JSON.
    pub json: &'static str,
    /// Word in the flag.
    pub flag: &'static str,
    /// Other names that are read.
    pub others: &'static [&'static str],
    /// The help and errors name it.
    pub is_shown: bool,
}

/// An enum of option words. In JSON names are exact; a flag has them in any case of letters.
pub(crate) trait Words: Copy + PartialEq + 'static {
    /// Names of every variant.
    const WORDS: &'static [Word<Self>];

    /// Names of this variant.
    fn word(self) -> &'static Word<Self> {
        Self::WORDS.iter().find(|word| word.value == self).expect("every variant has a word")
    }

    /// Variant with a name for which `is` returns true.
    fn find(is: impl Fn(&str) -> bool) -> Option<Self> {
        let has =
            |word: &&Word<Self>| is(word.json) || is(word.flag) || word.others.iter().any(|name| is(name));
        Self::WORDS.iter().find(has).map(|word| word.value)
    }

    /// Words of the flag that are shown.
    fn flag_words() -> Vec<&'static str> {
        Self::WORDS.iter().filter(|word| word.is_shown).map(|word| word.flag).collect()
    }

    /// Reads a name in JSON.
    fn word_from_json(json: &Value, walk: &Walk) -> Result<Self, JsonError> {
        let found = json.as_str().and_then(|text| Self::find(|name| name == text));
        found.ok_or_else(|| {
            let shown = Self::WORDS.iter().filter(|word| word.is_shown).map(|word| word.json);
            walk.wrong(json, one_of(&shown.collect::<Vec<_>>()))
        })
    }
}
