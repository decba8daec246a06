//! Sparse words in pages that copies share. Sharing saves memory, because crash images differ in
//! only a few words.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;

const PAGE_WORDS: usize = 512;
const PAGE_BYTES: u64 = PAGE_WORDS as u64 * 8;

/// Sparse words. Missing pages are zero. A clone shares each page until one of the two stores to
/// it.
#[derive(Clone, Default)]
pub(super) struct Pages {
    pages: BTreeMap<u64, Arc<[u64; PAGE_WORDS]>>,
    digest: u128,
}

impl Pages {
    pub(super) fn load(&self, at: u64) -> u64 {
        self.pages.get(&(at / PAGE_BYTES)).map_or(0, |page| page[word_in_page(at)])
    }

    pub(super) fn store(&mut self, at: u64, word: u64) {
        let page = match self.pages.entry(at / PAGE_BYTES) {
            Entry::Vacant(_) if word == 0 => return,
            entry => entry.or_insert_with(|| Arc::new([0; PAGE_WORDS])),
        };
        let old = std::mem::replace(&mut Arc::make_mut(page)[word_in_page(at)], word);
        self.digest ^= digest_of(at, old) ^ digest_of(at, word);
    }

    /// Returns the digest of the content. The probability that different contents have the same
    /// digest is 2^-128.
    pub(super) fn digest(&self) -> u128 {
        self.digest
    }

    pub(super) fn read(&self, offset_bytes: u64, into: &mut [u8]) {
        let (mut at, mut rest) = (offset_bytes, into);
        while !rest.is_empty() {
            let within = (at % PAGE_BYTES) as usize;
            let take = rest.len().min(PAGE_BYTES as usize - within);
            let (now, later) = rest.split_at_mut(take);
            match self.pages.get(&(at / PAGE_BYTES)) {
                Some(page) => copy_out(page.as_ref(), within, now),
                None => now.fill(0),
            }
            at += take as u64;
            rest = later;
        }
    }

    /// Returns the nonzero words in a range, by offset. The range must start and end at word
    /// boundaries.
    pub(super) fn words(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let numbers = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
        let in_page = |(number, page): (&u64, &Arc<[u64; PAGE_WORDS]>)| {
            let (start, page) = (number * PAGE_BYTES, Arc::clone(page));
            (0..PAGE_WORDS).map(move |word| (start + word as u64 * 8, page[word]))
        };
        self.pages
            .range(numbers)
            .flat_map(in_page)
            .filter(move |(at, word)| *word != 0 && range.contains(at))
    }

    /// Zeroes everything at and after `offset_bytes`.
    pub(super) fn truncate(&mut self, offset_bytes: u64) {
        let behind: Vec<u64> = self.words(offset_bytes..u64::MAX).map(|(at, _)| at).collect();
        behind.into_iter().for_each(|at| self.store(at, 0));
        self.pages.split_off(&offset_bytes.div_ceil(PAGE_BYTES));
    }
}

/// Returns the contribution of a word to the digest. The digest is the XOR of all contributions,
/// and a zero word contributes 0.
fn digest_of(at: u64, word: u64) -> u128 {
    if word == 0 {
        return 0;
    }
    let low = mixed(word ^ mixed(at));
    let high = mixed(word ^ mixed(!at));
    u128::from(high) << 64 | u128::from(low)
}

/// Finalizer of SplitMix64 (Steele, Lea and Flood 2014).
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

fn word_in_page(at: u64) -> usize {
    (at % PAGE_BYTES / 8) as usize
}

/// Copies bytes of a page, starting at any byte.
fn copy_out(page: &[u64; PAGE_WORDS], within: usize, into: &mut [u8]) {
    if within.is_multiple_of(8) && into.len().is_multiple_of(8) {
        for (bytes, word) in into.as_chunks_mut::<8>().0.iter_mut().zip(&page[within / 8..]) {
            *bytes = word.to_le_bytes();
        }
    } else {
        for (at, byte) in (within..).zip(into) {
            *byte = page[at / 8].to_le_bytes()[at % 8];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_at_any_byte_return_stored_data() {
        let mut pages = Pages::default();
        let at = |word: u64| PAGE_BYTES - 16 + word * 8;
        (0..4).for_each(|word| pages.store(at(word), 0x0101_0101_0101_0101 * (word + 1)));
        let mut bytes = [0xee; 32];
        pages.read(at(0), &mut bytes);
        assert_eq!(bytes, [[1; 8], [2; 8], [3; 8], [4; 8]].concat()[..]);
        for start in 0..32 {
            for end in start..=32 {
                let mut part = vec![0xee; end - start];
                pages.read(at(0) + start as u64, &mut part);
                assert_eq!(part, bytes[start..end]);
            }
        }
        assert_eq!(pages.words(at(1)..at(3)).count(), 2);
    }

    #[test]
    fn digests_are_equal_only_for_equal_content() {
        let pages = |words: &[(u64, u64)]| {
            let mut pages = Pages::default();
            words.iter().for_each(|(at, word)| pages.store(*at, *word));
            pages.digest()
        };
        let digest = pages(&[(8, 1), (PAGE_BYTES, 2)]);
        assert_eq!(digest, pages(&[(PAGE_BYTES, 2), (8, 1)]));
        assert_eq!(digest, pages(&[(8, 5), (16, 3), (PAGE_BYTES, 2), (8, 1), (16, 0)]));
        for other in [
            &[(8, 1)][..],
            &[(8, 2), (PAGE_BYTES, 1)],
            &[(16, 1), (PAGE_BYTES, 2)],
            &[(8, 1), (PAGE_BYTES, 2), (24, 1)],
            &[(1, 8), (PAGE_BYTES, 2)],
        ] {
            assert_ne!(digest, pages(other), "{other:?}");
        }
        let mut cut = Pages::default();
        [(8, 1), (PAGE_BYTES, 2), (PAGE_BYTES + 8, 3), (3 * PAGE_BYTES, 4)]
            .iter()
            .for_each(|(at, word)| cut.store(*at, *word));
        cut.truncate(PAGE_BYTES + 8);
        assert_eq!(digest, cut.digest());
    }

    #[test]
    fn copy_is_independent_and_a_cut_leaves_zeros() {
        let mut pages = Pages::default();
        [8, 16, 3 * PAGE_BYTES].iter().for_each(|at| pages.store(*at, 7));
        let copy = pages.clone();
        pages.store(8, 9);
        assert_eq!((pages.load(8), copy.load(8)), (9, 7));
        pages.truncate(16);
        assert_eq!(pages.words(0..u64::MAX).collect::<Vec<_>>(), [(8, 9)]);
        assert_eq!(copy.words(0..u64::MAX).count(), 3);
    }
}
