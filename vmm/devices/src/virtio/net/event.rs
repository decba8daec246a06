//! The worker of one queue pair. The worker runs on its own thread and transfers frames between
//! the guest and the host's interface.
//!
//! It holds a guard of guest memory while it copies frames, but never during a system call that
//! sends or receives a frame.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use tracing::debug;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_queue::QueueT;
use vm_memory::GuestAddressSpace;

use super::frames::{FRAME_LEN_MIN, FRAMES_MAX, Frames};
use super::header::{self, HEADER_LEN, Offloads};
use super::metrics::{Direction, DropReason};
use super::request::{self, ChainBuffer, DESCRIPTORS_MAX, FitResult, Limits};
use super::state::Interface;
use super::tap::HostQueue;
use super::used;
use crate::event_loop::Interest;
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;

const RECEIVE_KICK: u32 = 0;
const TRANSMIT_KICK: u32 = 1;
const INPUT: u32 = 2;
const ROOM: u32 = 3;
const WAKE: u32 = 4;

/// Number of batches of [`FRAMES_MAX`] frames before the other direction is served.
const PASSES: usize = 4;

pub(super) struct Worker {
    net: Arc<Interface>,
    pair: u16,
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    receive: ActiveQueue,
    transmit: ActiveQueue,
    host: Box<dyn HostQueue>,
    is_mergeable: bool,
    /// Offloads for frames to the driver.
    to_driver: Offloads,
    limits: Limits,
    /// Frames from the host that were not yet copied to the driver's buffers.
    incoming: Frames,
    chain_buffer: ChainBuffer,
    /// Frames from the driver that were not yet sent to the host.
    outgoing: Frames,
    /// Chains that are returned to the driver together.
    used: Vec<(u16, u32)>,
    /// True while frames wait for buffers from the driver. The driver's notification resumes the
    /// worker.
    is_starving: bool,
    /// Registered while the worker waits for frames from the host.
    input: Interest,
    /// Registered while frames wait for space in the host's queue.
    room: Interest,
}

impl Worker {
    pub(super) fn new(
        net: Arc<Interface>,
        pair: u16,
        (view, interrupt): (GuestView, Arc<dyn VirtioInterrupt>),
        [receive, transmit]: [ActiveQueue; 2],
        features: u64,
    ) -> io::Result<Self> {
        let host = net.host().queue(pair)?;
        let max_descriptors = transmit.queue.size().min(DESCRIPTORS_MAX);
        Ok(Self {
            net,
            pair,
            view,
            interrupt,
            receive,
            transmit,
            host,
            is_mergeable: features & 1 << VIRTIO_NET_F_MRG_RXBUF != 0,
            to_driver: Offloads::of_device(features),
            limits: Limits { max_descriptors, offloads: Offloads::of_driver(features) },
            incoming: Frames::default(),
            chain_buffer: ChainBuffer::default(),
            outgoing: Frames::default(),
            used: Vec::with_capacity(FRAMES_MAX),
            is_starving: false,
            input: Interest::new("frames of a network interface", INPUT, EventSet::IN),
            room: Interest::new("send buffer of a network interface", ROOM, EventSet::OUT),
        })
    }

    fn count_pass(&self) {
        #[cfg(test)]
        self.net.metrics().passes.fetch_add(1, Ordering::Relaxed);
    }

    // Transfer from the guest to the host.

    fn serve_transmit(&mut self, ops: &mut EventOps) {
        for _ in 0..PASSES {
            self.count_pass();
            // While frames wait for space at the host, further frames remain in the driver's ring.
            if !self.send(ops) {
                return;
            }
            let more = self.gather();
            if !self.send(ops) || !more {
                return;
            }
        }
        self.transmit.reschedule();
    }

