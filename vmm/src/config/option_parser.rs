//! Cloud Hypervisor's syntax of a flag's value: `key=value,key=value`, some keys without a value.
//!
//! A comma within double quotes or brackets does not separate; quotes around a value are taken off.

use std::path::PathBuf;
use std::str::FromStr;

use foreshore_types::size;

use super::error::ConfigError;

/// A key of Cloud Hypervisor that foreshore refuses, unless it asks for what is the case anyway.
#[derive(Debug)]
pub struct Refused {
    /// The key.
    pub key: &'static str,
    /// Values that ask for nothing.
    pub neutral: &'static [&'static str],
    /// Why it is refused otherwise.
    pub why: &'static str,
}

/// The values of a switch that is off.
pub const OFF: &[&str] = &["off", "false"];
/// The values of a switch that is on.
pub const ON: &[&str] = &["on", "true"];

/// What one flag understands.
#[derive(Debug)]
pub struct Syntax {
    /// The flag, as it is named in errors.
    pub flag: &'static str,
    /// Keys with a value.
    pub keys: &'static [&'static str],
    /// Keys that stand alone.
    pub words: &'static [&'static str],
    /// Keys of Cloud Hypervisor that are refused, those that other flags refuse as well by themselves.
    pub refused: &'static [&'static [Refused]],
}

/// A flag's value, taken apart.
#[derive(Debug)]
pub struct Options {
    flag: &'static str,
    given: Vec<(&'static str, String)>,
}

impl Syntax {
    /// Takes `text` apart.
    pub fn parse(&self, text: &str) -> Result<Options, ConfigError> {
        let mut options = Options { flag: self.flag, given: Vec::new() };
        for part in split(self.flag, text)? {
            let (key, value) = part.split_once('=').map_or((part, None), |(key, value)| (key, Some(value)));
            self.take(&mut options, key, value)?;
        }
        Ok(options)
    }

    /// Keys of Cloud Hypervisor that are refused.
    pub fn refused(&self) -> impl Iterator<Item = &'static Refused> {
        self.refused.iter().copied().flatten()
    }

    fn take(&self, options: &mut Options, key: &str, value: Option<&str>) -> Result<(), ConfigError> {
        if let Some(refused) = self.refused().find(|refused| refused.key == key) {
            if value.is_some_and(|value| refused.neutral.contains(&value)) {
                return Ok(());
            }
            return Err(ConfigError::Unsupported {
                flag: self.flag,
                key: refused.key,
                value: value.map_or_else(String::new, |value| format!("={}", value.escape_debug())),
                why: refused.why,
            });
        }
        let known = if value.is_some() { self.keys } else { self.words };
        let Some(key) = known.iter().copied().find(|known| *known == key) else {
            return Err(self.unknown(key, value.is_some()));
        };
        if options.text(key).is_some() {
            return Err(ConfigError::Duplicate { flag: self.flag, key: key.to_owned() });
        }
        options.given.push((key, unquote(value.unwrap_or_default()).to_owned()));
        Ok(())
    }

    fn unknown(&self, key: &str, has_value: bool) -> ConfigError {
        // A known key that only lacks its value, or has one too many, is told apart from an unknown one.
        if !has_value && self.keys.contains(&key) {
            return ConfigError::BadValue {
                flag: self.flag,
                key: key.to_owned(),
                value: String::new(),
                expected: "a value".to_owned(),
            };
        }
        let keys = self.keys.iter().map(|key| format!("{key}="));
        let known: Vec<_> = self.words.iter().map(|&word| word.to_owned()).chain(keys).collect();
        ConfigError::UnknownKey { flag: self.flag, key: key.to_owned(), known: known.join(", ") }
    }
}

impl Options {
    /// Whether a word is there.
    pub fn has(&self, word: &str) -> bool {
        self.text(word).is_some()
    }

    /// The same, as if keys without a value had not been given.
    pub fn without_empty(mut self) -> Self {
        self.given.retain(|(_, value)| !value.is_empty());
        self
    }

    /// The keys that were given, with their values as they were written.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.given.iter().map(|(key, value)| (*key, value.as_str()))
    }

    /// A key's value as it was written.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.given.iter().find(|(given, _)| *given == key).map(|(_, value)| value.as_str())
    }

    /// A key's value by whatever reads it; `expected` completes "is not ...".
    pub fn read<T>(
        &self,
        key: &'static str,
        expected: &str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.text(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| ConfigError::BadValue {
            flag: self.flag,
            key: key.to_owned(),
            value: value.to_owned(),
            expected: expected.to_owned(),
        })
    }

    /// A size in bytes.
    pub fn size(&self, key: &'static str) -> Result<Option<u64>, ConfigError> {
        let Some(text) = self.text(key) else { return Ok(None) };
        let bytes = size::parse(text);
        bytes.map(Some).map_err(|error| ConfigError::NotASize { flag: self.flag, key, error })
    }

    /// A whole number from 0 to the largest that `T` has.
    pub fn number<T: FromStr>(&self, key: &'static str) -> Result<Option<T>, ConfigError> {
        let expected = format!("a whole number of {} bits", 8 * size_of::<T>());
        self.read(key, &expected, |text| {
            let digits = text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse().ok()).flatten()
        })
    }

    /// A switch.
    pub fn switch(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        self.read(key, "on or off", |text| match text {
            _ if ON.contains(&text) => Some(true),
            _ if OFF.contains(&text) => Some(false),
            _ => None,
        })
    }

    /// A path.
    pub fn path(&self, key: &'static str) -> Result<Option<PathBuf>, ConfigError> {
        self.read(key, "a path", |text| (!text.is_empty()).then(|| PathBuf::from(text)))
    }

    /// The value of a key that must be there.
    pub fn required<T>(&self, key: &'static str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or(ConfigError::Missing { flag: self.flag, key })
    }
}

