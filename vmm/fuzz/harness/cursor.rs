//! Reads numbers from a fuzzer's bytes.

/// Reader of a byte string. Behind its end, all bytes read as zero.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(super) fn number(&mut self, count: usize) -> u64 {
        let (now, later) = self.bytes.split_at(count.min(self.bytes.len()));
        self.bytes = later;
        let mut word = [0; 8];
        word[..now.len()].copy_from_slice(now);
        u64::from_le_bytes(word)
    }

    /// Returns true if all bytes have been read.
    pub(super) fn is_done(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns one of the values, which need not be `Copy`.
    pub(super) fn pick_of<T, const COUNT: usize>(&mut self, all: [T; COUNT]) -> T {
        let nth = self.number(1) as usize % COUNT;
        all.into_iter().nth(nth).expect("less than COUNT")
    }

    pub(super) fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.number(1) as usize % all.len()]
    }
}
