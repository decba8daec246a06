//! The worker of the vsock device. After each event, it moves packets between the queues and the
//! muxer.

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use thiserror::Error;
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT, Reader, Writer};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::timerfd::TimerFd;
use zerocopy::{FromBytes, IntoBytes};

use super::metrics::VsockMetrics;
use super::muxer::{Muxer, Packet, Readiness, Token, Watch};
use super::packet::{HEADER_LEN, RawHeader};
use super::{RX_QUEUE, TX_QUEUE};
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::{GuestView, MappedMemory};
use crate::virtio::ActiveQueue;
use crate::virtio::worker::next_chain;

const RX_KICK: u32 = 0;
const TX_KICK: u32 = 1;
const EVENT_KICK: u32 = 2;
const LISTENER: u32 = 3;
const TIMER: u32 = 4;

/// Maximum number of chains that a pass takes from each queue. Without this limit, a guest that
/// keeps refilling its queues would delay other devices on the loop, and plugs, which wait for the
/// worker's guard of guest memory.
const PASS_BUDGET: usize = 256;

/// Maximum number of descriptors in a chain. A header and the largest packet in single pages need
/// fewer, but an indirect table could have 65535.
const MAX_DESCRIPTORS: usize = 64;

/// Time for which no clients are accepted after the process has run out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Error in a ring. The device ignores its rings until the next reset.
#[derive(Debug, Error)]
#[error("queue {index} is invalid")]
struct BrokenQueue {
    index: u16,
    #[source]
    source: virtio_queue::Error,
}

type Chain<'a> = DescriptorChain<&'a MappedMemory>;

/// Worker that owns the queues and all connections from an activation to the next reset.
pub(super) struct Worker {
    view: GuestView,
    interrupt: Arc<dyn VirtioInterrupt>,
    rx: ActiveQueue,
    tx: ActiveQueue,
    /// Event queue, whose buffers are never used. The only event that virtio defines reports a
    /// migration (virtio 1.3, 5.10.6.7), and after a restart the guest loads its driver again.
    event: Option<ActiveQueue>,
    muxer: Muxer,
    metrics: Arc<VsockMetrics>,
    timer: TimerFd,
    armed: Option<Instant>,
    accept_paused_until: Option<Instant>,
    broken: bool,
}

impl Worker {
    pub(super) fn new(
        view: GuestView,
        interrupt: Arc<dyn VirtioInterrupt>,
        queues: (ActiveQueue, ActiveQueue),
        event: Option<ActiveQueue>,
        muxer: Muxer,
        metrics: Arc<VsockMetrics>,
    ) -> io::Result<Self> {
        let (rx, tx) = queues;
        let timer = TimerFd::new()?;
        Ok(Self {
            view,
            interrupt,
            rx,
            tx,
            event,
            muxer,
            metrics,
            timer,
            armed: None,
            accept_paused_until: None,
            broken: false,
        })
    }

    /// Moves packets until no more can be moved or the budget is used up.
    pub(super) fn pass(&mut self, watch: &mut dyn Watch, now: Instant) {
        if !self.broken {
            match self.move_all(watch, now) {
                // The notification event of the transmit queue is signaled to schedule another
                // pass.
                Ok(true) => self.tx.reschedule(),
                Ok(false) => {}
                Err(err) => {
                    rate_limited!(error, %err, source = %err.source, "vsock stopped until the guest resets it");
                    self.metrics.broken_queues_total.increment();
                    self.broken = true;
                    if let Err(err) = self.interrupt.needs_reset() {
                        rate_limited!(error, %err, "Cannot notify the guest that vsock needs a reset");
                    }
                }
            }
        }
        self.arm_timer(now);
    }

    /// Returns true if the budget is used up.
    fn move_all(&mut self, watch: &mut dyn Watch, now: Instant) -> Result<bool, BrokenQueue> {
        let mut budget = PASS_BUDGET;
        loop {
            {
                let memory = self.view.memory();
                // Packets from the guest are handled first, because they contain credit and their
                // answers can then be sent in the same pass.
                self.move_tx(&memory, &mut budget, watch, now)?;
                if !self.muxer.has_connect_request() {
                    let more_rx = self.move_rx(&memory, watch, now)?;
                    return Ok(budget == 0 || more_rx);
                }
            }
            self.muxer.connect(watch, now);
        }
    }

