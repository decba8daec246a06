//! Media in ordinary memory, for tests and for work without a file.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Durability, Media, MediaError, assert_inside};

/// Media in memory that never fails. Every store is durable immediately.
pub struct MemoryMedia {
    words: Box<[AtomicU64]>,
}

impl MemoryMedia {
    /// Creates zeroed media. `len_bytes` must be a multiple of 8.
    pub fn new(len_bytes: u64) -> Self {
        Self::from_bytes(&vec![0; usize::try_from(len_bytes).expect("fits the address space")])
    }

    /// Creates media with a copy of `bytes`, whose length must be a multiple of 8.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        assert!(bytes.len().is_multiple_of(8));
        let (words, _) = bytes.as_chunks::<8>();
        Self { words: words.iter().map(|w| AtomicU64::new(u64::from_le_bytes(*w))).collect() }
    }

    /// Returns a copy of the whole media.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|w| w.load(Ordering::Acquire).to_le_bytes()).collect()
    }

    fn word(&self, offset_bytes: u64) -> &AtomicU64 {
        &self.words[usize::try_from(offset_bytes / 8).expect("inside media that fits memory")]
    }
}

impl Media for MemoryMedia {
    fn len_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        assert_inside(offset_bytes, into.len() as u64, self.len_bytes());
        let mut at = offset_bytes;
        let mut rest = into;
        while !rest.is_empty() {
            let within = (at % 8) as usize;
            let take = rest.len().min(8 - within);
            let word = self.word(at).load(Ordering::Acquire).to_le_bytes();
            let (now, later) = rest.split_at_mut(take);
            now.copy_from_slice(&word[within..within + take]);
            at += take as u64;
            rest = later;
        }
        Ok(())
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        assert!(offset_bytes.is_multiple_of(8));
        assert_inside(offset_bytes, 8, self.len_bytes());
        Ok(self.word(offset_bytes).load(Ordering::Acquire))
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        assert_inside(offset_bytes, bytes.len() as u64, self.len_bytes());
        let mut at = offset_bytes;
        let mut rest = bytes;
        while !rest.is_empty() {
            let within = (at % 8) as usize;
            let take = rest.len().min(8 - within);
            let mut word = self.word(at).load(Ordering::Acquire).to_le_bytes();
            word[within..within + take].copy_from_slice(&rest[..take]);
            self.word(at).store(u64::from_le_bytes(word), Ordering::Release);
            at += take as u64;
            rest = &rest[take..];
        }
        Ok(())
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        assert!(offset_bytes.is_multiple_of(8));
        assert_inside(offset_bytes, 8, self.len_bytes());
        self.word(offset_bytes).store(word, Ordering::Release);
        Ok(())
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        for range in ranges {
            assert_inside(range.start, range.end - range.start, self.len_bytes());
        }
        Ok(())
    }

    fn erase(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        for range in ranges {
            assert!(range.start.is_multiple_of(8) && range.end.is_multiple_of(8));
            assert_inside(range.start, range.end - range.start, self.len_bytes());
            for offset in range.clone().step_by(8) {
                self.word(offset).store(0, Ordering::Release);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaligned_stores_and_reads_agree() {
        let media = MemoryMedia::new(64);
        media.store(3, b"persistent memory").unwrap();
        let mut back = [0; 17];
        media.read(3, &mut back).unwrap();
        assert_eq!(&back, b"persistent memory");
        assert_eq!(media.load_word(0).unwrap().to_le_bytes(), *b"\0\0\0persi");
    }

    #[test]
    #[should_panic(expected = "outside media")]
    fn offset_outside_panics() {
        let _ = MemoryMedia::new(64).load_word(64);
    }
}
