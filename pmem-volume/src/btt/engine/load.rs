//! Filling an empty BTT in bulk.
//!
//! An exchange makes a few sectors durable, with two flushes of the media. Sectors that read as
//! zeros need no exchange: each has a block of its own, which nobody reads once its map entry says
//! zeros. So a window of many sectors takes three steps:
//!
//! 1. Map entries of all sectors of the window: zeros. Each keeps its block. **Persist**.
//! 2. Data, to these blocks. **Persist**.
//! 3. Map entries of the sectors that were stored: their blocks. **Persist**, together with step 1
//!    of the next window.
//!
//! What each order is for:
//!
//! - Zeros before data: a sector that was never written names its block, and would show data that
//!   is torn.
//! - Data before the last step: an entry that names its block has all of its data.
//!
//! After a crash, a sector reads as zeros or as its new data. No block changes its owner, so the
//! log has nothing to record, and recovery changes nothing: the lanes keep their blocks.

use std::mem;
use std::ops::Range;

use super::arena::Arena;
use super::map::{self, LINE_SECTORS};
use super::{Common, Engine, EngineError, Place};
use crate::btt::check;
use crate::btt::content::holds_data;
use crate::btt::layout::{MAP_BLOCK, PAGE_BYTES};
use crate::media::{Media, MediaError, Pending};

/// Bytes of the sectors of a window. On a disk, each window costs two barriers.
const WINDOW_BYTES: u64 = 64 << 20;

/// A BTT that is being filled. It owns the engine, so that nobody reads or writes meanwhile.
pub struct Load<S> {
    engine: Engine<S>,
    window_sectors: u32,
    window: Option<Window>,
    /// Arena and first sector of the last window. Entering a window erases it, so no window is
    /// entered twice.
    last_entered: Option<(usize, u32)>,
}

/// Sectors between steps 1 and 3.
struct Window {
    /// Number of their arena.
    arena: usize,
    sectors: Range<u32>,
    /// Sectors that were stored.
    stored: Vec<Range<u32>>,
    data: Pending,
}

impl<S: Media> Engine<S> {
    /// Begins to fill an empty BTT. Returns the engine if that is impossible, so that sectors can
    /// be written one by one:
    ///
    /// - A sector holds data, or an arena takes no writes.
    /// - A check has findings. A guest may have stored map entries that name no block, or the same
    ///   block twice.
    /// - Sectors are smaller than a page. See [`Engine::discard`] for the reason.
    pub fn into_load(self) -> Result<Load<S>, Box<Self>> {
        let is_writable = |place: &Place| place.arena().and_then(Arena::check_writable).is_ok();
        let is_empty = u64::from(self.sector_bytes) >= PAGE_BYTES
            && self.places.iter().all(is_writable)
            && holds_data(self.space()).is_ok_and(|holds_data| !holds_data)
            && check(self.space()).is_clean();
        if !is_empty {
            return Err(Box::new(self));
        }
        let window_sectors = (WINDOW_BYTES / u64::from(self.sector_bytes)) as u32;
        Ok(Load { engine: self, window_sectors, window: None, last_entered: None })
    }
}

impl<S: Media> Load<S> {
    /// The engine, to look at.
    pub fn engine(&self) -> &Engine<S> {
        &self.engine
    }

    /// Stores whole sectors. They are durable when [`Load::finish`] has returned. After a crash,
    /// each reads as zeros or as its last stored data.
    ///
    /// # Panics
    ///
    /// Panics if the sectors precede the current window.
    pub fn write(&mut self, first_sector: u64, bytes: &[u8]) -> Result<(), EngineError> {
        let sectors = self.engine.whole_sectors(first_sector, bytes.len())?;
        let sector_bytes = self.engine.sector_bytes as usize;
        let mut parts = Vec::new();
        for (arena, sectors) in self.engine.parts(sectors) {
            parts.push((arena?.number, sectors));
        }
        let mut rest = bytes;
        for (arena, mut sectors) in parts {
            while !sectors.is_empty() {
                let end = self.enter(arena, sectors.start)?.min(sectors.end);
                let (now, later) = rest.split_at((end - sectors.start) as usize * sector_bytes);
                self.store(sectors.start..end, now)?;
                (sectors.start, rest) = (end, later);
            }
        }
        Ok(())
    }

