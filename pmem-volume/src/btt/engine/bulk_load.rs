//! Bulk filling of an empty BTT.
//!
//! An exchange makes a few sectors durable with two flushes of the media. Sectors that read as
//! zeros need no exchange. Each of them has its own block, which is never read while its map entry
//! is marked as zeros. Therefore, a window of many sectors takes only three steps:
//!
//! 1. Mark the map entries of all sectors in the window as zeros. Each entry keeps its block.
//!    **Persist** them.
//! 2. Store the data to these blocks. **Persist** it.
//! 3. For the sectors that were stored, make the map entries name their blocks. **Persist** them
//!    together with step 1 of the next window.
//!
//! Reasons for this order:
//!
//! - Zeros before data: a sector that was never written maps to its own block, and would expose
//!   torn data. Therefore, step 1 also marks sectors that a discard would not change.
//! - Data before the last step: an entry that names its block has all of its data.
//!
//! Each step allocates space before it stores anything.
//!
//! After a crash, a sector reads as zeros or as its new data. No block changes its owner, so
//! nothing is logged, and recovery changes nothing. The lanes keep their blocks.

use std::mem;
use std::ops::Range;

use super::arena::Arena;
use super::map::{self, LINE_SECTORS};
use super::{ArenaSlot, BttError, Common, Engine};
use crate::btt::check;
use crate::btt::content::holds_data;
use crate::btt::layout::{MAP_BLOCK, PAGE_BYTES};
use crate::media::{Media, MediaError, Pending};

/// Size of a window in bytes. On a disk, each window costs two barriers. In a thin volume, each
/// chunk that it allocates costs another one.
const WINDOW_BYTES: u64 = 64 << 20;

/// BTT that is being filled. It owns the engine, so that no sector is read or written concurrently.
pub struct BulkLoad<S> {
    engine: Engine<S>,
    window_sectors: u32,
    window: Option<Window>,
    /// Arena and map words of the last window that was left, until the words are durable.
    left: Option<(usize, Range<u64>)>,
    /// Arena and first sector of the last window. Entering a window erases it, so no window is
    /// entered twice.
    last_entered: Option<(usize, u32)>,
}

/// Sectors that are between steps 1 and 3.
struct Window {
    /// Number of the arena that contains the sectors.
    arena: usize,
    sectors: Range<u32>,
    /// Sectors that have been stored.
    stored: Vec<Range<u32>>,
    data: Pending,
}

impl<S: Media> Engine<S> {
    /// Begins to fill an empty BTT. Returns the engine if bulk filling is impossible, so that the
    /// caller can write sectors individually:
    ///
    /// - A sector contains data, or an arena is read-only.
    /// - A check of the BTT has findings. A guest may have stored map entries that name a block
    ///   that does not exist, or the same block twice.
    /// - Sectors are smaller than a page. See [`Engine::write_zeroes`] for the reason.
    pub fn into_bulk_load(self) -> Result<BulkLoad<S>, Box<Self>> {
        let is_writable = |slot: &ArenaSlot| slot.arena().and_then(Arena::check_writable).is_ok();
        let is_empty = u64::from(self.sector_bytes) >= PAGE_BYTES
            && self.arena_slots.iter().all(is_writable)
            && holds_data(self.space()).is_ok_and(|holds_data| !holds_data)
            && check(self.space()).is_clean();
        if !is_empty {
            return Err(Box::new(self));
        }
        let window_sectors = (WINDOW_BYTES / u64::from(self.sector_bytes)) as u32;
        Ok(BulkLoad { engine: self, window_sectors, window: None, left: None, last_entered: None })
    }
}

impl<S: Media> BulkLoad<S> {
    /// Returns the engine for queries.
    pub fn engine(&self) -> &Engine<S> {
        &self.engine
    }

    /// Stores whole sectors, which are durable when [`BulkLoad::finish`] has returned. After a
    /// crash, each sector reads as zeros or as the data that was stored last.
    ///
    /// # Panics
    ///
    /// Panics if the sectors precede the current window.
    pub fn write(&mut self, first_sector: u64, bytes: &[u8]) -> Result<(), BttError> {
        let sectors = self.engine.whole_sectors(first_sector, bytes.len())?;
        let sector_bytes = self.engine.sector_bytes as usize;
        let mut parts = Vec::new();
        for (arena, sectors) in self.engine.parts(sectors) {
            parts.push((arena?.number, sectors));
        }
        let mut rest = bytes;
        for (arena, mut sectors) in parts {
            while !sectors.is_empty() {
                let end = self.enter_window(arena, sectors.start)?.min(sectors.end);
                let (now, later) = rest.split_at((end - sectors.start) as usize * sector_bytes);
                self.store(sectors.start..end, now)?;
                (sectors.start, rest) = (end, later);
            }
        }
        Ok(())
    }

