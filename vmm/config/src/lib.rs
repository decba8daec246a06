//! Configuration keys of Foreshore. One table per section defines the struct, the flag, the JSON
//! format, the help and the errors.
//!
//! [`section`] generates a section from its table, and [`words`] generates an enum of option words.
//! The type of a key defines the format of its value: [`FlagValue`] in a flag, [`JsonValue`] in
//! JSON. [`Options`] splits the value of a flag. [`Walk`] parses JSON and tracks the path of the
//! current field.

#![forbid(unsafe_code)]

mod bounds;
mod error;
mod flag;
mod help;
mod json;
mod list;
mod macros;
pub mod name;
pub mod refused_keys;
pub mod size;
mod unknown_keys;
mod unsupported;
mod volume_format;
mod word;

// The macros use these paths, so that callers need not depend on these crates.
#[doc(hidden)]
pub use {serde, serde_json};

pub use self::bounds::{check_range, range_text};
pub use self::error::{ConfigError, PATH_OR_FD, SectionError, bounds};
pub use self::flag::{FlagValue, InheritedFd, Label, OFF, Options};
pub use self::help::one_of;
pub use self::json::{FieldError, JsonError};
pub use self::json::{JsonValue, Object, Walk, read_body};
pub use self::list::{Item, digits, items, range, unbracketed};
pub use self::unknown_keys::Unknown;
pub use self::unsupported::{Refused, asks_for_nothing};
pub use self::word::{Word, Words};

/// Key of a flag.
#[derive(Clone, Debug)]
pub struct Key {
    pub name: &'static str,
    /// Form of the value, for the help.
    pub syntax: fn() -> String,
    /// Default value in the syntax of the flag.
    pub default: Option<String>,
    pub range: Option<String>,
    /// True if the flag may begin with its value, without the key.
    pub is_bare: bool,
    /// True if the key may be given several times.
    pub is_repeated: bool,
    pub about: &'static str,
}

/// Section of the configuration that a flag sets.
pub trait Section: Object {
    /// Description for the help.
    const ABOUT: &'static str;
    /// Keys of the flag that have no value.
    const WORDS: &'static [&'static str] = &[];

    /// Keys of the flag that have a value.
    fn keys() -> Vec<Key>;

    /// Parses the section from the keys of a flag.
    fn from_options(options: &Options) -> Result<Self, ConfigError>;
}

/// Table of a section, independent of the section's type.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Flag that errors name.
    pub flag: &'static str,
    /// Description for the help.
    pub about: &'static str,
    /// Function that returns the keys that have a value.
    pub keys: fn() -> Vec<Key>,
    /// Keys that have no value.
    pub words: &'static [&'static str],
    /// Keys that are refused unless their value is neutral.
    pub refused: &'static [&'static [Refused]],
}

impl Table {
    pub const fn of<T: Section>() -> Self {
        Self { flag: T::FLAG, about: T::ABOUT, keys: T::keys, words: T::WORDS, refused: T::REFUSED }
    }

    /// Returns the table for another flag with the same keys.
    pub const fn named(self, flag: &'static str, about: &'static str) -> Self {
        Self { flag, about, ..self }
    }

    /// Names of the keys that have a value.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        (self.keys)().into_iter().map(|key| key.name)
    }
}

#[cfg(test)]
mod tests;
