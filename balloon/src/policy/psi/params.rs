//! Parameters of `psi` and their bounds.

use crate::MIB;
use crate::params::params;

params! {
    /// Parameters of `psi`. docs/reference/policies.md explains each.
    pub struct Params {
        /// Growth of used memory, in bytes per second, that the headroom absorbs until more memory is online.
        burst_bytes_per_s: "burst", Bytes, 0 => 1 << 50, 256 * MIB;
        /// Lower limit of the headroom, the available memory below which the guest grows.
        min_headroom_bytes: "min_headroom", Bytes, 2 * MIB => 1 << 40, 32 * MIB;
        /// Upper limit of the headroom that results from `burst`, as a share of the guest's memory.
        headroom_permille: "headroom", Permille, 10 => 500, 125;
        /// Lower limit of the headroom, as a multiple of the sum of kswapd's high watermarks.
        watermark_scale: "watermark-scale", Count, 1 => 65_536, 1;
        /// Available memory above the headroom after a grow, as a share of used memory and headroom; at least `min_step`.
        margin_permille: "margin", Permille, 5 => 500, 31;
        /// Time for which a grow provides memory in advance, at the rate at which the guest fills memory.
        horizon_ms: "horizon", Ms, 0 => 60_000, 1_500;
        /// Smallest grow; doubled with every grow within `streak` of the previous one.
        min_step_bytes: "min_step", Bytes, 2 * MIB => 1 << 40, 16 * MIB;
        /// The second of two grows within this time doubles `min_step`.
        streak_ms: "streak", Ms, 100 => 600_000, 1_000;
        /// The guest grows if tasks wait for memory for at least this share of the time.
        stall_permille: "stall", Permille, 1 => 1000, 100;
        /// A guest with waiting tasks is thrashing if evicted pages are read back at this rate or faster, in bytes per second.
        refault_bytes_per_s: "refault", Bytes, 4096 => 1 << 50, 8 * MIB;
        /// Time for which available memory must stay unused before the guest returns it.
        idle_ms: "idle", Ms, 100 => 86_400_000, 10_000;
        /// Upper limit of `idle`, which doubles if a guest needs returned memory again.
        max_idle_ms: "max_idle", Ms, 100 => 86_400_000, 30_000;
    }
    order { "idle" <= "max_idle"; }
}
