//! Help for a flag. The help is generated from the table of the flag's keys.

use std::fmt::Write;

use super::flag::OFF;
use super::{Key, Table};

impl Table {
    /// One line with every key: `path=PATH,readonly=on|off: about [default: ...]`.
    pub fn line(&self) -> String {
        let keys = (self.keys)();
        let pairs = keys.iter().map(Key::form);
        let words = self.words.join("|");
        let forms: Vec<_> =
            Some(words).filter(|words| !words.is_empty()).into_iter().chain(pairs).collect();
        let default = |key: &Key| {
            let default = key.default.as_deref().filter(|default| !OFF.contains(default))?;
            Some(format!("{}={default}", key.name))
        };
        let defaults: Vec<_> = keys.iter().filter_map(default).collect();
        let defaults = match &*defaults {
            [] => String::new(),
            all => format!(" [default: {}]", all.join(",")),
        };
        format!("{}: {}{defaults}", forms.join(","), self.about)
    }

    /// Description of the flag, followed by a line for each key.
    pub fn listing(&self) -> String {
        let mut text = self.about.to_owned();
        if !self.words.is_empty() {
            write!(text, "\n  {}", self.words.join("|")).expect("a string");
        }
        for key in (self.keys)() {
            let default = key
                .default
                .as_ref()
                .map_or_else(String::new, |default| format!(" [default: {default}]"));
            write!(text, "\n  {}: {}{default}", key.form(), key.description()).expect("a string");
        }
        text
    }
}

impl Key {
    fn description(&self) -> String {
        match &self.range {
            Some(range) => format!("{} ({range})", self.about),
            None => self.about.to_owned(),
        }
    }

    fn form(&self) -> String {
        let (name, syntax) = (self.name, (self.syntax)());
        let more = if self.is_repeated { "..." } else { "" };
        if self.is_bare { format!("[{name}=]{syntax}") } else { format!("{name}={syntax}{more}") }
    }
}

/// Joins words: `a`, `a or b`, `a, b or c`.
pub fn one_of(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [some @ .., last] => format!("{} or {last}", some.join(", ")),
    }
}
