//! Erasing of returned chunks while the pool is in use. Erasing is also called scrubbing.
//!
//! A returned chunk is marked *scrub* and queued. It is erased without holding a lock, and is then
//! free. If an allocation finds too few clean chunks, it erases the missing ones itself, or waits
//! for erasures in progress. It never waits while enough clean chunks are left.

use std::sync::atomic::Ordering;

use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError};
use crate::pool::format::chunk::Run;
use crate::pool::format::table::Owner;
use crate::pool::{Pool, PoolError, State, StateGuard, bytes};
use crate::progress::{OnProgress, Progress, Task, ignore_progress};

/// Number of chunks per batch (256 MiB) if a caller waits for all of them. On a disk, each batch
/// ends with a barrier.
const ON_DEMAND_BATCH_CHUNKS: u32 = 128;

impl<M: Media> Pool<M> {
    /// Erases and frees up to `max_bytes` of the waiting chunks, but at least one chunk. In the
    /// meantime, other threads may use the pool. Returns the number of erased bytes, which is 0 if
    /// no chunk was waiting.
    pub fn scrub_some(&self, max_bytes: u64) -> Result<u64, PoolError> {
        let chunks = u32::try_from(max_bytes / CHUNK_BYTES).unwrap_or(u32::MAX).max(1);
        let batch = self.lock_for_change()?.scrub.take(chunks);
        self.erase_and_free(&batch)?;
        Ok(batch.iter().map(|run| run.len_bytes()).sum())
    }

    /// Erases and frees all waiting chunks. When the call returns, no chunk is waiting, and no
    /// other thread is erasing chunks.
    pub fn scrub_all(&self) -> Result<(), PoolError> {
        self.scrub_all_with(&mut ignore_progress)
    }

    /// Erases and frees all waiting chunks, and reports the progress. The total is the number of
    /// chunks that were waiting at the start.
    pub fn scrub_all_with(&self, progress: OnProgress<'_>) -> Result<(), PoolError> {
        self.scrub_until(|state| state.scrub.pending(), progress)
    }

    /// Erases waiting chunks until `remaining` returns 0. Its value must never exceed the number
    /// of waiting chunks.
    pub(in crate::pool) fn scrub_until(
        &self,
        remaining: impl Fn(&State) -> u32,
        progress: OnProgress<'_>,
    ) -> Result<(), PoolError> {
        let total = remaining(&*self.lock_for_change()?);
        let mut left = total;
        let mut report = |left| {
            let (done_bytes, total_bytes) = (bytes(total - left), bytes(total));
            progress(Progress { task: Task::Erase, done_bytes, total_bytes });
        };
        report(left);
        while left > 0 {
            let mut state = self.lock_for_change()?;
            let missing = remaining(&state);
            if missing > 0 {
                state = self.erase_some(state, missing)?;
            }
            // Chunks that other threads add in the meantime are erased too, but are not part of the
            // progress.
            left = left.min(remaining(&state));
            drop(state);
            report(left);
        }
        self.check_not_latched()
    }

    /// Returns the number of bytes erased since the pool was opened.
    pub fn scrubbed_bytes(&self) -> u64 {
        self.scrubbed_chunks.load(Ordering::Relaxed) * CHUNK_BYTES
    }

    /// Returns the number of bytes erased on demand since the last call.
    pub(in crate::pool) fn take_on_demand_bytes(&self) -> u64 {
        self.on_demand_chunks.swap(0, Ordering::Relaxed) * CHUNK_BYTES
    }

    /// Returns true if erasing uses bandwidth of the media. Punching holes does not, and also
    /// returns memory or blocks to the host.
    pub fn scrubbing_costs_bandwidth(&self) -> bool {
        !self.makes_holes()
    }

