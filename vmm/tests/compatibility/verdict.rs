//! What comes of trying something of Cloud Hypervisor.

use foreshore::config::CliError;
use foreshore_config::{ConfigError, JsonError};

/// How far foreshore has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is taken and makes a difference.
    Implemented,
    /// It is taken and makes none, and why.
    Neutral(String),
    /// It is refused, with this reason.
    Refused(String),
    NotThere(String),
}

impl Verdict {
    /// It is so anyway.
    pub(crate) fn without_effect() -> Self {
        Self::Neutral("it changes nothing".to_owned())
    }

    /// What a warning about what was tried says: that it has not got what it asked for.
    pub(crate) fn of_warnings(warnings: &[String], flag: &str) -> Option<Self> {
        let warning = warnings.iter().find(|warning| warning.starts_with(flag))?;
        let (_, text) = warning.split_once(": ").expect("a warning about a flag");
        Some(Self::Neutral(text.to_owned()))
    }

    /// As it stands on the page.
    pub(crate) fn columns(&self) -> (&'static str, &str) {
        match self {
            Self::Implemented => ("implemented", ""),
            Self::Neutral(why) => ("neutral", why),
            Self::Refused(why) => ("refused", why),
            Self::NotThere(why) => ("not there", why),
        }
    }

    /// A reason with something more to say.
    pub(crate) fn and(self, more: &str) -> Self {
        match self {
            Self::Refused(why) => Self::Refused(format!("{why}; {more}")),
            other => other,
        }
    }
}

/// What an error says, if it says that something is not there; others are about the values that
/// were tried.
pub(crate) fn of_error(error: &ConfigError) -> Option<Verdict> {
    match error {
        ConfigError::Unsupported { why, .. } | ConfigError::ForeignSection { why, .. } => {
            Some(Verdict::Refused((*why).to_owned()))
        }
        ConfigError::BadValue { expected, .. } => {
            Some(Verdict::Refused(format!("it must be {expected}")))
        }
        ConfigError::UnknownKey { .. } => Some(Verdict::NotThere("an unknown key".to_owned())),
        _ => None,
    }
}

/// The same of a command line.
pub(crate) fn of_cli_error(error: &CliError) -> Option<Verdict> {
    match error {
        CliError::Foreign { why, .. } => Some(Verdict::Refused((*why).to_owned())),
        CliError::Config(error) => of_error(error),
        CliError::Usage(text) if text.contains("unexpected argument") => {
            Some(Verdict::NotThere("an unknown flag".to_owned()))
        }
        CliError::Usage(_) => None,
    }
}

/// The same of a configuration in JSON.
pub(crate) fn of_json_error(error: &JsonError) -> Option<Verdict> {
    match error {
        JsonError::Config(error) => of_error(error),
        // A value that was no fair try.
        JsonError::Field(_) => None,
    }
}
