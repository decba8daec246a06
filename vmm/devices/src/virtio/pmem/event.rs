//! The worker of a raw device. The worker answers flushes on the device's own thread.

use std::sync::Arc;

use event_manager::{EventOps, Events, MutEventSubscriber};

use super::device::{FLUSH_QUEUE, Flusher};
use crate::log::rate_limited;
use crate::virtio::Activation;

const KICK: u32 = 0;

pub(super) struct Worker {
    flusher: Arc<Flusher>,
    /// Activation of the device. The activation must contain the flush queue.
    active: Activation,
}

impl Worker {
    pub(super) fn new(flusher: Arc<Flusher>, active: Activation) -> Self {
        Self { flusher, active }
    }

    /// Answers at most as many flushes as the ring has entries. Later flushes have their own
    /// notification.
    fn serve(&mut self) {
        if self.flusher.serve(&mut self.active)
            && let Err(err) = self.active.interrupt.signal_queue(FLUSH_QUEUE)
        {
            rate_limited!(error, device = self.flusher.name(), %err, "Cannot interrupt the driver");
        }
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        for queue in self.active.queues.iter().flatten() {
            queue.watch(KICK, ops);
        }
        self.serve();
    }

    fn process(&mut self, _: Events, _: &mut EventOps) {
        // The notification is cleared before the queue is read. If a later flush arrives, its
        // notification therefore remains pending.
        for queue in self.active.queues.iter().flatten() {
            queue.clear_kick();
        }
        self.serve();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    use parking_lot::Mutex;

    use crate::memory::view::GuestView;
    use crate::persist::{Persist, PersistError};
    use crate::virtio::VirtioDevice;
    use crate::virtio::pmem::device::Pmem;
    use crate::virtio::testing::{BUFFERS, Buffer, TestDriver};

    use super::*;

    const RESPONSE: u64 = BUFFERS + 0x1000;

    /// Backing that reports when a persist begins, and ends it when the test sends the result.
    struct Backing {
        begun: Mutex<Sender<()>>,
        end: Mutex<Receiver<Result<(), PersistError>>>,
        ended: AtomicU32,
    }

    impl Persist for Backing {
        fn persist(&self) -> Result<(), PersistError> {
            self.begun.lock().send(()).unwrap();
            let result = self.end.lock().recv().unwrap();
            self.ended.fetch_add(1, Ordering::Relaxed);
            result
        }
    }

    struct Fixture {
        device: Pmem,
        driver: TestDriver,
        view: GuestView,
        backing: Arc<Backing>,
        begun: Receiver<()>,
        end: Sender<Result<(), PersistError>>,
    }

    fn fixture() -> Fixture {
        let ((begun_sender, begun), (end, end_receiver)) = (channel(), channel());
        let backing = Arc::new(Backing {
            begun: Mutex::new(begun_sender),
            end: Mutex::new(end_receiver),
            ended: AtomicU32::new(0),
        });
        let mut device = Pmem::raw("test".to_owned(), 1 << 32, 1 << 30, backing.clone()).unwrap();
        let mut driver = TestDriver::new(1);
        let activation = driver.activation(device.features());
        let view = activation.view.clone();
        device.activate(activation).unwrap();
        Fixture { device, driver, view, backing, begun, end }
    }

    /// Sends a flush request.
    fn flush(f: &mut Fixture, nth: u64) -> u16 {
        f.driver.write(RESPONSE + 8 * nth, &[0xaa; 4]);
        let head = f.driver.add(0, &[Buffer::Out(BUFFERS, 4), Buffer::In(RESPONSE + 8 * nth, 4)]);
        f.driver.kick(0);
        head
    }

    #[test]
    fn slow_flush_delays_neither_vcpus_nor_plugs() {
        let mut f = fixture();
        assert!(f.device.synchronous_queues().is_empty(), "a vCPU could block in a notification");
        assert!(!f.device.has_mapped_registers());
        let first = flush(&mut f, 0);
        f.begun.recv().unwrap();
        // Memory can be plugged during the flush, because the device holds no guard of guest
        // memory.
        drop(f.view.exclusive());
        // A later flush may cover later stores, so it needs its own persist.
        let second = flush(&mut f, 1);
        assert_eq!(f.driver.used(0), None);
        f.end.send(Ok(())).unwrap();
        assert_eq!(f.driver.wait_used(0), (first, 4));
        f.begun.recv().unwrap();
        f.end.send(Err(PersistError::ReadOnly)).unwrap();
        assert_eq!(f.driver.wait_used(0), (second, 4));
        assert_eq!(f.driver.read(RESPONSE, 4), [0; 4]);
        assert_eq!(f.driver.read(RESPONSE + 8, 4), [0xff; 4]);
        let metrics = f.device.metrics();
        assert_eq!(metrics.flushes.load(Ordering::Relaxed), 1);
        assert_eq!(metrics.flush_failures.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn reset_waits_for_the_flush_in_progress() {
        let mut f = fixture();
        flush(&mut f, 0);
        f.begun.recv().unwrap();
        let end = f.end.clone();
        let disk = thread::spawn(move || end.send(Ok(())).unwrap());
        f.device.reset();
        assert_eq!(
            f.backing.ended.load(Ordering::Relaxed),
            1,
            "the ring could be written after the reset"
        );
        disk.join().unwrap();
        // After the reset, the worker has stopped, and the device can be activated again.
        flush(&mut f, 1);
        assert!(f.begun.try_recv().is_err());
        let activation = f.driver.activation(f.device.features());
        f.device.activate(activation).unwrap();
    }
}
