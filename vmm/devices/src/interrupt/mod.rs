//! How devices interrupt the guest.

use std::collections::BTreeMap;
use std::io;

use vmm_sys_util::eventfd::EventFd;

use crate::pci::msix::MsiMessage;

mod kvm;
pub mod router;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use router::MsiRouter;

/// What takes message-signalled interrupts to the vCPUs: KVM, or a test's record of them.
pub trait MsiController: Send + Sync {
    /// Replaces all MSI routes: GSI to message. The I/O APIC's routes stay.
    fn set_msi_routes(&self, messages: &BTreeMap<u32, MsiMessage>) -> io::Result<()>;
    /// From now on, a write to `irqfd` raises `gsi`.
    fn register_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Undoes [`Self::register_irqfd`].
    fn unregister_irqfd(&self, irqfd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Makes the line of the I/O APIC's interrupt `gsi` high or low, until the next call.
    fn set_line(&self, gsi: u32, high: bool) -> io::Result<()>;
    /// Delivers `message` before this returns.
    fn signal_msi(&self, message: MsiMessage) -> io::Result<()>;
}

/// What a virtio device signals (virtio 1.3, 2.3 and 2.9). The transport decides how: MSI-X by
/// irqfd, or by a message sent at once.
pub trait VirtioInterrupt: Send + Sync {
    /// "Used buffer" notification for `queue`, by irqfd: cheap, but the kernel may deliver it from
    /// a work queue.
    fn signal_queue(&self, queue: u16) -> io::Result<()>;

    /// The same, delivered before this returns (KVM_SIGNAL_MSI): a vCPU that waits for nothing but
    /// its own exit finds the interrupt pending when it enters the guest again.
    fn signal_queue_now(&self, queue: u16) -> io::Result<()>;

    /// Has `call` interrupt for `queue` without anybody's help, whenever the guest lets it:
    /// somebody who is no thread of this process raises it. Where it does not, `call` stays
    /// raised, and its owner answers that by [`Self::signal_queue`].
    fn bind_queue(&self, _queue: u16, _call: &EventFd) -> io::Result<()> {
        Ok(())
    }

    /// Undoes [`Self::bind_queue`].
    fn unbind_queue(&self, _queue: u16) {}

    fn signal_config(&self) -> io::Result<()>;

    /// The device has met something that it cannot go on after: its status says DEVICE_NEEDS_RESET
    /// until it is reset (2.1.2).
    fn needs_reset(&self) -> io::Result<()> {
        self.signal_config()
    }
}
