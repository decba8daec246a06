//! Causes for serving a BTT volume without its BTT.

/// Cause for showing the bytes of a volume, read-only, instead of the sectors of its BTT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BttLoss {
    /// Content of the guest in place of the BTT.
    Replaced {
        /// Difference from a BTT.
        reason: String,
    },
    /// Damage of an arena behind the first one, whose end is unknown.
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
