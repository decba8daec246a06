//! Lending chunks as memory.

use super::buddy::Placement;
use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError};
use crate::pool::format::chunk::{Extent, MAX_ORDER, Run};
use crate::pool::format::table::Owner;
use crate::pool::{Pool, PoolError};

impl<M: Media> Pool<M> {
    /// Takes `size_bytes`, a multiple of 2 MiB, to be used as memory: the largest extents there are
    /// first, together exactly that size. All of it reads as zeros. STRG is never lent.
    ///
    /// At return the chunks are durably marked: whatever happens now, they are erased before
    /// anybody else gets them.
    ///
    /// 1. Owner words and wear counts, persist.
    /// 2. Only then do the extents leave this function.
    pub fn alloc_memory(&self, size_bytes: u64) -> Result<Vec<Extent>, PoolError> {
        let chunks = chunk_count("memory size", size_bytes)?;
        let mut state = self.lock_for_change()?;
        let extents = loop {
            let reserved = self.reserved_chunks(state.levels());
            let lendable = state.available_chunks() - reserved;
            let Some(chunks) = chunks.filter(|chunks| *chunks <= lendable) else {
                return Err(PoolError::PoolFull {
                    requested_bytes: size_bytes,
                    free_bytes: state.available_bytes(),
                    reserved_bytes: u64::from(reserved) * CHUNK_BYTES,
                });
            };
            // Clean chunks first, in however many pieces: what waits is never erased for the sake
            // of larger ones.
            match state.buddy.allocate(chunks, Placement::High) {
                Some(extents) => break extents,
                None => {
                    let missing = state.missing_clean(chunks);
                    state = self.clean_some(state, missing)?;
                }
            }
        };
        let runs: Vec<Run> = extents.iter().map(|extent| extent.run()).collect();
        let chunks: u32 = runs.iter().map(|run| run.chunks).sum();
        // Counted as to be erased, in case it fails: that is what they are then, for the next open.
        state.counts.scrubbing += chunks;
        self.latch(self.mark(&runs, |_| Owner::Memory))?;
        state.counts.scrubbing -= chunks;
        state.counts.memory += chunks;
        Ok(extents)
    }

    /// Takes lent chunks back: extents as they were lent, or any aligned part of them. When this
    /// returns they wait to be erased, and are free after that. The caller has unmapped them.
    ///
    /// They are marked to be erased, so that nobody gives them back twice. That need not be
    /// durable: *memory* means the same at the next open.
    pub fn free_memory(&self, extents: &[Extent]) -> Result<(), PoolError> {
        if let Some(extent) = extents.iter().find(|extent| extent.order > MAX_ORDER) {
            return Err(PoolError::NotLent { extent: *extent });
        }
        let runs: Vec<Run> = extents.iter().map(|extent| extent.run()).collect();
        let chunks: u32 = runs.iter().map(|run| run.chunks).sum();
        let mut state = self.lock_for_change()?;
        self.check_lent(extents)?;
        for chunk in runs.iter().flat_map(|run| run.ids()) {
            self.latch(self.table.set_owner(self.media(), chunk, Owner::Scrub))?;
        }
        state.counts.memory -= chunks;
        state.counts.scrubbing += chunks;
        self.queue_scrub(&mut state, &runs);
        Ok(())
    }

    /// Stores an owner for each chunk of the runs, counts one more use of it, and persists. The
    /// closure gets the chunk's place in the runs.
    pub(in crate::pool) fn mark(
        &self,
        runs: &[Run],
        owner: impl Fn(u32) -> Owner,
    ) -> Result<(), MediaError> {
        let media = self.media();
        for (place, chunk) in runs.iter().flat_map(|run| run.ids()).enumerate() {
            self.table.set_owner(media, chunk, owner(place as u32))?;
            self.table.count_use(media, chunk)?;
        }
        self.persist_entries(runs)
    }

    /// Is every chunk of the extents lent, and none of them named twice?
    fn check_lent(&self, extents: &[Extent]) -> Result<(), PoolError> {
        let mut sorted = extents.to_vec();
        sorted.sort_unstable();
        for (at, extent) in sorted.iter().enumerate() {
            let not_lent = || PoolError::NotLent { extent: *extent };
            let end = extent
                .start
                .0
                .checked_add(extent.chunks())
                .filter(|end| *end <= self.table.entries());
            let twice = at > 0 && sorted[at - 1].start.0 + sorted[at - 1].chunks() > extent.start.0;
            if end.is_none() || twice {
                return Err(not_lent());
            }
            for chunk in extent.run().ids() {
                if self.latch(self.table.owner(self.media(), chunk))? != Ok(Owner::Memory) {
                    return Err(not_lent());
                }
            }
        }
        Ok(())
    }
}

/// Checks that a size is a positive multiple of 2 MiB. `None`: more chunks than any pool has.
pub(in crate::pool) fn chunk_count(
    what: &'static str,
    size_bytes: u64,
) -> Result<Option<u32>, PoolError> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(CHUNK_BYTES) {
        let rule = "is not a positive multiple of 2 MiB".to_owned();
        return Err(PoolError::Size { what, value: size_bytes, rule });
    }
    Ok(u32::try_from(size_bytes / CHUNK_BYTES).ok())
}
