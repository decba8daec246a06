//! Parameters of `psi` and their bounds.

use crate::MIB;
use crate::params::params;

params! {
    /// Parameters of `psi`. docs/reference/policies.md explains each.
    pub struct Params {
        /// Growth per second that the headroom absorbs.
        burst_bytes_per_s: "burst", Bytes, 0 => 1 << 50, 256 * MIB;
        /// Lower limit of the headroom.
        min_headroom_bytes: "min_headroom", Bytes, 2 * MIB => 1 << 40, 32 * MIB;
        /// Upper limit of the headroom from `burst`, as a share of memory.
        headroom_permille: "headroom", Permille, 10 => 500, 125;
        /// The headroom is at least this multiple of the sum of kswapd's high watermarks.
        watermark_scale: "watermark-scale", Count, 1 => 65_536, 1;
        /// Margin above the headroom, as a share of need; at least `min_step`.
        margin_permille: "margin", Permille, 5 => 500, 31;
        /// Time for which memory is provided at the present fill rate.
        horizon_ms: "horizon", Ms, 0 => 60_000, 1_500;
        /// Smallest grow.
        min_step_bytes: "min_step", Bytes, 2 * MIB => 1 << 40, 16 * MIB;
        /// Longest time between grows that double `min_step`.
        streak_ms: "streak", Ms, 100 => 600_000, 1_000;
        /// Share of time with waiting tasks that counts as stalled.
        stall_permille: "stall", Permille, 1 => 1000, 100;
        /// Evicted pages returning per second that count as thrashing.
        refault_bytes_per_s: "refault", Bytes, 4096 => 1 << 50, 8 * MIB;
        /// Time for which memory must be idle before it is surplus.
        idle_ms: "idle", Ms, 100 => 86_400_000, 10_000;
        /// Upper limit of `idle`.
        max_idle_ms: "max_idle", Ms, 100 => 86_400_000, 30_000;
    }
    order { "idle" <= "max_idle"; }
}
