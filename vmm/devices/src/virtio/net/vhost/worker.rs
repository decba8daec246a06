//! The worker of a queue pair that the kernel serves. The worker handles interrupts that the
//! guest has masked, and errors.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use tracing::debug;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::VhostError;
use super::engine::{Connect, Engine, Setup};
use crate::event_loop::{EventLoopHandle, Gate, Helper};
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, RegionWatcher};
use crate::virtio::ActiveQueue;
use crate::virtio::net::state::{Interface, PairBackend};

const CALLS: [u32; 2] = [0, 1];
const ERRORS: [u32; 2] = [2, 3];
const FAILURE: u32 = 4;

/// Worker that runs on the device's thread while a driver is active.
pub(in super::super) struct Worker {
    net: Arc<Interface>,
    pair: u16,
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    queues: [ActiveQueue; 2],
    features: u64,
    connect: Connect,
    gate: Arc<Gate>,
    tap: File,
    /// `None` until the kernel has accepted the queues.
    engine: Option<Arc<Engine>>,
    calls: [EventFd; 2],
    errors: [EventFd; 2],
    failure: EventFd,
}

impl Worker {
    pub(in super::super) fn new(
        net: Arc<Interface>,
        pair: u16,
        (view, interrupt): (GuestView, Arc<dyn VirtioInterrupt>),
        queues: [ActiveQueue; 2],
        features: u64,
        (connect, event_loop): (&Connect, &EventLoopHandle),
    ) -> io::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        let tap = net.host().file(pair)?;
        Ok(Self {
            net,
            pair,
            view,
            interrupt,
            queues,
            features,
            connect: Arc::clone(connect),
            gate: event_loop.gate(),
            tap,
            engine: None,
            calls: [event()?, event()?],
            errors: [event()?, event()?],
            failure: event()?,
        })
    }

    /// Passes the queues to the kernel. Must not be called on a vCPU's thread, which may be pinned.
    /// Since Linux 6.4 the kernel's thread belongs to this process and inherits the CPU affinity of
    /// its creator.
    fn hand_over(&self) -> Result<Arc<Engine>, VhostError> {
        let [receive, transmit] = &self.queues;
        let (tap, kicks) =
            (self.tap.try_clone()?, [receive.kick.try_clone()?, transmit.kick.try_clone()?]);
        let failure = self.failure.try_clone()?;
        // The view is locked, so that regions cannot change between the creation of the table and
        // the registration for updates.
        let mut memory = self.view.exclusive();
        let rings = (self.connect)(Setup {
            regions: &memory.regions(),
            features: self.features,
            queues: [&receive.queue, &transmit.queue],
            kicks: kicks.each_ref(),
            calls: self.calls.each_ref(),
            errors: self.errors.each_ref(),
            tap,
        })?;
        let engine = Engine::new(self.net.shape().id.clone(), rings, kicks, failure);
        let watcher: Arc<dyn RegionWatcher> = Arc::clone(&engine) as _;
        memory.watch_regions(Arc::downgrade(&watcher));
        drop(memory);
        let helper: Arc<dyn Helper> = Arc::clone(&engine) as _;
        self.gate.add_helper(Arc::downgrade(&helper));
        Ok(engine)
    }

    fn queue(&self, nth: usize) -> u16 {
        2 * self.pair + nth as u16
    }

    fn bind(&self) -> io::Result<()> {
        (0..2).try_for_each(|nth| self.interrupt.bind_queue(self.queue(nth), &self.calls[nth]))
    }

    /// Signals an interrupt that KVM has not delivered, for example because the guest has masked
    /// it.
    fn interrupt(&self, nth: usize) {
        if self.calls[nth].read().is_ok()
            && let Err(err) = self.interrupt.signal_queue(self.queue(nth))
        {
            rate_limited!(warn, net = self.net.shape().id, %err, "Cannot interrupt the driver");
        }
    }

    /// Handles an error in a ring or of the interface, after which the kernel has stopped serving
    /// the queue.
    fn meet_error(&self, nth: usize) {
        // The read fails only if the event was already read.
        let _ = self.errors[nth].read();
        let Some(engine) = self.engine.as_ref().filter(|engine| !engine.is_given_up()) else {
            return;
        };
        if !self.net.is_active(self.pair) {
            // The pair was deactivated in the meantime. If its rings are invalid, the error is
            // reported again as soon as the pair is used again.
            return;
        }
        debug!(net = self.net.shape().id, queue = self.queue(nth), "vhost-net stopped a queue");
        engine.give_up();
        self.end_pair();
    }

    /// Reports the end of the pair. If the interface was removed, reports that the link is down.
    /// Otherwise requests a reset.
    fn end_pair(&self) {
        match self.net.host().exists() {
            true => self.break_queue(),
            false => self.net.set_link_down(),
        }
    }

    fn break_queue(&self) {
        self.net.metrics().broken_queues.fetch_add(1, Ordering::Relaxed);
        rate_limited!(
            warn,
            net = self.net.shape().id,
            pair = self.pair,
            "Queue pair disabled; the device needs a reset"
        );
        if let Err(err) = self.interrupt.needs_reset() {
            let net = &self.net.shape().id;
            rate_limited!(warn, net, %err, "Cannot notify the driver that the device needs a reset");
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(engine) = &self.engine {
            engine.give_up();
        }
        (0..2).for_each(|nth| self.interrupt.unbind_queue(self.queue(nth)));
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        let events = [
            (&self.calls[0], CALLS[0]),
            (&self.calls[1], CALLS[1]),
            (&self.errors[0], ERRORS[0]),
            (&self.errors[1], ERRORS[1]),
            (&self.failure, FAILURE),
        ];
        for (event, data) in events {
            if let Err(err) = ops.add(Events::with_data(event, data, EventSet::IN)) {
                rate_limited!(
                    error,
                    ?err,
                    net = self.net.shape().id,
                    "Cannot watch the events of vhost-net"
                );
            }
        }
        if let Err(err) = self.bind() {
            // Without the binding, this worker receives the interrupts and delivers them, which is
            // only slower.
            rate_limited!(warn, %err, net = self.net.shape().id, "Cannot bind vhost-net interrupts to the queues; the VMM delivers them");
        }
        match self.hand_over() {
            Ok(engine) => {
                let backend: Arc<dyn PairBackend> = Arc::clone(&engine) as _;
                self.engine = Some(engine);
                self.net.add_backend(self.pair, &backend);
            }
            Err(err) => {
                let error = &err as &dyn std::error::Error;
                rate_limited!(
                    error,
                    net = self.net.shape().id,
                    error,
                    "vhost-net rejected a queue pair"
                );
                self.end_pair();
            }
        }
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        match events.data() {
            FAILURE => {
                // The read fails only if the event was already read.
                let _ = self.failure.read();
                self.end_pair();
            }
            data if CALLS.contains(&data) => self.interrupt(data as usize),
            data => self.meet_error((data - ERRORS[0]) as usize),
        }
    }
}
