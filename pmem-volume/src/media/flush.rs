//! CPU instructions that write cache lines back to persistent memory. The instruction is chosen once, at open.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};

const CACHE_LINE_BYTES: usize = 64;

/// The best instruction this CPU has for writing a cache line back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineFlush {
    /// Writes back and may keep the line.
    Clwb,
    /// Writes back and evicts; unordered, so a fence must follow.
    ClflushOpt,
    /// Writes back and evicts, one after the other.
    Clflush,
}

impl LineFlush {
    /// Asks the CPU (Intel SDM, CPUID leaf 7, EBX bits 23 and 24).
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

    /// Writes back every line that `length` bytes at `start` touch. The caller fences afterwards.
    ///
    /// # Safety
    /// The bytes must be mapped.
    pub(super) unsafe fn write_back(self, start: *const u8, length: usize) {
        let first = start as usize & !(CACHE_LINE_BYTES - 1);
        let end = start as usize + length;
        for line in (first..end).step_by(CACHE_LINE_BYTES) {
            // SAFETY: flushing a line changes no architectural state; the line holds a byte that the caller
            // promises is mapped, and detect() found the instruction.
            unsafe {
                match self {
                    LineFlush::Clwb => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
                    LineFlush::ClflushOpt => {
                        asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
                    }
                    LineFlush::Clflush => {
                        asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags))
                    }
                }
            }
        }
    }
}

/// Orders all write-backs and non-temporal stores of this thread before anything later.
pub(super) fn fence() {
    // SAFETY: SSE is part of x86-64; the instruction takes no operands.
    unsafe { _mm_sfence() }
}

/// Zeroes memory past the cache: nothing is left to write back, and the caches keep what they hold.
///
/// # Safety
/// `length` bytes at `start` must be mapped writable and be nobody else's; both are multiples of 16.
pub(super) unsafe fn zero_non_temporal(start: *mut u8, length: usize) {
    assert!((start as usize).is_multiple_of(16) && length.is_multiple_of(16));
    for offset in (0..length).step_by(16) {
        // SAFETY: inside the range that the caller vouches for, aligned to 16.
        unsafe { _mm_stream_si128(start.add(offset).cast::<__m128i>(), _mm_setzero_si128()) }
    }
    fence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_an_unaligned_range_is_written_back_without_harm() {
        let bytes = vec![0x5au8; 300];
        // SAFETY: the range is inside the vector.
        unsafe { LineFlush::detect().write_back(bytes.as_ptr().add(3), 290) };
        fence();
        assert!(bytes.iter().all(|b| *b == 0x5a));
    }

    #[test]
    fn non_temporal_zeroing_zeroes_exactly_its_range() {
        let mut words = vec![u128::MAX; 64];
        // SAFETY: 32 aligned words in the middle of the vector.
        unsafe { zero_non_temporal(words.as_mut_ptr().add(16).cast(), 32 * 16) };
        assert!(words[16..48].iter().all(|w| *w == 0));
        assert!(words[..16].iter().chain(&words[48..]).all(|w| *w == u128::MAX));
    }
}
