//! The watchdog device. It has one queue and no configuration.

use std::sync::Arc;

use super::event::{QUEUE, Worker};
use super::metrics::WatchdogMetrics;
use crate::event_loop::EventLoopHandle;
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, VirtioDevice};

/// Device type (virtio 1.3, 5: "watchdog").
const TYPE_WATCHDOG: u16 = 35;
const QUEUE_SIZES: [u16; 1] = [8];

/// Callback for a guest that has stopped pinging.
pub(super) type OnTimeout = Arc<dyn Fn() + Send + Sync>;

pub struct Watchdog {
    on_timeout: OnTimeout,
    metrics: Arc<WatchdogMetrics>,
    worker: WorkerSlot,
}

impl Watchdog {
    /// Creates a watchdog that calls `on_timeout` when the guest has stopped pinging. The callback
    /// is called again only if the guest has pinged in the meantime.
    pub fn new(on_timeout: OnTimeout, event_loop: EventLoopHandle) -> Self {
        Self { on_timeout, metrics: Arc::default(), worker: WorkerSlot::new(event_loop) }
    }

    pub fn metrics(&self) -> Arc<WatchdogMetrics> {
        Arc::clone(&self.metrics)
    }
}

impl VirtioDevice for Watchdog {
    fn device_type(&self) -> u16 {
        TYPE_WATCHDOG
    }

    fn name(&self) -> &str {
        "__watchdog"
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        let queue = activation.take_queue(QUEUE)?;
        let (view, interrupt) = (activation.view, activation.interrupt);
        let (metrics, on_timeout) = (Arc::clone(&self.metrics), Arc::clone(&self.on_timeout));
        self.worker.start(Box::new(Worker::new(view, interrupt, queue, metrics, on_timeout)?))
    }

    /// Ends the countdown, because a driver that was unloaded cannot ping.
    fn reset(&mut self) {
        self.worker.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use foreshore_confinement::thread::ThreadKind;

    use super::*;
    use crate::event_loop::EventLoop;
    use crate::virtio::testing::{BUFFERS, Buffer, MEMORY_LEN, TestDriver};

    struct Rig {
        _event_loop: EventLoop,
        watchdog: Watchdog,
        driver: TestDriver,
    }

    impl Rig {
        fn new() -> Self {
            let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
            let mut watchdog = Watchdog::new(Arc::new(|| {}), event_loop.handle());
            let mut driver = TestDriver::new(1);
            watchdog.activate(driver.activation(watchdog.features())).unwrap();
            Self { _event_loop: event_loop, watchdog, driver }
        }

        fn ping(&mut self, buffer: Buffer) -> (u16, u32) {
            self.driver.add(0, &[buffer]);
            self.driver.kick(0);
            self.driver.wait_used(0)
        }

        fn counted(&self) -> (u64, u64) {
            let metrics = self.watchdog.metrics();
            (metrics.pings.load(Ordering::Relaxed), metrics.bad_requests.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn each_ping_is_answered_with_a_one() {
        let mut rig = Rig::new();
        for _ in 0..3 {
            rig.driver.write(BUFFERS, &[0, 7]);
            assert_eq!(rig.ping(Buffer::In(BUFFERS, 1)).1, 1);
            assert_eq!(rig.driver.read(BUFFERS, 2), [1, 7]);
        }
        assert_eq!(rig.counted(), (3, 0));
        rig.watchdog.reset();
        let activation = rig.driver.activation(rig.watchdog.features());
        rig.watchdog.activate(activation).unwrap();
        assert_eq!(rig.ping(Buffer::In(BUFFERS, 1)).1, 1);
    }

    #[test]
    fn request_without_a_writable_byte_is_not_a_ping() {
        let mut rig = Rig::new();
        assert_eq!(rig.ping(Buffer::Out(BUFFERS, 1)).1, 0);
        assert_eq!(rig.ping(Buffer::In(MEMORY_LEN, 1)).1, 0);
        assert_eq!(rig.counted(), (0, 2));
    }

    #[test]
    fn activation_without_its_queue_fails() {
        let event_loop = EventLoop::spawn(ThreadKind::Device, "test").unwrap();
        let mut watchdog = Watchdog::new(Arc::new(|| {}), event_loop.handle());
        // The id is the same as in Cloud Hypervisor. The prefix marks a permanent device.
        assert_eq!(watchdog.name(), "__watchdog");
        let mut activation = TestDriver::new(1).activation(watchdog.features());
        activation.queues[0] = None;
        let error = watchdog.activate(activation).unwrap_err();
        assert!(matches!(error, ActivateError::QueueMissing { index: 0 }));
    }
}
