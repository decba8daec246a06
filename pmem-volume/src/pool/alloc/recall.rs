//! Recall of lent memory for thin volumes.
//!
//! Memory may borrow bytes that thin volumes were promised but do not use yet, up to a limit. The
//! borrower must be able to return that many bytes at any time, whatever its guest does. Its thread
//! waits in [`Pool::next_recall`] and returns chunks by [`Pool::free_memory`]. If it cannot, it
//! calls [`Pool::refuse_recall`], and the writes that need these chunks fail.
//!
//! While memory borrows, it leaves a few chunks free ([`Loan::min_free_bytes`]). Volumes use them
//! while the thread returns further chunks, so few writes wait.

use std::time::{Duration, Instant};

use foreshore_types::lending::Loan;

use crate::CHUNK_BYTES;
use crate::media::Media;
use crate::pool::{Pool, PoolError, State, StateGuard, bytes};

/// Minimum time between a refused recall and the next one for a write. A write tries many blocks,
/// and each attempt may be expensive.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// Time after a refused recall until waiting writes are worth another attempt. Each one may resume
/// a paused VM for a moment.
pub(in crate::pool) const ASK_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Requests to return lent chunks.
#[derive(Debug, Default)]
pub(in crate::pool) struct Recall {
    pub(in crate::pool) loan: Loan,
    /// A thread returns chunks on request.
    is_served: bool,
    /// Chunks for which writes are waiting.
    pub(in crate::pool) awaited_chunks: u32,
    /// Time of the last refusal, if nothing has changed since then.
    pub(in crate::pool) refused_at: Option<Instant>,
}

impl<M: Media> Pool<M> {
    /// Allows memory to borrow promised bytes ([`Pool::set_borrowable_bytes`]). Volumes can then
    /// still allocate `min_free_bytes`, or the bytes that they need if these are fewer. `None`,
    /// the default, allows nothing, and recalls nothing that is already lent.
    pub fn lend_promised(&self, min_free_bytes: Option<u64>) {
        self.change_loan(|loan| loan.min_free_bytes = min_free_bytes);
    }

    /// Sets the number of promised bytes that memory may borrow.
    pub fn set_borrowable_bytes(&self, borrowable_bytes: u64) {
        self.change_loan(|loan| loan.borrowable_bytes = borrowable_bytes);
    }

    fn change_loan(&self, change: impl FnOnce(&mut Loan)) {
        let mut state = self.lock_state();
        change(&mut state.recall.loan);
        state.recall.refused_at = None;
        self.recalled.notify_all();
    }

    /// Announces a thread that calls [`Pool::next_recall`]. From now on, writes without a chunk
    /// wait for that thread.
    pub fn start_recalls(&self) {
        self.lock_state().recall.is_served = true;
    }

    /// Ends [`Pool::next_recall`]. Waiting writes fail.
    pub fn end_recalls(&self) {
        self.lock_state().recall.is_served = false;
        self.recalled.notify_all();
        self.scrubbed.notify_all();
    }

    /// Waits until thin volumes need lent chunks, and returns the number of bytes that they need.
    /// Returns `None` after [`Pool::end_recalls`].
    pub fn next_recall(&self) -> Option<u64> {
        let mut state = self.lock_state();
        while state.recall.is_served {
            if self.check_not_latched().is_err() {
                // A latched pool takes no memory back, so waiting writes fail.
                self.refuse(&mut state);
            }
            let shortage = state.shortage_chunks();
            if shortage > 0 && state.recall.refused_at.is_none() {
                return Some(bytes(shortage));
            }
            state = state.wait(&self.recalled);
        }
        None
    }

    /// Reports that no chunk can be returned. Waiting writes fail. A later write that needs one
    /// starts a new attempt ([`RETRY_AFTER`]).
    pub fn refuse_recall(&self) {
        self.refuse(&mut self.lock_state());
    }

    fn refuse(&self, state: &mut State) {
        state.recall.refused_at = Some(Instant::now());
        self.scrubbed.notify_all();
    }

    /// Waits until `chunks` chunks are clean or waiting to be erased. Fails if no thread returns
    /// them. The state is unlocked in the meantime, so the caller must check again.
    pub(in crate::pool) fn wait_for_recall<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        chunks: u32,
    ) -> Result<StateGuard<'a>, PoolError> {
        if state.recall.refused_at.is_some_and(|at| at.elapsed() >= RETRY_AFTER) {
            state.recall.refused_at = None;
        }
        while state.available_chunks() < chunks {
            // Checked before each wait, because a failure of the pool wakes no waiting thread.
            self.check_not_latched()?;
            let is_refused = state.recall.refused_at.is_some();
            if !state.recall.is_served || is_refused || state.counts.memory == 0 {
                return Err(state.pool_full(bytes(chunks)));
            }
            state.recall.awaited_chunks += chunks;
            self.recalled.notify_all();
            state = state.wait(&self.scrubbed);
            state.recall.awaited_chunks -= chunks;
        }
        self.check_not_latched()?;
        Ok(state)
    }

    /// Wakes the thread that returns chunks if volumes may need some, after the number of available
    /// chunks has fallen.
    pub(in crate::pool) fn notify_shortage(&self, state: &mut State) {
        if state.shortage_chunks() > 0 {
            state.recall.refused_at = None;
            self.recalled.notify_all();
        }
    }
}

impl State {
    /// Returns true if an allocation of `chunks` chunks, which has failed before, may succeed now:
    /// they are available, or the next attempt recalls them ([`ASK_AGAIN_AFTER`]).
    pub(in crate::pool) fn may_allocate(&self, chunks: u32) -> bool {
        let is_over = |at: Instant| at.elapsed() >= ASK_AGAIN_AFTER;
        let asks_again = self.recall.refused_at.is_none_or(is_over);
        let may_recall = self.recall.is_served && self.counts.memory > 0 && asks_again;
        chunks <= self.available_chunks() || may_recall
    }

    /// Returns the number of lent chunks that must be returned, so that waiting writes can continue
    /// and enough chunks are free for the next ones.
    pub(in crate::pool) fn shortage_chunks(&self) -> u32 {
        let Recall { loan, is_served, awaited_chunks, .. } = self.recall;
        let loan = Loan { min_free_bytes: loan.min_free_bytes.filter(|_| is_served), ..loan };
        let short_bytes = loan.shortage_bytes(
            bytes(self.available_chunks()),
            self.totals().unallocated_bytes(),
            bytes(awaited_chunks),
            bytes(self.counts.memory),
        );
        (short_bytes / CHUNK_BYTES) as u32
    }
}
