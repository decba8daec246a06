//! Bit streams of zstd. Each stream starts with its least significant bit. Streams of entropy codes
//! are read from the end.

use super::ZstdError;

/// Reads bits from the start of a stream.
pub(super) struct ForwardBits<'a> {
    data: &'a [u8],
    /// Number of bits that have been read.
    at: usize,
}

impl<'a> ForwardBits<'a> {
    pub(super) fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0 }
    }

    /// Returns the next `count` bits, at most 16, without consuming them. Bits after the end of the
    /// stream are 0.
    pub(super) fn peek(&self, count: u32) -> u32 {
        let byte = |nth: usize| u32::from(self.data.get(self.at / 8 + nth).copied().unwrap_or(0));
        let word = byte(0) | byte(1) << 8 | byte(2) << 16;
        word >> (self.at % 8) & ((1 << count) - 1)
    }

    pub(super) fn skip(&mut self, count: u32) {
        self.at += count as usize;
    }

    pub(super) fn read(&mut self, count: u32) -> u32 {
        let bits = self.peek(count);
        self.skip(count);
        bits
    }

    /// Returns the bytes after the last byte that was read in part or completely.
    pub(super) fn rest(&self) -> Result<&'a [u8], ZstdError> {
        self.data.get(self.at.div_ceil(8)..).ok_or(ZstdError::Truncated)
    }
}

/// Reads bits from the end of a stream, whose last byte contains a 1 bit as an end mark.
///
/// Bits before the start of the stream are 0. After the last read, the caller checks that
/// [`BackwardBits::left`] is 0, which is faster than a check for each read.
#[derive(Clone, Copy)]
pub(super) struct BackwardBits<'a> {
    /// Bytes that are not in `word` yet.
    data: &'a [u8],
    /// Next bits, starting with the most significant one.
    word: u64,
    /// Number of valid bits in `word`. Negative if bits before the start of the stream were read.
    valid: i32,
}

impl<'a> BackwardBits<'a> {
    /// Number of bits that can be read after a refill.
    pub(super) const REFILLED: u32 = 56;

    pub(super) fn new(data: &'a [u8]) -> Result<Self, ZstdError> {
        let last = data.last().filter(|last| **last != 0).ok_or(ZstdError::NoEndMark)?;
        let mut bits = Self { data, word: 0, valid: 0 };
        bits.refill();
        bits.skip(last.leading_zeros() + 1);
        Ok(bits)
    }

    /// Loads bytes until at least [`Self::REFILLED`] bits are valid, or all are loaded.
    #[inline(always)]
    pub(super) fn refill(&mut self) {
        if let Some((_, next)) = self.data.split_last_chunk::<8>() {
            // While bytes are left, `valid` is in 0..64, because at most as many bits are read as
            // the last refill has loaded.
            let valid = self.valid as u32;
            self.word |= u64::from_le_bytes(*next).wrapping_shr(valid);
            let byte_count = (63u32.wrapping_sub(valid) / 8) & 7;
            self.data = &self.data[..self.data.len() - byte_count as usize];
            self.valid += 8 * byte_count as i32;
        } else {
            self.refill_slowly();
        }
    }

    /// Refills near the start of the stream.
    #[cold]
    fn refill_slowly(&mut self) {
        while let Ok(valid @ 0..=56) = u32::try_from(self.valid)
            && let Some((last, rest)) = self.data.split_last()
        {
            self.word |= u64::from(*last) << (56 - valid);
            self.data = rest;
            self.valid += 8;
        }
    }

    /// Returns the next `COUNT` bits without consuming them.
    #[inline(always)]
    pub(super) fn peek<const COUNT: u32>(&self) -> u64 {
        self.word >> (64 - COUNT)
    }

    /// Consumes at most 63 bits.
    #[inline(always)]
    pub(super) fn skip(&mut self, count: u32) {
        self.word = self.word.wrapping_shl(count);
        self.valid = self.valid.wrapping_sub(count as i32);
    }

    /// Reads at most 56 bits, which a refill has loaded.
    #[inline(always)]
    pub(super) fn read(&mut self, count: u8) -> u64 {
        // Two shifts, because a shift by 64 is not possible.
        let bits = (self.word >> 1).wrapping_shr(63 - u32::from(count));
        self.skip(u32::from(count));
        bits
    }

    /// Number of bits that have not been read yet. Negative if too many were read.
    pub(super) fn left(&self) -> i64 {
        i64::from(self.valid) + 8 * self.data.len() as i64
    }

    /// Checks that all bits of the stream were read, and not more.
    pub(super) fn check_end(&self) -> Result<(), ZstdError> {
        match self.left() {
            0 => Ok(()),
            left_bits => Err(ZstdError::BitsLeft { left_bits }),
        }
    }
}
