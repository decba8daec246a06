//! Lists in a flag. The form is `[a,b]`, `a:b` (as in older versions of Cloud Hypervisor), or a
//! single item.

use std::str::FromStr;

use super::JsonValue;
use super::flag::{FlagValue, split};

pub trait Item: JsonValue {
    /// Form of a list, for the help.
    const SYNTAX: &'static str;
    /// Text after "is not" in an error.
    const EXPECTED: &'static str;

    /// Parses an item, which is one value or a range of values.
    fn read_item(text: &str) -> Option<Vec<Self>>;
}

impl<T: Item> FlagValue for Vec<T> {
    fn syntax() -> String {
        T::SYNTAX.to_owned()
    }

    fn expected() -> String {
        T::EXPECTED.to_owned()
    }

    fn read(text: &str) -> Option<Self> {
        let mut values = Vec::new();
        for item in items(text)? {
            values.extend(T::read_item(item)?);
        }
        Some(values)
    }
}

impl Item for u8 {
    const SYNTAX: &'static str = "[N-N,N]";
    const EXPECTED: &'static str = "a list of numbers, as 0-2:5 or [0-2,5]";

    fn read_item(text: &str) -> Option<Vec<Self>> {
        let (first, last) = range(text)?;
        Some((first..=last).collect())
    }
}

impl Item for String {
    const SYNTAX: &'static str = "[ID,ID]";
    const EXPECTED: &'static str = "a list of ids, as mem0:mem1";

    fn read_item(text: &str) -> Option<Vec<Self>> {
        (!text.is_empty()).then(|| vec![text.to_owned()])
    }
}

/// Text between the brackets of a list, or the whole text if it has no brackets.
pub fn unbracketed(text: &str) -> &str {
    text.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(text)
}

/// Items of a list. `None` if the list contains unbalanced brackets.
pub fn items(text: &str) -> Option<Vec<&str>> {
    match unbracketed(text) {
        "" => Some(Vec::new()),
        inner => {
            split(inner, &[',', ':']).ok().map(|items| items.into_iter().map(str::trim).collect())
        }
    }
}

/// Parses a number without a sign.
pub fn digits<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Parses `3` or `0-2`.
pub fn range<T: FromStr + PartialOrd + Copy>(text: &str) -> Option<(T, T)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (digits(first)?, digits(last)?);
    (first <= last).then_some((first, last))
}
