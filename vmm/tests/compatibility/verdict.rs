//! Verdicts on Cloud Hypervisor's features.

use foreshore::config::CliError;
use foreshore_config::{ConfigError, JsonError};

/// Level of support for a feature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Accepted, and has an effect.
    Implemented,
    /// Accepted without an effect, for this reason.
    Neutral(String),
    /// Refused for this reason.
    Refused(String),
    NotThere(String),
}

impl Verdict {
    /// Verdict on a value that changes nothing.
    pub(crate) fn without_effect() -> Self {
        Self::Neutral("it changes nothing".to_owned())
    }

    /// Verdict from a warning that the value has no effect.
    pub(crate) fn of_warnings(warnings: &[String], flag: &str) -> Option<Self> {
        let warning = warnings.iter().find(|warning| warning.starts_with(flag))?;
        let (_, text) = warning.split_once(": ").expect("a warning about a flag");
        Some(Self::Neutral(text.to_owned()))
    }

    /// Columns for the table in the page.
    pub(crate) fn columns(&self) -> (&'static str, &str) {
        match self {
            Self::Implemented => ("implemented", ""),
            Self::Neutral(why) => ("neutral", why),
            Self::Refused(why) => ("refused", why),
            Self::NotThere(why) => ("not there", why),
        }
    }

    /// Appends text to the reason for a refusal.
    pub(crate) fn and(self, more: &str) -> Self {
        match self {
            Self::Refused(why) => Self::Refused(format!("{why}; {more}")),
            other => other,
        }
    }
}

/// Verdict from an error about an unsupported or unknown feature. `None` if the error is about the
/// sample values.
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

/// Verdict from an error of the command line parser.
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

/// Verdict from an error of the JSON parser.
pub(crate) fn of_json_error(error: &JsonError) -> Option<Verdict> {
    match error {
        JsonError::Config(error) => of_error(error),
        // The error is about the sample value.
        JsonError::Field(_) => None,
    }
}
