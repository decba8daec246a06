//! The worker of the watchdog. The worker receives pings from the queue, and ticks from a timer
//! that is started at the first ping.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use tracing::warn;
use virtio_queue::{DescriptorChain, Writer};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::timerfd::TimerFd;

use super::countdown::{Countdown, TICK};
use super::device::OnTimeout;
use super::metrics::WatchdogMetrics;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

pub(super) const QUEUE: u16 = 0;
/// Byte that answers a ping.
const ACKNOWLEDGMENT: [u8; 1] = [1];
/// Number of pings to serve before other devices on the event loop are served.
const BATCH: usize = 64;

const KICK: u32 = 0;
const TICKED: u32 = 1;

pub(super) struct Worker {
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    queue: ActiveQueue,
    timer: TimerFd,
    countdown: Countdown,
    metrics: Arc<WatchdogMetrics>,
    on_timeout: OnTimeout,
}

impl Worker {
    pub(super) fn new(
        view: GuestView,
        interrupt: Arc<dyn VirtioInterrupt>,
        queue: ActiveQueue,
        metrics: Arc<WatchdogMetrics>,
        on_timeout: OnTimeout,
    ) -> io::Result<Self> {
        let (timer, countdown) = (TimerFd::new()?, Countdown::default());
        Ok(Self { view, interrupt, queue, timer, countdown, metrics, on_timeout })
    }

    fn serve(&mut self) {
        let mut pinged = false;
        let guard = self.view.memory();
        let memory: &MappedMemory = &guard;
        let metrics = &self.metrics;
        let needs_interrupt = self.queue.serve(memory, &*self.interrupt, BATCH, |chain| {
            let is_ping = answer(memory, chain);
            let counter = if is_ping { &metrics.pings } else { &metrics.bad_requests };
            counter.fetch_add(1, Ordering::Relaxed);
            pinged |= is_ping;
            Some(if is_ping { ACKNOWLEDGMENT.len() as u32 } else { 0 })
        });
        drop(guard);
        // The timer is set before the driver is notified of the answer.
        if pinged && self.countdown.ping() {
            self.begin();
        }
        if needs_interrupt && let Err(err) = self.interrupt.signal_queue(QUEUE) {
            rate_limited!(warn, %err, "Cannot interrupt the watchdog driver");
        }
    }

    fn begin(&mut self) {
        if let Err(err) = self.timer.reset(TICK, Some(TICK)) {
            warn!(%err, "Cannot set the watchdog timer; a guest that hangs is not restarted");
        }
    }

    fn tick(&mut self) {
        if self.countdown.tick() {
            warn!("Guest did not ping its watchdog in time");
            (self.on_timeout)();
        }
        if !self.countdown.is_on()
            && let Err(err) = self.timer.clear()
        {
            warn!(%err, "Cannot stop the watchdog timer");
        }
    }
}

/// Writes the answer to the driver's buffer. Returns false if the chain has no writable byte.
fn answer(memory: &MappedMemory, chain: DescriptorChain<&MappedMemory>) -> bool {
    Writer::new(memory, chain).is_ok_and(|mut writer| writer.write_all(&ACKNOWLEDGMENT).is_ok())
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.queue.watch(KICK, ops);
        if let Err(err) = ops.add(Events::with_data(&self.timer, TICKED, EventSet::IN)) {
            warn!(?err, "Cannot watch the watchdog timer");
        }
        self.serve();
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        match events.data() {
            TICKED => {
                // Several expirations count as one tick, because the guest could not ping while it
                // was stopped.
                if self.timer.wait().is_ok() {
                    self.tick();
                }
            }
            _ => {
                self.queue.clear_kick();
                self.serve();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};

    #[test]
    fn guest_that_stops_pinging_is_reported_once() {
        let mut driver = TestDriver::new(1);
        let mut activation = driver.activation(0);
        let queue = activation.queues.pop().flatten().unwrap();
        let silences = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&silences);
        let on_timeout: OnTimeout = Arc::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        let mut worker =
            Worker::new(activation.view, activation.interrupt, queue, Arc::default(), on_timeout)
                .unwrap();
        let ticks = |worker: &mut Worker| (0..100).for_each(|_| worker.tick());
        ticks(&mut worker);
        assert_eq!(silences.load(Ordering::Relaxed), 0, "the guest has not begun to ping");
        assert!(!worker.timer.is_armed().unwrap());
        for expected in 1..3 {
            driver.add(0, &[Buffer::In(BUFFERS, 1)]);
            worker.serve();
            assert!(worker.timer.is_armed().unwrap());
            ticks(&mut worker);
            assert_eq!(silences.load(Ordering::Relaxed), expected);
            assert!(!worker.timer.is_armed().unwrap(), "an unused timer is still armed");
        }
    }
}
