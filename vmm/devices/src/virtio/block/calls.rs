//! Execution of requests by blocking calls. One pass takes requests from the queue, executes steps
//! and answers requests. Blocking is acceptable because each queue has its own thread.
//!
//! A request with many steps, such as a discard of gigabytes, does not delay other requests. After
//! each step the worker takes one more request, and it executes steps in the order in which they
//! became ready.

use std::io;

use vm_memory::GuestAddressSpace;

use super::event::{TakenRequest, Worker};
use super::job::Job;
use crate::disk::Step;
use crate::memory::view::MappedMemory;

/// Maximum number of steps before the driver is notified of completed requests.
const BATCH: usize = 8;

type Over = (Job, Step, io::Result<()>);

#[expect(clippy::large_enum_variant, reason = "a box would cost more than the move")]
enum NextStep {
    Step(Job, Step),
    /// Run another pass. More requests may be available than one pass takes.
    Again,
    /// Wait for the driver's next notification.
    Idle,
}

impl Worker {
    /// Executes at most [`BATCH`] steps. Returns false if nothing is left to do.
    pub(super) fn pass_by_calls(&mut self) -> bool {
        let mut completed = None;
        for _ in 0..BATCH {
            let (job, mut step) = match self.next_step(completed.take()) {
                NextStep::Step(job, step) => (job, step),
                end @ (NextStep::Again | NextStep::Idle) => {
                    self.interrupt_if_due();
                    return matches!(end, NextStep::Again);
                }
            };
            if self.is_stopping() {
                return false;
            }
            self.interrupt_if_due();
            completed = if let Step::Flush = step {
                let ticket = self.disk.flushes().begin();
                let result = self.disk.device().flush();
                self.flushed(job, ticket, result).map(|(job, result)| (job, step, result))
            } else {
                let result = step.execute(&**self.disk.device());
                self.park_if_full((job, step, result))
            };
        }
        let guard = self.view.memory();
        self.put_back(&guard, completed);
        self.check_interrupt(&guard);
        drop(guard);
        self.interrupt_if_due();
        true
    }

    /// Processes a completed step, and queues the next step of its request.
    fn put_back(&mut self, guard: &MappedMemory, completed: Option<Over>) {
        let next = completed.and_then(|(job, step, result)| self.finish(guard, job, step, result));
        self.next.extend(next);
    }

    /// Returns a step to execute. If the step may take long, first checks whether an interrupt is
    /// due, so that the driver is notified of requests that are already completed.
    fn begin_step(&mut self, guard: &MappedMemory, (job, step): (Job, Step)) -> NextStep {
        if !matches!(step, Step::Read(..) | Step::Write(..)) || !self.disk.device().is_memory() {
            self.check_interrupt(guard);
        }
        NextStep::Step(job, step)
    }

    /// Processes a completed step and returns the next step to execute. Takes one guard of guest
    /// memory for both.
    fn next_step(&mut self, completed: Option<Over>) -> NextStep {
        let guard = self.view.memory();
        if completed.is_none() {
            self.silence(&guard);
        }
        self.put_back(&guard, completed);
        for (job, result) in self.take_flushed() {
            // No step follows, because a flush is always the last step of its job.
            let none = self.finish(&guard, job, Step::Flush, result);
            assert!(none.is_none(), "a step behind a flush");
        }
        let retry = self.take_retry(&guard);
        self.next.extend(retry);
        // Refused requests count toward the limit. Otherwise a driver could make this loop hold the
        // guard forever.
        let mut taken = TakenRequest::Answered;
        for _ in 0..BATCH {
            taken = self.take(&guard);
            if !matches!(taken, TakenRequest::Answered) {
                break;
            }
        }
        let is_empty = matches!(taken, TakenRequest::Nothing);
        if let TakenRequest::Started(job, step) = taken {
            self.next.push_back((job, step));
        }
        if let Some(next) = self.next.pop_front() {
            return self.begin_step(&guard, next);
        }
        self.check_interrupt(&guard);
        if is_empty && !self.is_wanted(&guard) { NextStep::Idle } else { NextStep::Again }
    }
}
