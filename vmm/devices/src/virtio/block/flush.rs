//! Error handling for overlapping flushes: if one of them fails, all must fail.
//!
//! All queues of a disk share one open file. If Linux cannot write back a page, it reports the
//! error once per open file. The next fsync() receives it, no matter which queue wrote the page.
//! Every fsync() calls file_check_and_advance_wb_err(). If two flushes overlap, one of them may
//! receive the error for data of the other. The other then succeeds although its data is not
//! durable.
//!
//! After a successful fsync(), the device therefore waits for all other flushes that are in
//! progress. If one of them fails, the successful flush is reported as failed as well.
//! `pmem_volume::media` does the same for pools, but blocks a thread. The queue of a disk does not
//! block: it continues with other requests, and an event reports the end of the flushes.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use vmm_sys_util::eventfd::EventFd;

/// Flushes of a disk that are in progress.
#[derive(Default)]
pub(super) struct Flushes {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    in_flight: BTreeSet<u64>,
    /// Events to signal when the next flush ends.
    waiting: Vec<Arc<EventFd>>,
}

impl State {
    fn awaits(&self, answered: Answered) -> bool {
        self.in_flight.first().is_some_and(|first| *first < answered.0)
    }
}

/// A flush in progress. The ticket is created before the flush is sent to the media, and it must
/// exist until a failure is recorded. Dropping the ticket ends the flush.
pub(super) struct Ticket {
    flushes: Arc<Flushes>,
    number: u64,
}

/// The flushes that were in progress when the media completed a flush: all with a smaller number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered(u64);

impl Flushes {
    pub(super) fn begin(self: &Arc<Self>) -> Ticket {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.in_flight.insert(number);
        Ticket { flushes: Arc::clone(self), number }
    }

    /// Returns true if all flushes in `answered` have ended. Otherwise, `event` is signaled when
    /// the next flush ends.
    pub(super) fn has_ended(&self, answered: Answered, event: &Arc<EventFd>) -> bool {
        let mut state = self.state.lock();
        let awaits = state.awaits(answered);
        if awaits && !state.waiting.iter().any(|other| Arc::ptr_eq(other, event)) {
            state.waiting.push(Arc::clone(event));
        }
        !awaits
    }

    /// Waits until all flushes in `answered` have ended.
    pub(super) fn wait(&self, answered: Answered) {
        let mut state = self.state.lock();
        self.ended.wait_while(&mut state, |state| state.awaits(answered));
    }
}

impl Ticket {
    /// Ends the flush after the media have completed it. The caller must already have recorded a
    /// failure.
    pub(super) fn end(self) -> Answered {
        let flushes = Arc::clone(&self.flushes);
        drop(self);
        Answered(flushes.state.lock().next)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.flushes.state.lock();
        state.in_flight.remove(&self.number);
        self.flushes.ended.notify_all();
        for event in state.waiting.drain(..) {
            // The write fails only if the event's counter is full. In that case the event is
            // already pending.
            let _: io::Result<()> = event.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[test]
    fn flush_waits_only_for_flushes_that_began_before_its_answer() {
        let flushes = Arc::new(Flushes::default());
        let event = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let (first, second) = (flushes.begin(), flushes.begin());
        let answered = second.end();
        let later = flushes.begin();
        assert!(!flushes.has_ended(answered, &event));
        assert!(event.read().is_err());
        drop(later);
        assert!(event.read().is_ok(), "the waiting queue was not notified");
        assert!(!flushes.has_ended(answered, &event));
        let later = flushes.begin();
        drop(first);
        assert!(event.read().is_ok());
        assert!(flushes.has_ended(answered, &event));
        flushes.wait(answered);
        drop(later);
        assert!(event.read().is_err(), "no queue waits any more");
    }
}
