//! Reads numbers from the bytes of a fuzzer.

/// Cursor over the bytes, which continues with zeros after their end.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns up to `count` bytes.
    pub(super) fn take(&mut self, count: usize) -> &'a [u8] {
        let (now, later) = self.bytes.split_at(count.min(self.bytes.len()));
        self.bytes = later;
        now
    }

    pub(super) fn number(&mut self, bytes: usize) -> u64 {
        let mut word = [0; 8];
        let taken = self.take(bytes);
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word)
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        let bytes = (64 - bound.leading_zeros()).div_ceil(8) as usize;
        self.number(bytes) % bound
    }

    /// Returns a value that is likely to cause errors.
    pub(super) fn value(&mut self) -> u64 {
        match self.number(1) % 6 {
            0 => self.number(1),
            1 => self.number(8),
            2 => 1 << self.below(64),
            3 => (1u64 << self.below(64)).wrapping_sub(self.below(16)),
            4 => self.number(1) * super::image::CHUNK_BYTES,
            _ => u64::MAX - self.number(1),
        }
    }
}
