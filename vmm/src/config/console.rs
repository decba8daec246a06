//! `--serial` and `--console`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::option_parser::{OFF, Refused, Syntax};

const REFUSED: &[Refused] = &[
    Refused { key: "pty", neutral: &[], why: "use tty or file=PATH" },
    Refused { key: "socket", neutral: &[], why: "use tty or file=PATH" },
    Refused { key: "iommu", neutral: OFF, why: "there is no virtual IOMMU" },
];
const WORDS: &[&str] = &["off", "null", "tty"];
pub(super) const SERIAL: Syntax =
    Syntax { flag: "--serial", keys: &["file"], words: WORDS, refused: REFUSED };
pub(super) const CONSOLE: Syntax =
    Syntax { flag: "--console", keys: &["file"], words: WORDS, refused: REFUSED };

/// Where a console's bytes go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConsoleMode {
    /// The device is not there.
    #[default]
    Off,
    /// Output is thrown away.
    Null,
    /// Standard input and output.
    Tty,
    /// Output to a file.
    File,
}

/// `--serial`, `--console`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleConfig {
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file, with [`ConsoleMode::File`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
}

impl ConsoleConfig {
    /// COM1 when nothing is said of it: there, and silent.
    pub fn default_serial() -> Self {
        Self { mode: ConsoleMode::Null, file: None }
    }

    /// hvc0 when nothing is said of it: the terminal.
    pub fn default_console() -> Self {
        Self { mode: ConsoleMode::Tty, file: None }
    }

    /// Reads `--serial`'s value.
    pub fn parse_serial(text: &str) -> Result<Self, ConfigError> {
        Self::parse(&SERIAL, text)
    }

    /// Reads `--console`'s value.
    pub fn parse_console(text: &str) -> Result<Self, ConfigError> {
        Self::parse(&CONSOLE, text)
    }

    fn parse(syntax: &'static Syntax, text: &str) -> Result<Self, ConfigError> {
        let options = syntax.parse(text)?;
        let file = options.path("file")?;
        let mut modes = WORDS.iter().filter(|word| options.has(word)).map(|word| mode_of(word));
        let mode = match (modes.next(), modes.next(), &file) {
            (Some(mode), None, None) => mode,
            (None, None, Some(_)) => ConsoleMode::File,
            _ => return Err(one_of(syntax.flag, text)),
        };
        Ok(Self { mode, file })
    }

    /// A file where there must be one, and only there.
    pub fn validate(&self, flag: &'static str) -> Result<(), ConfigError> {
        if (self.mode == ConsoleMode::File) == self.file.is_some() {
            return Ok(());
        }
        let reason = format!("mode {:?} and file {:?} contradict each other", self.mode, self.file);
        Err(ConfigError::Conflict { flag, reason })
    }
}

fn mode_of(word: &str) -> ConsoleMode {
    match word {
        "null" => ConsoleMode::Null,
        "tty" => ConsoleMode::Tty,
        _ => ConsoleMode::Off,
    }
}

fn one_of(flag: &'static str, text: &str) -> ConfigError {
    ConfigError::Conflict { flag, reason: format!("{text:?} is not one of off, null, tty and file=PATH") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_read() {
        let serial = |text| ConsoleConfig::parse_serial(text).unwrap();
        assert_eq!(serial("off").mode, ConsoleMode::Off);
        assert_eq!(serial("null").mode, ConsoleMode::Null);
        assert_eq!(serial("tty").mode, ConsoleMode::Tty);
        let file = ConsoleConfig { mode: ConsoleMode::File, file: Some("/log".into()) };
        assert_eq!(serial("file=/log"), file);
        assert!(file.validate("--serial").is_ok());
    }

    #[test]
    fn anything_else_is_refused() {
        let error = |text| ConsoleConfig::parse_console(text).unwrap_err().to_string();
        assert_eq!(error("off,tty"), r#"--console: "off,tty" is not one of off, null, tty and file=PATH"#);
        assert!(error("tty,file=/log").contains("is not one of"));
        assert!(error("file=").contains("is not a path"));
        assert_eq!(error("pty"), "--console: pty is not supported by foreshore: use tty or file=PATH");
        assert!(error("loud").contains("the keys are off, null, tty, file="));
        let wrong = ConsoleConfig { mode: ConsoleMode::File, file: None };
        assert!(wrong.validate("--serial").unwrap_err().to_string().starts_with("--serial: mode File"));
    }
}
