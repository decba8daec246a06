//! The worker: takes requests off the queue, one after the other.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use parking_lot::Mutex;
use virtio_queue::QueueT;
use vm_memory::GuestAddressSpace;
use vmm_sys_util::timerfd::TimerFd;

use super::handle::Shared;
use super::plug::Executor;
use super::request::{ReplySlot, Request, read_request};
use crate::interrupt::VirtioInterrupt;
use crate::log::sparsely;
use crate::memory::view::GuestView;
use crate::virtio::ActiveQueue;

const KICK: u32 = 0;
const SWEEP: u32 = 1;

/// What came out of the queue.
enum Popped {
    Request {
        head: u16,
        request: Request,
        reply: ReplySlot,
    },
    /// No request, but a chain that must be returned.
    Malformed {
        head: u16,
    },
}

pub(super) struct Worker {
    pub(super) queue: ActiveQueue,
    pub(super) sweep_timer: TimerFd,
    pub(super) view: GuestView,
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    pub(super) executor: Arc<Mutex<Executor>>,
    pub(super) shared: Arc<Shared>,
}

impl Worker {
    /// Serves the requests that are there. A driver that adds more all the time gets them served as well, but
    /// not before other devices of the loop and the loop's owner had their turn.
    fn serve(&mut self) {
        let mut served = 0;
        while let Some(popped) = self.pop() {
            if !self.answer(popped) {
                return;
            }
            served += 1;
            if served == self.queue.queue.size() {
                self.queue.come_back();
                break;
            }
        }
        if served > 0
            && let Err(err) = self.interrupt.signal_queue(0)
        {
            sparsely!(error, zone = %self.shared.zone.id, %err, "The driver cannot be told of an answer");
        }
        // The driver has its answer, and works on it meanwhile. Its next request comes before the next step.
        if self.executor.lock().prepare(Instant::now()) {
            self.queue.come_back();
        }
    }

    fn answer(&mut self, popped: Popped) -> bool {
        let (head, answer) = match popped {
            Popped::Request { head, request, reply } => {
                // No guard is held here: an unplug waits until all are gone.
                let response = self.executor.lock().execute(request);
                (head, Some((reply, response)))
            }
            Popped::Malformed { head } => (head, None),
        };
        let guard = self.view.memory();
        let len = match answer.map(|(reply, response)| reply.write(&guard, response)) {
            Some(Ok(len)) => len,
            Some(Err(err)) => {
                sparsely!(warn, zone = %self.shared.zone.id, %err, "An answer has no place in plugged memory");
                self.shared.metrics.malformed.fetch_add(1, Ordering::Relaxed);
                0
            }
            None => 0,
        };
        let added = self.queue.queue.add_used(&*guard, head, len);
        if let Err(err) = &added {
            sparsely!(warn, zone = %self.shared.zone.id, %err, "The used ring cannot be written");
        }
        added.is_ok()
    }

    fn pop(&mut self) -> Option<Popped> {
        let guard = self.view.memory();
        let chain = self.queue.pop(&guard, &*self.interrupt)?;
        let head = chain.head_index();
        Some(match read_request(&guard, chain) {
            Ok((request, reply)) => Popped::Request { head, request, reply },
            Err(err) => {
                sparsely!(warn, zone = %self.shared.zone.id, %err, "The driver sends what is no request");
                self.shared.metrics.malformed.fetch_add(1, Ordering::Relaxed);
                Popped::Malformed { head }
            }
        })
    }

    /// Sets the timer for the next removal of empty slots.
    fn arm_sweep(&mut self) {
        let Some(due) = self.executor.lock().sweep_due() else { return };
        // A timer set to 0 would never expire.
        let wait = due.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if let Err(err) = self.sweep_timer.reset(wait, None) {
            // They go with a later one, or with the VM.
            sparsely!(warn, zone = %self.shared.zone.id, %err, "Empty memory slots stay for now");
        }
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.queue.watch(KICK, ops);
        if let Err(err) = ops.add(Events::with_data(&self.sweep_timer, SWEEP, EventSet::IN)) {
            sparsely!(error, zone = %self.shared.zone.id, %err, "The worker cannot wait for its timer");
        }
        // A notification may have come before the worker did, and slots may have become empty under an earlier
        // one. Not here, though: whoever adds the worker waits for this.
        self.queue.come_back();
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        match events.data() {
            KICK => {
                self.queue.clear_kick();
                self.serve();
            }
            _ => {
                let _ = self.sweep_timer.wait();
                self.executor.lock().sweep(Instant::now());
            }
        }
        self.arm_sweep();
    }
}
