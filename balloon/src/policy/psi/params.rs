//! The parameters of `psi`, with their bounds.

use serde::Serialize;

use crate::units::in_range;
use crate::{MIB, ParamError};

/// Parameters of `psi`. docs/policy.md says what each is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Params {
    /// The headroom at rest, in thousandths of what the guest has.
    pub headroom_permille: u64,
    /// The least headroom.
    pub min_headroom_bytes: u64,
    /// The most headroom that `headroom_permille` makes.
    pub max_headroom_bytes: u64,
    /// The headroom is at least this many times the sum of kswapd's high watermarks.
    pub watermark_scale: u64,
    /// How far ahead the present rate of growth is provided for.
    pub horizon_ms: u64,
    /// The least that is added at a time; doubled with every grow that follows closely upon another.
    pub min_step_bytes: u64,
    /// How closely.
    pub streak_ms: u64,
    /// Tasks waiting for memory for this share of the time, in thousandths, is pressure.
    pub stall_permille: u64,
    /// Evicted pages coming back at this rate is pressure, if tasks wait as well.
    pub refault_bytes_per_s: u64,
    /// Memory is surplus once it has been idle for this long.
    pub idle_ms: u64,
}

impl Default for Params {
    fn default() -> Self {
        Params {
            headroom_permille: 125,
            min_headroom_bytes: 32 * MIB,
            max_headroom_bytes: 1024 * MIB,
            watermark_scale: 8,
            horizon_ms: 1_500,
            min_step_bytes: 32 * MIB,
            streak_ms: 3_000,
            stall_permille: 100,
            refault_bytes_per_s: 8 * MIB,
            idle_ms: 3_000,
        }
    }
}

impl Params {
    /// Checks every parameter against its bounds.
    pub fn validate(&self) -> Result<(), ParamError> {
        in_range("headroom", self.headroom_permille, 10, 500)?;
        in_range("min_headroom", self.min_headroom_bytes, 2 * MIB, 1 << 40)?;
        in_range("max_headroom", self.max_headroom_bytes, self.min_headroom_bytes, 1 << 40)?;
        in_range("watermark-scale", self.watermark_scale, 1, 65_536)?;
        in_range("horizon", self.horizon_ms, 0, 60_000)?;
        in_range("min_step", self.min_step_bytes, 2 * MIB, 1 << 40)?;
        in_range("streak", self.streak_ms, 100, 600_000)?;
        in_range("stall", self.stall_permille, 1, 1000)?;
        in_range("refault", self.refault_bytes_per_s, 4096, 1 << 50)?;
        in_range("idle", self.idle_ms, 100, 86_400_000)
    }
}