    /// Sends the gathered frames to the host. Returns false if the host has no space for all of
    /// them.
    fn send(&mut self, ops: &mut EventOps) -> bool {
        let metrics = self.net.metrics();
        while let Some(packet) = self.outgoing.first() {
            let len = packet.len() - HEADER_LEN;
            match self.host.send(packet) {
                Ok(()) => metrics.passed(Direction::FromGuest, len),
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    self.room.set(true, &self.host.output(), ops);
                    return false;
                }
                Err(err) => {
                    debug!(net = self.net.shape().id, %err, "Host refused a frame");
                    metrics.dropped(Direction::FromGuest, DropReason::Host, 1);
                }
            }
            self.outgoing.pop();
        }
        self.room.set(false, &self.host.output(), ops);
        true
    }

    /// Copies frames from the ring under one guard and returns their chains to the driver. Returns
    /// true if more frames are available.
    fn gather(&mut self) -> bool {
        let view = self.view.clone();
        let guard = view.memory();
        let memory: &MappedMemory = &guard;
        let (old, was_broken) = (self.transmit.queue.next_used(), self.transmit.is_broken());
        self.be_quiet(memory);
        self.used.clear();
        let is_empty = self.take_packets(memory);
        // The copies are used only if no page of the copied memory was lost.
        if memory.check_whole().is_err() {
            let frames = self.outgoing.len() as u64;
            self.net.metrics().dropped(Direction::FromGuest, DropReason::Memory, frames);
            self.outgoing.clear();
        }
        self.count_broken(was_broken, self.transmit.is_broken());
        if let Err(err) = used::give_back(&mut self.transmit.queue, memory, &self.used) {
            debug!(net = self.net.shape().id, %err, "Cannot write the used ring");
            // The pass ends, because further chains would be lost as well. The next notification
            // starts another pass.
            return false;
        }
        let needs_interrupt = used::wants_interrupt(&self.transmit.queue, memory, old);
        let more = !is_empty || self.transmit.wait_for_more(memory);
        drop(guard);
        if needs_interrupt {
            self.signal(2 * self.pair + 1);
        }
        more
    }

    /// Takes a limited number of frames, including refused ones. Returns true if the ring is empty.
    fn take_packets(&mut self, memory: &MappedMemory) -> bool {
        while self.used.len() < FRAMES_MAX
            && let Some(room) = self.outgoing.room()
        {
            let Some(mut chain) = self.transmit.pop(memory, &*self.interrupt) else { return true };
            self.used.push((chain.head_index(), 0));
            match request::read_packet(memory, &mut chain, &self.limits, room) {
                Ok(len) => self.outgoing.push(len),
                Err(err) => {
                    self.net.metrics().bad_requests.fetch_add(1, Ordering::Relaxed);
                    debug!(net = self.net.shape().id, %err, "Frame refused");
                }
            }
        }
        false
    }

    fn be_quiet(&mut self, memory: &MappedMemory) {
        if let Err(err) = self.transmit.queue.disable_notification(memory) {
            debug!(net = self.net.shape().id, %err, "Cannot disable queue notifications");
        }
    }

    // Transfer from the host to the guest.

    fn serve_receive(&mut self, ops: &mut EventOps) {
        self.is_starving = false;
        for _ in 0..PASSES {
            self.count_pass();
            // A detached queue has no frames. Reading it would fail with the same error as a
            // removed interface.
            if !self.net.is_active(self.pair) {
                return self.watch_input(false, ops);
            }
            let outcome = self.fetch();
            if !self.deliver() {
                self.is_starving = true;
                return self.watch_input(false, ops);
            }
            match outcome {
                Fetched::All => return self.watch_input(true, ops),
                Fetched::Some => {}
                Fetched::Gone => {
                    // The queue may have been detached since the check above.
                    if self.net.is_active(self.pair) {
                        self.net.set_link_down();
                    }
                    return self.watch_input(false, ops);
                }
            }
        }
        // The worker resumes when the host has further frames.
        self.watch_input(true, ops);
    }

    fn watch_input(&mut self, on: bool, ops: &mut EventOps) {
        self.input.set(on, &self.host.input(), ops);
    }

    /// Takes frames from the host until the buffer is full or the host has no more.
    fn fetch(&mut self) -> Fetched {
        // Dropped frames count toward the limit as well.
        for _ in 0..FRAMES_MAX {
            let Some(room) = self.incoming.room() else { return Fetched::Some };
            let reason = match self.host.receive(room) {
                Ok(len) if len >= HEADER_LEN + FRAME_LEN_MIN => {
                    let header = room.first_chunk_mut::<HEADER_LEN>().expect("a header");
                    match header::check_received(header, self.to_driver) {
                        Ok(()) => {
                            self.incoming.push(len);
                            continue;
                        }
                        Err(_) => DropReason::Offload,
                    }
                }
                Ok(_) => DropReason::Host,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Fetched::All,
                Err(err) if err.raw_os_error() == Some(libc::EBADFD) => return Fetched::Gone,
                Err(err) => {
                    debug!(net = self.net.shape().id, %err, "Cannot read a frame from the host");
                    DropReason::Host
                }
            };
            self.net.metrics().dropped(Direction::ToGuest, reason, 1);
        }
        Fetched::Some
    }

    /// Copies frames to the driver's buffers under one guard. Returns false if too few buffers are
    /// available or the ring cannot be used.
    fn deliver(&mut self) -> bool {
        if self.incoming.is_empty() {
            return true;
        }
        let view = self.view.clone();
        let guard = view.memory();
        let memory: &MappedMemory = &guard;
        let (old, was_broken) = (self.receive.queue.next_used(), self.receive.is_broken());
        if let Err(err) = self.receive.queue.disable_notification(memory) {
            debug!(net = self.net.shape().id, %err, "Cannot disable queue notifications");
        }
        // Limits the number of chains. Otherwise another vCPU could add invalid chains as fast as
        // they are refused.
        let mut chains_left = usize::from(self.receive.queue.size());
        let mut is_given = true;
        while !self.incoming.is_empty() && is_given {
            let has_all = self.fill_buffers(memory, &mut chains_left);
            is_given = self.give_back(memory);
            if !has_all && (chains_left == 0 || !is_given || !self.receive.wait_for_more(memory)) {
                break;
            }
        }
        self.count_broken(was_broken, self.receive.is_broken());
        let needs_interrupt = is_given && used::wants_interrupt(&self.receive.queue, memory, old);
        drop(guard);
        if needs_interrupt {
            self.signal(2 * self.pair);
        }
        if chains_left == 0 && !self.incoming.is_empty() {
            self.receive.reschedule();
        }
        self.incoming.is_empty()
    }

    /// Fills buffers until the frames or the buffers are used up. Returns true if no frames remain.
    fn fill_buffers(&mut self, memory: &MappedMemory, chains_left: &mut usize) -> bool {
        let chains_max = usize::from(self.receive.queue.size());
        let metrics = self.net.metrics();
        self.used.clear();
        while let Some(packet) = self.incoming.first() {
            match self.chain_buffer.fit(packet.len(), chains_max, self.is_mergeable) {
                FitResult::Chains(count) => {
                    match self.chain_buffer.write(memory, packet, count, &mut self.used) {
                        Ok(()) => metrics.passed(Direction::ToGuest, packet.len() - HEADER_LEN),
                        Err(err) => {
                            debug!(net = self.net.shape().id, %err, "Frame does not fit into the receive buffers");
                            metrics.bad_requests.fetch_add(1, Ordering::Relaxed);
                            metrics.dropped(Direction::ToGuest, DropReason::Buffers, 1);
                        }
                    }
                    self.incoming.pop();
                }
                FitResult::Never => {
                    metrics.dropped(Direction::ToGuest, DropReason::Buffers, 1);
                    self.incoming.pop();
                }
                FitResult::More => {
                    if *chains_left == 0 {
                        return false;
                    }
                    let Some(mut chain) = self.receive.pop(memory, &*self.interrupt) else {
                        return false;
                    };
                    *chains_left -= 1;
                    let head = chain.head_index();
                    if let Err(err) =
                        self.chain_buffer.take(&mut chain, self.limits.max_descriptors)
                    {
                        debug!(net = self.net.shape().id, %err, "Receive buffer refused");
                        metrics.bad_requests.fetch_add(1, Ordering::Relaxed);
                        self.used.push((head, 0));
                    }
                }
            }
        }
        true
    }

    /// Returns all filled buffers to the driver together. Returns false if the ring cannot be
    /// written.
    fn give_back(&mut self, memory: &MappedMemory) -> bool {
        let result = used::give_back(&mut self.receive.queue, memory, &self.used);
        if let Err(err) = &result {
            debug!(net = self.net.shape().id, %err, "Cannot write the used ring");
            self.net.metrics().dropped(Direction::ToGuest, DropReason::Ring, 1);
        }
        result.is_ok()
    }

    fn count_broken(&self, was_broken: bool, is_broken: bool) {
        if is_broken && !was_broken {
            self.net.metrics().broken_queues.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn signal(&self, queue: u16) {
        if let Err(err) = self.interrupt.signal_queue(queue) {
            rate_limited!(warn, net = self.net.shape().id, %err, "Cannot interrupt the driver");
        }
    }
}

enum Fetched {
    /// The host has no more frames.
    All,
    /// More frames may be available.
    Some,
    /// The interface was removed or the queue was detached.
    Gone,
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.receive.watch(RECEIVE_KICK, ops);
        self.transmit.watch(TRANSMIT_KICK, ops);
        if let Err(err) = ops.add(Events::with_data(self.net.wake(self.pair), WAKE, EventSet::IN)) {
            rate_limited!(
                error,
                ?err,
                net = self.net.shape().id,
                "Cannot watch for changes of the queue pairs"
            );
        }
        self.serve_transmit(ops);
        self.serve_receive(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            TRANSMIT_KICK => {
                self.transmit.clear_kick();
                self.serve_transmit(ops);
            }
            ROOM => self.serve_transmit(ops),
            RECEIVE_KICK => {
                self.receive.clear_kick();
                // If no frame is waiting, the new buffers are used when one arrives.
                if self.is_starving {
                    self.serve_receive(ops);
                }
            }
            WAKE => {
                // The read fails only if the event was already read.
                let _ = self.net.wake(self.pair).read();
                self.serve_receive(ops);
            }
            _ => self.serve_receive(ops),
        }
    }
}