/// Cuts at the commas that are in neither quotes nor brackets.
fn split<'a>(flag: &'static str, text: &'a str) -> Result<Vec<&'a str>, ConfigError> {
    let unbalanced = |what| ConfigError::Unbalanced { flag, text: text.to_owned(), what };
    let (mut parts, mut start, mut depth, mut quoted) = (Vec::new(), 0, 0u32, false);
    for (at, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '[' => depth += 1,
            ']' => depth = depth.checked_sub(1).ok_or_else(|| unbalanced("bracket"))?,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if quoted {
        return Err(unbalanced("quote"));
    }
    if depth != 0 {
        return Err(unbalanced("bracket"));
    }
    // Nothing at all is no part, as a flag without a value is.
    if !text.is_empty() {
        parts.push(&text[start..]);
    }
    Ok(parts)
}

fn unquote(value: &str) -> &str {
    value.strip_prefix('"').and_then(|inner| inner.strip_suffix('"')).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SYNTAX: Syntax = Syntax {
        flag: "--thing",
        keys: &["size", "count", "path", "shared", "list"],
        words: &["tty"],
        refused: &[&[Refused { key: "hugepages", neutral: OFF, why: "there are none" }]],
    };

    fn error(text: &str) -> String {
        SYNTAX.parse(text).unwrap_err().to_string()
    }

    #[test]
    fn keys_and_words_are_found() {
        let options = SYNTAX.parse("size=4M,tty,shared=on,count=7,path=/a=b,list=[1,2]").unwrap();
        assert_eq!(options.size("size"), Ok(Some(4 << 20)));
        assert_eq!(options.number::<u8>("count"), Ok(Some(7)));
        assert_eq!(options.switch("shared"), Ok(Some(true)));
        assert_eq!(options.path("path"), Ok(Some("/a=b".into())));
        assert_eq!(options.text("list"), Some("[1,2]"));
        assert!(options.has("tty"));
        assert!(!SYNTAX.parse("size=1").unwrap().has("tty"));
    }

    #[test]
    fn a_quoted_comma_does_not_separate() {
        let options = SYNTAX.parse(r#"path="/a,b",count=1"#).unwrap();
        assert_eq!(options.path("path"), Ok(Some("/a,b".into())));
        assert_eq!(options.number::<u8>("count"), Ok(Some(1)));
    }

    #[test]
    fn unknown_keys_are_told_with_the_known_ones() {
        assert_eq!(
            error("sise=4M"),
            r#"--thing: unknown key "sise"; the keys are tty, size=, count=, path=, shared=, list="#
        );
        assert!(error("tty=1").contains(r#"unknown key "tty""#));
        assert!(SYNTAX.parse("").unwrap().given().next().is_none());
        assert!(error("size=4M,").contains(r#"unknown key """#));
        assert_eq!(error("size"), r#"--thing: size="" is not a value"#);
    }

    #[test]
    fn a_key_may_be_given_once() {
        assert_eq!(error("size=1,size=1"), "--thing: size is given twice");
    }

    #[test]
    fn refused_keys_pass_when_they_ask_for_nothing() {
        assert!(SYNTAX.parse("hugepages=off").is_ok());
        assert_eq!(
            error("hugepages=on"),
            "--thing: hugepages=on is not supported by foreshore: there are none"
        );
        assert!(!error("hugepages=a\nb").contains('\n'));
    }

    #[test]
    fn sizes_are_parsed_as_in_all_programs() {
        for text in ["64MiB", "64M", "65536K", "0.0625G", "67108864"] {
            let options = SYNTAX.parse(&format!("size={text}")).unwrap();
            assert_eq!(options.size("size").unwrap(), Some(64 << 20), "{text}");
        }
    }

    #[test]
    fn values_that_cannot_be_read_are_named() {
        let options = SYNTAX.parse("size=4Q,count=256,shared=maybe,path=").unwrap();
        assert_eq!(
            options.size("size").unwrap_err().to_string(),
            r#"--thing: size="4Q" is not a size: bytes, or a number with K, M, G or T"#
        );
        assert_eq!(
            SYNTAX.parse("size=64MB").unwrap().size("size").unwrap_err().to_string(),
            r#"--thing: size="64MB" could be 64000000 or 67108864 bytes; use 64M, 64MiB or the number of bytes"#
        );
        assert_eq!(
            options.number::<u8>("count").unwrap_err().to_string(),
            r#"--thing: count="256" is not a whole number of 8 bits"#
        );
        assert_eq!(
            options.switch("shared").unwrap_err().to_string(),
            r#"--thing: shared="maybe" is not on or off"#
        );
        assert_eq!(options.path("path").unwrap_err().to_string(), r#"--thing: path="" is not a path"#);
        assert_eq!(
            options.required::<u64>("size", None).unwrap_err().to_string(),
            "--thing: size= is missing"
        );
    }

    #[test]
    fn open_quotes_and_brackets_are_refused() {
        assert_eq!(error("list=[1,2"), r#"--thing: "list=[1,2" has a bracket that is not closed"#);
        assert!(error("list=1]").contains("bracket"));
        assert!(error(r#"path="a"#).contains("quote"));
    }

    proptest! {
        #[test]
        fn no_text_panics_and_every_error_is_one_line(text in ".*") {
            if let Err(error) = SYNTAX.parse(&text) {
                prop_assert_eq!(error.to_string().lines().count(), 1);
            }
        }
    }
}
