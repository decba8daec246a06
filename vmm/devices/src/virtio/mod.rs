//! Virtio devices (virtio 1.3), each a folder of its own, and the transport that shows them to the
//! guest.
//!
//! A device is split in two. Its front, a [`VirtioDevice`], answers configuration accesses on vCPU
//! threads. Its worker owns queues and file descriptors, is made by [`VirtioDevice::activate`], and
//! runs on an event loop.

pub mod balloon;
pub mod block;
pub mod console;
pub mod mem;
pub mod net;
pub mod pmem;
pub mod rng;
#[cfg(test)]
mod testing;
pub mod transport;
pub mod vsock;
pub mod watchdog;
mod worker;

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

/// A queue that the driver has enabled, with the event that its notification raises.
pub struct ActiveQueue {
    /// The ring. Its addresses come from the guest and were checked by the transport when it was
    /// enabled.
    pub queue: Queue,
    /// Raised by the guest's notification. Never raised for a queue of
    /// [`VirtioDevice::synchronous_queues`].
    pub kick: EventFd,
    /// The driver has made nonsense of its ring: nothing is taken from it until the device is
    /// reset.
    is_broken: bool,
}

/// What a device gets when the driver sets DRIVER_OK (virtio 1.3, 3.1.1).
pub struct Activation {
    /// The guest's memory: take one guard per pass over a queue, never two at a time on one
    /// thread.
    pub view: GuestView,
    /// Where to announce used buffers and configuration changes.
    pub interrupt: Arc<dyn VirtioInterrupt>,
    /// By queue index; `None` where the driver did not enable the queue.
    pub queues: Vec<Option<ActiveQueue>>,
    /// The features that both sides agreed on.
    pub features: u64,
}

/// Why a device cannot be activated; the transport answers with DEVICE_NEEDS_RESET (virtio 1.3,
/// 2.1.2).
#[derive(Debug, Error)]
pub enum ActivateError {
    /// The driver did not enable a queue without which the device cannot work.
    #[error("Queue {index} is needed, but the driver has not enabled it")]
    QueueMissing { index: u16 },
    /// The event loop does not take the worker.
    #[error("The device's worker cannot be started")]
    Worker(#[from] crate::event_loop::EventLoopError),
    #[error("The device cannot set its files up")]
    Io(#[from] std::io::Error),
}

/// The front of a virtio device: what the transport needs to show it.
///
/// All calls come from the transport, one at a time.
pub trait VirtioDevice: Send {
    /// Device type (virtio 1.3, 5).
    fn device_type(&self) -> u16;

    /// A short name for logs, threads and metrics, such as `rng`.
    fn name(&self) -> &str;

    /// Features offered, VIRTIO_F_VERSION_1 included; many devices have no other.
    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1
    }

    /// False makes the transport refuse FEATURES_OK (virtio 1.3, 2.2): for features that the device
    /// cannot work without. `features` is a subset of what was offered. What the configuration
    /// says from then on, before DRIVER_OK, may depend on them.
    fn accepts_features(&self, features: u64) -> bool {
        features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    /// The largest size of each queue; a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Reads the device's configuration; bytes beyond its end read as zero, which is all that some
    /// devices have.
    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    /// Writes the device's configuration; most devices have nothing to write.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Starts work. Called once between resets. After an error the device is as if it had not been
    /// called.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Stops work: when this returns, nothing of the device touches queues or guest memory any
    /// more. The device may be activated again.
    fn reset(&mut self);

    /// The device's own threads, where it does not work on those that devices share.
    fn loops(&self) -> Vec<EventLoopHandle> {
        Vec::new()
    }

    /// Queues whose notification is handled inside the vCPU's exit, by
    /// [`VirtioDevice::notify_synchronous`], instead of by an ioeventfd and a worker.
    fn synchronous_queues(&self) -> &[u16] {
        &[]
    }

    /// Handles a notification of a synchronous queue on the vCPU's thread: when it returns, the
    /// work is done, the used ring is written and the interrupt is pending.
    fn notify_synchronous(&mut self, _queue: u16) {}
}

/// Copies the part of `config` that starts at `offset` to `data`; beyond its end, zeros.
pub fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let Ok(offset) = usize::try_from(offset) else { return };
    if let Some(rest) = config.get(offset..) {
        let len = rest.len().min(data.len());
        data[..len].copy_from_slice(&rest[..len]);
    }
}

/// Wraps a device in the PCI transport. The name of the device is its id.
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
