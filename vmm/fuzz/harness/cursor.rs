//! Numbers out of a fuzzer's bytes.

/// Gives bytes as long as there are any, and zeros behind them.
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

    /// Whether there are only zeros left.
    pub(super) fn is_done(&self) -> bool {
        self.bytes.is_empty()
    }

    /// One of them, to keep.
    pub(super) fn pick_of<T, const COUNT: usize>(&mut self, all: [T; COUNT]) -> T {
        let nth = self.number(1) as usize % COUNT;
        all.into_iter().nth(nth).expect("less than COUNT")
    }

    pub(super) fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.number(1) as usize % all.len()]
    }
}
