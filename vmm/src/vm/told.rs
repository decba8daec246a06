//! A virtio device whose comings and goings are events: `activated` when its driver is ready, `reset` when that lets it go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::event_loop::EventLoopHandle;
use crate::events::{Event, Events};
use crate::virtio::{ActivateError, Activation, VirtioDevice};

/// What is told of one device at once. A driver that is loaded and unloaded is two.
const MOST_AT_ONCE: u32 = 16;
/// Until one more is told. A guest may reset its devices as often as it likes, and what is told may end up in a file.
const INTERVAL: Duration = Duration::from_secs(10);

/// How much may be told.
#[derive(Debug)]
struct Allowance {
    left: u32,
    /// Until when the intervals that have passed were counted.
    counted: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { left: MOST_AT_ONCE, counted: now }
    }

    /// Whether one more may be told.
    fn take(&mut self, now: Instant) -> bool {
        while self.left < MOST_AT_ONCE && now.duration_since(self.counted) >= INTERVAL {
            self.left += 1;
            self.counted += INTERVAL;
        }
        if self.left == MOST_AT_ONCE {
            self.counted = now;
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

/// Where the devices of a machine tell. Silent once the machine ends: what it resets then, no driver has let go.
#[derive(Clone)]
pub(super) struct Teller {
    events: Events,
    is_silent: Arc<AtomicBool>,
}

impl Teller {
    pub(super) fn new(events: Events) -> Self {
        Self { events, is_silent: Arc::default() }
    }

    pub(super) fn fall_silent(&self) {
        self.is_silent.store(true, Ordering::Relaxed);
    }

    /// `device`, called `id`, which tells.
    pub(super) fn wrap(&self, id: &str, device: Box<dyn VirtioDevice>) -> Box<dyn VirtioDevice> {
        let allowance = Allowance::new(Instant::now());
        Box::new(Told { id: id.to_owned(), teller: self.clone(), allowance, device })
    }

    fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Relaxed)
    }
}

struct Told {
    id: String,
    teller: Teller,
    allowance: Allowance,
    device: Box<dyn VirtioDevice>,
}

impl Told {
    fn may_tell(&mut self) -> bool {
        !self.teller.is_silent() && self.allowance.take(Instant::now())
    }
}

impl VirtioDevice for Told {
    fn device_type(&self) -> u16 {
        self.device.device_type()
    }

    fn name(&self) -> &str {
        self.device.name()
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn accepts_features(&self, features: u64) -> bool {
        self.device.accepts_features(features)
    }

    fn queue_sizes(&self) -> &[u16] {
        self.device.queue_sizes()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.device.read_config(offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.device.write_config(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.device.activate(activation)?;
        if self.may_tell() {
            self.teller.events.tell(Event::DeviceActivated { id: &self.id });
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.device.reset();
        if self.may_tell() {
            self.teller.events.tell(Event::DeviceReset { id: &self.id });
        }
    }

    fn loops(&self) -> Vec<EventLoopHandle> {
        self.device.loops()
    }

    fn synchronous_queues(&self) -> &[u16] {
        self.device.synchronous_queues()
    }

    fn notify_synchronous(&mut self, queue: u16) {
        self.device.notify_synchronous(queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event_loop::EventLoop;
    use crate::virtio::rng::{EntropySource, Rng};
    use crate::virtio::testing::TestDriver;

    #[test]
    fn a_guest_that_goes_on_and_on_is_told_of_ever_less() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        let mut told = |at| (0..1000).filter(|_| allowance.take(at)).count() as u32;
        assert_eq!(told(start), MOST_AT_ONCE);
        assert_eq!(told(start + INTERVAL / 2), 0);
        assert_eq!(told(start + INTERVAL), 1);
        assert_eq!(told(start + 3 * INTERVAL), 2);
        assert_eq!(told(start + 1000 * INTERVAL), MOST_AT_ONCE);
        assert_eq!(told(start + 1000 * INTERVAL), 0);
    }

    #[test]
    fn what_a_driver_does_is_told_and_the_end_of_the_machine_is_not() {
        let events = Events::start();
        let counters = events.counters();
        let told = || {
            let count = |name| counters.told().get(&("virtio-device", name)).copied().unwrap_or(0);
            (count("activated"), count("reset"))
        };
        let event_loop = EventLoop::spawn("test").unwrap();
        let teller = Teller::new(events);
        let mut device = teller.wrap("rng", Box::new(Rng::new(EntropySource::Kernel, event_loop.handle())));
        let mut driver = TestDriver::new(1);
        let mut activation = driver.activation(0);
        activation.queues[0] = None;
        device.activate(activation).unwrap_err();
        assert_eq!(told(), (0, 0), "it could not be");
        device.activate(driver.activation(0)).unwrap();
        device.reset();
        assert_eq!(told(), (1, 1));
        device.activate(driver.activation(0)).unwrap();
        teller.fall_silent();
        device.reset();
        assert_eq!(told(), (2, 1));
    }
}
