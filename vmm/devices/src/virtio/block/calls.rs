//! The short path: a device whose calls return when they are done. A request is taken, executed and
//! answered by the same pass. The queue has a thread of its own, so nothing else waits.
//!
//! A request of many steps, such as a discard of gigabytes, does not keep others waiting: after
//! each step one more request is taken, and steps have their turns in the order in which their
//! requests came to them.

use std::io;

use vm_memory::GuestAddressSpace;

use super::event::{Taken, Worker};
use super::job::Job;
use crate::disk::Step;
use crate::memory::view::MappedMemory;

/// Upper limit of steps before the driver is notified of answers.
const BATCH: usize = 8;

type Over = (Job, Step, io::Result<()>);

/// Continuation of a pass.
#[expect(clippy::large_enum_variant, reason = "a box would cost more than the move")]
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
            self.interrupt_if_due();
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
        self.put_back(&guard, over);
        self.check_interrupt(&guard);
        drop(guard);
        self.interrupt_if_due();
        true
    }

    /// Passes on what is over. If that was not the last step of its request, the next one waits for
    /// its turn.
    fn put_back(&mut self, guard: &MappedMemory, over: Option<Over>) {
        let next = over.and_then(|(job, step, result)| self.finish(guard, job, step, result));
        self.next.extend(next);
    }

    /// Returns a step to execute. If it may take long, the driver is notified before of all that is
    /// answered.
    fn begin_step(&mut self, guard: &MappedMemory, (job, step): (Job, Step)) -> Turn {
        if !matches!(step, Step::Read(..) | Step::Write(..)) || !self.disk.device().is_memory() {
            self.check_interrupt(guard);
        }
        Turn::Step(job, step)
    }

    /// Passes on what is over and looks for the next step, under one guard.
    fn turn(&mut self, over: Option<Over>) -> Turn {
        let guard = self.view.memory();
        if over.is_none() {
            self.silence(&guard);
        }
        self.put_back(&guard, over);
        for (job, result) in self.take_settled() {
            // A flush is the last step of its job.
            let none = self.finish(&guard, job, Step::Flush, result);
            assert!(none.is_none(), "a step behind a flush");
        }
        // Refused requests count as well: a guard is held for a bounded number of them.
        let mut taken = Taken::Answered;
        for _ in 0..BATCH {
            taken = self.take(&guard);
            if !matches!(taken, Taken::Answered) {
                break;
            }
        }
        let is_empty = matches!(taken, Taken::Nothing);
        if let Taken::Begun(job, step) = taken {
            self.next.push_back((job, step));
        }
        if let Some(next) = self.next.pop_front() {
            return self.begin_step(&guard, next);
        }
        self.check_interrupt(&guard);
        if is_empty && !self.is_wanted(&guard) { Turn::Idle } else { Turn::Again }
    }
}
