//! The virtio-mem device: its configuration, activation and reset.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(test)]
use std::time::{Duration, Instant};

use balloon::UNSUPPORTED_DRIVER;
use parking_lot::Mutex;
use tracing::warn;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_MEM;
use vmm_sys_util::timerfd::TimerFd;

use super::budget::PlugBudget;
use super::event::Worker;
use super::handle::{MemEvent, MemHandle, MemObserver, Shared};
use super::plug::Executor;
#[cfg(test)]
use super::request::{Request, Response};
use super::state::MemState;
use crate::event_loop::EventLoopHandle;
use crate::memory::view::GuestView;
use crate::memory::zone::device_id;
use crate::memory::{BLOCK_BYTES, HotplugPart};
use crate::virtio::worker::WorkerSlot;
use crate::virtio::{ActivateError, Activation, VirtioDevice, read_config_bytes};

/// `node_id` is valid (virtio 1.3, 5.15.3).
const F_ACPI_PXM: u64 = 1 << 0;
/// Feature with which the driver must neither read nor write unplugged memory.
const F_UNPLUGGED_INACCESSIBLE: u64 = 1 << 1;

/// Size of the request queue. Linux's driver sends one request at a time, but other drivers may
/// send more.
const QUEUE_SIZES: [u16; 1] = [64];

pub struct MemDevice {
    name: String,
    shared: Arc<Shared>,
    executor: Arc<Mutex<Executor>>,
    worker: WorkerSlot,
    /// Set after a refused driver was logged. The refusal is logged only once, because a guest can
    /// negotiate any number of times.
    is_refusal_logged: AtomicBool,
}

impl MemDevice {
    /// Creates the device for `part`. Its worker runs on `event_loop`, which must serve only
    /// virtio-mem devices: the worker blocks until all other devices have dropped their guards of
    /// guest memory.
    ///
    /// # Panics
    /// Panics if the zone's node number does not fit in 16 bits. The validation of the
    /// configuration prevents this.
    pub fn new(
        part: HotplugPart,
        view: GuestView,
        event_loop: EventLoopHandle,
        observer: MemObserver,
        budget: Arc<Mutex<PlugBudget>>,
    ) -> (Self, MemHandle) {
        let HotplugPart { spec, range, linux_block_bytes, backing, slots } = part;
        let node_id = u16::try_from(spec.guest_node).expect("a validated node");
        let name = device_id(&spec.id);
        let shared = Arc::new(Shared {
            state: Mutex::new(MemState::new(
                range.start,
                range.len,
                spec.hotplug_bytes,
                BLOCK_BYTES,
                linux_block_bytes,
                node_id,
            )),
            zone: spec,
            interrupt: Mutex::default(),
            metrics: Arc::default(),
            observer,
        });
        let executor =
            Arc::new(Mutex::new(Executor::new(backing, slots, view, budget, Arc::clone(&shared))));
        let handle = MemHandle { shared: Arc::clone(&shared) };
        let worker = WorkerSlot::new(event_loop);
        (Self { name, shared, executor, worker, is_refusal_logged: AtomicBool::new(false) }, handle)
    }
}

impl VirtioDevice for MemDevice {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_MEM as u16
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | F_ACPI_PXM | F_UNPLUGGED_INACCESSIBLE
    }

    fn accepts_features(&self, features: u64) -> bool {
        // Unplugged memory is PROT_NONE. A driver without the feature may read it, and the fault
        // would terminate the VM.
        if features & F_UNPLUGGED_INACCESSIBLE == 0 {
            self.refuse_driver();
            return false;
        }
        features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.shared.state.lock().config(), offset, data);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        let queue = activation.take_queue(0)?;
        let Activation { view, interrupt, .. } = activation;
        let worker = Worker {
            queue,
            sweep_timer: TimerFd::new().map_err(std::io::Error::from)?,
            budget_timer: TimerFd::new().map_err(std::io::Error::from)?,
            delayed: None,
            view,
            interrupt: Arc::clone(&interrupt),
            executor: Arc::clone(&self.executor),
            shared: Arc::clone(&self.shared),
        };
        *self.shared.interrupt.lock() = Some(interrupt);
        if let Err(err) = self.worker.start(Box::new(worker)) {
            *self.shared.interrupt.lock() = None;
            return Err(err);
        }
        self.shared.state.lock().driver_came();
        self.shared.report(MemEvent::DriverPresent);
        Ok(())
    }

    /// Retains plugged memory (virtio 1.3, 5.15.5.2). A kernel that was started by kexec or that
    /// writes a crash dump resets the device and then continues to use the memory.
    fn reset(&mut self) {
        if !self.worker.stop() {
            return;
        }
        *self.shared.interrupt.lock() = None;
        self.shared.state.lock().driver_left();
        self.shared.report(MemEvent::DriverGone);
    }
}

impl MemDevice {
    /// Reports that the device refuses the driver. The refusal remains recorded until a supported
    /// driver is active.
    fn refuse_driver(&self) {
        self.shared.refuse_driver();
        if !self.is_refusal_logged.swap(true, Ordering::Relaxed) {
            let zone = &self.shared.zone.id;
            warn!(
                %zone,
                device = self.name,
                "Guest driver refused; the zone is not resized: {UNSUPPORTED_DRIVER}"
            );
        }
    }
}

#[cfg(test)]
impl MemDevice {
    /// Executes a request at the time `now` of a simulated clock.
    pub(super) fn execute(&self, request: Request, now: Instant) -> Result<Response, Duration> {
        self.executor.lock().execute(request, now)
    }

    /// Returns true if the device is still preparing for the next request.
    pub(super) fn is_preparing(&self) -> bool {
        self.executor.lock().is_preparing()
    }
}

impl Drop for MemDevice {
    fn drop(&mut self) {
        self.reset();
    }
}
