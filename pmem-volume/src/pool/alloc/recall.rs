//! Recall of lent memory for thin volumes.
//!
//! Memory may borrow bytes that thin volumes were promised but do not use yet, up to a limit. The
//! borrower must be able to return that many bytes at any time, whatever its guest does. Its thread
//! waits in [`Pool::next_recall`] and returns chunks by [`Pool::free_memory`]. If it cannot, it
//! calls [`Pool::refuse_recall`], and the writes that need these chunks fail.
//!
//! While memory borrows, a few chunks are never lent ([`STOCK_BYTES`]). Volumes use them while the
//! thread returns further chunks, so few writes wait.

use crate::CHUNK_BYTES;
use crate::media::Media;
use crate::pool::{Pool, PoolError, State, StateGuard, bytes};

/// Bytes that are kept for the next writes to thin volumes while memory may borrow.
pub const STOCK_BYTES: u64 = 16 * CHUNK_BYTES;

/// Borrowing of promised bytes, and requests to return them.
#[derive(Debug, Default)]
pub(in crate::pool) struct Recall {
    /// Promised bytes that may be lent.
    pub(in crate::pool) borrowable_bytes: u64,
    /// A thread returns chunks on request.
    is_served: bool,
    /// Largest number of available chunks that a waiting write needs.
    pub(in crate::pool) awaited_chunks: u32,
    /// The last recall was refused, and nothing has changed since then.
    is_refused: bool,
    refusals: u64,
}

/// Returns the part of `available_bytes` that is withheld from memory: the unallocated part of the
/// reserve, or of the promised bytes that memory must not borrow, whichever is larger.
pub(in crate::pool) fn withheld_bytes(
    available_bytes: u64,
    reserve_bytes: u64,
    promised_bytes: u64,
    borrowable_bytes: u64,
) -> u64 {
    let stock_bytes = if borrowable_bytes == 0 { 0 } else { STOCK_BYTES.min(promised_bytes) };
    let promised_bytes = promised_bytes.saturating_sub(borrowable_bytes).max(stock_bytes);
    promised_bytes.max(reserve_bytes).min(available_bytes)
}

impl<M: Media> Pool<M> {
    /// Sets the number of promised bytes that memory may borrow.
    pub fn set_borrowable_bytes(&self, borrowable_bytes: u64) {
        let mut state = self.lock_state();
        state.recall.borrowable_bytes = borrowable_bytes;
        state.recall.is_refused = false;
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
            let shortage = state.shortage_chunks();
            if shortage > 0 && !state.recall.is_refused && self.check_not_latched().is_ok() {
                return Some(bytes(shortage));
            }
            state = state.wait(&self.recalled);
        }
        None
    }

    /// Reports that no chunk can be returned. Waiting writes fail. The next write that needs a chunk
    /// starts a new attempt.
    pub fn refuse_recall(&self) {
        let mut state = self.lock_state();
        state.recall.is_refused = true;
        state.recall.refusals += 1;
        state.recall.awaited_chunks = 0;
        drop(state);
        self.scrubbed.notify_all();
    }

    /// Waits until `chunks` chunks are clean or waiting to be erased. Fails if no thread returns
    /// them. The state is unlocked in the meantime, so the caller must check again.
    pub(in crate::pool) fn wait_for_recall<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        chunks: u32,
    ) -> Result<StateGuard<'a>, PoolError> {
        let refusals = state.recall.refusals;
        state.recall.is_refused = false;
        while state.available_chunks() < chunks {
            let can_return = state.recall.is_served && state.counts.memory > 0;
            if !can_return || state.recall.refusals != refusals {
                return Err(state.pool_full(bytes(chunks)));
            }
            state.recall.awaited_chunks = state.recall.awaited_chunks.max(chunks);
            self.recalled.notify_all();
            state = state.wait(&self.scrubbed);
            self.check_not_latched()?;
        }
        Ok(state)
    }

    /// Wakes the thread that returns chunks if volumes may need some, after the number of available
    /// chunks has fallen.
    pub(in crate::pool) fn notify_shortage(&self, state: &mut State) {
        if state.shortage_chunks() > 0 {
            state.recall.is_refused = false;
            self.recalled.notify_all();
        }
    }
}

impl State {
    /// Returns the number of lent chunks that must be returned, so that waiting writes can continue
    /// and the stock is full.
    pub(in crate::pool) fn shortage_chunks(&mut self) -> u32 {
        let available = self.available_chunks();
        if self.recall.awaited_chunks <= available {
            self.recall.awaited_chunks = 0;
        }
        let stock_bytes = STOCK_BYTES.min(self.totals().unallocated_bytes());
        let stock = if self.recall.is_served { (stock_bytes / CHUNK_BYTES) as u32 } else { 0 };
        stock.max(self.recall.awaited_chunks).saturating_sub(available).min(self.counts.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn borrowing_leaves_the_stock_and_the_reserve() {
        // All promised bytes are withheld unless memory may borrow some.
        assert_eq!(withheld_bytes(800 * MIB, 0, 500 * MIB, 0), 500 * MIB);
        assert_eq!(withheld_bytes(800 * MIB, 0, 500 * MIB, 200 * MIB), 300 * MIB);
        assert_eq!(withheld_bytes(800 * MIB, 0, 500 * MIB, 490 * MIB), STOCK_BYTES);
        assert_eq!(withheld_bytes(800 * MIB, 0, 500 * MIB, 900 * MIB), STOCK_BYTES);
        assert_eq!(withheld_bytes(800 * MIB, 0, 4 * MIB, 900 * MIB), 4 * MIB);
        // The reserve is never lent.
        assert_eq!(withheld_bytes(800 * MIB, 400 * MIB, 500 * MIB, 300 * MIB), 400 * MIB);
        // No more is withheld than there is.
        assert_eq!(withheld_bytes(100 * MIB, 400 * MIB, 500 * MIB, 0), 100 * MIB);
    }
}
