//! Parses flags in Cloud Hypervisor's syntax: `key=value,key=value`. Some keys have no value.
//!
//! As in Cloud Hypervisor's parser, a comma within double quotes or brackets is not a separator.
//! Quotes are removed, values are trimmed, and a key with an empty value counts as not given. If a
//! flag begins with a value without its key, this value extends unchanged up to the next key.

use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;

use foreshore_types::similar::suggestion;
use foreshore_types::size::{self, Size};
use serde::Serialize;

use super::list::digits;
use super::{JsonValue, Key, Refused, Table};
use crate::error::ConfigError;
use crate::text_value;

pub trait FlagValue: JsonValue {
    /// True for a size in bytes. Errors then show its bounds with units.
    const IS_SIZE: bool = false;

    /// Form of the value, for the help.
    fn syntax() -> String;

    /// Text after "is not" in an error.
    fn expected() -> String;

    /// Words that errors suggest for a similar value.
    fn words() -> Vec<&'static str> {
        Vec::new()
    }

    /// Parses the trimmed value.
    fn read(text: &str) -> Option<Self>;

    /// Returns the error for a value that cannot be parsed.
    fn error(flag: &'static str, key: &'static str, text: &str) -> ConfigError {
        let expected = Self::expected() + &suggestion(text, Self::words());
        let (key, value) = (key.to_owned(), text.to_owned());
        ConfigError::BadValue { flag, key, value, expected }
    }

    /// Formats the value as a default, for the help. `None` if the help shows no default.
    fn show(&self) -> Option<String> {
        None
    }
}

impl<T: FlagValue> FlagValue for Option<T> {
    fn syntax() -> String {
        T::syntax()
    }

    fn expected() -> String {
        T::expected()
    }

    fn read(text: &str) -> Option<Self> {
        T::read(text).map(Some)
    }

    fn error(flag: &'static str, key: &'static str, text: &str) -> ConfigError {
        T::error(flag, key, text)
    }

    fn show(&self) -> Option<String> {
        self.as_ref()?.show()
    }
}

impl FlagValue for bool {
    fn syntax() -> String {
        "on|off".to_owned()
    }

    fn expected() -> String {
        "on or off".to_owned()
    }

    fn words() -> Vec<&'static str> {
        [ON, OFF].concat()
    }

    fn read(text: &str) -> Option<Self> {
        let is = |words: &[&str]| words.iter().any(|word| word.eq_ignore_ascii_case(text));
        is(ON).then_some(true).or_else(|| is(OFF).then_some(false))
    }

    fn show(&self) -> Option<String> {
        Some(if *self { ON[0] } else { OFF[0] }.to_owned())
    }
}

/// Values that turn a switch off.
pub const OFF: &[&str] = &["off", "false"];
/// Values that turn a switch on.
pub(crate) const ON: &[&str] = &["on", "true"];