    /// Queues chunks for erasing. They must already be marked and counted as *scrub*. Words that
    /// contained a slot or an index must have been replaced durably.
    pub(in crate::pool) fn queue_scrub(&self, state: &mut State, runs: &[Run]) {
        runs.iter().for_each(|run| state.scrub.add(*run));
        self.scrub_wake.notify_queued();
        // A write to a thin volume may be waiting for these chunks, and erases them itself.
        self.scrubbed.notify_all();
    }

    /// Erases a batch, or waits for erasures in progress, for a caller that needs `missing` more
    /// clean chunks. At least `missing` chunks must be pending. The state is unlocked in the
    /// meantime, so the caller must check again.
    pub(in crate::pool) fn erase_some<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        missing: u32,
    ) -> Result<StateGuard<'a>, PoolError> {
        assert!(0 < missing && missing <= state.scrub.pending(), "an erasure is in flight");
        let not_in_flight = missing.saturating_sub(state.scrub.in_flight());
        let batch = state.scrub.take(not_in_flight.min(ON_DEMAND_BATCH_CHUNKS));
        if batch.is_empty() {
            state = state.wait(&self.scrubbed);
        } else {
            drop(state);
            // Counted before the erasure starts, so that the scrubber pauses during the erasure.
            let chunks: u32 = batch.iter().map(|run| run.chunks).sum();
            self.on_demand_chunks.fetch_add(u64::from(chunks), Ordering::Relaxed);
            self.erase_and_free(&batch)?;
            state = self.lock_state();
        }
        self.check_not_latched()?;
        Ok(state)
    }

    /// 1. Erase the chunks, durably, while other threads use the pool.
    /// 2. Mark them *free*. The mark need not be durable, because chunks without it are only erased
    ///    again.
    /// 3. Wake all threads that wait for clean chunks. This is also necessary after a failure,
    ///    which ends their wait.
    fn erase_and_free(&self, batch: &[Run]) -> Result<(), PoolError> {
        if batch.is_empty() {
            return Ok(());
        }
        let ranges: Vec<_> = batch.iter().map(|run| run.byte_range()).collect();
        let erased = self.latch_failure(self.media().erase(&ranges));
        let mut state = self.lock_state();
        // Store nothing more if another change has failed in the meantime.
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
        let table = self.table();
        for chunk in batch.iter().flat_map(|run| run.ids()) {
            table.set_owner(self.media(), chunk, Owner::Free)?;
        }
        Ok(())
    }
}

impl State {
    /// Returns the number of chunks that are clean or will be clean after they are erased.
    pub(in crate::pool) fn available_chunks(&self) -> u32 {
        self.buddy.free_chunks() + self.scrub.pending()
    }

    pub(in crate::pool) fn available_bytes(&self) -> u64 {
        u64::from(self.available_chunks()) * CHUNK_BYTES
    }

    /// Returns the number of available chunks that are promised to thin volumes but not allocated.
    pub(in crate::pool) fn promised_holes(&self) -> u32 {
        let promised_bytes = self.totals().unallocated_bytes().min(self.available_bytes());
        (promised_bytes / CHUNK_BYTES) as u32
    }

    /// Returns the number of available chunks that can be promised to a new or growing volume.
    pub(in crate::pool) fn unpromised_chunks(&self) -> u32 {
        self.available_chunks() - self.promised_holes()
    }

    /// Checks that the promise to a volume can grow from `before` to `after` chunks. The chunks
    /// that were promised to other volumes stay available, unless memory has borrowed them.
    pub(in crate::pool) fn check_promise(&self, before: u32, after: u32) -> Result<(), PoolError> {
        match self.allows_promise(before, after) {
            true => Ok(()),
            false => Err(self.pool_full(bytes(after - before))),
        }
    }

    pub(in crate::pool) fn allows_promise(&self, before: u32, after: u32) -> bool {
        after.saturating_sub(before) <= self.unpromised_chunks()
    }

    /// Returns the number of clean chunks that are missing for an allocation of `chunks`.
    pub(in crate::pool) fn missing_clean(&self, chunks: u32) -> u32 {
        chunks.saturating_sub(self.buddy.free_chunks())
    }
}
