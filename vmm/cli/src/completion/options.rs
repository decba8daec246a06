//! Completion of options that are separated by commas, as in `path=/disk.raw,readonly=on`.

use std::ffi::OsStr;
use std::path::Path;

use clap_complete::engine::{
    ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};

/// Option of a flag.
pub struct FlagOption {
    /// Key without `=`, or nothing if the option is only a value.
    key: String,
    values: Values,
    is_bare: bool,
    is_repeated: bool,
}

/// Values to offer for an option.
pub enum Values {
    /// Values that cannot be listed, such as sizes.
    Unlisted,
    /// Files for which the function returns true, and all directories.
    Paths(fn(&Path) -> bool),
    /// Words. The function is called only if the value is completed.
    Words(Box<dyn FnOnce() -> Vec<String>>),
}

impl Values {
    /// Creates a list of words.
    pub fn words<T: Into<String>>(words: impl IntoIterator<Item = T>) -> Self {
        let words: Vec<_> = words.into_iter().map(Into::into).collect();
        Self::Words(Box::new(|| words))
    }

    /// Returns the values that begin with `start`.
    fn starting_with(self, start: &str) -> Vec<CompletionCandidate> {
        match self {
            Self::Unlisted => Vec::new(),
            Self::Paths(is_wanted) => paths(OsStr::new(start), is_wanted),
            Self::Words(words) => {
                let words = words().into_iter().filter(|word| word.starts_with(start));
                words.map(CompletionCandidate::new).collect()
            }
        }
    }
}

/// Returns the wanted paths that begin with `start`, and all directories.
pub(super) fn paths(start: &OsStr, is_wanted: fn(&Path) -> bool) -> Vec<CompletionCandidate> {
    let mut paths = PathCompleter::any().filter(is_wanted).complete(start);
    // The current directory is not a useful value of any option.
    paths.retain(|path| path.get_value() != ".");
    paths
}

impl FlagOption {
    /// Creates an option of the form `key=value`.
    pub fn new(key: impl Into<String>, values: Values) -> Self {
        Self { key: key.into(), values, is_bare: false, is_repeated: false }
    }

    /// Creates an option that is a value without a key, with which the flag can begin.
    pub fn without_key(values: Values) -> Self {
        Self { is_bare: true, ..Self::new("", values) }
    }

    /// If `is_bare` is true, lets the flag begin with the value of the option.
    pub fn bare(self, is_bare: bool) -> Self {
        Self { is_bare, ..self }
    }

    /// If `is_repeated` is true, lets the flag have the option several times.
    pub fn repeated(self, is_repeated: bool) -> Self {
        Self { is_repeated, ..self }
    }

    fn is_in(&self, given: &GivenOptions) -> bool {
        (self.is_bare && given.first.is_some())
            || given.pairs.iter().any(|(key, _)| *key == self.key)
    }
}

/// Options that precede the one at the cursor.
#[derive(Debug, Default, PartialEq)]
pub struct GivenOptions {
    /// First option, if it has no key.
    first: Option<String>,
    pairs: Vec<(String, String)>,
}

impl GivenOptions {
    fn of(options: &[&str]) -> Self {
        let pair =
            |option: &&str| option.split_once('=').map(|(key, value)| (key.into(), value.into()));
        let first = options.first().filter(|option| !option.contains('='));
        let first = first.map(|option| (*option).to_owned());
        Self { first, pairs: options.iter().filter_map(pair).collect() }
    }

    /// Returns the first option if it has no key.
    pub fn first(&self) -> Option<&str> {
        self.first.as_deref()
    }

    /// Returns the value of `key`.
    pub fn value(&self, key: &str) -> Option<&str> {
        let mut pairs = self.pairs.iter();
        pairs.find(|(given, _)| given == key).map(|(_, value)| value.as_str())
    }
}

/// Creates a completer for options that are separated by commas. `options` returns the options of
/// the flag, which may depend on those given before the cursor.
pub fn complete_options(
    options: impl Fn(&GivenOptions) -> Vec<FlagOption> + Send + Sync + 'static,
) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| {
        let current = current.to_string_lossy();
        let parts = split(&current);
        let (last, before) = parts.split_last().expect("a text has at least one part");
        let given = GivenOptions::of(before);
        let mut options = options(&given);
        options.retain(|option| option.is_repeated || !option.is_in(&given));
        let found = match last.split_once('=') {
            Some((key, value)) => values_of(options, key, value),
            None => keys_and_bare_values(options, last, before.is_empty()),
        };
        let prefix = &current[..current.len() - last.len()];
        found.into_iter().map(|candidate| candidate.add_prefix(prefix)).collect()
    })
}