macro_rules! number_value {
    ($($Number:ty)*) => { $(
        impl FlagValue for $Number {
            fn syntax() -> String {
                "N".to_owned()
            }

            fn expected() -> String {
                format!("a whole number from 0 to {}", <$Number>::MAX)
            }

            fn read(text: &str) -> Option<Self> {
                digits(text)
            }

            fn show(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )* };
}

number_value!(u8 u16 u32);

/// A `u64` is a size in bytes. Keys that are counts use smaller types.
impl FlagValue for u64 {
    const IS_SIZE: bool = true;

    fn syntax() -> String {
        "SIZE".to_owned()
    }

    fn expected() -> String {
        format!("a size: {}", size::SYNTAX)
    }

    fn read(text: &str) -> Option<Self> {
        size::parse(text).ok()
    }

    /// Returns an error with the reason, for example both possible meanings of `64MB`.
    fn error(flag: &'static str, key: &'static str, text: &str) -> ConfigError {
        let error = size::parse(text).expect_err("an invalid size");
        ConfigError::NotASize { flag, key, error }
    }

    fn show(&self) -> Option<String> {
        Some(Size(*self).compact())
    }
}

impl FlagValue for PathBuf {
    fn syntax() -> String {
        "PATH".to_owned()
    }

    fn expected() -> String {
        "a path".to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self::from(text))
    }

    fn show(&self) -> Option<String> {
        self.as_path().to_str().map(str::to_owned)
    }
}

impl FlagValue for String {
    fn syntax() -> String {
        "NAME".to_owned()
    }

    fn expected() -> String {
        "a name".to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        Some(text.to_owned())
    }

    fn show(&self) -> Option<String> {
        Some(self.clone())
    }
}

/// Keys and values of a flag.
#[derive(Debug)]
pub struct Options {
    flag: &'static str,
    given: Vec<(&'static str, String)>,
    words: Vec<&'static str>,
}

impl Options {
    /// Splits a flag's value into keys and values. `more` lists keys that are accepted in addition
    /// to the table.
    pub fn parse(table: &Table, more: &[&'static str], text: &str) -> Result<Self, ConfigError> {
        let flag = table.flag;
        let in_table = (table.keys)();
        let keys: Vec<_> =
            in_table.iter().map(|key| key.name).chain(more.iter().copied()).collect();
        let (bare, text) = split_bare(&in_table, text.trim());
        let mut options = Self { flag, given: Vec::from_iter(bare), words: Vec::new() };
        let mut seen: Vec<_> = options.given().map(|(key, _)| key).collect();
        let is_repeated = |name| in_table.iter().any(|key| key.is_repeated && key.name == name);
        let parts = match text {
            "" => Vec::new(),
            text => split(text, &[',']).map_err(|what| {
                let text = text.to_owned();
                ConfigError::Unbalanced { flag, text, what }
            })?,
        };
        for part in parts {
            let (key, value) = match part.split_once('=') {
                Some((key, value)) => (key.trim(), Some(value.trim())),
                None => (part.trim(), None),
            };
            if let Some(refused) = Refused::find(table.refused, key) {
                if value.is_some_and(|value| refused.is_neutral_text(value)) {
                    continue;
                }
                let value =
                    value.map_or_else(String::new, |value| format!("={}", value.escape_debug()));
                return Err(refused.error(flag, value));
            }
            let known: &[_] = if value.is_some() { &keys } else { table.words };
            let Some(key) = known.iter().copied().find(|known| *known == key) else {
                return Err(unknown(flag, key, value.is_some(), table.words, &keys));
            };
            if seen.contains(&key) && !is_repeated(key) {
                return Err(ConfigError::Duplicate { flag, key: key.to_owned() });
            }
            seen.push(key);
            match value {
                None => options.words.push(key),
                Some("") => {}
                Some(value) => options.given.push((key, unquoted(value))),
            }
        }
        Ok(options)
    }

    /// Keys without a value that were given.
    pub fn words(&self) -> &[&'static str] {
        &self.words
    }

    /// Keys with a value that were given, with their values.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.given.iter().map(|(key, value)| (*key, value.as_str()))
    }

    /// Parses the value of a key, if the key is given. Values of a repeated key are joined by
    /// commas.
    pub fn take<T: FlagValue>(&self, key: &'static str) -> Result<Option<T>, ConfigError> {
        let given = self.given().filter(|(given, _)| *given == key);
        let values: Vec<_> = given.map(|(_, value)| value).collect();
        if values.is_empty() {
            return Ok(None);
        }
        let value = values.join(",");
        T::read(&value).map(Some).ok_or_else(|| T::error(self.flag, key, &value))
    }

    /// Returns the value for a key that is not given and has no default.
    pub fn absent<T: JsonValue>(&self, key: &'static str) -> Result<T, ConfigError> {
        T::absent().ok_or(ConfigError::Missing { flag: self.flag, key })
    }
}

/// Returns the error for a key that is unknown, that lacks its value, or that must not have a
/// value.
fn unknown(
    flag: &'static str,
    key: &str,
    has_value: bool,
    words: &[&'static str],
    keys: &[&'static str],
) -> ConfigError {
    let key = key.to_owned();
    if !has_value && keys.contains(&&*key) {
        return ConfigError::BadValue {
            flag,
            key,
            value: String::new(),
            expected: "a value".to_owned(),
        };
    }
    let keys = keys.iter().map(|key| format!("{key}="));
    let known: Vec<_> = words.iter().map(|&word| word.to_owned()).chain(keys).collect();
    ConfigError::UnknownKey { flag, key, known: known.join(", ") }
}

/// Splits off the first value of a flag if this value has no key.
fn split_bare<'a>(keys: &[Key], text: &'a str) -> (Option<(&'static str, String)>, &'a str) {
    let begins = |key: &Key| text.starts_with(&format!("{}=", key.name));
    let Some(bare) = keys.iter().find(|key| key.is_bare) else { return (None, text) };
    if text.is_empty() || keys.iter().any(begins) {
        return (None, text);
    }
    let end = keys.iter().filter_map(|key| text.find(&format!(",{}=", key.name))).min();
    let (value, rest) = end.map_or((text, ""), |end| (&text[..end], &text[end + 1..]));
    (Some((bare.name, value.trim().to_owned())), rest)
}

/// Splits at separators that are outside of quotes and brackets. The error names an unclosed quote
/// or bracket.
pub(super) fn split<'a>(text: &'a str, separators: &[char]) -> Result<Vec<&'a str>, &'static str> {
    let (mut parts, mut start, mut depth, mut quoted) = (Vec::new(), 0, 0u32, false);
    for (at, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '[' => depth += 1,
            ']' => depth = depth.checked_sub(1).ok_or("bracket")?,
            _ if depth == 0 && separators.contains(&c) => {
                parts.push(&text[start..at]);
                start = at + c.len_utf8();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    match (quoted, depth) {
        (true, _) => Err("quote"),
        (false, 0) => Ok(parts),
        (false, _) => Err("bracket"),
    }
}

/// Removes quotes. Within quotes, two consecutive quotes stand for one quote.
fn unquoted(value: &str) -> String {
    let (mut text, mut quoted, mut previous) = (String::new(), false, None);
    for c in value.chars() {
        if c == '"' {
            if previous == Some('"') && !quoted {
                text.push(c);
            }
            quoted = !quoted;
        } else {
            text.push(c);
        }
        previous = Some(c);
    }
    text
}

/// Highest descriptor of the standard streams.
const STANDARD_ERROR: RawFd = 2;

/// Number of an inherited descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct InheritedFd(pub RawFd);

text_value!(InheritedFd, "N", "the number of an inherited file descriptor, 3 and up", |text| {
    text.parse().ok().filter(|fd| *fd > STANDARD_ERROR).map(InheritedFd)
});

/// Name without control characters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Label(pub String);

text_value!(Label, "NAME", "a name without control characters", |text| {
    let is_name = !text.is_empty() && !text.contains(char::is_control);
    is_name.then(|| Label(text.to_owned()))
});

text_value!(IpAddr, "ADDRESS", "an IPv4 or IPv6 address", |text| text.parse().ok());
