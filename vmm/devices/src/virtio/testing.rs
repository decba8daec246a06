//! A driver for tests, with rings in guest memory and interrupts that tests can wait for.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE, VRING_USED_F_NO_NOTIFY,
};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::{Descriptor, VirtqUsedElem};
use virtio_queue::{Queue, QueueT};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Activation, ActiveQueue};
use crate::interrupt::VirtioInterrupt;
use crate::memory::view::GuestView;

pub(super) const MEMORY_LEN: u64 = 1 << 20;
/// Guest-physical start of the memory that tests can use for buffers.
pub(super) const BUFFERS: u64 = 0x8_0000;
const QUEUE_SIZE: u16 = 32;
/// Time limit of each wait in milliseconds, long enough even for a slow host.
const WAIT_MS_MAX: i32 = 60_000;

/// Returns the number of requests in a workload whose instructions are counted with callgrind
/// (docs/design/benchmarks.md). An environment variable can set it.
pub(super) fn counted_requests(default: u64) -> u64 {
    std::env::var("FORESHORE_COST_REQUESTS").map_or(default, |text| text.parse().unwrap())
}

#[derive(Clone, Copy)]
pub(super) enum Buffer {
    /// Address and length of a buffer that the device reads.
    Out(u64, u32),
    /// Address and length of a buffer that the device writes.
    In(u64, u32),
}

/// Records interrupts, so that tests can wait for them.
pub(super) struct TestInterrupt {
    queues: Vec<EventFd>,
    config: EventFd,
    resets_needed: AtomicUsize,
}