fn values_of(options: Vec<FlagOption>, key: &str, start: &str) -> Vec<CompletionCandidate> {
    let Some(option) = options.into_iter().find(|option| option.key == key) else {
        return Vec::new();
    };
    let values = option.values.starting_with(start).into_iter();
    values.map(|value| value.add_prefix(format!("{key}="))).collect()
}

fn keys_and_bare_values(
    options: Vec<FlagOption>,
    start: &str,
    is_first: bool,
) -> Vec<CompletionCandidate> {
    let (mut keys, mut values) = (Vec::<CompletionCandidate>::new(), Vec::new());
    for option in options {
        if !option.key.is_empty() && option.key.starts_with(start) {
            let key = CompletionCandidate::new(format!("{}=", option.key));
            keys.extend((!keys.contains(&key)).then_some(key));
        }
        if option.is_bare && is_first {
            values.extend(option.values.starting_with(start));
        }
    }
    values.append(&mut keys);
    values
}

/// Splits at the commas that are outside of quotes and brackets.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut quoted) = (Vec::new(), 0, 0u32, false);
    for (at, letter) in text.char_indices() {
        match letter {
            '"' => quoted = !quoted,
            '[' if !quoted => depth += 1,
            ']' if !quoted => depth = depth.saturating_sub(1),
            ',' if !quoted && depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    fn completed(completer: &ArgValueCompleter, current: &str) -> Vec<String> {
        let candidates = completer.complete(OsStr::new(current));
        candidates.iter().map(|found| found.get_value().to_string_lossy().into_owned()).collect()
    }

    fn completer() -> ArgValueCompleter {
        complete_options(|given| {
            let names = given.value("path").map_or_else(Vec::new, |path| vec![format!("{path}-a")]);
            vec![
                FlagOption::new("size", Values::Unlisted),
                FlagOption::new("policy", Values::words(["psi", "pmb"])),
                FlagOption::new("path", Values::Paths(Path::is_file)).bare(true),
                FlagOption::new("host", Values::Unlisted).repeated(true),
                FlagOption::new("name", Values::words(names)),
                FlagOption::without_key(Values::words(["off"])),
            ]
        })
    }

    #[test]
    fn keys_are_offered_once_and_only_behind_commas() {
        let completer = completer();
        assert_eq!(completed(&completer, "si"), ["size="]);
        assert_eq!(completed(&completer, "size=1"), Vec::<String>::new());
        let rest = ["policy=", "path=", "host=", "name="].map(|key| format!("size=1G,{key}"));
        assert_eq!(completed(&completer, "size=1G,"), rest);
        assert_eq!(completed(&completer, "size=1G,size"), Vec::<String>::new());
        assert_eq!(completed(&completer, "host=a,h"), ["host=a,host="]);
        assert_eq!(completed(&completer, "size=[1,p"), Vec::<String>::new(), "in brackets");
    }

    #[test]
    fn values_of_the_key_are_offered() {
        let completer = completer();
        let both = ["size=1G,policy=psi", "size=1G,policy=pmb"];
        assert_eq!(completed(&completer, "size=1G,policy=p"), both);
        assert_eq!(completed(&completer, "path=/b,name="), ["path=/b,name=/b-a"]);
        assert_eq!(completed(&completer, "of"), ["off"]);
        assert_eq!(completed(&completer, "size=1G,of"), Vec::<String>::new());
    }

    #[test]
    fn paths_are_offered_with_and_without_their_key() {
        let completer = completer();
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("disk.raw");
        fs::write(&file, "").unwrap();
        let file = file.display().to_string();
        let start = file.strip_suffix("sk.raw").unwrap();
        let expected = format!("size=1G,path={file}");
        assert_eq!(completed(&completer, &format!("size=1G,path={start}")), [expected]);
        assert_eq!(completed(&completer, start), [file.as_str()]);
        assert_eq!(completed(&completer, &format!("size={start}")), Vec::<String>::new());
        assert_eq!(completed(&completer, &format!("{file},pa")), Vec::<String>::new());
    }
}
