//! Erasing what was given back, while others use the pool.
//!
//! A chunk that is given back is marked *scrub* and waits. It is erased without any lock, and is
//! free after that. Who needs it earlier erases it himself: an allocation that finds too few clean
//! chunks erases what it lacks, or waits for what is being erased already. As long as clean chunks
//! are left, nobody waits for a scrub.

use std::sync::atomic::Ordering;

use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError};
use crate::pool::format::chunk::Run;
use crate::pool::format::table::Owner;
use crate::pool::{Pool, PoolError, State, StateGuard, bytes};
use crate::progress::{OnProgress, Progress, Task, unheard};

/// Chunks in one batch where somebody waits for all of it, 256 MiB: on a disk each batch costs a
/// barrier.
const AWAITED_BATCH_CHUNKS: u32 = 128;

impl<M: Media> Pool<M> {
    /// Erases up to `max_bytes` of what waits, at least one chunk, and frees it. Others use the
    /// pool meanwhile. Returns how much it was: 0 when nothing waits.
    pub fn scrub_some(&self, max_bytes: u64) -> Result<u64, PoolError> {
        let chunks = u32::try_from(max_bytes / CHUNK_BYTES).unwrap_or(u32::MAX).max(1);
        let batch = self.lock_for_change()?.scrub.take(chunks);
        self.erase_and_free(&batch)?;
        Ok(batch.iter().map(|run| run.len_bytes()).sum())
    }

    /// Erases and frees everything that waits. At return nothing waits any more, and nothing is
    /// being erased by others.
    pub fn scrub_all(&self) -> Result<(), PoolError> {
        self.scrub_all_with(&mut unheard)
    }

    /// The same; `progress` hears of what waited at the start.
    pub fn scrub_all_with(&self, progress: OnProgress<'_>) -> Result<(), PoolError> {
        self.scrub_until(|state| state.scrub.pending(), progress)
    }

    /// Erases what waits until nothing is left to do. Never more is left than waits.
    pub(in crate::pool) fn scrub_until(
        &self,
        left_to_do: impl Fn(&State) -> u32,
        progress: OnProgress<'_>,
    ) -> Result<(), PoolError> {
        let total = left_to_do(&*self.lock_for_change()?);
        let mut left = total;
        let mut say = |left| {
            let (done_bytes, total_bytes) = (bytes(total - left), bytes(total));
            progress(Progress { task: Task::Erase, done_bytes, total_bytes });
        };
        say(left);
        while left > 0 {
            let mut state = self.lock_for_change()?;
            let missing = left_to_do(&state);
            if missing > 0 {
                state = self.clean_some(state, missing)?;
            }
            // Others may let more wait meanwhile, which is erased too.
            left = left.min(left_to_do(&state));
            drop(state);
            say(left);
        }
        self.check_not_latched()
    }

    /// Bytes that were erased since the pool was opened.
    pub fn scrubbed_bytes(&self) -> u64 {
        self.scrubbed_chunks.load(Ordering::Relaxed) * CHUNK_BYTES
    }

    /// Bytes erased on demand since the last call.
    pub(in crate::pool) fn take_awaited_bytes(&self) -> u64 {
        self.awaited_chunks.swap(0, Ordering::Relaxed) * CHUNK_BYTES
    }

    /// Does erasing take the media's bandwidth? Holes do not, and give the host memory or blocks
    /// back.
    pub fn scrubbing_costs_bandwidth(&self) -> bool {
        !self.makes_holes()
    }

    /// Lets chunks wait to be erased. They are marked and counted as such, and whatever names a
    /// slot or an index has been replaced durably.
    pub(in crate::pool) fn queue_scrub(&self, state: &mut State, runs: &[Run]) {
        runs.iter().for_each(|run| state.scrub.add(*run));
        self.scrub_wake.work();
    }

    /// One step for somebody who lacks `missing` clean chunks, of which not more are pending:
    /// erases them, or waits for who does already. The state was unlocked meanwhile, so the
    /// caller decides anew.
    pub(in crate::pool) fn clean_some<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        missing: u32,
    ) -> Result<StateGuard<'a>, PoolError> {
        assert!(0 < missing && missing <= state.scrub.pending(), "there is nothing to wait for");
        let not_in_flight = missing.saturating_sub(state.scrub.in_flight());
        let batch = state.scrub.take(not_in_flight.min(AWAITED_BATCH_CHUNKS));
        if batch.is_empty() {
            state = state.wait(&self.scrubbed);
        } else {
            drop(state);
            // Counted before the erasure, so that the scrubber pauses during it.
            let chunks: u32 = batch.iter().map(|run| run.chunks).sum();
            self.awaited_chunks.fetch_add(u64::from(chunks), Ordering::Relaxed);
            self.erase_and_free(&batch)?;
            state = self.lock_state();
        }
        self.check_not_latched()?;
        Ok(state)
    }

    /// 1. Erased, durably, while others use the pool.
    /// 2. Free. This need not be durable: lost, it means that they are erased once more.
    /// 3. Who waits for clean chunks looks again: also after a failure, which ends all waiting.
    fn erase_and_free(&self, batch: &[Run]) -> Result<(), PoolError> {
        if batch.is_empty() {
            return Ok(());
        }
        let ranges: Vec<_> = batch.iter().map(|run| run.byte_range()).collect();
        let erased = self.latch_failure(self.media().erase(&ranges));
        let mut state = self.lock_state();
        // A change of these chunks may have failed meanwhile: nothing is stored any more.
        let freed = erased.and_then(|()| self.check_not_latched());
        let freed = freed.and_then(|()| self.latch(self.mark_free(batch)));
        state.scrub.finish(batch);
        if freed.is_ok() {
            let chunks: u32 = batch.iter().map(|run| run.chunks).sum();
            state.counts.scrubbing -= chunks;
            batch.iter().for_each(|run| state.buddy.free_run(*run));
            self.scrubbed_chunks.fetch_add(u64::from(chunks), Ordering::Relaxed);
        }
        drop(state);
        self.scrubbed.notify_all();
        freed
    }

    fn mark_free(&self, batch: &[Run]) -> Result<(), MediaError> {
        for chunk in batch.iter().flat_map(|run| run.ids()) {
            self.table.set_owner(self.media(), chunk, Owner::Free)?;
        }
        Ok(())
    }
}

impl State {
    /// Chunks that can be had: clean now, or as soon as they are erased.
    pub(in crate::pool) fn available_chunks(&self) -> u32 {
        self.buddy.free_chunks() + self.scrub.pending()
    }

    /// The same in bytes.
    pub(in crate::pool) fn available_bytes(&self) -> u64 {
        u64::from(self.available_chunks()) * CHUNK_BYTES
    }

    /// How many of `chunks` are not clean yet.
    pub(in crate::pool) fn missing_clean(&self, chunks: u32) -> u32 {
        chunks.saturating_sub(self.buddy.free_chunks())
    }
}
