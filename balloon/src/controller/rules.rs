//! The parameters of the rules above every policy.

use serde::Serialize;

use crate::units::in_range;
use crate::{MIB, ParamError};

/// Parameters of the rules above every policy. docs/policy.md says what each is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rules {
    /// No memory is taken back for this long after a grow.
    pub cool_down_ms: u64,
    /// The longest that the cool-down becomes when shrinks turn out to have been wrong.
    pub max_cool_down_ms: u64,
    /// At most this is taken back in one step, or an eighth of what is plugged if that is more.
    pub shrink_step_bytes: u64,
    /// The least time between two steps.
    pub shrink_interval_ms: u64,
    /// A request on which nothing happens for this long has made no progress.
    pub progress_ms: u64,
    /// The longest that a zone which did not follow is left alone.
    pub max_retry_ms: u64,
    /// No report for this long means that reports are lost.
    pub lost_ms: u64,
    /// So many grows follow upon lost reports, each twice the one before.
    pub lost_steps: u32,
    /// The first of them.
    pub lost_step_bytes: u64,
    /// The share of a zone that is lent to a guest which does not online it movable, in thousandths.
    pub unmovable_permille: u64,
    /// Decide, but ask nothing of the guest.
    pub dry_run: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            cool_down_ms: 5_000,
            max_cool_down_ms: 60_000,
            shrink_step_bytes: 128 * MIB,
            shrink_interval_ms: 1_000,
            progress_ms: 5_000,
            max_retry_ms: 60_000,
            lost_ms: 3_000,
            lost_steps: 4,
            lost_step_bytes: 64 * MIB,
            unmovable_permille: 250,
            dry_run: false,
        }
    }
}

impl Rules {
    /// Checks every parameter against its bounds.
    pub fn validate(&self) -> Result<(), ParamError> {
        in_range("cool_down", self.cool_down_ms, 100, 86_400_000)?;
        in_range("max_cool_down", self.max_cool_down_ms, self.cool_down_ms, 86_400_000)?;
        in_range("shrink_step", self.shrink_step_bytes, 2 * MIB, 1 << 46)?;
        in_range("shrink_interval", self.shrink_interval_ms, 0, 86_400_000)?;
        in_range("progress", self.progress_ms, 100, 600_000)?;
        in_range("max_retry", self.max_retry_ms, self.progress_ms, 86_400_000)?;
        in_range("lost", self.lost_ms, 1_500, 600_000)?;
        in_range("lost_steps", self.lost_steps.into(), 0, 32)?;
        in_range("lost_step", self.lost_step_bytes, 2 * MIB, 1 << 40)?;
        in_range("unmovable", self.unmovable_permille, 0, 1000)
    }
}