    /// Steps 2 and 3 of the last window. Returns the engine.
    pub fn finish(mut self) -> Result<Engine<S>, EngineError> {
        if let Some((arena, words)) = self.leave()? {
            let arena = self.engine.places[arena].arena()?;
            arena.latch(self.engine.common.space.persist_range(words))?;
        }
        Ok(self.engine)
    }

    /// Step 1 of the window of a sector, unless it is the current one. Returns its end.
    fn enter(&mut self, arena: usize, sector: u32) -> Result<u32, EngineError> {
        if let Some(window) = &self.window
            && window.arena == arena
            && window.sectors.contains(&sector)
        {
            return Ok(window.sectors.end);
        }
        let left = self.leave()?;
        let Engine { places, common, .. } = &self.engine;
        let place = places[arena].arena()?;
        let start = sector / self.window_sectors * self.window_sectors;
        let previous = self.last_entered.replace((arena, start));
        assert!(previous < Some((arena, start)), "windows are stored in ascending order");
        let end = start.saturating_add(self.window_sectors).min(place.info.sectors);
        let failed = place.store_discarded(common, start..end)?;
        assert!(failed.is_empty(), "sectors in error are data, and an empty BTT has none");
        let words = [Some(place.map.words_of(&(start..end))), left.map(|(_, words)| words)];
        let words: Vec<_> = words.into_iter().flatten().collect();
        place.latch(common.space.persist(&words))?;
        let (stored, data) = (Vec::new(), Pending::default());
        self.window = Some(Window { arena, sectors: start..end, stored, data });
        Ok(end)
    }

    /// The first half of step 2, for sectors of the current window. Sectors whose blocks follow
    /// each other are one store.
    fn store(&mut self, sectors: Range<u32>, bytes: &[u8]) -> Result<(), EngineError> {
        let Engine { places, common, sector_bytes, .. } = &self.engine;
        let window = self.window.as_mut().expect("it was entered");
        let arena = places[window.arena].arena()?;
        let sector_bytes = u64::from(*sector_bytes);
        let mut places = Vec::with_capacity(sectors.len());
        for sector in sectors.clone() {
            let entry = arena.map.entry(&common.space, sector).map_err(EngineError::Media)?;
            places.push(arena.info.block_at(entry & MAP_BLOCK));
        }
        let mut rest = bytes;
        for run in places.chunk_by(|a, b| a + sector_bytes == *b) {
            let (now, later) = rest.split_at(run.len() * sector_bytes as usize);
            arena.latch(common.space.store_bulk(run[0], now, &mut window.data))?;
            rest = later;
        }
        window.stored.push(sectors);
        Ok(())
    }

    /// The second half of step 2, and step 3 without its persist. Returns the arena and the words
    /// of the map that are to be persisted.
    fn leave(&mut self) -> Result<Option<(usize, Range<u64>)>, EngineError> {
        let Some(window) = self.window.take() else { return Ok(None) };
        let common = &self.engine.common;
        let arena = self.engine.places[window.arena].arena()?;
        arena.check_writable()?;
        arena.latch(common.space.end_persist(&window.data))?;
        for sectors in window.stored {
            arena.latch(publish(common, arena, sectors))?;
        }
        Ok(Some((window.arena, arena.map.words_of(&window.sectors))))
    }
}

/// Lets map entries that say zeros name their blocks.
fn publish(
    common: &Common<impl Media>,
    arena: &Arena,
    mut sectors: Range<u32>,
) -> Result<(), MediaError> {
    while !sectors.is_empty() {
        let end = (sectors.start / LINE_SECTORS * LINE_SECTORS).saturating_add(LINE_SECTORS);
        let line = mem::replace(&mut sectors.start, end.min(sectors.end))..end.min(sectors.end);
        let locked = common.locks.lock(arena.map.words_of(&line));
        let named = |_, entry: u32| map::written(entry & MAP_BLOCK);
        arena.map.change(&common.space, line, &locked, named)?;
    }
    Ok(())
}

#[cfg(test)]
impl<S> Load<S> {
    /// The same with small windows.
    pub(super) fn in_windows_of(self, window_sectors: u32) -> Self {
        Self { window_sectors, ..self }
    }
}
