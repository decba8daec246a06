//! A small guest driver for tests. It has rings in guest memory, sends and receives packets, and
//! waits for interrupts. The mock queue of the crate virtio-queue cannot be used for long
//! transfers, because it never wraps around its ring.

use std::io;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zerocopy::{FromBytes, IntoBytes};

use crate::interrupt::VirtioInterrupt;
use crate::memory::view::GuestView;
use crate::virtio::vsock::packet::tests::{from_guest, parse_by_guest};
use crate::virtio::vsock::packet::{Credit, GuestPacket, HEADER_LEN, Link, Op, RawHeader};
use crate::virtio::{Activation, ActiveQueue};

pub(super) const CID: u64 = 3;
pub(super) const QUEUE_SIZE: u16 = 64;
pub(super) const MIB: u64 = 1 << 20;
pub(super) const UNPLUGGED: u64 = 32 * MIB;

const RX_BUFFERS: u64 = MIB;
pub(super) const RX_BUFFER_LEN: u64 = 4096;
const TX_BUFFERS: u64 = 16 * MIB;
/// Size of a buffer for a header and the largest payload.
const TX_BUFFER_LEN: u64 = 0x2_0000;
/// Number of descriptors for each transmitted packet: one for the header and up to three for the
/// payload.
const TX_DESCRIPTORS: u16 = 4;

/// Time limit of each wait, long enough even for a slow host.
const TIMEOUT: Duration = Duration::from_secs(30);

const WRITE: u16 = 2;
const NEXT: u16 = 1;

#[derive(Default)]
pub(super) struct Interrupts {
    count: Mutex<u64>,
    changed: Condvar,
}

impl VirtioInterrupt for Interrupts {
    fn signal_queue(&self, _: u16) -> io::Result<()> {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
        Ok(())
    }
    fn signal_queue_now(&self, queue: u16) -> io::Result<()> {
        self.signal_queue(queue)
    }
    fn needs_reset(&self) -> io::Result<()> {
        Ok(())
    }
    fn signal_config(&self) -> io::Result<()> {
        unreachable!("the configuration of vsock does not change")
    }
}

pub(super) struct Ring {
    base: u64,
    kick: EventFd,
    next_avail: u16,
    last_used: u16,
}

impl Ring {
    fn new(base: u64) -> Self {
        Self { base, kick: EventFd::new(EFD_NONBLOCK).unwrap(), next_avail: 0, last_used: 0 }
    }
    fn avail(&self) -> u64 {
        self.base + 0x1000
    }
    fn used(&self) -> u64 {
        self.base + 0x2000
    }

    /// Makes a chain available, and notifies the device unless the device has suppressed
    /// notifications. A device that forgets to enable notifications therefore stalls.
    fn offer(&mut self, view: &GuestView, head: u16, event_idx: bool) {
        let memory = view.memory();
        let slot = self.avail() + 4 + u64::from(self.next_avail % QUEUE_SIZE) * 2;
        memory.write_obj(head, GuestAddress(slot)).unwrap();
        let old = self.next_avail;
        self.next_avail = old.wrapping_add(1);
        memory.store(self.next_avail, GuestAddress(self.avail() + 2), Ordering::Release).unwrap();
        fence(Ordering::SeqCst);
        let load = |addr| memory.load::<u16>(GuestAddress(addr), Ordering::Acquire).unwrap();
        let wanted = if event_idx {
            // The device has set avail_event (virtio 1.3, 2.7.10) to this chain, so it wants a
            // notification.
            load(self.used() + 4 + u64::from(QUEUE_SIZE) * 8) == old
        } else {
            load(self.used()) & 1 == 0
        };
        drop(memory);
        if wanted {
            self.kick.write(1).unwrap();
        }
    }
    fn queue(&self) -> Queue {
        let mut queue = Queue::new(QUEUE_SIZE).unwrap();
        queue.set_size(QUEUE_SIZE);
        queue.set_desc_table_address(Some(self.base as u32), Some(0));
        queue.set_avail_ring_address(Some(self.avail() as u32), Some(0));
        queue.set_used_ring_address(Some(self.used() as u32), Some(0));
        queue.set_ready(true);
        queue
    }
}

pub(super) struct Driver {
    pub view: GuestView,
    pub interrupts: Arc<Interrupts>,
    pub rx: Ring,
    pub tx: Ring,
    event: Ring,
    tx_free: Vec<u16>,
    event_idx: bool,
    /// Credit to announce in packets from the guest.
    pub credit: Credit,
}

