//! Why a line is refused.

use std::fmt;

use thiserror::Error;

/// The bound that a value broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// At least this.
    AtLeast(u64),
    /// At most this.
    AtMost(u64),
    /// At most another field, which had this value.
    AtMostField(&'static str, u64),
    /// One of the values that another field has.
    AmongField(&'static str),
    /// A power of two in this range.
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

/// Why a line is refused. The loop goes on after each of them; [`Refusal::label`] names it in a
/// metric.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The line is longer than a line may be.
    #[error("Line longer than {bound_bytes} bytes")]
    TooLong {
        /// The bound.
        bound_bytes: usize,
    },
    /// The line is not UTF-8.
    #[error("Line is not UTF-8")]
    NotUtf8,
    /// The line is not a JSON text.
    #[error("Line is not JSON: {reason}")]
    NotJson {
        /// What the parser says.
        reason: String,
    },
    /// A JSON text, but fields are missing or of another type.
    #[error("Message has the wrong shape: {reason}")]
    WrongShape {
        /// What the parser says.
        reason: String,
    },
    /// The sender speaks another version of the protocol.
    #[error("Message has protocol version {theirs}, this side speaks {ours}")]
    WrongVersion {
        /// What the message says.
        theirs: u64,
        /// What we speak.
        ours: u32,
    },
    /// A type of message that does not exist, or does not travel in this direction.
    #[error("Message type {kind:?} is unknown")]
    UnknownType {
        /// The beginning of what the message says.
        kind: String,
    },
    /// A value outside its bound.
    #[error("{field} is {value}, must be {bound}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What was expected.
        bound: Bound,
    },
    /// Repeated, or older than what was accepted before it, or sent before the hello.
    #[error("{field} is {value}, must be above {last}")]
    OutOfOrder {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The last one accepted.
        last: u64,
    },
    /// The guest's clock ran further between two reports than the host's did.
    #[error("monotonic_ms is {value}, must be at most {bound} by the host's clock")]
    FromTheFuture {
        /// What the report says.
        value: u64,
        /// The furthest that is believed.
        bound: u64,
    },
    /// A report on a connection that has not said hello.
    #[error("Report before the hello")]
    BeforeHello,
}

/// How much of a sender's own text an error repeats.
const MAX_QUOTED_CHARS: usize = 32;

/// Defines the labels and the match over them, so that neither can lack one.
macro_rules! labels {
    ($($variant:ident: $label:literal,)+) => {
        /// Labels of all reasons, for a metric that exports each of them from the start.
        pub const LABELS: [&'static str; [$($label),+].len()] = [$($label),+];

        /// A short name that does not change between releases.
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
        // The text may quote the sender's data, so it is bounded; it carries line and column at its
        // end, which say nothing here.
        let reason = error.to_string().chars().take(4 * MAX_QUOTED_CHARS).collect();
        match error.classify() {
            serde_json::error::Category::Data => Refusal::WrongShape { reason },
            _ => Refusal::NotJson { reason },
        }
    }
}
