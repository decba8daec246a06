//! The worker of the device. The worker executes requests one at a time.

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
use crate::log::rate_limited;
use crate::memory::view::GuestView;
use crate::virtio::ActiveQueue;

const KICK: u32 = 0;
const SWEEP: u32 = 1;
const BUDGET: u32 = 2;

/// A request that is not answered yet.
pub(super) struct Pending {
    head: u16,
    request: Request,
    reply: ReplySlot,
    /// Set if the request is delayed because it exceeded the budget.
    delay: Option<Delay>,
}

#[derive(Clone, Copy)]
struct Delay {
    since: Instant,
    /// Earliest time of the next attempt. Notifications do not cause an earlier attempt.
    retry_at: Instant,
}

/// Minimum time between two attempts to execute a delayed request.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// A chain that was taken from the queue.
enum PoppedChain {
    Request(Pending),
    /// A chain without a valid request. The chain must be returned to the driver.
    Malformed {
        head: u16,
    },
}

enum Answer {
    Given,
    /// The request exceeds the budget.
    Delayed,
    /// The used ring cannot be written.
    Lost,
}

pub(super) struct Worker {
    pub(super) queue: ActiveQueue,
    pub(super) sweep_timer: TimerFd,
    pub(super) budget_timer: TimerFd,
    /// Request that is delayed until the budget suffices. No other request is taken from the queue
    /// in the meantime. A reset of the device or the machine discards the delayed request, which
    /// has no effect then.
    pub(super) delayed: Option<Pending>,
    pub(super) view: GuestView,
    pub(super) interrupt: Arc<dyn VirtioInterrupt>,
    pub(super) executor: Arc<Mutex<Executor>>,
    pub(super) shared: Arc<Shared>,
}

impl Worker {
    /// Serves available requests. After as many requests as the queue has entries, other devices on
    /// the loop and the loop's owner are served first.
    fn serve(&mut self) {
        let mut served = 0;
        while let Some(popped) = self.next() {
            match self.answer(popped) {
                Answer::Given => served += 1,
                Answer::Delayed => break,
                Answer::Lost => return,
            }
            if served == self.queue.queue.size() {
                self.queue.reschedule();
                break;
            }
        }
        if served > 0
            && let Err(err) = self.interrupt.signal_queue(0)
        {
            rate_limited!(error, zone = %self.shared.zone.id, %err, "Cannot interrupt the driver for a response");
        }
        // Prepares for the next request while the driver processes its answer. A new request is
        // served before the next step of the preparation.
        if self.executor.lock().prepare(Instant::now()) {
            self.queue.reschedule();
        }
    }

    /// Serves requests, unless a delayed request must still wait. If a notification arrives
    /// together with an expired timer, they must count as only one attempt.
    fn serve_unless_early(&mut self) {
        let delay = self.delayed.as_ref().and_then(|pending| pending.delay);
        match delay.map(|delay| delay.retry_at.saturating_duration_since(Instant::now())) {
            Some(wait) if !wait.is_zero() => self.retry_after(wait),
            _ => self.serve(),
        }
    }

    fn answer(&mut self, popped: PoppedChain) -> Answer {
        let (head, answer) = match popped {
            PoppedChain::Request(pending) => {
                let now = Instant::now();
                // No guard of guest memory is held here, because an unplug waits until all guards
                // are dropped.
                let result = self.executor.lock().execute(pending.request, now);
                match result {
                    Ok(response) => {
                        if let Some(delay) = pending.delay {
                            self.shared
                                .metrics
                                .throttled
                                .end(now.saturating_duration_since(delay.since));
                        }
                        (pending.head, Some((pending.reply, response)))
                    }
                    Err(wait) => {
                        self.delay(pending, wait, now);
                        return Answer::Delayed;
                    }
                }
            }
            PoppedChain::Malformed { head } => (head, None),
        };
        let guard = self.view.memory();
        let len = match answer.map(|(reply, response)| reply.write(&guard, response)) {
            Some(Ok(len)) => len,
            Some(Err(err)) => {
                rate_limited!(warn, zone = %self.shared.zone.id, %err, "Response buffer is outside of plugged memory");
                self.shared.metrics.malformed.fetch_add(1, Ordering::Relaxed);
                0
            }
            None => 0,
        };
        let added = self.queue.queue.add_used(&*guard, head, len);
        if let Err(err) = &added {
            rate_limited!(warn, zone = %self.shared.zone.id, %err, "Cannot write the used ring");
        }
        if added.is_ok() { Answer::Given } else { Answer::Lost }
    }

    fn delay(&mut self, mut pending: Pending, wait: Duration, now: Instant) {
        if pending.delay.is_none() {
            self.shared.metrics.throttled.begin();
        }
        let since = pending.delay.map_or(now, |delay| delay.since);
        pending.delay = Some(Delay { since, retry_at: now + RETRY_INTERVAL });
        self.delayed = Some(pending);
        self.retry_after(wait);
    }

    fn retry_after(&mut self, wait: Duration) {
        // A timer set to 0 would never expire.
        if let Err(err) = self.budget_timer.reset(wait.max(Duration::from_nanos(1)), None) {
            rate_limited!(error, zone = %self.shared.zone.id, %err, "Cannot set the timer of a delayed request; retrying at once");
            self.queue.reschedule();
        }
    }

    fn next(&mut self) -> Option<PoppedChain> {
        self.delayed.take().map(PoppedChain::Request).or_else(|| self.pop())
    }

    fn pop(&mut self) -> Option<PoppedChain> {
        let guard = self.view.memory();
        let chain = self.queue.pop(&guard, &*self.interrupt)?;
        let head = chain.head_index();
        Some(match read_request(&guard, chain) {
            Ok((request, reply)) => {
                PoppedChain::Request(Pending { head, request, reply, delay: None })
            }
            Err(err) => {
                rate_limited!(warn, zone = %self.shared.zone.id, %err, "Driver sent an invalid request");
                self.shared.metrics.malformed.fetch_add(1, Ordering::Relaxed);
                PoppedChain::Malformed { head }
            }
        })
    }

    /// Sets the timer for the next removal of empty slots.
    fn arm_sweep(&mut self) {
        let Some(due) = self.executor.lock().sweep_due() else { return };
        // A timer set to 0 would never expire.
        let wait = due.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if let Err(err) = self.sweep_timer.reset(wait, None) {
            // The slots are removed by a later timer or at the end of the VM.
            rate_limited!(warn, zone = %self.shared.zone.id, %err, "Cannot set the timer that removes empty memory slots");
        }
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.queue.watch(KICK, ops);
        for (timer, data) in [(&self.sweep_timer, SWEEP), (&self.budget_timer, BUDGET)] {
            if let Err(err) = ops.add(Events::with_data(timer, data, EventSet::IN)) {
                rate_limited!(error, zone = %self.shared.zone.id, %err, "Cannot watch a timer of the worker");
            }
        }
        // The driver may have sent a notification before the worker was added, and slots may have
        // become empty under an earlier worker. The queue is not served here but scheduled, because
        // the thread that adds the worker waits for `init`.
        self.queue.reschedule();
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        // The timer is cleared, not read. An earlier event in the same pass may have set it again,
        // and a read would then block the loop until the timer expires.
        match events.data() {
            KICK => {
                self.queue.clear_kick();
                self.serve_unless_early();
            }
            BUDGET => {
                let _ = self.budget_timer.clear();
                self.serve_unless_early();
            }
            _ => {
                let _ = self.sweep_timer.clear();
                self.executor.lock().sweep(Instant::now());
            }
        }
        self.arm_sweep();
    }
}