    /// Takes packets from the guest until `budget` is used up or a packet must be handled after the
    /// guard of guest memory is dropped.
    fn move_tx(
        &mut self,
        memory: &MappedMemory,
        budget: &mut usize,
        watch: &mut dyn Watch,
        now: Instant,
    ) -> Result<(), BrokenQueue> {
        if *budget == 0 {
            return Ok(());
        }
        let broken = |source| BrokenQueue { index: TX_QUEUE, source };
        let mut used = false;
        'drain: loop {
            self.tx.queue.disable_notification(memory).map_err(broken)?;
            while let Some(chain) = next_chain(&mut self.tx.queue, memory).map_err(broken)? {
                let head = chain.head_index();
                match read_packet(memory, chain) {
                    Some((header, payload)) => {
                        let payload_bytes = payload.available_bytes();
                        let mut payload = memory.whole(payload);
                        self.muxer.on_guest_packet(
                            &header,
                            &mut payload,
                            payload_bytes,
                            watch,
                            now,
                        );
                    }
                    None => self.metrics.bad_buffers_total.increment(),
                }
                self.tx.queue.add_used(memory, head, 0).map_err(broken)?;
                used = true;
                *budget -= 1;
                if *budget == 0 || self.muxer.has_connect_request() {
                    break 'drain;
                }
            }
            if !self.tx.queue.enable_notification(memory).map_err(broken)? {
                break;
            }
        }
        if used && self.tx.queue.needs_notification(memory).map_err(broken)? {
            self.signal(TX_QUEUE);
        }
        Ok(())
    }

    /// Moves packets to the guest. Returns true if the budget is used up.
    fn move_rx(
        &mut self,
        memory: &MappedMemory,
        watch: &mut dyn Watch,
        now: Instant,
    ) -> Result<bool, BrokenQueue> {
        let broken = |source| BrokenQueue { index: RX_QUEUE, source };
        let mut budget = PASS_BUDGET;
        let mut used = false;
        // Notifications of new buffers are needed only while packets wait for buffers.
        self.rx.queue.disable_notification(memory).map_err(broken)?;
        while self.muxer.has_packets() && budget > 0 {
            let Some(chain) = next_chain(&mut self.rx.queue, memory).map_err(broken)? else {
                if self.rx.queue.enable_notification(memory).map_err(broken)? {
                    self.rx.queue.disable_notification(memory).map_err(broken)?;
                    continue;
                }
                break;
            };
            let head = chain.head_index();
            let len_bytes = match PacketBuffer::new(memory, chain) {
                Some(buffer) => match self.muxer.next_packet(buffer.capacity(), watch, now) {
                    Some(packet) => buffer.write(&packet),
                    // No socket was readable after all, so the buffer is kept for the next packet.
                    None => {
                        self.rx.queue.go_to_previous_position();
                        break;
                    }
                },
                None => {
                    self.metrics.bad_buffers_total.increment();
                    0
                }
            };
            self.rx.queue.add_used(memory, head, len_bytes).map_err(broken)?;
            used = true;
            budget -= 1;
        }
        if used && self.rx.queue.needs_notification(memory).map_err(broken)? {
            self.signal(RX_QUEUE);
        }
        Ok(budget == 0)
    }

    fn signal(&self, queue: u16) {
        if let Err(err) = self.interrupt.signal_queue(queue) {
            rate_limited!(error, queue, %err, "Cannot interrupt the guest for vsock");
        }
    }

    /// Sets the timer to the earliest deadline. A timer that is already set is never postponed, so
    /// it may expire when no deadline has passed.
    fn arm_timer(&mut self, now: Instant) {
        let next = self.muxer.next_deadline().into_iter().chain(self.accept_paused_until).min();
        let Some(next) = next else { return };
        if self.armed.is_some_and(|armed| armed <= next) {
            return;
        }
        // A timer set to 0 would never expire.
        let wait = next.saturating_duration_since(now).max(Duration::from_millis(1));
        match self.timer.reset(wait, None) {
            Ok(()) => self.armed = Some(next),
            Err(err) => rate_limited!(error, %err, "Cannot set the timer of vsock"),
        }
    }

    fn on_timer(&mut self, ops: &mut EventOps, now: Instant) {
        if let Err(err) = self.timer.wait() {
            rate_limited!(error, %err, "Cannot read the timer of vsock");
        }
        self.armed = None;
        self.muxer.expire(&mut EpollWatch(ops), now);
        if self.accept_paused_until.is_some_and(|until| until <= now) {
            self.accept_paused_until = None;
            add(ops, self.muxer.host().listener(), LISTENER, EventSet::IN);
        }
    }

    fn on_client(&mut self, ops: &mut EventOps, now: Instant) {
        if let Err(err) = self.muxer.accept(&mut EpollWatch(ops), now) {
            // Usually the process has no free file descriptor. The listener is removed from epoll
            // for a while, because epoll would report it again immediately.
            rate_limited!(warn, %err, "Cannot accept vsock clients; retrying later");
            let events = Events::with_data(self.muxer.host().listener(), LISTENER, EventSet::IN);
            if let Err(err) = ops.remove(events) {
                rate_limited!(error, ?err, "Cannot stop watching the vsock socket");
            }
            self.accept_paused_until = Some(now + ACCEPT_PAUSE);
        }
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        self.rx.watch(RX_KICK, ops);
        self.tx.watch(TX_KICK, ops);
        if let Some(event) = &self.event {
            event.watch(EVENT_KICK, ops);
        }
        add(ops, self.muxer.host().listener(), LISTENER, EventSet::IN);
        add(ops, &self.timer, TIMER, EventSet::IN);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let now = Instant::now();
        match events.data() {
            RX_KICK => self.rx.clear_kick(),
            TX_KICK => self.tx.clear_kick(),
            EVENT_KICK => self.event.iter().for_each(ActiveQueue::clear_kick),
            LISTENER => self.on_client(ops, now),
            TIMER => self.on_timer(ops, now),
            token => {
                let set = events.event_set();
                let failed = set.contains(EventSet::ERROR);
                let ready = Readiness {
                    readable: failed || set.intersects(EventSet::IN | EventSet::READ_HANG_UP),
                    writable: failed || set.contains(EventSet::OUT),
                    hung_up: set.contains(EventSet::HANG_UP),
                };
                self.muxer.on_socket(Token(token), ready, &mut EpollWatch(ops), now);
            }
        }
        self.pass(&mut EpollWatch(ops), now);
    }
}

