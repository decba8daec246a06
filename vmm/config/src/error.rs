//! Errors about a configuration.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use foreshore_types::size::{Size, SizeError};
use thiserror::Error;

/// Error of a rule that one section alone has. Two are equal if their texts are.
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

/// Error about a configuration. Every message is one line and names the flag, the value and the
/// bound.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// A rule of one section.
    #[error(transparent)]
    Section(#[from] SectionError),
    /// A key that nobody knows.
    #[error("{flag}: unknown key {key:?}; the keys are {known}")]
    UnknownKey {
        /// The flag.
        flag: &'static str,
        /// What was written.
        key: String,
        /// What could have been.
        known: String,
    },
    /// A key of Cloud Hypervisor that has no meaning here.
    #[error("{flag}: {key}{value} is not supported by foreshore: {why}")]
    Unsupported {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: &'static str,
        /// Its value, after a `=`, if there is one.
        value: String,
        /// Why not.
        why: &'static str,
    },
    /// A section of Cloud Hypervisor's configuration that has no meaning here.
    #[error("{flag} is not supported by foreshore: {why}")]
    ForeignSection {
        /// The flag that fills it.
        flag: &'static str,
        /// Why not.
        why: &'static str,
    },
    /// A key that is there twice.
    #[error("{flag}: {key} is given twice")]
    Duplicate {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: String,
    },
    /// A key that must be there.
    #[error("{flag}: {key}= is missing")]
    Missing {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: &'static str,
    },
    /// A parameter of a policy, or of the rules above all of them.
    #[error("{flag}: {error}")]
    Parameter {
        /// The flag.
        flag: &'static str,
        /// What is wrong.
        error: SectionError,
    },
    /// A flag that must be there.
    #[error("{flag} is missing: {why}")]
    MissingFlag {
        /// The flag.
        flag: &'static str,
        /// What it is needed for.
        why: &'static str,
    },
    /// A value that cannot be read.
    #[error("{flag}: {key}={value:?} is not {expected}")]
    BadValue {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: String,
        /// What was written.
        value: String,
        /// What could have been.
        expected: String,
    },
    /// A size that cannot be parsed.
    #[error("{flag}: {key}={error}")]
    NotASize {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: &'static str,
        /// Reason.
        error: SizeError,
    },
    /// A quote or bracket without its partner.
    #[error("{flag}: {text:?} has a {what} that is not closed")]
    Unbalanced {
        /// The flag.
        flag: &'static str,
        /// The flag's value.
        text: String,
        /// The quote or bracket.
        what: &'static str,
    },
    /// A size under its bound.
    #[error("{flag}: {key} is {value}, and must be at least {least}")]
    TooSmall {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: &'static str,
        /// The size.
        value: Size,
        /// The bound.
        least: Size,
    },
    /// A size over its bound.
    #[error("{flag}: {key} is {value}, and must be at most {most}{because}")]
    TooLarge {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: &'static str,
        /// The size.
        value: Size,
        /// The bound.
        most: Size,
        /// Where the bound comes from: empty, or text that begins with a comma.
        because: &'static str,
    },
    /// A size off the grid.
    #[error("{flag}: {key} is {value}, which is not a multiple of {unit}")]
    NotMultiple {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: &'static str,
        /// The size.
        value: Size,
        /// The grid.
        unit: Size,
    },
    /// A number out of its range.
    #[error("{flag}: {key} is {value}, and must be {}", bounds(*.least, *.most))]
    OutOfRange {
        /// The flag.
        flag: &'static str,
        /// The key.
        key: &'static str,
        /// The number.
        value: u64,
        /// The lower bound.
        least: u64,
        /// The upper bound.
        most: u64,
    },
    /// More queues than vCPUs use, or none.
    #[error("{flag}: num_queues is {value}, and must be {}: {why}", bounds(*.least, *.most))]
    QueueCount {
        /// The flag.
        flag: &'static str,
        /// The number.
        value: u16,
        /// The lower bound.
        least: u16,
        /// The upper bound.
        most: u16,
        /// Reason for the upper bound.
        why: String,
    },
    /// A path that does not fit into a socket's address.
    #[error("{flag}: {path:?} is {len} bytes long, and the path of a unix socket has at most {most}")]
    SocketPath {
        /// The flag.
        flag: &'static str,
        /// The path.
        path: String,
        /// Its length.
        len: usize,
        /// The bound.
        most: usize,
    },
    /// A name that something else has.
    #[error("{flag}: the id {id} is taken")]
    IdTaken {
        /// The flag.
        flag: &'static str,
        /// The name.
        id: String,
    },
    /// Two parts of a configuration that exclude each other.
    #[error("{flag}: {reason}")]
    Conflict {
        /// The flag that would have to change.
        flag: &'static str,
        /// What it collides with, and what to do.
        reason: String,
    },
}

/// From the one bound to the other; the one number that is left where they are the same.
pub fn bounds<T: PartialEq + fmt::Display>(least: T, most: T) -> String {
    if least == most { least.to_string() } else { format!("{least} to {most}") }
}
