//! Enums whose variants are option words.

use foreshore_types::similar::suggestion;
use serde_json::Value;

use super::{FlagValue, JsonError, JsonValue, Walk, one_of};

#[derive(Debug)]
pub struct Word<T: 'static> {
    pub value: T,
    pub json: &'static str,
    /// Alternative names in JSON.
    pub json_aliases: &'static [&'static str],
    /// Word in the flag.
    pub flag: &'static str,
    /// Alternative words in the flag. The name in JSON is also accepted.
    pub flag_aliases: &'static [&'static str],
    /// True if the help and errors list the word.
    pub is_shown: bool,
}

/// Enum whose variants are option words. JSON accepts only the exact names. Flags also accept other
/// words, and ignore case.
pub trait Words: Copy + PartialEq + 'static {
    /// Names and words of each variant.
    const WORDS: &'static [Word<Self>];

    /// Names and words of this variant.
    fn word(self) -> &'static Word<Self> {
        Self::WORDS.iter().find(|word| word.value == self).expect("every variant has a word")
    }

    /// Parses a word of the flag.
    fn word_from_flag(text: &str) -> Option<Self> {
        let has = |word: &&Word<Self>| {
            let mut names =
                [word.flag, word.json].into_iter().chain(word.flag_aliases.iter().copied());
            names.any(|name| name.eq_ignore_ascii_case(text))
        };
        Self::WORDS.iter().find(has).map(|word| word.value)
    }

    /// Words of the flag that the help and errors list.
    fn flag_words() -> Vec<&'static str> {
        Self::WORDS.iter().filter(|word| word.is_shown).map(|word| word.flag).collect()
    }

    /// Parses a name in JSON.
    fn word_from_json(json: &Value, walk: &Walk) -> Result<Self, JsonError> {
        let has = |word: &&Word<Self>| {
            word.json == json || word.json_aliases.iter().any(|name| name == json)
        };
        let found = Self::WORDS.iter().find(has);
        found.map(|word| word.value).ok_or_else(|| {
            let shown = Self::WORDS.iter().filter(|word| word.is_shown).map(|word| word.json);
            let shown: Vec<_> = shown.collect();
            let similar = json.as_str().map(|text| suggestion(text, shown.iter().copied()));
            walk.wrong(json, one_of(&shown) + &similar.unwrap_or_default())
        })
    }
}

impl<T: Words> JsonValue for T {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        Self::word_from_json(&json, walk)
    }
}

impl<T: Words> FlagValue for T {
    fn syntax() -> String {
        Self::flag_words().join("|")
    }

    fn expected() -> String {
        one_of(&Self::flag_words())
    }

    fn words() -> Vec<&'static str> {
        Self::flag_words()
    }

    fn read(text: &str) -> Option<Self> {
        Self::word_from_flag(text)
    }

    fn show(&self) -> Option<String> {
        let word = self.word();
        word.is_shown.then(|| word.flag.to_owned())
    }
}
