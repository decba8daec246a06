//! Erasing of returned chunks while the pool is in use.
//!
//! A returned chunk is marked *scrub* and waits. It is erased without a lock held, and is free
//! after that. An allocation that lacks clean chunks erases the missing ones itself, or waits for
//! erasures in progress. Allocations never wait while enough clean chunks are left.

use std::sync::atomic::Ordering;

use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError};
use crate::pool::format::chunk::Run;
use crate::pool::format::table::Owner;
use crate::pool::{Pool, PoolError, State, StateGuard, bytes};
use crate::progress::{OnProgress, Progress, Task, unheard};

/// Chunks per batch if a caller waits for all of them, 256 MiB. Each batch on a disk costs a
/// barrier.
const AWAITED_BATCH_CHUNKS: u32 = 128;

impl<M: Media> Pool<M> {
    /// Erases and frees up to `max_bytes` of waiting chunks, but at least one chunk. Other threads
    /// may use the pool meanwhile. Returns the erased bytes: 0 if no chunk waits.
    pub fn scrub_some(&self, max_bytes: u64) -> Result<u64, PoolError> {
        let chunks = u32::try_from(max_bytes / CHUNK_BYTES).unwrap_or(u32::MAX).max(1);
        let batch = self.lock_for_change()?.scrub.take(chunks);
        self.erase_and_free(&batch)?;
        Ok(batch.iter().map(|run| run.len_bytes()).sum())
    }

    /// Erases and frees all waiting chunks. At return, no chunk waits and no other thread is
    /// erasing.
    pub fn scrub_all(&self) -> Result<(), PoolError> {
        self.scrub_all_with(&mut unheard)
    }

    /// Like [`Pool::scrub_all`], and reports the progress. The total is the number of chunks that
    /// waited at the start.
    pub fn scrub_all_with(&self, progress: OnProgress<'_>) -> Result<(), PoolError> {
        self.scrub_until(|state| state.scrub.pending(), progress)
    }

    /// Erases waiting chunks until `left_to_do` returns 0. It must never return more than the
    /// number of waiting chunks.
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
            // Chunks that other threads add meanwhile are erased too, but do not count.
            left = left.min(left_to_do(&state));
            drop(state);
            say(left);
        }
        self.check_not_latched()
    }

    /// Bytes erased since the pool was opened.
    pub fn scrubbed_bytes(&self) -> u64 {
        self.scrubbed_chunks.load(Ordering::Relaxed) * CHUNK_BYTES
    }

    /// Bytes erased on demand since the last call.
    pub(in crate::pool) fn take_awaited_bytes(&self) -> u64 {
        self.awaited_chunks.swap(0, Ordering::Relaxed) * CHUNK_BYTES
    }

    /// Returns true if erasing uses bandwidth of the media. Making holes does not, and returns
    /// memory or blocks to the host.
    pub fn scrubbing_costs_bandwidth(&self) -> bool {
        !self.makes_holes()
    }

    /// Queues chunks for erasing. They are already marked and counted as *scrub*, and words that
    /// contained a slot or an index have been replaced durably.
    pub(in crate::pool) fn queue_scrub(&self, state: &mut State, runs: &[Run]) {
        runs.iter().for_each(|run| state.scrub.add(*run));
        self.scrub_wake.work();
    }

    /// Makes progress for a caller that lacks `missing` clean chunks: erases a batch, or waits for
    /// erasures in progress. At least `missing` chunks must be pending. The state is unlocked
    /// meanwhile, so the caller must check again.
    pub(in crate::pool) fn clean_some<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        missing: u32,
    ) -> Result<StateGuard<'a>, PoolError> {
        assert!(0 < missing && missing <= state.scrub.pending(), "an erasure is in flight");
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

    /// 1. Erase the chunks, durably, while other threads use the pool.
    /// 2. Mark them *free*. This need not be durable: without the mark they are erased again.
    /// 3. Wake all threads that wait for clean chunks, after a failure too, because it ends their
    ///    wait.
    fn erase_and_free(&self, batch: &[Run]) -> Result<(), PoolError> {
        if batch.is_empty() {
            return Ok(());
        }
        let ranges: Vec<_> = batch.iter().map(|run| run.byte_range()).collect();
        let erased = self.latch_failure(self.media().erase(&ranges));
        let mut state = self.lock_state();
        // Store nothing more if another change has failed meanwhile.
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
    /// Chunks that are clean, or will be after erasing.
    pub(in crate::pool) fn available_chunks(&self) -> u32 {
        self.buddy.free_chunks() + self.scrub.pending()
    }

    pub(in crate::pool) fn available_bytes(&self) -> u64 {
        u64::from(self.available_chunks()) * CHUNK_BYTES
    }

    /// Number of clean chunks that an allocation of `chunks` lacks.
    pub(in crate::pool) fn missing_clean(&self, chunks: u32) -> u32 {
        chunks.saturating_sub(self.buddy.free_chunks())
    }
}
