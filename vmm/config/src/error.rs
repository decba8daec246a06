//! Errors in a configuration.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use foreshore_types::similar::suggestion_from_list;
use foreshore_types::size::{Size, SizeError};
use thiserror::Error;

/// The forms of a flag that accepts either a path or a descriptor.
pub const PATH_OR_FD: &str = "path=PATH and fd=N";

/// Error from a rule of a single section. Two errors are equal if their texts are equal.
#[derive(Clone, Debug)]
pub struct SectionError(Arc<dyn StdError + Send + Sync>);

impl SectionError {
    /// Wraps an error whose text names the flag, the value and the bound.
    pub fn new(error: impl StdError + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl fmt::Display for SectionError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

impl StdError for SectionError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

impl PartialEq for SectionError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for SectionError {}

/// Error in a configuration. Each message is one line, and names the flag, the value and the bound.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    #[error(transparent)]
    Section(#[from] SectionError),
    #[error(
        "{flag}: unknown key {key:?}{}; the keys are {known}",
        suggestion_from_list(key, known)
    )]
    UnknownKey {
        flag: &'static str,
        key: String,
        /// Keys that are accepted.
        known: String,
    },
    /// A key of Cloud Hypervisor that Foreshore does not support.
    #[error("{flag}: {key}{value} is not supported by foreshore: {why}")]
    Unsupported {
        flag: &'static str,
        key: &'static str,
        /// `=` and the value of the key, if it has one.
        value: String,
        why: &'static str,
    },
    /// A section of Cloud Hypervisor's configuration that Foreshore does not support.
    #[error("{flag} is not supported by foreshore: {why}")]
    ForeignSection {
        /// Flag that sets the section.
        flag: &'static str,
        why: &'static str,
    },
    #[error("{flag}: {key} is given twice")]
    Duplicate { flag: &'static str, key: String },
    #[error("{flag}: {key}= is missing")]
    Missing { flag: &'static str, key: &'static str },
    /// A key that only some values of another key need.
    #[error("{flag}: {key}= is missing: {needed_by} needs it")]
    MissingFor {
        flag: &'static str,
        key: &'static str,
        /// Setting that needs the key.
        needed_by: &'static str,
    },
    /// Error in a parameter of a policy, or in a parameter of the rules for all policies.
    #[error("{flag}: {error}")]
    Parameter { flag: &'static str, error: SectionError },
    #[error("{flag} is missing: {why}")]
    MissingFlag {
        flag: &'static str,
        /// Reason why the flag is needed.
        why: &'static str,
    },
    #[error("{flag}: {key}={value:?} is not {expected}")]
    BadValue {
        flag: &'static str,
        key: String,
        value: String,
        /// Values that are accepted.
        expected: String,
    },
    /// The value matches none of the forms, or more than one.
    #[error("{flag}: {text:?} is not one of {forms}")]
    NotOneOf { flag: &'static str, text: String, forms: &'static str },
    #[error("{flag}: {key}={error}")]
    NotASize { flag: &'static str, key: &'static str, error: SizeError },
    /// A quote or bracket is not closed.
    #[error("{flag}: {text:?} has an unclosed {what}")]
    Unbalanced {
        flag: &'static str,
        text: String,
        /// "quote" or "bracket".
        what: &'static str,
    },
    #[error("{flag}: {key} is {value}, and must be at least {least}")]
    TooSmall { flag: &'static str, key: &'static str, value: Size, least: Size },
    #[error("{flag}: {key} is {value}, and must be at most {most}{because}")]
    TooLarge {
        flag: &'static str,
        key: &'static str,
        value: Size,
        most: Size,
        /// Reason for the bound. Either empty, or text that begins with a comma.
        because: &'static str,
    },
    #[error("{flag}: {key} is {value}, which is not a multiple of {unit}")]
    NotMultiple { flag: &'static str, key: &'static str, value: Size, unit: Size },
    #[error("{flag}: {key} is {value}, and must be {}", bounds(*.least, *.most))]
    OutOfRange { flag: &'static str, key: &'static str, value: u64, least: u64, most: u64 },
    /// The number of queues is 0 or exceeds the number of vCPUs.
    #[error("{flag}: num_queues is {value}, and must be {}: {why}", bounds(*.least, *.most))]
    QueueCount {
        flag: &'static str,
        value: u16,
        least: u16,
        most: u16,
        /// Reason for the upper bound.
        why: String,
    },
    /// The path does not fit into the address of a Unix socket.
    #[error("{flag}: {path:?} has {len} bytes, but the path of a Unix socket has at most {most}")]
    SocketPath { flag: &'static str, path: String, len: usize, most: usize },
    /// The ID is already in use.
    #[error("{flag}: the id {id} is already in use; choose another id")]
    IdTaken { flag: &'static str, id: String },
    #[error("{flag}: {reason}")]
    Conflict {
        /// Flag that must change to resolve the conflict.
        flag: &'static str,
        /// Description of the conflict, and how to resolve it.
        reason: String,
    },
}

/// Formats bounds as a range, or as a single number if they are equal.
pub fn bounds<T: PartialEq + fmt::Display>(least: T, most: T) -> String {
    if least == most { least.to_string() } else { format!("{least} to {most}") }
}
