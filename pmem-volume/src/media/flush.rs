//! CPU instructions that write cache lines back to persistent memory. The instruction is selected
//! once when the media is opened. [`super::guarded`] executes it.

#[cfg(test)]
pub(crate) mod recorded_ops;

use std::arch::x86_64::{__cpuid_count, _mm_sfence};

/// Unit of a write-back in bytes.
pub(super) const CACHE_LINE_BYTES: usize = 64;

/// Best instruction for writing back a cache line on this CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineFlush {
    /// Writes the line back and may keep it in the cache.
    Clwb,
    /// Writes the line back and evicts it. Write-backs are unordered, so a fence must follow.
    ClflushOpt,
    /// Writes the line back and evicts it. Write-backs are serialized.
    Clflush,
}

impl LineFlush {
    /// Selects the instruction based on CPUID (Intel SDM, CPUID leaf 7, EBX bits 23 and 24).
    pub(super) fn detect() -> Self {
        let features = __cpuid_count(7, 0).ebx;
        if features & (1 << 24) != 0 {
            LineFlush::Clwb
        } else if features & (1 << 23) != 0 {
            LineFlush::ClflushOpt
        } else {
            LineFlush::Clflush
        }
    }
}

/// Orders all write-backs and non-temporal stores of this thread before later stores.
pub(super) fn fence() {
    #[cfg(test)]
    recorded_ops::record(recorded_ops::RecordedOp::Fenced);
    // SAFETY: SSE is part of x86-64; the instruction takes no operands.
    unsafe { _mm_sfence() }
}