impl VirtioInterrupt for TestInterrupt {
    fn signal_queue(&self, queue: u16) -> io::Result<()> {
        self.queues[usize::from(queue)].write(1)
    }
    fn signal_queue_now(&self, queue: u16) -> io::Result<()> {
        self.signal_queue(queue)
    }
    fn signal_config(&self) -> io::Result<()> {
        self.config.write(1)
    }
    fn needs_reset(&self) -> io::Result<()> {
        self.resets_needed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Ring {
    descriptors: u64,
    available: u64,
    used: u64,
}

impl Ring {
    /// Address of `used_event`, the index of the used buffer for which the driver wants an
    /// interrupt (virtio 1.3, 2.7.7).
    fn used_event(&self) -> u64 {
        self.available + 4 + 2 * u64::from(QUEUE_SIZE)
    }

    /// Address of `avail_event`, the index of the available buffer for which the device wants a
    /// notification (2.7.10).
    fn avail_event(&self) -> u64 {
        self.used + 4 + 8 * u64::from(QUEUE_SIZE)
    }
}

/// A driver with queues of 32 descriptors. Like Linux, it omits notifications that the device has
/// suppressed. A device that forgets to enable notifications therefore stalls.
pub(super) struct TestDriver {
    pub memory: GuestMemoryMmap,
    /// View of memory for the device, if it differs from `memory`.
    view: Option<GuestView>,
    interrupt: Arc<TestInterrupt>,
    kicks: Vec<EventFd>,
    rings: Vec<Ring>,
    /// Next free descriptor of each queue. After the last descriptor, the first one is reused. A
    /// test that adds so many chains has already waited for the earlier ones.
    free: Vec<u16>,
    last_used: Vec<u16>,
    /// Available index of each queue at the time of the last notification.
    notified: Vec<u16>,
    event_idx: bool,
}

impl TestDriver {
    pub(super) fn new(queues: usize) -> Self {
        let event = |flags| (0..queues).map(|_| EventFd::new(flags).unwrap()).collect();
        Self {
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_LEN as usize)])
                .unwrap(),
            view: None,
            interrupt: Arc::new(TestInterrupt {
                queues: event(EFD_NONBLOCK),
                config: EventFd::new(EFD_NONBLOCK).unwrap(),
                resets_needed: AtomicUsize::new(0),
            }),
            kicks: event(EFD_NONBLOCK),
            rings: Vec::new(),
            free: vec![0; queues],
            last_used: vec![0; queues],
            notified: vec![0; queues],
            event_idx: false,
        }
    }

    /// Creates a driver that uses the first MiB of `memory` and passes `view` to the device.
    pub(super) fn with_memory(queues: usize, memory: GuestMemoryMmap, view: GuestView) -> Self {
        Self { memory, view: Some(view), ..Self::new(queues) }
    }

    fn ring(&self, queue: usize) -> &Ring {
        &self.rings[queue]
    }

    /// Resets the rings and returns the activation that the transport would pass to the device.
    pub(super) fn activation(&mut self, features: u64) -> Activation {
        let mut queues = Vec::new();
        self.rings.clear();
        self.event_idx = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        for kick in &self.kicks {
            let start = 0x1_0000 * (self.rings.len() as u64 + 1);
            let ring = Ring { descriptors: start, available: start + 0x1000, used: start + 0x2000 };
            // Clears the flags and the index of both rings.
            [ring.available, ring.used].into_iter().for_each(|at| self.store(at, 0u32));
            [ring.used_event(), ring.avail_event()].into_iter().for_each(|at| self.store(at, 0u16));
            let mut queue = Queue::new(QUEUE_SIZE).unwrap();
            queue.try_set_desc_table_address(GuestAddress(ring.descriptors)).unwrap();
            queue.try_set_avail_ring_address(GuestAddress(ring.available)).unwrap();
            queue.try_set_used_ring_address(GuestAddress(ring.used)).unwrap();
            queue.set_event_idx(self.event_idx);
            queue.set_ready(true);
            self.rings.push(ring);
            queues.push(Some(ActiveQueue::new("test", queue, kick.try_clone().unwrap())));
        }
        self.free.fill(0);
        self.last_used.fill(0);
        self.notified.fill(0);
        let view = self.view.clone().unwrap_or_else(|| GuestView::new(self.memory.clone()));
        Activation { view, interrupt: self.interrupt.clone(), queues, features }
    }

    /// Makes a chain available without a notification. Returns the head of the chain.
    pub(super) fn add(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        if usize::from(self.free[queue]) + buffers.len() > usize::from(QUEUE_SIZE) {
            self.free[queue] = 0;
        }
        let head = self.free[queue];
        let ring = *self.ring(queue);
        for (buffer, index) in buffers.iter().zip(head..) {
            let (address, len, flags) = match *buffer {
                Buffer::Out(address, len) => (address, len, 0),
                Buffer::In(address, len) => (address, len, VRING_DESC_F_WRITE),
            };
            let last = usize::from(index - head) + 1 == buffers.len();
            let flags = if last { flags } else { flags | VRING_DESC_F_NEXT };
            let descriptor = Descriptor::new(address, len, flags as u16, index + 1);
            self.store(ring.descriptors + 16 * u64::from(index), RawDescriptor::from(descriptor));
        }
        self.free[queue] += buffers.len() as u16;
        self.add_again(queue, head);
        head
    }

    /// Writes a descriptor (address, length, flags and next) to a queue's table.
    pub(super) fn set_descriptor(
        &self,
        queue: usize,
        index: u16,
        (address, len, flags, next): (u64, u32, u32, u16),
    ) {
        self.write_descriptor(self.ring(queue).descriptors, index, (address, len, flags, next));
    }

    /// Writes a descriptor to a table at any address.
    pub(super) fn write_descriptor(
        &self,
        table: u64,
        index: u16,
        descriptor: (u64, u32, u32, u16),
    ) {
        let (address, len, flags, next) = descriptor;
        let descriptor = Descriptor::new(address, len, flags as u16, next);
        self.store(table + 16 * u64::from(index), RawDescriptor::from(descriptor));
    }

    /// Makes the chain at `head` available again, without a notification.
    pub(super) fn add_again(&self, queue: usize, head: u16) {
        let available = self.ring(queue).available;
        let next: u16 = self.load(available + 2);
        self.store(available + 4 + 2 * u64::from(next % QUEUE_SIZE), head);
        self.memory
            .store(next.wrapping_add(1), GuestAddress(available + 2), Ordering::Release)
            .unwrap();
    }

    /// Advances the available index by `chains` without adding chains and without a notification.
    pub(super) fn jump(&self, queue: usize, chains: u16) {
        let at = self.ring(queue).available + 2;
        self.store(at, self.load::<u16>(at).wrapping_add(chains));
    }

    pub(super) fn interrupt(&self) -> Arc<TestInterrupt> {
        Arc::clone(&self.interrupt)
    }

    /// Number of times that the device has set DEVICE_NEEDS_RESET.
    pub(super) fn resets_needed(&self) -> usize {
        self.interrupt.resets_needed.load(Ordering::Relaxed)
    }

    /// Notifies the device of new buffers unless the device has suppressed notifications (virtio
    /// 1.3, 2.7.10).
    ///
    /// # Panics
    /// Panics if there are no new buffers since the last notification. A second notification could
    /// hide that the device has lost the first one.
    pub(super) fn kick(&mut self, queue: usize) {
        let available: u16 = self.load(self.ring(queue).available + 2);
        let notified = std::mem::replace(&mut self.notified[queue], available);
        assert_ne!(available, notified, "queue {queue} has no new buffers");
        // The available index must be stored before the device's suppression is loaded.
        fence(Ordering::SeqCst);
        if self.is_wanted(self.ring(queue), notified, available) {
            self.kick_spuriously(queue);
        }
    }

    /// Notifies the device unconditionally. A driver may do so even without new buffers.
    pub(super) fn kick_spuriously(&self, queue: usize) {
        self.kicks[queue].write(1).unwrap();
    }

    /// Returns true if the device wants a notification of the buffers from index `old` to `new`.
    fn is_wanted(&self, ring: &Ring, old: u16, new: u16) -> bool {
        if !self.event_idx {
            return self.load::<u16>(ring.used) & VRING_USED_F_NO_NOTIFY as u16 == 0;
        }
        let event: u16 = self.load(ring.avail_event());
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Takes the next used buffer. Returns its head and length, or `None` if the device has not
    /// returned another buffer.
    pub(super) fn used(&mut self, queue: usize) -> Option<(u16, u32)> {
        let ring = *self.ring(queue);
        let next: u16 = self.memory.load(GuestAddress(ring.used + 2), Ordering::Acquire).unwrap();
        if next == self.last_used[queue] {
            return None;
        }
        let element: VirtqUsedElem =
            self.load(ring.used + 4 + 8 * u64::from(self.last_used[queue] % QUEUE_SIZE));
        self.last_used[queue] = self.last_used[queue].wrapping_add(1);
        Some((element.id() as u16, element.len()))
    }

    /// Takes a pending interrupt of a queue. Returns false if none is pending.
    pub(super) fn interrupted(&self, queue: usize) -> bool {
        self.interrupt.queues[queue].read().is_ok()
    }

    /// Waits until there is a used buffer.
    pub(super) fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        loop {
            // The device reads `used_event` after it has stored its used index. If that index has
            // already passed the event, the device sends no interrupt. The ring is therefore read
            // once more before the wait.
            self.store(self.ring(queue).used_event(), self.last_used[queue]);
            fence(Ordering::SeqCst);
            if let Some(used) = self.used(queue) {
                return used;
            }
            wait(&self.interrupt.queues[queue], &format!("queue {queue}"));
        }
    }

    /// Waits for a configuration change interrupt.
    pub(super) fn wait_config(&self) {
        wait(&self.interrupt.config, "the configuration");
    }

    /// Takes a pending configuration change interrupt. Returns false if none is pending.
    pub(super) fn config_changed(&self) -> bool {
        self.interrupt.config.read().is_ok()
    }

    fn load<T: ByteValued>(&self, address: u64) -> T {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }

    fn store<T: ByteValued>(&self, address: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(address)).unwrap();
    }

    pub(super) fn read(&self, address: u64, len: u32) -> Vec<u8> {
        let mut data = vec![0; len as usize];
        self.memory.read_slice(&mut data, GuestAddress(address)).unwrap();
        data
    }

    pub(super) fn write(&self, address: u64, data: &[u8]) {
        self.memory.write_slice(data, GuestAddress(address)).unwrap();
    }
}

fn wait(interrupt: &EventFd, of: &str) {
    let mut poll = libc::pollfd { fd: interrupt.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one valid entry.
    let ready = unsafe { libc::poll(&mut poll, 1, WAIT_MS_MAX) };
    assert_eq!(ready, 1, "no interrupt of {of} in {WAIT_MS_MAX} ms");
    interrupt.read().unwrap();
}

#[test]
#[should_panic(expected = "queue 0 has no new buffers")]
fn kick_without_new_buffers_is_refused() {
    let mut driver = TestDriver::new(1);
    driver.activation(0);
    driver.add(0, &[Buffer::Out(BUFFERS, 1)]);
    driver.kick(0);
    driver.kick(0);
}