pub(super) fn new_view() -> GuestView {
    let ranges =
        [(GuestAddress(0), 32 * MIB as usize), (GuestAddress(UNPLUGGED), 2 * MIB as usize)];
    let view = GuestView::new(GuestMemoryMmap::from_ranges(&ranges).unwrap());
    view.exclusive().add_pluggable(GuestAddress(UNPLUGGED), 2 * MIB, 2 * MIB).unwrap();
    view
}

impl Driver {
    /// Creates a driver that has not added any buffers.
    pub(super) fn new(view: GuestView) -> Self {
        let memory = view.memory();
        memory.write_slice(&[0; 0x2_0000], GuestAddress(0)).unwrap();
        drop(memory);
        Self {
            view,
            interrupts: Arc::default(),
            rx: Ring::new(0x4000),
            tx: Ring::new(0x8000),
            event: Ring::new(0xc000),
            tx_free: (0..QUEUE_SIZE / TX_DESCRIPTORS).map(|slot| slot * TX_DESCRIPTORS).collect(),
            event_idx: false,
            credit: Credit { buf_alloc: 256 * 1024, fwd_cnt: 0 },
        }
    }

    pub(super) fn activation(&mut self, features: u64) -> Activation {
        self.event_idx = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        let active = |ring: &Ring| {
            Some(ActiveQueue::new("vsock", ring.queue(), ring.kick.try_clone().unwrap()))
        };
        Activation {
            view: self.view.clone(),
            interrupt: self.interrupts.clone(),
            queues: [&self.rx, &self.tx, &self.event].map(active).into(),
            features,
        }
    }

    pub(super) fn write(&self, addr: u64, bytes: &[u8]) {
        self.view.memory().write_slice(bytes, GuestAddress(addr)).unwrap();
    }

    fn read_u16(&self, addr: u64) -> u16 {
        self.view.memory().load::<u16>(GuestAddress(addr), Ordering::Acquire).unwrap()
    }

