//! The virtio-pmem device and the threads that answer flushes.
//!
//! **With a BTT** in the guest, a flush is completed before the vCPU enters the guest again. The
//! guest's BTT flushes under a spinlock, so its driver must not sleep while it waits for the
//! answer. The answer must therefore be ready when the instruction that notifies the device
//! retires:
//! 1. The flush queue has no ioeventfd, so the notification causes a vCPU exit.
//! 2. During this exit, the backing is made durable and the used ring is written.
//! 3. The interrupt is sent as a message (KVM_SIGNAL_MSI), not by irqfd, which KVM may defer.
//! 4. The vCPU enters the guest. The interrupt arrives when the driver releases its queue lock, and
//!    the thread that requested the flush finds its request completed.
//!
//! With one vCPU this suffices. With more, the interrupt may be directed at another vCPU, which
//! cannot take the queue lock while the first vCPU holds it. A VMM cannot close that window, so a
//! BTT in the guest is refused with several vCPUs (see `volume::interface`).
//!
//! **A raw range** is flushed by file systems and programs, which may sleep. The device has its own
//! thread for flushes, so that a slow disk delays only the flushing program and not a vCPU.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use foreshore_confinement::thread::ThreadKind;
use tracing::debug;
use virtio_queue::QueueT;
use vm_memory::GuestAddressSpace;

use super::event::Worker;
use super::metrics::PmemMetrics;
use super::request::{Answer, Kind, Request, RequestError};
use crate::event_loop::{EventLoop, EventLoopError, EventLoopHandle};
use crate::interrupt::VirtioInterrupt;
use crate::log::rate_limited;
use crate::memory::view::MappedMemory;
use crate::persist::Persist;
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, read_config_bytes};

/// Device type (virtio 1.3, 5).
const TYPE_PMEM: u16 = 27;
pub(super) const FLUSH_QUEUE: u16 = 0;
const QUEUE_SIZES: [u16; 1] = [64];

pub struct Pmem {
    /// `struct virtio_pmem_config` (5.19.4): start and size, 64 bits each.
    config: [u8; 16],
    flusher: Arc<Flusher>,
    answers: Answers,
}

enum Answers {
    /// Requests are answered in the exit of the vCPU that flushes. Contains the activation while
    /// the device is active.
    InExit(Option<Activation>),
    OnThread {
        worker: WorkerSlot,
        /// Dropped after `worker`, which runs on this thread.
        thread: EventLoop,
    },
}

/// Executes and answers flushes on any thread.
pub(super) struct Flusher {
    name: String,
    backing: Arc<dyn Persist>,
    metrics: Arc<PmemMetrics>,
}

impl Pmem {
    /// Creates a device for a guest that uses a BTT. The range has `len_bytes` and begins at the
    /// guest-physical address `start`. `backing` makes it durable.
    pub fn new(name: String, start: u64, len_bytes: u64, backing: Arc<dyn Persist>) -> Self {
        Self::answered(name, start, len_bytes, backing, Answers::InExit(None))
    }

    /// Creates a device for a guest in which flushes may sleep.
    pub fn raw(
        name: String,
        start: u64,
        len_bytes: u64,
        backing: Arc<dyn Persist>,
    ) -> Result<Self, EventLoopError> {
        let thread = EventLoop::spawn(ThreadKind::Queue, "_pmem")?;
        let answers = Answers::OnThread { worker: WorkerSlot::new(thread.handle()), thread };
        Ok(Self::answered(name, start, len_bytes, backing, answers))
    }

    fn answered(
        name: String,
        start: u64,
        len_bytes: u64,
        backing: Arc<dyn Persist>,
        answers: Answers,
    ) -> Self {
        let mut config = [0; 16];
        config[..8].copy_from_slice(&start.to_le_bytes());
        config[8..].copy_from_slice(&len_bytes.to_le_bytes());
        let flusher = Arc::new(Flusher { name, backing, metrics: Arc::default() });
        Self { config, flusher, answers }
    }

    pub fn metrics(&self) -> Arc<PmemMetrics> {
        Arc::clone(&self.flusher.metrics)
    }
}

