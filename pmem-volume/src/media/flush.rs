//! CPU instructions that write cache lines back to persistent memory. The instruction is selected
//! once, at open, and executed by [`super::guarded`].

#[cfg(test)]
pub(crate) mod noted;

use std::arch::x86_64::{__cpuid_count, _mm_sfence};

/// Bytes that are written back at once.
pub(super) const CACHE_LINE_BYTES: usize = 64;

/// Best instruction of this CPU for writing back a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineFlush {
    /// Writes back and may keep the line.
    Clwb,
    /// Writes back and evicts, unordered, so a fence must follow.
    ClflushOpt,
    /// Writes back and evicts, one after the other.
    Clflush,
}

impl LineFlush {
    /// Selects the instruction by CPUID (Intel SDM, CPUID leaf 7, EBX bits 23 and 24).
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
    noted::note(noted::Noted::Fenced);
    // SAFETY: SSE is part of x86-64; the instruction takes no operands.
    unsafe { _mm_sfence() }
}
