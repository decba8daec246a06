//! The entropy device. It has one queue and no configuration.

use std::sync::Arc;

use super::event::{QUEUE, Worker};
use super::metrics::RngMetrics;
use super::source::EntropySource;
use crate::event_loop::EventLoopHandle;
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, VirtioDevice};

/// Device type (virtio 1.3, 5).
const TYPE_ENTROPY: u16 = 4;
const QUEUE_SIZES: [u16; 1] = [64];

pub struct Rng {
    source: EntropySource,
    metrics: Arc<RngMetrics>,
    worker: WorkerSlot,
}

impl Rng {
    /// Creates a device that provides entropy from `source`.
    pub fn new(source: EntropySource, event_loop: EventLoopHandle) -> Self {
        Self { source, metrics: Arc::default(), worker: WorkerSlot::new(event_loop) }
    }

    pub fn metrics(&self) -> Arc<RngMetrics> {
        Arc::clone(&self.metrics)
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u16 {
        TYPE_ENTROPY
    }

    fn name(&self) -> &str {
        "__rng"
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        let queue = activation.take_queue(QUEUE)?;
        let source = self.source.try_clone()?;
        let worker = Worker::new(
            activation.view,
            activation.interrupt,
            queue,
            source,
            Arc::clone(&self.metrics),
        );
        self.worker.start(Box::new(worker))
    }

    fn reset(&mut self) {
        self.worker.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{self, Write};
    use std::os::fd::{AsRawFd, OwnedFd, RawFd};
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
    use foreshore_confinement::thread::ThreadKind;
    use rustix::fs::{OFlags, fcntl_setfl};
    use vm_memory::GuestAddress;

    use super::*;
    use crate::event_loop::{EventLoop, Subscriber};
    use crate::virtio::testing::{BUFFERS, Buffer, MEMORY_LEN, TestDriver};

    fn start(source: EntropySource) -> (EventLoop, Rng, TestDriver) {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let mut rng = Rng::new(source, event_loop.handle());
        let mut driver = TestDriver::new(1);
        rng.activate(driver.activation(rng.features())).unwrap();
        (event_loop, rng, driver)
    }

    #[test]
    fn chain_of_buffers_is_filled() {
        let (_loop, rng, mut driver) = start(EntropySource::Kernel);
        let head = driver.add(0, &[Buffer::In(BUFFERS, 40), Buffer::In(BUFFERS + 0x1000, 24)]);
        driver.kick(0);
        assert_eq!(driver.wait_used(0), (head, 64));
        assert_ne!(driver.read(BUFFERS, 40), [0; 40]);
        assert_ne!(driver.read(BUFFERS + 0x1000, 24), [0; 24]);
        assert_eq!(driver.read(BUFFERS + 40, 8), [0; 8]);
        assert_eq!(rng.metrics().bytes.load(Ordering::Relaxed), 64);
    }

    #[test]
    fn large_request_is_filled_partly() {
        let (_loop, _rng, mut driver) = start(EntropySource::Kernel);
        driver.add(0, &[Buffer::In(BUFFERS, 0x1_0000)]);
        driver.kick(0);
        let (_, len) = driver.wait_used(0);
        assert!(len > 0 && len <= 4096, "{len}");
    }

    #[test]
    fn readable_buffers_are_not_written() {
        let (_loop, rng, mut driver) = start(EntropySource::Kernel);
        driver.add(0, &[Buffer::Out(BUFFERS, 64)]);
        driver.add(0, &[Buffer::In(MEMORY_LEN - 8, 64)]);
        driver.add(0, &[Buffer::In(u64::MAX - 8, 64)]);
        driver.kick(0);
        for _ in 0..3 {
            assert_eq!(driver.wait_used(0).1, 0);
        }
        assert_eq!(driver.read(BUFFERS, 64), [0; 64]);
        assert_eq!(rng.metrics().bad_requests.load(Ordering::Relaxed), 3);
    }

    /// Returns an empty pipe to use as a source, and its writing end.
    fn pipe() -> (File, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        let fd = OwnedFd::from(reader);
        fcntl_setfl(&fd, OFlags::NONBLOCK).unwrap();
        (File::from(fd), writer)
    }

    /// Subscriber that adds a file descriptor to the event loop, so that adding it again fails.
    struct Blocker(RawFd);

    impl MutEventSubscriber for Blocker {
        fn init(&mut self, ops: &mut EventOps) {
            ops.add(Events::with_data_raw(self.0, 0, EventSet::empty())).unwrap();
        }
        fn process(&mut self, _: Events, _: &mut EventOps) {}
    }

    #[test]
    fn source_that_cannot_be_watched_is_replaced_by_the_kernel() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let (file, _writer) = pipe();
        let blocker: Subscriber = Box::new(Blocker(file.as_raw_fd()));
        event_loop.handle().add(blocker).unwrap();
        let mut driver = TestDriver::new(1);
        let mut activation = driver.activation(0);
        let queue = activation.take_queue(QUEUE).unwrap();
        let metrics = Arc::new(RngMetrics::default());
        let source = EntropySource::File(file);
        let worker =
            Worker::new(activation.view, activation.interrupt, queue, source, Arc::clone(&metrics));
        event_loop.handle().add(Box::new(worker)).unwrap();
        let head = driver.add(0, &[Buffer::In(BUFFERS, 64)]);
        driver.kick(0);
        assert_eq!(driver.wait_used(0), (head, 64));
        assert_eq!(metrics.source_failures.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn request_waits_for_an_empty_source() {
        let (file, mut writer) = pipe();
        let (_loop, _rng, mut driver) = start(EntropySource::File(file));
        let first = driver.add(0, &[Buffer::In(BUFFERS, 8)]);
        driver.kick(0);
        let second = driver.add(0, &[Buffer::In(BUFFERS + 8, 8)]);
        driver.kick(0);
        assert_eq!(driver.used(0), None);
        writer.write_all(b"entropy!").unwrap();
        assert_eq!(driver.wait_used(0), (first, 8));
        writer.write_all(b"more").unwrap();
        assert_eq!(driver.wait_used(0), (second, 4));
        assert_eq!(driver.read(BUFFERS, 12), b"entropy!more");
    }

    #[test]
    fn memory_can_be_unplugged_while_a_source_blocks() {
        // Reads of this source block, as with a file on a slow disk.
        let (reader, writer) = io::pipe().unwrap();
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let source = EntropySource::File(File::from(OwnedFd::from(reader)));
        let mut rng = Rng::new(source, event_loop.handle());
        // The writer is dropped before the device, so that the blocked read ends if the test fails.
        let mut writer = writer;
        let mut driver = TestDriver::new(1);
        let activation = driver.activation(rng.features());
        let view = activation.view.clone();
        rng.activate(activation).unwrap();
        let first = driver.add(0, &[Buffer::In(BUFFERS, 8)]);
        let second = driver.add(0, &[Buffer::In(BUFFERS + 8, 8)]);
        writer.write_all(b"one").unwrap();
        driver.kick(0);
        // After the first answer, the device immediately starts to read for the second request.
        let begin = Instant::now();
        let answered = std::iter::from_fn(|| Some(driver.used(0))).find(|used| {
            assert!(begin.elapsed() < Duration::from_secs(60), "no response");
            used.is_some()
        });
        assert_eq!(answered.flatten(), Some((first, 3)));
        let (unplugged, done) = mpsc::channel();
        std::thread::spawn(move || {
            drop(view.exclusive());
            unplugged.send(()).unwrap();
        });
        done.recv_timeout(Duration::from_secs(60)).expect("a guard of unused memory");
        writer.write_all(b"two").unwrap();
        assert_eq!(driver.wait_used(0), (second, 3));
    }

    #[test]
    fn source_that_ends_is_replaced_by_the_kernel() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"one").unwrap();
        io::Seek::rewind(&mut file).unwrap();
        let (_loop, rng, mut driver) = start(EntropySource::File(file));
        driver.add(0, &[Buffer::In(BUFFERS, 64)]);
        driver.add(0, &[Buffer::In(BUFFERS + 64, 64)]);
        driver.kick(0);
        assert_eq!(driver.wait_used(0).1, 3);
        assert_eq!(driver.wait_used(0).1, 64);
        assert_eq!(rng.metrics().source_failures.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn reset_device_is_inactive_until_its_next_activation() {
        let (_loop, mut rng, mut driver) = start(EntropySource::Kernel);
        rng.reset();
        driver.add(0, &[Buffer::In(BUFFERS, 64)]);
        driver.kick(0);
        assert_eq!(driver.used(0), None);
        rng.reset();
        rng.activate(driver.activation(rng.features())).unwrap();
        // The device serves a request that was added before the activation, without a notification.
        rng.reset();
        let activation = driver.activation(rng.features());
        driver.add(0, &[Buffer::In(BUFFERS, 64)]);
        rng.activate(activation).unwrap();
        assert_eq!(driver.wait_used(0).1, 64);
    }

    #[test]
    fn unwritable_used_ring_loses_one_request() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let mut rng = Rng::new(EntropySource::Kernel, event_loop.handle());
        let mut driver = TestDriver::new(1);
        let mut activation = driver.activation(rng.features());
        let queue = &mut activation.queues[0].as_mut().unwrap().queue;
        queue.try_set_used_ring_address(GuestAddress(MEMORY_LEN)).unwrap();
        for _ in 0..3 {
            driver.add(0, &[Buffer::In(BUFFERS, 64)]);
        }
        rng.activate(activation).unwrap();
        assert_eq!(rng.metrics().bytes.load(Ordering::Relaxed), 64);
        assert!(!driver.interrupted(0));
    }

    #[test]
    fn activation_without_its_queue_fails() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let mut rng = Rng::new(EntropySource::Kernel, event_loop.handle());
        let mut activation = TestDriver::new(1).activation(rng.features());
        activation.queues[0] = None;
        assert!(matches!(rng.activate(activation), Err(ActivateError::QueueMissing { index: 0 })));
    }
}
