//! A virtio device whose comings and goings are events: `activated` when its driver is ready,
//! `reset` when that lets it go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::event_loop::EventLoopHandle;
use crate::events::{Event, Events};
use crate::virtio::{ActivateError, Activation, VirtioDevice};

/// Where the devices of a machine tell. Silent once the machine ends: what it resets then, no
/// driver has let go.
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
        Box::new(Told { id: id.to_owned(), teller: self.clone(), device })
    }

    fn tell(&self, event: Event<'_>) {
        if !self.is_silent.load(Ordering::Relaxed) {
            self.events.tell_of_guest(event);
        }
    }
}

struct Told {
    id: String,
    teller: Teller,
    device: Box<dyn VirtioDevice>,
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
        self.teller.tell(Event::DeviceActivated { id: &self.id });
        Ok(())
    }

    fn reset(&mut self) {
        self.device.reset();
        self.teller.tell(Event::DeviceReset { id: &self.id });
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
    fn what_a_driver_does_is_told_and_the_end_of_the_machine_is_not() {
        let events = Events::start();
        let counters = events.counters();
        let told = || {
            let count = |name| counters.told().get(&("virtio-device", name)).copied().unwrap_or(0);
            (count("activated"), count("reset"))
        };
        let event_loop = EventLoop::spawn("test").unwrap();
        let teller = Teller::new(events);
        let mut device =
            teller.wrap("rng", Box::new(Rng::new(EntropySource::Kernel, event_loop.handle())));
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
