//! Reasons for serving a BTT volume without its BTT.

/// Reason for serving a volume's raw bytes, read-only, instead of the sectors of its BTT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BttLoss {
    /// The guest has overwritten the BTT with other content.
    Replaced {
        /// Description of how the content differs from a BTT.
        reason: String,
    },
    /// An arena after the first one is damaged, and its end is unknown.
    Damaged {
        /// Damaged arena, and the kind of the damage.
        reason: String,
    },
}

impl BttLoss {
    /// Reason why the BTT cannot be served.
    pub fn reason(&self) -> &str {
        match self {
            Self::Replaced { reason } | Self::Damaged { reason } => reason,
        }
    }
}