fn add(ops: &mut EventOps, source: &impl AsRawFd, data: u32, set: EventSet) {
    if let Err(err) = ops.add(Events::with_data(source, data, set)) {
        rate_limited!(error, ?err, data, "Cannot watch a file of vsock");
    }
}

/// Implementation of [`Watch`] that adds sockets to the worker's event loop.
struct EpollWatch<'a, 'b>(&'a mut EventOps<'b>);

impl Watch for EpollWatch<'_, '_> {
    fn watch(&mut self, stream: &UnixStream, token: Token) -> io::Result<()> {
        let set = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        self.0
            .add(Events::with_data(stream, token.0, set))
            .map_err(|err| io::Error::other(format!("epoll: {err:?}")))
    }

    fn unwatch(&mut self, stream: &UnixStream) {
        if let Err(err) = self.0.remove(Events::empty(stream)) {
            rate_limited!(error, ?err, "Cannot stop watching a vsock connection");
        }
    }
}

fn is_short(chain: &Chain) -> bool {
    chain.clone().take(MAX_DESCRIPTORS + 1).count() <= MAX_DESCRIPTORS
}

/// Reads the header of a packet from the guest. The header may be divided into any number of
/// descriptors. Returns `None` if the header is incomplete or a descriptor is outside of memory.
fn read_packet<'a>(memory: &'a MappedMemory, chain: Chain<'a>) -> Option<(RawHeader, Reader<'a>)> {
    if !is_short(&chain) {
        return None;
    }
    let mut reader = Reader::new(memory, chain).ok()?;
    let mut header = [0; HEADER_LEN];
    io::Read::read_exact(&mut reader, &mut header).ok()?;
    Some((RawHeader::read_from_bytes(&header).expect("an array of the header's size"), reader))
}

/// A buffer from the guest for one packet. The buffer has room for a header and at least one byte
/// of payload.
struct PacketBuffer<'a> {
    header: Writer<'a>,
    payload: Writer<'a>,
}

impl<'a> PacketBuffer<'a> {
    fn new(memory: &'a MappedMemory, chain: Chain<'a>) -> Option<Self> {
        if !is_short(&chain) {
            return None;
        }
        let mut header: Writer = Writer::new(memory, chain).ok()?;
        if header.available_bytes() <= HEADER_LEN {
            return None;
        }
        let payload = header.split_at(HEADER_LEN).ok()?;
        Some(Self { header, payload })
    }

    fn capacity(&self) -> usize {
        self.payload.available_bytes()
    }

    /// Writes a packet, which must fit, and returns its length.
    fn write(mut self, packet: &Packet) -> u32 {
        self.header.write_all(packet.header.as_bytes()).expect("room for a header was checked");
        self.payload.write_all(packet.payload).expect("payload is at most the capacity");
        u32::try_from(HEADER_LEN + packet.payload.len()).expect("payload is at most one chunk")
    }
}
