//! How devices interrupt the guest.

use std::io;

/// What a virtio device signals (virtio 1.3, 2.3 and 2.9). The transport decides how: MSI-X by irqfd, or by a
/// message sent at once.
pub trait VirtioInterrupt: Send + Sync {
    /// "Used buffer" notification for `queue`, by irqfd: cheap, but the kernel may deliver it from a work queue.
    fn signal_queue(&self, queue: u16) -> io::Result<()>;

    /// The same, delivered before this returns (KVM_SIGNAL_MSI): a vCPU that waits for nothing but its own exit
    /// finds the interrupt pending when it enters the guest again.
    fn signal_queue_now(&self, queue: u16) -> io::Result<()>;

    /// Configuration change notification.
    fn signal_config(&self) -> io::Result<()>;
}
