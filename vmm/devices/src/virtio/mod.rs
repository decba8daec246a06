//! Virtio devices (virtio 1.3), one module each, and the PCI transport that presents them to the
//! guest.
//!
//! A device has two parts. Its [`VirtioDevice`] handles configuration accesses on vCPU threads. Its
//! worker owns queues and file descriptors, is created by [`VirtioDevice::activate`], and runs on
//! an event loop.

pub mod balloon;
pub mod block;
pub mod console;
pub mod mem;
pub mod net;
pub mod pmem;
#[cfg(test)]
mod read_once;
pub mod rng;
#[cfg(test)]
mod testing;
pub mod transport;
pub mod vsock;
pub mod watchdog;
mod worker;
pub mod zone_device;

use std::sync::Arc;

use thiserror::Error;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use self::transport::pci::{TransportError, VirtioPciDevice};
use crate::device::{DeviceContext, NewDevice};
use crate::event_loop::EventLoopHandle;
use crate::interrupt::VirtioInterrupt;
use crate::memory::view::GuestView;

/// A queue that the driver has enabled, and the event that signals its notifications.
pub struct ActiveQueue {
    /// Name of the device, for log lines.
    device: Box<str>,
    /// The ring. The transport checked its guest addresses when the driver enabled the queue.
    pub queue: Queue,
    /// Signaled when the driver notifies the device. Unused for queues of
    /// [`VirtioDevice::synchronous_queues`].
    pub kick: EventFd,
    /// True if the driver's ring was found to be invalid. The device takes no more chains from it
    /// until a reset.
    is_broken: bool,
}

/// Resources that a device receives when the driver sets DRIVER_OK (virtio 1.3, 3.1.1).
pub struct Activation {
    /// Guest memory. Take one guard ([`GuestView`]) per pass over a queue, and never hold two on
    /// one thread.
    pub view: GuestView,
    /// Interrupts that signal used buffers and configuration changes to the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// Queues by index. `None` if the driver did not enable the queue.
    pub queues: Vec<Option<ActiveQueue>>,
    /// Negotiated features.
    pub features: u64,
}

/// Error of an activation. The transport then sets DEVICE_NEEDS_RESET (virtio 1.3, 2.1.2).
#[derive(Debug, Error)]
pub enum ActivateError {
    /// The driver did not enable a queue that the device requires.
    #[error("required queue {index} is not enabled by the driver")]
    QueueMissing { index: u16 },
    /// The event loop did not accept the worker.
    #[error("cannot start the device's worker")]
    Worker(#[from] crate::event_loop::EventLoopError),
    #[error("cannot set up the device's files")]
    Io(#[from] std::io::Error),
}

/// Interface of a virtio device that the transport calls.
///
/// The transport serializes all calls.
pub trait VirtioDevice: Send {
    /// Device type (virtio 1.3, 5).
    fn device_type(&self) -> u16;

    /// Short name for logs, threads and metrics, such as `rng`.
    fn name(&self) -> &str;

    /// Offered features, including VIRTIO_F_VERSION_1.
    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1
    }

    /// Checks that `features`, a subset of the offered ones, include all features that the device
    /// requires. If this returns false, the transport refuses FEATURES_OK (virtio 1.3, 2.2). After
    /// this call and even before DRIVER_OK, the configuration may depend on `features`.
    fn accepts_features(&self, features: u64) -> bool {
        features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    /// Largest size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Reads the device's configuration. Bytes beyond its end read as zero. The default is an empty
    /// configuration.
    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    /// Writes the device's configuration. The default ignores the write.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Starts the device. Called at most once between two resets. If it fails, the device remains
    /// inactive.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Stops the device. When this returns, the device no longer accesses queues or guest memory,
    /// and may be activated again.
    fn reset(&mut self);

    /// Threads that belong to this device. Empty if the device runs only on shared event loops.
    fn loops(&self) -> Vec<EventLoopHandle> {
        Vec::new()
    }

    /// Queues without an ioeventfd. Each notification causes a vCPU exit, in which
    /// [`VirtioDevice::notify_synchronous`] serves the queue.
    fn synchronous_queues(&self) -> &[u16] {
        &[]
    }

    /// Handles a notification of a synchronous queue on the vCPU's thread. When it returns, all
    /// requests are completed, the used ring is written and the interrupt is pending.
    fn notify_synchronous(&mut self, _queue: u16) {}

    /// Returns true if an active driver reads the device status so often that the reads must not
    /// cause exits. The configuration of such a device must be constant, because only exits detect
    /// its changes.
    fn has_mapped_registers(&self) -> bool {
        false
    }
}

/// Copies `config` from `offset` to `data`, and fills the bytes beyond its end with zeros.
pub fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let Ok(offset) = usize::try_from(offset) else { return };
    if let Some(rest) = config.get(offset..) {
        let len = rest.len().min(data.len());
        data[..len].copy_from_slice(&rest[..len]);
    }
}

/// Wraps a device in the PCI transport and uses the device's name as its id.
pub fn new_device(
    device: impl VirtioDevice + 'static,
    context: &DeviceContext,
) -> Result<NewDevice, TransportError> {
    let id = device.name().to_owned();
    new_device_with_id(&id, device, context)
}

/// Wraps a device in the PCI transport.
pub fn new_device_with_id(
    id: &str,
    device: impl VirtioDevice + 'static,
    context: &DeviceContext,
) -> Result<NewDevice, TransportError> {
    let loops = device.loops();
    let device = VirtioPciDevice::new(id, Box::new(device), context)?;
    Ok(NewDevice::new(id, device, loops))
}
