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
    /// Replaces all MSI routes, which map GSIs to messages. The I/O APIC's routes stay.
    fn set_msi_routes(&self, messages: &BTreeMap<u32, MsiMessage>) -> io::Result<()>;
    /// Makes writes to `irqfd` raise `gsi`.
    fn register_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Undoes [`Self::register_irqfd`].
    fn unregister_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Sets the line of the I/O APIC's interrupt `gsi` to high or low until the next call.
    fn set_line(&self, gsi: u32, high: bool) -> io::Result<()>;
    /// Delivers `message` before this returns.
    fn signal_msi(&self, message: MsiMessage) -> io::Result<()>;
}

/// Notifications of a virtio device (virtio 1.3, 2.3 and 2.9). The transport delivers them by
/// MSI-X: through an irqfd, or as a message sent at once.
pub trait VirtioInterrupt: Send + Sync {
    /// "Used buffer" notification for `queue` through an irqfd. It is cheap, but the kernel may
    /// deliver it from a work queue.
    fn signal_queue(&self, queue: u16) -> io::Result<()>;

    /// As [`Self::signal_queue`], but delivered before this returns (KVM_SIGNAL_MSI). A vCPU in an
    /// exit finds the interrupt pending when it enters the guest again.
    fn signal_queue_now(&self, queue: u16) -> io::Result<()>;

    /// Connects `call`, which the kernel raises, to the interrupt of `queue`, so that no thread of
    /// this process is involved. While the guest masks the interrupt, `call` stays raised, and its
    /// owner responds by [`Self::signal_queue`].
    fn bind_queue(&self, _queue: u16, _call: &EventFd) -> io::Result<()> {
        Ok(())
    }

    /// Undoes [`Self::bind_queue`].
    fn unbind_queue(&self, _queue: u16) {}

    fn signal_config(&self) -> io::Result<()>;

    /// Reports an error from which the device cannot continue. Its status has DEVICE_NEEDS_RESET
    /// until it is reset (2.1.2).
    fn needs_reset(&self) -> io::Result<()> {
        self.signal_config()
    }
}
