//! Reasons for which a line is refused.

use std::fmt;

use thiserror::Error;

/// Bound that a value violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Minimum.
    AtLeast(u64),
    /// Maximum.
    AtMost(u64),
    /// Maximum: another field, with its value.
    AtMostField(&'static str, u64),
    /// Must occur in another field.
    AmongField(&'static str),
    /// Power of two in this range.
    PowerOfTwo(u64, u64),
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bound::AtLeast(bound) => write!(f, "at least {bound}"),
            Bound::AtMost(bound) => write!(f, "at most {bound}"),
            Bound::AtMostField(field, bound) => write!(f, "at most {field}, which is {bound}"),
            Bound::AmongField(field) => write!(f, "one of those in {field}"),
            Bound::PowerOfTwo(low, high) => write!(f, "a power of two from {low} to {high}"),
        }
    }
}

/// Reason for which a line is refused. Readers continue after any of them. [`Refusal::label`] is
/// the name in metrics.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The line exceeds the maximum length.
    #[error("line exceeds {bound_bytes} bytes")]
    TooLong {
        /// Maximum length.
        bound_bytes: usize,
    },
    /// The line is not UTF-8.
    #[error("line is not UTF-8")]
    NotUtf8,
    /// The line is not a JSON text.
    #[error("line is not JSON: {reason}")]
    NotJson {
        /// Error of the parser.
        reason: String,
    },
    /// The line is JSON, but fields are missing or have another type.
    #[error("message has missing or wrong fields: {reason}")]
    WrongShape {
        /// Error of the parser.
        reason: String,
    },
    /// The sender has another version of the protocol.
    #[error("message has protocol version {theirs}, must be {ours}")]
    WrongVersion {
        /// Version in the message.
        theirs: u64,
        /// Version of this crate.
        ours: u32,
    },
    /// The message type does not exist, or not in this direction.
    #[error("unknown message type: {kind:?}")]
    UnknownType {
        /// Beginning of the type in the message.
        kind: String,
    },
    /// A value violates its bound.
    #[error("{field} is {value}, must be {bound}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Bound of the field.
        bound: Bound,
    },
    /// The message repeats or precedes an accepted one.
    #[error("{field} is {value}, must be above {last}")]
    OutOfOrder {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Last accepted value.
        last: u64,
    },
    /// The guest's clock advanced further between two reports than the host's.
    #[error("monotonic_ms is {value}, must be at most {bound} by the host's clock")]
    FromTheFuture {
        /// Value in the report.
        value: u64,
        /// Largest accepted value.
        bound: u64,
    },
    /// A report precedes the hello of its connection.
    #[error("report precedes the hello")]
    BeforeHello,
}

/// Maximum length of a sender's text in an error.
const MAX_QUOTED_CHARS: usize = 32;

/// Defines the labels and the match over them, so that neither can miss one.
macro_rules! labels {
    ($($variant:ident: $label:literal,)+) => {
        /// Labels of all reasons, for a metric that exports each of them from the start.
        pub const LABELS: [&'static str; [$($label),+].len()] = [$($label),+];

        /// Short name that does not change between releases.
        pub fn label(&self) -> &'static str {
            match self {
                $(Refusal::$variant { .. } => $label,)+
            }
        }
    };
}

impl Refusal {
    labels! {
        TooLong: "too_long",
        NotUtf8: "not_utf8",
        NotJson: "not_json",
        WrongShape: "wrong_shape",
        WrongVersion: "wrong_version",
        UnknownType: "unknown_type",
        OutOfRange: "out_of_range",
        OutOfOrder: "out_of_order",
        FromTheFuture: "from_the_future",
        BeforeHello: "before_hello",
    }

    pub(crate) fn unknown_type(kind: &str) -> Self {
        Refusal::UnknownType { kind: kind.chars().take(MAX_QUOTED_CHARS).collect() }
    }

    pub(crate) fn from_json(error: serde_json::Error) -> Self {
        // The text is cut, because it may quote the sender's data. The cut also drops the line and
        // column at its end, which are of no use here.
        let reason = error.to_string().chars().take(4 * MAX_QUOTED_CHARS).collect();
        match error.classify() {
            serde_json::error::Category::Data => Refusal::WrongShape { reason },
            _ => Refusal::NotJson { reason },
        }
    }
}
