//! The short path: a device whose calls return when they are done. A request is taken, executed and
//! answered by the same pass, one after the other. The queue has a thread of its own, so nothing
//! else waits.

use std::io;

use vm_memory::GuestAddressSpace;

use super::event::{Taken, Worker};
use super::job::Job;
use crate::disk::Step;

/// Steps before the driver is notified of what is answered.
const BATCH: usize = 8;

type Over = (Job, Step, io::Result<()>);

/// Continuation of a pass.
enum Turn {
    Step(Job, Step),
    /// Look again: there may be more than what one guard is held for.
    Again,
    /// Wait for the driver.
    Idle,
}

impl Worker {
    /// Executes up to a batch of steps. False: nothing is left to do.
    pub(super) fn pass_by_calls(&mut self) -> bool {
        let mut over = None;
        for _ in 0..BATCH {
            let (job, mut step) = match self.turn(over.take()) {
                Turn::Step(job, step) => (job, step),
                end @ (Turn::Again | Turn::Idle) => {
                    self.interrupt_if_due();
                    return matches!(end, Turn::Again);
                }
            };
            if self.is_stopping() {
                return false;
            }
            over = if let Step::Flush = step {
                let ticket = self.disk.flushes().begin();
                let result = self.disk.device().flush();
                self.flushed(job, ticket, result).map(|(job, result)| (job, step, result))
            } else {
                let result = step.execute(&**self.disk.device());
                Some((job, step, result))
            };
        }
        let guard = self.view.memory();
        self.next = over.and_then(|(job, step, result)| self.finish(&guard, job, step, result));
        self.check_interrupt(&guard);
        drop(guard);
        self.interrupt_if_due();
        true
    }

    /// Passes on what is over and looks for the next step, under one guard.
    fn turn(&mut self, over: Option<Over>) -> Turn {
        let guard = self.view.memory();
        if over.is_none() {
            self.silence(&guard);
        }
        let next = over.and_then(|(job, step, result)| self.finish(&guard, job, step, result));
        for (job, result) in self.take_settled() {
            // A flush is the last step of its job.
            let none = self.finish(&guard, job, Step::Flush, result);
            assert!(none.is_none(), "a step behind a flush");
        }
        if let Some((job, step)) = next.or_else(|| self.next.take()) {
            return Turn::Step(job, step);
        }
        // Refused requests count as well: a guard is held for a bounded number of them.
        for _ in 0..BATCH {
            match self.take(&guard) {
                Taken::Begun(job, step) => return Turn::Step(job, step),
                Taken::Answered => {}
                Taken::Nothing => {
                    self.check_interrupt(&guard);
                    return if self.is_wanted(&guard) { Turn::Again } else { Turn::Idle };
                }
            }
        }
        self.check_interrupt(&guard);
        Turn::Again
    }
}
