//! Parameters of the rules that apply to every policy.

use crate::params::{Parameters, Setting, params};
use crate::{MIB, ParamError};

params! {
    /// Parameters of the rules that apply to every policy. docs/reference/policies.md explains
    /// each.
    pub struct Rules {
        /// Lower limit of the requested memory of all zones together, including the part of boot memory that a balloon can take.
        floor_bytes: "floor", Blocks, 0 => 1 << 46, 0;
        /// Upper limit of the requested memory of all zones together, including the part of boot memory that a balloon can take.
        ceiling_bytes: "ceiling", Blocks, 0 => 1 << 46, 1 << 46;
        /// Time after a grow in which no memory is taken back.
        cool_down_ms: "cool_down", Ms, 100 => 86_400_000, 5_000;
        /// Upper limit of `cool_down`, which doubles when a shrink has to be undone.
        max_cool_down_ms: "max_cool_down", Ms, 100 => 86_400_000, 60_000;
        /// Most memory taken back in one step, unless `shrink_share` allows more.
        shrink_step_bytes: "shrink_step", Bytes, 2 * MIB => 1 << 46, 128 * MIB;
        /// Share of the plugged memory that one step may take back, even if it is more than `shrink_step`.
        shrink_share_permille: "shrink_share", Permille, 0 => 1000, 125;
        /// Shortest time between two shrinks.
        shrink_interval_ms: "shrink_interval", Ms, 0 => 86_400_000, 1_000;
        /// Time without a change of the plugged size after which a request is reduced or withdrawn.
        progress_ms: "progress", Ms, 100 => 600_000, 5_000;
        /// Longest pause before more is requested from a zone that did not follow a request.
        max_retry_ms: "max_retry", Ms, 100 => 86_400_000, 60_000;
        /// Time without a report after which reports count as lost.
        lost_ms: "lost", Ms, 1_500 => 600_000, 3_000;
        /// Number of grows while reports are lost, each twice as large as the previous one.
        lost_steps: "lost_steps", Count, 0 => 32, 4;
        /// Size of the first grow after reports count as lost.
        lost_step_bytes: "lost_step", Bytes, 2 * MIB => 1 << 40, 64 * MIB;
        /// Largest share of a zone that is plugged if the guest does not online the zone as movable memory.
        unmovable_permille: "unmovable", Permille, 0 => 1000, 250;
        /// Upper limit of the plugged memory of a guest whose agent does not report, as a multiple of its boot memory without the part in the balloon.
        unreported_multiple: "unreported", Count, 0 => 64, 8;
    }
    and {
        /// Makes decisions without requests to the guest.
        dry_run: bool = false;
    }
    order { "floor" <= "ceiling"; "cool_down" <= "max_cool_down"; "progress" <= "max_retry"; }
}

impl Rules {
    /// Returns these rules with changed parameters. If one of them is invalid, none is changed.
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
