//! The parameters of the rules above every policy.

use crate::params::{Parameters, Setting, params};
use crate::{MIB, ParamError};

params! {
    /// Parameters of the rules above every policy. docs/reference/policies.md says what each is for.
    pub struct Rules {
        /// All zones together, what a balloon can take of boot memory among them, are never asked for less memory than this.
        floor_bytes: "floor", Blocks, 0 => 1 << 46, 0;
        /// Nor for more than this.
        ceiling_bytes: "ceiling", Blocks, 0 => 1 << 46, 1 << 46;
        /// No memory is taken back for this long after a grow.
        cool_down_ms: "cool_down", Ms, 100 => 86_400_000, 5_000;
        /// The longest that the cool-down becomes when shrinks turn out to have been wrong.
        max_cool_down_ms: "max_cool_down", Ms, 100 => 86_400_000, 60_000;
        /// At most this is taken back in one step, or `shrink_share` of what is plugged if that is more.
        shrink_step_bytes: "shrink_step", Bytes, 2 * MIB => 1 << 46, 128 * MIB;
        /// The share of what is plugged that may be taken back in one step however little `shrink_step` is.
        shrink_share_permille: "shrink_share", Permille, 0 => 1000, 125;
        /// The least time between two steps.
        shrink_interval_ms: "shrink_interval", Ms, 0 => 86_400_000, 1_000;
        /// A request on which nothing happens for this long has made no progress.
        progress_ms: "progress", Ms, 100 => 600_000, 5_000;
        /// The longest that a zone which did not follow is left alone.
        max_retry_ms: "max_retry", Ms, 100 => 86_400_000, 60_000;
        /// No report for this long means that reports are lost.
        lost_ms: "lost", Ms, 1_500 => 600_000, 3_000;
        /// So many grows follow upon lost reports, each twice the one before.
        lost_steps: "lost_steps", Count, 0 => 32, 4;
        /// The first of them.
        lost_step_bytes: "lost_step", Bytes, 2 * MIB => 1 << 40, 64 * MIB;
        /// The share of a zone that is lent to a guest which does not online it movable.
        unmovable_permille: "unmovable", Permille, 0 => 1000, 250;
        /// Upper limit of the plugged memory of a guest whose agent does not report, as a multiple of its boot memory without the part in the balloon.
        unreported_multiple: "unreported", Count, 0 => 64, 8;
    }
    and {
        /// Decide, but ask nothing of the guest.
        dry_run: bool = false;
    }
    order { "floor" <= "ceiling"; "cool_down" <= "max_cool_down"; "progress" <= "max_retry"; }
}

impl Rules {
    /// The same rules with these parameters changed: all of them, or, with an error, none.
    pub fn with<'a>(
        &self,
        settings: impl IntoIterator<Item = (&'a str, &'a Setting)>,
    ) -> Result<Self, ParamError> {
        let mut changed = self.clone();
        for (name, setting) in settings {
            changed.set("the rules", name, setting)?;
        }
        changed.validate()?;
        Ok(changed)
    }
}