    pub(super) fn descriptor(
        &self,
        table: u64,
        index: u16,
        addr: u64,
        len: u64,
        flags: u16,
        next: u16,
    ) {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(u32::try_from(len).unwrap().to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.write(table + u64::from(index) * 16, &bytes);
    }

    pub(super) fn offer_rx(&mut self, head: u16, addr: u64, len: u64) {
        self.descriptor(self.rx.base, head, addr, len, WRITE, 0);
        self.rx.offer(&self.view, head, self.event_idx);
    }

    pub(super) fn offer_rx_buffer(&mut self, head: u16) {
        self.offer_rx(head, RX_BUFFERS + u64::from(head) * RX_BUFFER_LEN, RX_BUFFER_LEN);
    }

    pub(super) fn offer_all_rx_buffers(&mut self) {
        (0..QUEUE_SIZE).for_each(|head| self.offer_rx_buffer(head));
    }

    /// Makes a chain available. The test has already written its descriptors.
    pub(super) fn offer_tx(&mut self, head: u16) {
        self.tx.offer(&self.view, head, self.event_idx);
    }

    pub(super) fn tx_table(&self) -> u64 {
        self.tx.base
    }

    /// Sets the available index to an invalid value: more than the ring's size ahead.
    pub(super) fn offer_absurdly_many(&mut self) {
        self.write(self.tx.avail() + 2, &(QUEUE_SIZE * 3).to_le_bytes());
        self.tx.kick.write(1).unwrap();
    }

    fn take_used(&mut self, rx: bool) -> Option<(u16, u32)> {
        let ring = if rx { &self.rx } else { &self.tx };
        let (used, last) = (ring.used(), ring.last_used);
        if self.read_u16(used + 2) == last {
            return None;
        }
        let entry = GuestAddress(used + 4 + u64::from(last % QUEUE_SIZE) * 8);
        let [head, len] = self.view.memory().read_obj::<[u32; 2]>(entry).unwrap();
        let ring = if rx { &mut self.rx } else { &mut self.tx };
        ring.last_used = last.wrapping_add(1);
        // Sets used_event (virtio 1.3, 2.7.10) so that the next entry causes an interrupt.
        let (event, last) = (ring.avail() + 4 + u64::from(QUEUE_SIZE) * 2, ring.last_used);
        self.write(event, &last.to_le_bytes());
        fence(Ordering::SeqCst);
        Some((u16::try_from(head).unwrap(), len))
    }

    /// Waits for interrupts until `condition` returns a value.
    #[track_caller]
    pub(super) fn wait<T>(&mut self, mut condition: impl FnMut(&mut Self) -> Option<T>) -> T {
        let interrupts = Arc::clone(&self.interrupts);
        loop {
            let before = *interrupts.count.lock().unwrap();
            if let Some(found) = condition(self) {
                return found;
            }
            let count = interrupts.count.lock().unwrap();
            let (_count, timeout) = interrupts
                .changed
                .wait_timeout_while(count, TIMEOUT, |count| *count == before)
                .unwrap();
            assert!(!timeout.timed_out(), "the device did not interrupt");
        }
    }

    pub(super) fn reap_tx(&mut self) {
        while let Some((head, len)) = self.take_used(false) {
            assert_eq!(len, 0);
            self.tx_free.push(head);
        }
    }

    /// Waits until the device has returned all chains. Then reserves a head and its descriptors for
    /// chains that the test builds itself.
    #[track_caller]
    pub(super) fn take_tx_head(&mut self) -> u16 {
        let all = usize::from(QUEUE_SIZE / TX_DESCRIPTORS);
        self.wait(|driver| {
            driver.reap_tx();
            (driver.tx_free.len() == all).then_some(())
        });
        self.tx_free.pop().expect("all heads")
    }

    /// Waits until the device returns a chain that the test has built itself.
    #[track_caller]
    pub(super) fn wait_tx(&mut self, expected: u16) {
        let (head, len) = self.wait(|driver| driver.take_used(false));
        assert_eq!((head, len), (expected, 0));
    }

    pub(super) fn can_send(&mut self) -> bool {
        self.reap_tx();
        !self.tx_free.is_empty()
    }

    /// Sends a packet whose payload is divided into `pieces` descriptors.
    pub(super) fn send_in_pieces(&mut self, link: Link, op: Op, payload: &[u8], pieces: usize) {
        let head = self.wait(|driver| {
            driver.reap_tx();
            driver.tx_free.pop()
        });
        let buffer = TX_BUFFERS + u64::from(head / TX_DESCRIPTORS) * TX_BUFFER_LEN;
        let header = from_guest(CID, link, op, self.credit);
        self.write(buffer, header.as_bytes());
        self.write(buffer + HEADER_LEN as u64, payload);
        let table = self.tx.base;
        let len = payload.len().div_ceil(pieces).max(1);
        let chunks: Vec<_> = payload.chunks(len).collect();
        let flags = |last: bool| if last { 0 } else { NEXT };
        self.descriptor(table, head, buffer, HEADER_LEN as u64, flags(chunks.is_empty()), head + 1);
        let mut addr = buffer + HEADER_LEN as u64;
        for (i, chunk) in chunks.iter().enumerate() {
            let index = head + 1 + u16::try_from(i).unwrap();
            let chunk_len = chunk.len() as u64;
            self.descriptor(table, index, addr, chunk_len, flags(i + 1 == chunks.len()), index + 1);
            addr += chunk_len;
        }
        self.tx.offer(&self.view, head, self.event_idx);
    }

    pub(super) fn send(&mut self, link: Link, op: Op, payload: &[u8]) {
        self.send_in_pieces(link, op, payload, 1);
    }

    pub(super) fn send_data(&mut self, link: Link, payload: &[u8]) {
        self.send(link, Op::Data { len_bytes: payload.len().try_into().unwrap() }, payload);
    }

    /// Takes a received buffer without adding it to the queue again. Returns its head and the
    /// length that the device has written.
    pub(super) fn try_receive_raw(&mut self) -> Option<(u16, u32)> {
        self.take_used(true)
    }

    pub(super) fn try_receive(&mut self) -> Option<(GuestPacket, Vec<u8>)> {
        let (head, len) = self.take_used(true)?;
        let mut buffer = vec![0; len as usize];
        let addr = RX_BUFFERS + u64::from(head) * RX_BUFFER_LEN;
        self.view.memory().read_slice(&mut buffer, GuestAddress(addr)).unwrap();
        self.offer_rx_buffer(head);
        let (header, payload) = RawHeader::read_from_prefix(&buffer).unwrap();
        assert_eq!(header.len.get() as usize, payload.len());
        Some((parse_by_guest(&header), payload.to_vec()))
    }

    #[track_caller]
    pub(super) fn receive(&mut self) -> (GuestPacket, Vec<u8>) {
        self.wait(Self::try_receive)
    }

    #[track_caller]
    pub(super) fn expect(&mut self, link: Link, op: Op) {
        let (packet, _) = self.receive();
        assert_eq!((packet.link, packet.op), (link, op));
    }
}
