//! The parameters of `psi`, with their bounds.

use crate::MIB;
use crate::params::params;

params! {
    /// Parameters of `psi`. docs/reference/policies.md says what each is for.
    pub struct Params {
        /// A burst of so many bytes a second is served before the guest has said anything.
        burst_bytes_per_s: "burst", Bytes, 0 => 1 << 50, 256 * MIB;
        /// The least bridge.
        min_headroom_bytes: "min_headroom", Bytes, 2 * MIB => 1 << 40, 32 * MIB;
        /// The most that `burst` makes of it, in thousandths of what the guest has.
        headroom_permille: "headroom", Permille, 10 => 500, 125;
        /// The bridge is at least this many times the sum of kswapd's high watermarks.
        watermark_scale: "watermark-scale", Count, 1 => 65_536, 1;
        /// The slack beyond the bridge, in thousandths of need; at least `min_step`.
        slack_permille: "slack", Permille, 5 => 500, 31;
        /// How far ahead the present rate of growth is provided for.
        horizon_ms: "horizon", Ms, 0 => 60_000, 1_500;
        /// The least that is added at a time; doubled with every grow that follows closely upon another.
        min_step_bytes: "min_step", Bytes, 2 * MIB => 1 << 40, 16 * MIB;
        /// How closely.
        streak_ms: "streak", Ms, 100 => 600_000, 1_000;
        /// Tasks waiting for memory for this share of the time is pressure.
        stall_permille: "stall", Permille, 1 => 1000, 100;
        /// Evicted pages coming back at this rate, in bytes a second, is pressure, if tasks wait as well.
        refault_bytes_per_s: "refault", Bytes, 4096 => 1 << 50, 8 * MIB;
        /// Memory is surplus once it has been idle for this long.
        idle_ms: "idle", Ms, 100 => 86_400_000, 10_000;
        /// The longest that this becomes for a guest that wants back what went.
        max_idle_ms: "max_idle", Ms, 100 => 86_400_000, 30_000;
    }
    order { "idle" <= "max_idle"; }
}
