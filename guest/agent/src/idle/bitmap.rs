//! Idle page tracking: /sys/kernel/mm/page_idle/bitmap
//! (Documentation/admin-guide/mm/idle_page_tracking.rst). The bitmap has one bit per page frame.
//! Setting a bit marks the page idle, and an access clears it. Only user pages have bits, so free
//! memory cannot be found in this way.
//!
//! The agent marks a random sample of the bitmap's words, and reads them again later.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use foreshore_proto::scale;

use super::{MAX_NODES, NodeResult, PAGE_BYTES, SPAN_MS, nodes_of, span_bytes};
use crate::blocks::Range;

/// Number of words to mark per node, with 64 pages each. Marking and reading a page each require a
/// walk through page tables. Together they take about 10 ms per minute.
const WORDS: u64 = 64;
const WORD_PAGES: u64 = 64;

#[derive(Debug)]
pub(super) struct Bitmap {
    file: File,
    marked: Vec<(u32, u64, Vec<u64>)>,
    marked_ms: u64,
    found: Vec<NodeResult>,
    random: u64,
}

impl Bitmap {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Bitmap {
            file,
            marked: Vec::new(),
            marked_ms: 0,
            found: Vec::new(),
            random: 0x9e37_79b9_7f4a_7c15,
        })
    }

    /// Reads pages that were marked at least `SPAN_MS` ago, marks new ones, and returns the result.
    /// If the marks are more recent, returns the last result.
    pub(super) fn query(&mut self, ranges: &[Range], now_ms: u64) -> Vec<NodeResult> {
        if now_ms.saturating_sub(self.marked_ms) < SPAN_MS && !self.marked.is_empty() {
            return self.found.clone();
        }
        let marked = std::mem::take(&mut self.marked);
        if !marked.is_empty() {
            self.found = marked
                .into_iter()
                .map(|(node, span, words)| self.read(node, span, &words))
                .collect();
        }
        for (node, ranges) in nodes_of(ranges).into_iter().take(MAX_NODES as usize) {
            let mut words: Vec<u64> = (0..WORDS).filter_map(|_| self.choose(&ranges)).collect();
            words.sort_unstable();
            words.dedup();
            words.retain(|word| self.file.write_all_at(&u64::MAX.to_ne_bytes(), word * 8).is_ok());
            self.marked.push((node, span_bytes(&ranges), words));
        }
        self.marked_ms = now_ms;
        self.found.clone()
    }

    fn read(&self, node: u32, span_bytes: u64, words: &[u64]) -> NodeResult {
        let mut idle_pages = 0u64;
        for word in words {
            let mut bits = [0; 8];
            if self.file.read_exact_at(&mut bits, word * 8).is_ok() {
                idle_pages += u64::from(u64::from_ne_bytes(bits).count_ones());
            }
        }
        let idle_bytes = scale(span_bytes, idle_pages, words.len() as u64 * WORD_PAGES);
        NodeResult::new(node, idle_bytes, span_bytes, false)
    }

    /// Chooses a random word of the bitmap with pages in `ranges`. All words are equally likely.
    fn choose(&mut self, ranges: &[Range]) -> Option<u64> {
        let word_bytes = WORD_PAGES * PAGE_BYTES;
        // xorshift64 is good enough, because the values only need to be spread out.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let mut place = self.random.checked_rem(span_bytes(ranges))?;
        let range = ranges.iter().find(|range| {
            let length = range.end.saturating_sub(range.start);
            let inside = place < length;
            place -= if inside { 0 } else { length };
            inside
        })?;
        Some((range.start + place) / word_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::range;
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Bitmap of a guest with `mib` of memory and no idle page.
    fn bitmap(mib: u64) -> (tempfile::TempDir, Bitmap) {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("bitmap");
        std::fs::write(&path, vec![0; (mib * MIB / PAGE_BYTES / 8) as usize]).expect("write");
        let bitmap = Bitmap::open(&path).expect("opens");
        (dir, bitmap)
    }

    #[test]
    fn pages_without_an_access_between_two_looks_are_idle() {
        let (_dir, mut bitmap) = bitmap(1024);
        let ranges = [range(0, 0, 128), range(0, 256, 384), range(1, 512, 1024)];
        assert_eq!(bitmap.query(&ranges, 1_000), [], "nothing is known yet");
        assert_eq!(bitmap.query(&ranges, 60_999), [], "nor now");
        // All pages of node 1 are accessed.
        bitmap.file.write_all_at(&vec![0; 512 * 32], 512 * 32).expect("write");
        let found = bitmap.query(&ranges, 61_000);
        let expected =
            |node, idle_mib, span_mib| NodeResult::new(node, idle_mib * MIB, span_mib * MIB, false);
        assert_eq!(found, [expected(0, 256, 256), expected(1, 0, 512)]);
        // Half of the pages in every word of node 0 are accessed.
        bitmap.file.write_all_at(&vec![0x0f; 512 * 32], 0).expect("write");
        assert_eq!(bitmap.query(&ranges, 121_000)[0], expected(0, 128, 256));
        assert!(
            bitmap.query(&[], 181_000).len() == 2 && bitmap.query(&[], 241_000).len() == 2,
            "as last found"
        );
    }

    #[test]
    fn words_are_chosen_from_all_ranges_only() {
        let (_dir, mut bitmap) = bitmap(1);
        let ranges = [range(0, 0, 128), range(0, 512, 640)];
        let words: Vec<u64> = (0..1000).filter_map(|_| bitmap.choose(&ranges)).collect();
        assert_eq!(words.len(), 1000);
        let low = words.iter().filter(|word| **word < 512).count();
        let high = words.iter().filter(|word| (2048..2560).contains(*word)).count();
        assert_eq!(low + high, 1000);
        assert!(low > 400 && high > 400, "{low} and {high}");
        assert_eq!(bitmap.choose(&[]), None);
    }

    #[test]
    fn too_short_bitmap_has_no_idle_pages() {
        let (_dir, mut bitmap) = bitmap(1);
        let ranges = [range(0, 512, 1024)];
        bitmap.query(&ranges, 0);
        bitmap.file.set_len(8).expect("truncates");
        assert_eq!(bitmap.query(&ranges, SPAN_MS)[0].idle_bytes, 0);
    }
}
