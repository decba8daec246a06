//! Interrupts of devices.

use std::collections::BTreeMap;
use std::io;

use vmm_sys_util::eventfd::EventFd;

use crate::pci::msix::MsiMessage;

mod kvm;
pub mod router;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use router::MsiRouter;

/// Controller that delivers message-signaled interrupts to vCPUs: KVM, or a recorder in tests.
pub trait MsiController: Send + Sync {
    /// Replaces all MSI routes, which map GSIs to messages. The routes of the I/O APIC do not
    /// change.
    fn set_msi_routes(&self, messages: &BTreeMap<u32, MsiMessage>) -> io::Result<()>;
    /// Registers `irqfd`, so that writing to it raises `gsi`.
    fn register_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Undoes [`Self::register_irqfd`].
    fn unregister_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Sets the line of interrupt `gsi` at the I/O APIC to high or low.
    fn set_line(&self, gsi: u32, high: bool) -> io::Result<()>;
    /// Delivers `message` before this returns.
    fn signal_msi(&self, message: MsiMessage) -> io::Result<()>;
}

/// Notifications of a virtio device (virtio 1.3, 2.3 and 2.9). The transport delivers them by
/// MSI-X, either through an irqfd or as a message that is sent immediately.
pub trait VirtioInterrupt: Send + Sync {
    /// "Used buffer" notification for `queue` through an irqfd. It is cheap, but the kernel may
    /// deliver it from a work queue.
    fn signal_queue(&self, queue: u16) -> io::Result<()>;

    /// Same as [`Self::signal_queue`], but delivers the notification before it returns
    /// (KVM_SIGNAL_MSI). If this runs during an exit of a vCPU, the interrupt is pending when the
    /// vCPU enters the guest again.
    fn signal_queue_now(&self, queue: u16) -> io::Result<()>;

    /// Connects `call`, which the kernel raises, to the interrupt of `queue`, so that no thread of
    /// this process is involved. While the guest masks the interrupt, `call` remains raised, and
    /// its owner must call [`Self::signal_queue`].
    fn bind_queue(&self, _queue: u16, _call: &EventFd) -> io::Result<()> {
        Ok(())
    }

    /// Undoes [`Self::bind_queue`].
    fn unbind_queue(&self, _queue: u16) {}

    fn signal_config(&self) -> io::Result<()>;

    /// Reports an error after which the device cannot continue. Sets DEVICE_NEEDS_RESET in the
    /// device status until the device is reset (2.1.2).
    fn needs_reset(&self) -> io::Result<()> {
        self.signal_config()
    }
}