impl Flusher {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Makes the range durable. The result applies to all flushes that were taken from the queue
    /// before this call.
    fn persist(&self) -> Answer {
        let begin = Instant::now();
        let result = self.backing.persist();
        self.metrics.persists.observe(begin.elapsed());
        match result {
            Ok(()) => Answer::Durable,
            Err(err) => {
                rate_limited!(error, device = self.name, error = %err, "Flush failed; the guest receives an I/O error");
                Answer::Failed
            }
        }
    }

    /// Answers the flushes in the queue. Returns true if the guest wants an interrupt.
    ///
    /// One pass suffices, because notifications are never disabled and the driver therefore
    /// notifies the device of later flushes. No guard of guest memory is held while the backing is
    /// made durable, because it may take long, and a plug waits for all guards and blocks new ones.
    pub(super) fn serve(&self, active: &mut Activation) -> bool {
        let Activation { queues, view, interrupt, .. } = active;
        let Some(Some(active)) = queues.get_mut(usize::from(FLUSH_QUEUE)) else { return false };
        // 1. Take the available flushes, at most as many as the ring has entries. Later flushes are
        //    not taken, because they may cover stores that are made after the persist has begun.
        //    They have their own notification.
        let requests = self.take(active, &view.memory(), &**interrupt);
        if requests.is_empty() {
            return false;
        }
        // 2. Make the range durable once for all of these flushes.
        let wanted = requests
            .iter()
            .any(|(_, request)| matches!(request, Ok(Request { kind: Kind::Flush, .. })));
        let answer = if wanted { self.persist() } else { Answer::Failed };
        // 3. Write the answers, and then publish them in the used ring.
        let guard = view.memory();
        let memory: &MappedMemory = &guard;
        let queue = &mut active.queue;
        for (head, request) in requests {
            let written = self.answer(memory, request, answer);
            if let Err(err) = queue.add_used(memory, head, written) {
                debug!(device = self.name, %err, "Cannot write the used ring");
            }
        }
        queue.needs_notification(memory).unwrap_or(true)
    }

    fn take(
        &self,
        active: &mut ActiveQueue,
        memory: &MappedMemory,
        interrupt: &dyn VirtioInterrupt,
    ) -> Vec<(u16, Result<Request, RequestError>)> {
        let mut requests = Vec::new();
        while requests.len() < usize::from(active.queue.size())
            && let Some(mut chain) = active.pop(memory, interrupt)
        {
            requests.push((chain.head_index(), Request::parse(memory, &mut chain)));
        }
        requests
    }

    fn answer(
        &self,
        memory: &MappedMemory,
        request: Result<Request, RequestError>,
        flushed: Answer,
    ) -> u32 {
        let result = request.and_then(|request| {
            let (answer, counter) = match (request.kind, flushed) {
                (Kind::Flush, Answer::Durable) => (Answer::Durable, &self.metrics.flushes),
                (Kind::Flush, Answer::Failed) => (Answer::Failed, &self.metrics.flush_failures),
                (Kind::Unknown(_), _) => (Answer::Failed, &self.metrics.bad_requests),
            };
            counter.fetch_add(1, Ordering::Relaxed);
            request.answer(memory, answer)
        });
        result.unwrap_or_else(|err| {
            self.metrics.bad_requests.fetch_add(1, Ordering::Relaxed);
            debug!(device = self.name, %err, "Bad request");
            0
        })
    }
}

impl VirtioDevice for Pmem {
    fn device_type(&self) -> u16 {
        TYPE_PMEM
    }

    fn name(&self) -> &str {
        self.flusher.name()
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        if !matches!(activation.queues.first(), Some(Some(_))) {
            return Err(ActivateError::QueueMissing { index: FLUSH_QUEUE });
        }
        match &mut self.answers {
            Answers::InExit(active) => {
                *active = Some(activation);
                Ok(())
            }
            Answers::OnThread { worker, .. } => {
                worker.start(Box::new(Worker::new(Arc::clone(&self.flusher), activation)))
            }
        }
    }

