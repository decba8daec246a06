//! Execution of requests by io_uring. Steps of several requests are in progress concurrently, and
//! the worker's thread does not block.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::EventFd;

use super::event::{TakenRequest, Worker};
use super::flush::Ticket;
use super::job::Job;
use crate::disk::{Done, Executor, Step};

/// Executor of a queue while no worker uses it. Cheap to clone.
///
/// Executors are created with the device. A driver activates the device on the thread of a vCPU,
/// whose seccomp filter must not allow new rings, because seccomp does not see the operations of a
/// ring.
#[derive(Clone)]
pub(super) struct IdleExecutor(Arc<Mutex<Option<Box<dyn Executor>>>>);

impl IdleExecutor {
    pub(super) fn new(executor: Option<Box<dyn Executor>>) -> Self {
        Self(Arc::new(Mutex::new(executor)))
    }

    /// Returns the executor, unless the kernel has refused its steps.
    pub(super) fn take(&self) -> Option<Box<dyn Executor>> {
        self.0.lock().take_if(|executor| !executor.is_given_up())
    }

    /// Retains a drained executor. One whose steps the kernel has refused remains until the device
    /// is dropped, because the thread of a queue may not end a ring.
    pub(super) fn keep(&self, executor: Box<dyn Executor>) {
        *self.0.lock() = Some(executor);
    }
}

/// io_uring of one queue.
pub(super) struct Ring {
    executor: Box<dyn Executor>,
    jobs: Vec<Option<(Job, Option<Ticket>)>>,
    free: Vec<usize>,
}

impl Ring {
    /// Creates a ring with up to `depth` steps in progress.
    pub(super) fn new(executor: Box<dyn Executor>, depth: u16) -> Self {
        let jobs = (0..depth).map(|_| None).collect();
        Self { executor, jobs, free: (0..usize::from(depth)).collect() }
    }

    pub(super) fn into_executor(self) -> Box<dyn Executor> {
        self.executor
    }

    /// Event that is signaled when a step ends while the ring is armed.
    pub(super) fn event(&self) -> &EventFd {
        self.executor.event()
    }

    fn take_done(&mut self) -> Vec<Done> {
        let mut done = Vec::new();
        while done.len() < self.jobs.len()
            && let Some(one) = self.executor.next_done()
        {
            done.push(one);
        }
        done
    }

    fn end(&mut self, token: usize) -> (Job, Option<Ticket>) {
        self.free.push(token);
        self.jobs[token].take().expect("the job of a step in progress")
    }

    /// Waits for the steps in progress and returns the flushes among them. The caller must keep
    /// each ticket until it has recorded the result of the flush for all queues.
    pub(super) fn drain_flushes(&mut self) -> Vec<(Job, Option<Ticket>, io::Result<()>)> {
        let done = self.executor.drain();
        let flushes = done.into_iter().filter(|done| matches!(done.step, Step::Flush));
        flushes
            .map(|Done { token, result, .. }| {
                let (job, ticket) = self.end(token);
                (job, ticket, result)
            })
            .collect()
    }
}

impl Worker {
    /// Takes requests, begins their steps, and answers completed requests. Returns false if nothing
    /// is left to do until the next event.
    pub(super) fn pass_by_ring(&mut self, ring: &mut Ring) -> bool {
        let steps = self.take_batch(ring.executor.batch());
        let taken = !steps.is_empty();
        self.add(ring, steps);
        let batch = ring.executor.batch();
        let more = (0..batch).all(|_| !self.is_stopping() && ring.executor.begin());
        if ring.executor.is_given_up() {
            self.disk.metrics().io_uring.store(false, Ordering::Relaxed);
        }
        let finished = self.finish_done(ring);
        if self.used {
            self.check_interrupt(&self.view.memory());
        }
        self.interrupt_if_due();
        taken || more || finished || ring.executor.arm() || self.is_wanted(&self.view.memory())
    }

    /// Takes a batch of requests under one guard of guest memory. Returns the first step of each.
    fn take_batch(&mut self, batch: usize) -> Vec<(Job, Step)> {
        let guard = self.view.memory();
        self.silence(&guard);
        let mut steps = Vec::new();
        // Refused requests count toward the limit. Otherwise a driver could make this loop hold the
        // guard forever.
        for _ in 0..batch {
            match self.take(&guard) {
                TakenRequest::Started(job, step) => steps.push((job, step)),
                TakenRequest::Answered => {}
                TakenRequest::Nothing => break,
            }
        }
        steps
    }

    fn add(&mut self, ring: &mut Ring, steps: Vec<(Job, Step)>) {
        for (job, step) in steps {
            let ticket = matches!(step, Step::Flush).then(|| self.disk.flushes().begin());
            // The number of tokens equals the maximum number of requests in progress.
            let token = ring.free.pop().expect("a token for each request");
            ring.jobs[token] = Some((job, ticket));
            ring.executor.add(token, step);
        }
    }

    /// Answers completed requests and begins the next steps of the others. Returns false if no step
    /// has completed.
    fn finish_done(&mut self, ring: &mut Ring) -> bool {
        // 1. Record the results of flushes before other requests are answered.
        let mut over = Vec::new();
        for Done { token, step, result } in ring.take_done() {
            let (job, ticket) = ring.end(token);
            match ticket {
                None => over.push((job, step, result)),
                Some(ticket) => {
                    over.extend(
                        self.flushed(job, ticket, result).map(|(job, result)| (job, step, result)),
                    );
                }
            }
        }
        // 2. Take successful flushes for which all overlapping flushes have ended.
        over.extend(
            self.take_flushed().into_iter().map(|(job, result)| (job, Step::Flush, result)),
        );
        if over.is_empty() {
            return false;
        }
        // 3. Begin the next steps after the guard is dropped.
        let guard = self.view.memory();
        let next = over
            .into_iter()
            .filter_map(|(job, step, result)| self.finish(&guard, job, step, result));
        let next = next.collect();
        drop(guard);
        self.add(ring, next);
        true
    }
}
