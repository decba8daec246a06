//! One error for all flushes of a disk that overlap.
//!
//! All queues of a disk share one open file, and Linux tells of a page that could not be written
//! back once per open file (file_check_and_advance_wb_err(), called by every fsync()), to whoever
//! asks first, whosever page it was. So of two flushes that overlap, one may be told of the other's
//! lost page, and the other that all is well.
//!
//! Hence a flush that went well is answered when all have ended that were under way when the media
//! answered it, and only if none of them has failed. `pmem_volume::media` does the same for pools.
//! There, a thread waits; a queue of a disk has other things to do meanwhile, and is woken by an
//! event.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use vmm_sys_util::eventfd::EventFd;

/// Which flushes of a disk are under way.
#[derive(Default)]
pub(super) struct Flushes {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    under_way: BTreeSet<u64>,
    /// Raised when one ends.
    waiting: Vec<Arc<EventFd>>,
}

impl State {
    fn awaits(&self, answered: Answered) -> bool {
        self.under_way.first().is_some_and(|first| *first < answered.0)
    }
}

/// A flush that is under way, from before the media are asked until its failure would be known. It
/// ends also with whoever has it.
pub(super) struct Ticket {
    flushes: Arc<Flushes>,
    number: u64,
}

/// What was under way when the media answered a flush: all with a smaller number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered(u64);

impl Flushes {
    pub(super) fn begin(self: &Arc<Self>) -> Ticket {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.under_way.insert(number);
        Ticket { flushes: Arc::clone(self), number }
    }

    /// Whether all have ended that were under way then. If not, `event` is raised when another one
    /// ends.
    pub(super) fn is_settled(&self, answered: Answered, event: &Arc<EventFd>) -> bool {
        let mut state = self.state.lock();
        let awaits = state.awaits(answered);
        if awaits && !state.waiting.iter().any(|other| Arc::ptr_eq(other, event)) {
            state.waiting.push(Arc::clone(event));
        }
        !awaits
    }

    /// Waits until all have ended that were under way then.
    pub(super) fn wait(&self, answered: Answered) {
        let mut state = self.state.lock();
        self.ended.wait_while(&mut state, |state| state.awaits(answered));
    }
}

impl Ticket {
    /// The media have answered, and everybody can know if they have failed.
    pub(super) fn end(self) -> Answered {
        let flushes = Arc::clone(&self.flushes);
        drop(self);
        Answered(flushes.state.lock().next)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.flushes.state.lock();
        state.under_way.remove(&self.number);
        self.flushes.ended.notify_all();
        for event in state.waiting.drain(..) {
            // Fails only when it was raised without end, and then it is seen anyway.
            let _: io::Result<()> = event.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[test]
    fn a_flush_waits_for_those_before_its_answer_and_for_no_later_one() {
        let flushes = Arc::new(Flushes::default());
        let event = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let (first, second) = (flushes.begin(), flushes.begin());
        let answered = second.end();
        let later = flushes.begin();
        assert!(!flushes.is_settled(answered, &event));
        assert!(event.read().is_err());
        drop(later);
        assert!(event.read().is_ok(), "it looks again");
        assert!(!flushes.is_settled(answered, &event));
        let later = flushes.begin();
        drop(first);
        assert!(event.read().is_ok());
        assert!(flushes.is_settled(answered, &event));
        flushes.wait(answered);
        drop(later);
        assert!(event.read().is_err(), "nobody waits any more");
    }
}
