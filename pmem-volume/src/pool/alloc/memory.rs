//! Lending of chunks as memory.

use super::buddy::Placement;
use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError};
use crate::pool::format::chunk::{Extent, MAX_ORDER, Run};
use crate::pool::format::table::Owner;
use crate::pool::{Pool, PoolError};

impl<M: Media> Pool<M> {
    /// Lends `size_bytes`, a multiple of 2 MiB, as memory. The returned extents are as large as
    /// possible, largest first, and contain exactly `size_bytes` in total. All bytes read as zeros.
    /// Chunks that are withheld for volumes are never lent.
    ///
    /// When the call returns, the chunks are durably marked as *memory*. They are erased before any
    /// later use, even after a crash.
    ///
    /// 1. Store the owner words and wear counts, and persist them.
    /// 2. Return the extents.
    pub fn alloc_memory(&self, size_bytes: u64) -> Result<Vec<Extent>, PoolError> {
        let chunks = chunk_count("memory size", size_bytes)?;
        let mut state = self.lock_for_change()?;
        let extents = loop {
            let totals = state.totals();
            let lendable = (self.lendable_bytes(totals) / CHUNK_BYTES) as u32;
            let Some(chunks) = chunks.filter(|chunks| *chunks <= lendable) else {
                return Err(PoolError::PoolFull {
                    requested_bytes: size_bytes,
                    free_bytes: state.available_bytes(),
                    withheld_bytes: self.withheld_bytes(totals),
                });
            };
            // Use clean chunks first, even if they are fragmented. Waiting chunks are never erased
            // just to obtain larger extents.
            match state.buddy.allocate(chunks, Placement::High) {
                Some(extents) => break extents,
                None => {
                    let missing = state.missing_clean(chunks);
                    state = self.erase_some(state, missing)?;
                }
            }
        };
        let runs: Vec<Run> = extents.iter().map(|extent| extent.run()).collect();
        let chunks: u32 = runs.iter().map(|run| run.chunks).sum();
        // Count the chunks as waiting to be erased until the marks are durable. If marking fails,
        // the next open erases them.
        state.counts.scrubbing += chunks;
        self.latch(self.mark(&runs, |_| Owner::Memory))?;
        state.counts.scrubbing -= chunks;
        state.counts.memory += chunks;
        Ok(extents)
    }

    /// Returns lent chunks to the pool. The extents must be lent extents or aligned parts of them,
    /// and the caller must have unmapped them. The chunks are erased later, and are then free.
    ///
    /// The *scrub* mark prevents a second return of the same chunk. It need not be durable, because
    /// the next open treats *memory* like *scrub*.
    pub fn free_memory(&self, extents: &[Extent]) -> Result<(), PoolError> {
        if let Some(extent) = extents.iter().find(|extent| extent.order > MAX_ORDER) {
            return Err(PoolError::NotLent { extent: *extent });
        }
        let runs: Vec<Run> = extents.iter().map(|extent| extent.run()).collect();
        let chunks: u32 = runs.iter().map(|run| run.chunks).sum();
        let mut state = self.lock_for_change()?;
        self.check_lent(extents)?;
        let table = self.table();
        for chunk in runs.iter().flat_map(|run| run.ids()) {
            self.latch(table.set_owner(self.media(), chunk, Owner::Scrub))?;
        }
        state.counts.memory -= chunks;
        state.counts.scrubbing += chunks;
        self.queue_scrub(&mut state, &runs);
        Ok(())
    }

    /// Stores an owner for each chunk of `runs`, increments its number of uses, and persists both.
    /// `owner` receives the position of the chunk in `runs`.
    pub(in crate::pool) fn mark(
        &self,
        runs: &[Run],
        owner: impl Fn(u32) -> Owner,
    ) -> Result<(), MediaError> {
        let (media, table) = (self.media(), self.table());
        for (position, chunk) in runs.iter().flat_map(|run| run.ids()).enumerate() {
            table.set_user(media, chunk, owner(position as u32))?;
        }
        self.persist_entries(runs)
    }

    /// Checks that all chunks of `extents` are lent and that none occurs twice.
    fn check_lent(&self, extents: &[Extent]) -> Result<(), PoolError> {
        let table = self.table();
        let mut sorted = extents.to_vec();
        sorted.sort_unstable();
        for (at, extent) in sorted.iter().enumerate() {
            let not_lent = || PoolError::NotLent { extent: *extent };
            let end =
                extent.start.0.checked_add(extent.chunks()).filter(|end| *end <= table.entries());
            let twice = at > 0 && sorted[at - 1].start.0 + sorted[at - 1].chunks() > extent.start.0;
            if end.is_none() || twice {
                return Err(not_lent());
            }
            for chunk in extent.run().ids() {
                if self.latch(table.owner(self.media(), chunk))? != Ok(Owner::Memory) {
                    return Err(not_lent());
                }
            }
        }
        Ok(())
    }
}

/// Checks that a size is a positive multiple of 2 MiB, and converts it to chunks. Returns `None` if
/// no pool can have that many chunks.
pub(in crate::pool) fn chunk_count(
    quantity: &'static str,
    size_bytes: u64,
) -> Result<Option<u32>, PoolError> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(CHUNK_BYTES) {
        let rule = "is not a positive multiple of 2 MiB".to_owned();
        return Err(PoolError::Size { quantity, value: size_bytes, rule });
    }
    Ok(u32::try_from(size_bytes / CHUNK_BYTES).ok())
}