    /// Performs steps 2 and 3 for the last window, and returns the engine.
    pub fn finish(mut self) -> Result<Engine<S>, BttError> {
        self.leave_window()?;
        if let Some((arena, words)) = self.left.take() {
            let arena = self.engine.arena_slots[arena].arena()?;
            arena.latch(self.engine.common.space.persist_range(words))?;
        }
        Ok(self.engine)
    }

    /// Performs step 1 for the window that contains a sector, unless it is the current window.
    /// Returns the end of the window.
    fn enter_window(&mut self, arena: usize, sector: u32) -> Result<u32, BttError> {
        if let Some(window) = &self.window
            && window.arena == arena
            && window.sectors.contains(&sector)
        {
            return Ok(window.sectors.end);
        }
        self.leave_window()?;
        let Engine { arena_slots, common, .. } = &self.engine;
        let window_arena = arena_slots[arena].arena()?;
        let start = sector / self.window_sectors * self.window_sectors;
        let is_later = self.last_entered < Some((arena, start));
        assert!(is_later, "windows are stored in ascending order");
        let end = start.saturating_add(self.window_sectors).min(window_arena.info.sectors);
        let words = window_arena.map.word_range(&(start..end));
        // Fails without an effect if the pool is full.
        let failed = window_arena.mark_as_zeros(common, start..end)?;
        self.last_entered = Some((arena, start));
        assert!(failed.is_empty(), "sectors in error are data, and an empty BTT has none");
        let words: Vec<_> =
            self.left.iter().map(|(_, words)| words.clone()).chain([words]).collect();
        window_arena.latch(common.space.persist(&words))?;
        self.left = None;
        let (stored, data) = (Vec::new(), Pending::default());
        self.window = Some(Window { arena, sectors: start..end, stored, data });
        Ok(end)
    }

    /// Performs the first half of step 2 for sectors of the current window. Sectors with contiguous
    /// blocks are stored together.
    fn store(&mut self, sectors: Range<u32>, bytes: &[u8]) -> Result<(), BttError> {
        let Engine { arena_slots, common, sector_bytes, .. } = &self.engine;
        let window = self.window.as_mut().expect("it was entered");
        let arena = arena_slots[window.arena].arena()?;
        let sector_bytes = u64::from(*sector_bytes);
        let mut block_offsets = Vec::with_capacity(sectors.len());
        for sector in sectors.clone() {
            let entry = arena.map.entry(&common.space, sector).map_err(BttError::Media)?;
            block_offsets.push(arena.info.block_at(entry & MAP_BLOCK));
        }
        let runs = || block_offsets.chunk_by(|a, b| a + sector_bytes == *b);
        for run in runs() {
            let end = run[0] + run.len() as u64 * sector_bytes;
            arena.provision(&common.space, run[0]..end)?;
        }
        let mut rest = bytes;
        for run in runs() {
            let (now, later) = rest.split_at(run.len() * sector_bytes as usize);
            arena.latch(common.space.store_bulk(run[0], now, &mut window.data))?;
            rest = later;
        }
        window.stored.push(sectors);
        Ok(())
    }

    /// Performs the second half of step 2, and step 3 without its persist.
    fn leave_window(&mut self) -> Result<(), BttError> {
        let Some(window) = self.window.take() else { return Ok(()) };
        let common = &self.engine.common;
        let arena = self.engine.arena_slots[window.arena].arena()?;
        arena.check_writable()?;
        arena.latch(common.space.end_persist(&window.data))?;
        for sectors in window.stored {
            arena.latch(publish(common, arena, sectors))?;
        }
        self.left = Some((window.arena, arena.map.word_range(&window.sectors)));
        Ok(())
    }
}

/// Changes map entries from zeros to their blocks.
fn publish(
    common: &Common<impl Media>,
    arena: &Arena,
    mut sectors: Range<u32>,
) -> Result<(), MediaError> {
    while !sectors.is_empty() {
        let end = (sectors.start / LINE_SECTORS * LINE_SECTORS).saturating_add(LINE_SECTORS);
        let line = mem::replace(&mut sectors.start, end.min(sectors.end))..end.min(sectors.end);
        let locked = common.locks.lock(arena.map.word_range(&line));
        let named = |_, entry: u32| {
            let block = entry & MAP_BLOCK;
            if let Some(live) = &arena.live {
                live.add(block);
                if !map::is_live(entry) {
                    live.add_sector();
                }
            }
            map::written_entry(block)
        };
        arena.map.change(&common.space, line, &locked, named)?;
    }
    Ok(())
}

#[cfg(test)]
impl<S> BulkLoad<S> {
    /// Changes the size of windows.
    pub(super) fn with_window_sectors(self, window_sectors: u32) -> Self {
        Self { window_sectors, ..self }
    }
}