    fn reset(&mut self) {
        match &mut self.answers {
            Answers::InExit(active) => *active = None,
            Answers::OnThread { worker, .. } => {
                worker.stop();
            }
        }
    }

    fn loops(&self) -> Vec<EventLoopHandle> {
        match &self.answers {
            Answers::InExit(_) => Vec::new(),
            Answers::OnThread { thread, .. } => vec![thread.handle()],
        }
    }

    fn synchronous_queues(&self) -> &[u16] {
        match self.answers {
            Answers::InExit(_) => &[FLUSH_QUEUE],
            Answers::OnThread { .. } => &[],
        }
    }

    fn has_mapped_registers(&self) -> bool {
        // With a BTT, the driver waits for each flush, and reads the device status before it.
        matches!(self.answers, Answers::InExit(_))
    }

    fn notify_synchronous(&mut self, _queue: u16) {
        let Answers::InExit(Some(active)) = &mut self.answers else { return };
        if self.flusher.serve(active)
            && let Err(err) = active.interrupt.signal_queue_now(FLUSH_QUEUE)
        {
            rate_limited!(error, device = self.flusher.name, %err, "Cannot interrupt the driver");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, AtomicU32};

    use parking_lot::Mutex;

    use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::interrupt::VirtioInterrupt;
    use crate::memory::view::GuestView;
    use crate::persist::PersistError;

    const REQUEST: u64 = 0x8000;
    const RESPONSE: u64 = 0x9000;

    #[derive(Default)]
    struct Backing {
        persists: AtomicU32,
        fails: AtomicBool,
        /// View that is locked exclusively during a persist, as a plug would do.
        view: Mutex<Option<GuestView>>,
    }

    impl Persist for Backing {
        fn persist(&self) -> Result<(), PersistError> {
            self.persists.fetch_add(1, Ordering::Relaxed);
            if let Some(view) = &*self.view.lock() {
                drop(view.exclusive());
            }
            match self.fails.load(Ordering::Relaxed) {
                true => Err(PersistError::Backing(io::Error::from_raw_os_error(libc::EIO).into())),
                false => Ok(()),
            }
        }
    }

    #[derive(Default)]
    struct Line {
        now: AtomicU32,
    }

    impl VirtioInterrupt for Line {
        fn signal_queue(&self, _: u16) -> io::Result<()> {
            panic!("an irqfd may be deferred");
        }
        fn signal_queue_now(&self, _: u16) -> io::Result<()> {
            self.now.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        fn signal_config(&self) -> io::Result<()> {
            panic!("the configuration never changes");
        }
    }

    struct Fixture {
        memory: GuestMemoryMmap,
        device: Pmem,
        backing: Arc<Backing>,
        line: Arc<Line>,
    }

    fn flush(index: u64) -> [(u64, u32, u32); 2] {
        let next = VRING_DESC_F_NEXT;
        [(REQUEST + 8 * index, 4, next), (RESPONSE + 8 * index, 4, VRING_DESC_F_WRITE)]
    }

    /// Creates a device whose queue contains `chains`, with (address, length, flags) for each
    /// descriptor.
    fn fixture(chains: &[&[(u64, u32, u32)]]) -> Fixture {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        memory.write_slice(&[0xaa; 64], GuestAddress(RESPONSE)).unwrap();
        let ring = MockSplitQueue::new(&memory, 64);
        let mut descriptors = Vec::new();
        for chain in chains {
            for (i, &(address, len, flags)) in chain.iter().enumerate() {
                let flags = if i + 1 < chain.len() {
                    flags | VRING_DESC_F_NEXT
                } else {
                    flags & !VRING_DESC_F_NEXT
                };
                let next = descriptors.len() as u16 + 1;
                descriptors.push(RawDescriptor::from(Descriptor::new(
                    address,
                    len,
                    flags as u16,
                    next,
                )));
            }
        }
        if !descriptors.is_empty() {
            ring.build_multiple_desc_chains(&descriptors).unwrap();
        }
        let queue: virtio_queue::Queue = ring.create_queue().unwrap();
        let (backing, line) = (Arc::new(Backing::default()), Arc::new(Line::default()));
        let mut device = Pmem::new("test".to_owned(), 1 << 32, 1 << 30, backing.clone());
        device
            .activate(Activation {
                view: GuestView::new(memory.clone()),
                interrupt: line.clone(),
                queues: vec![Some(ActiveQueue::new("pmem", queue, EventFd::new(0).unwrap()))],
                features: device.features(),
            })
            .unwrap();
        Fixture { memory, device, backing, line }
    }

    fn response(fixture: &Fixture, index: u64) -> u32 {
        fixture.memory.read_obj(GuestAddress(RESPONSE + 8 * index)).unwrap()
    }

    #[test]
    fn waiting_flushes_share_one_persist_and_one_interrupt() {
        let mut f = fixture(&[&flush(0), &flush(1), &flush(2)]);
        f.device.notify_synchronous(0);
        assert_eq!([response(&f, 0), response(&f, 1), response(&f, 2)], [0; 3]);
        assert_eq!(f.backing.persists.load(Ordering::Relaxed), 1);
        assert_eq!(f.line.now.load(Ordering::Relaxed), 1);
        assert_eq!(f.device.metrics().flushes.load(Ordering::Relaxed), 3);
        // Without a new request, the device does nothing and sends no interrupt.
        f.device.notify_synchronous(0);
        assert_eq!(f.line.now.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn memory_can_be_plugged_during_a_flush() {
        let mut f = fixture(&[&flush(0)]);
        let Answers::InExit(Some(active)) = &f.device.answers else { panic!("not active") };
        *f.backing.view.lock() = Some(active.view.clone());
        // The test deadlocks if the device holds a guard of guest memory during the persist.
        f.device.notify_synchronous(0);
        assert_eq!(response(&f, 0), 0);
    }

    #[test]
    fn failed_persist_is_an_error_in_the_guest() {
        let mut f = fixture(&[&flush(0)]);
        f.backing.fails.store(true, Ordering::Relaxed);
        f.device.notify_synchronous(0);
        assert_eq!(response(&f, 0), u32::MAX);
        assert_eq!(f.device.metrics().flush_failures.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn unknown_type_fails_without_a_persist() {
        let mut f = fixture(&[&flush(0)]);
        f.memory.write_obj(7u32, GuestAddress(REQUEST)).unwrap();
        f.device.notify_synchronous(0);
        assert_eq!(response(&f, 0), u32::MAX);
        assert_eq!(f.backing.persists.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn invalid_chains_are_returned_and_counted() {
        let write = VRING_DESC_F_WRITE;
        let mut f = fixture(&[
            &[(REQUEST, 4, 0)],
            &[(REQUEST, 4, write), (RESPONSE, 4, write)],
            &[(REQUEST, 4, 0), (RESPONSE, 4, 0)],
            &[(REQUEST, 3, 0), (RESPONSE, 4, write)],
            &[(REQUEST, 4, 0), (RESPONSE, 3, write)],
            &[(1 << 40, 4, 0), (RESPONSE, 4, write)],
            &[(REQUEST, 4, 0), (1 << 40, 4, write)],
            &flush(1),
        ]);
        f.device.notify_synchronous(0);
        assert_eq!(f.device.metrics().bad_requests.load(Ordering::Relaxed), 7);
        assert_eq!(response(&f, 1), 0);
    }

    #[test]
    fn constant_configuration_contains_the_range() {
        let f = fixture(&[]);
        assert!(f.device.has_mapped_registers(), "each flush would need another exit");
        let mut data = [0; 20];
        f.device.read_config(0, &mut data);
        assert_eq!(data[..8], (1u64 << 32).to_le_bytes());
        assert_eq!(data[8..16], (1u64 << 30).to_le_bytes());
        assert_eq!(data[16..], [0; 4]);
    }

    #[test]
    fn notification_after_a_reset_has_no_effect() {
        let mut f = fixture(&[&flush(0)]);
        f.device.reset();
        f.device.notify_synchronous(0);
        assert_eq!(f.backing.persists.load(Ordering::Relaxed), 0);
    }
}
