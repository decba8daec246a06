//! Reasons for rejecting a line.

use std::fmt;

use thiserror::Error;

/// Bound that a value exceeds or falls below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Minimum.
    AtLeast(u64),
    /// Maximum.
    AtMost(u64),
    /// Maximum given by another field, with that field's value.
    AtMostField(&'static str, u64),
    /// The value must also occur in another field.
    AmongField(&'static str),
    /// The value must be a power of two in this range.
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

/// Reason for rejecting a line. Readers continue with the next line after any of them.
/// [`Refusal::label`] is the name used in metrics.
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
    /// The line is JSON, but fields are missing or have the wrong type.
    #[error("message has missing or wrong fields: {reason}")]
    WrongShape {
        /// Error of the parser.
        reason: String,
    },
    /// The sender uses another version of the protocol.
    #[error("message has protocol version {theirs}, must be {ours}")]
    WrongVersion {
        /// Version in the message.
        theirs: u64,
        /// Version of this crate.
        ours: u32,
    },
    /// The message type does not exist, or is not valid in this direction.
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
    /// The value is not greater than that of the last accepted message.
    #[error("{field} is {value}, must be above {last}")]
    OutOfOrder {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Last accepted value.
        last: u64,
    },
    /// Between two reports, the guest's clock advanced further than the host's.
    #[error("monotonic_ms is {value}, must be at most {bound} by the host's clock")]
    FromTheFuture {
        /// Value in the report.
        value: u64,
        /// Largest accepted value.
        bound: u64,
    },
    /// The report was received before the connection's hello.
    #[error("report precedes the hello")]
    BeforeHello,
}

/// Maximum length of text from the sender in an error message.
const MAX_QUOTED_CHARS: usize = 32;

/// Defines the list of labels and the `match` that returns a label in one place, so that neither
/// can omit a reason.
macro_rules! labels {
    ($($variant:ident: $label:literal,)+) => {
        /// Labels of all reasons, for a metric that exports each of them from the start.
        pub const LABELS: [&'static str; [$($label),+].len()] = [$($label),+];

        /// Short name that is stable across releases.
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
        // The text is cut, because it may quote data from the sender. The cut also drops the line
        // and column at its end, which are not useful here.
        let reason = error.to_string().chars().take(4 * MAX_QUOTED_CHARS).collect();
        match error.classify() {
            serde_json::error::Category::Data => Refusal::WrongShape { reason },
            _ => Refusal::NotJson { reason },
        }
    }
}
