//! Map of an open arena. A lock covers each line of entries, and a single aligned store changes an
//! entry.
//!
//! An entry has 32 bits, and a word of the media contains two entries. Changing one of them must
//! preserve the other, which must not change concurrently. Like the locks of Linux, a lock covers a
//! whole cache line.

use std::ops::Range;

use smallvec::SmallVec;

use super::lock::{Lock, LockGuard};
use crate::btt::arena::ArenaInfo;
use crate::btt::layout::{MAP_BLOCK, MAP_ENTRY_BYTES, MAP_ERROR, MAP_ZERO};
use crate::media::{Media, MediaError};

const LINE_BYTES: u64 = 64;
/// Number of sectors whose entries share a cache line.
pub(super) const LINE_SECTORS: u32 = (LINE_BYTES / MAP_ENTRY_BYTES) as u32;
/// Number of line locks for all arenas together. Lines whose numbers differ by a multiple of this
/// share a lock.
pub(super) const LOCKS: usize = 1024;

/// Locks for the lines of maps.
pub(super) struct LineLocks(Box<[LineLock]>);

#[repr(align(64))]
struct LineLock(Lock<()>);

/// Locked lines.
pub(super) struct LockedLines<'a> {
    words: Range<u64>,
    _guards: SmallVec<[LockGuard<'a, ()>; 1]>,
}

/// Position of an arena's map.
pub(super) struct Map {
    at: u64,
    sectors: u32,
}

impl LineLocks {
    pub(super) fn new(locks: usize) -> Self {
        Self((0..locks).map(|_| LineLock(Lock::new(()))).collect())
    }

    /// Locks the lines that contain the words. Locks are taken in a fixed order to prevent
    /// deadlocks.
    #[inline]
    pub(super) fn lock(&self, words: Range<u64>) -> LockedLines<'_> {
        let lines = words.start / LINE_BYTES..=(words.end - 1) / LINE_BYTES;
        let locks = self.0.len();
        let number = |line: u64| line as usize % locks;
        let lock = |number: usize| self.0[number].0.lock();
        let mut guards = SmallVec::new();
        if lines.start() == lines.end() {
            guards.push(lock(number(*lines.start())));
        } else {
            let mut numbers: SmallVec<[usize; 8]> = lines.map(number).collect();
            assert!(numbers.len() <= locks, "more lines than locks");
            numbers.sort_unstable();
            guards.extend(numbers.into_iter().map(lock));
        }
        LockedLines { words, _guards: guards }
    }
}

impl LockedLines<'_> {
    /// Returns the words of the locked sectors.
    #[inline]
    pub(super) fn words(&self) -> Range<u64> {
        self.words.clone()
    }
}

impl Map {
    pub(super) fn new(info: &ArenaInfo) -> Self {
        Self { at: info.map_at, sectors: info.sectors }
    }

    /// Reads the entry of a sector from the media.
    #[inline]
    pub(super) fn entry(&self, space: &impl Media, sector: u32) -> Result<u32, MediaError> {
        let word = space.load_word(self.word_at(sector))?;
        Ok(if sector.is_multiple_of(2) { word as u32 } else { (word >> 32) as u32 })
    }

    /// Prefetches the entry of a sector.
    #[inline]
    pub(super) fn prefetch(&self, space: &impl Media, sector: u32) {
        space.prefetch_word(self.word_at(sector));
    }

    /// Changes entries in locked lines. Each word is changed by one store that cannot tear.
    /// `change` returns the new entry. Unchanged words are not stored.
    #[inline]
    pub(super) fn change(
        &self,
        space: &impl Media,
        sectors: Range<u32>,
        locked: &LockedLines<'_>,
        change: impl Fn(u32, u32) -> u32,
    ) -> Result<(), MediaError> {
        let words = self.word_range(&sectors);
        assert!(
            locked.words.start <= words.start && words.end <= locked.words.end,
            "the lines are locked"
        );
        let mut sector = sectors.start;
        while sector < sectors.end {
            let at = self.word_at(sector);
            let old = space.load_word(at)?;
            let mut new = old;
            loop {
                let shift = sector % 2 * 32;
                let entry = change(sector, (new >> shift) as u32);
                new = new & !(u64::from(u32::MAX) << shift) | u64::from(entry) << shift;
                sector += 1;
                if sector == sectors.end || sector.is_multiple_of(2) {
                    break;
                }
            }
            if new != old {
                space.store_word(at, new)?;
            }
        }
        Ok(())
    }

    /// Returns the range of words that contain the entries of `sectors`.
    #[inline]
    pub(super) fn word_range(&self, sectors: &Range<u32>) -> Range<u64> {
        self.word_at(sectors.start)..self.word_at(sectors.end - 1) + 8
    }

    #[inline]
    fn word_at(&self, sector: u32) -> u64 {
        assert!(sector < self.sectors);
        self.at + u64::from(sector / 2) * 2 * MAP_ENTRY_BYTES
    }
}

/// Returns the entry of a written sector.
#[inline]
pub(super) fn written_entry(block: u32) -> u32 {
    block | MAP_ERROR | MAP_ZERO
}

/// Returns the entry of a sector after a discard. The sector keeps its block until a later write
/// exchanges it. Linux reads such an entry in the same way (drivers/nvdimm/btt.c, btt_map_read).
pub(super) fn discarded_entry(sector: u32, entry: u32) -> u32 {
    zeros_entry(if is_unwritten(entry) { sector } else { entry & MAP_BLOCK })
}

/// Returns the entry of a sector that has a block but reads as zeros.
pub(super) fn zeros_entry(block: u32) -> u32 {
    block | MAP_ZERO
}

/// Returns true if the entry names a block whose content matters, or is lost.
#[inline]
pub(super) fn is_live(entry: u32) -> bool {
    entry & MAP_ERROR != 0
}

/// Returns true if the sector was never written, and no discard changed its entry.
pub(super) fn is_unwritten(entry: u32) -> bool {
    entry & (MAP_ERROR | MAP_ZERO) == 0
}
