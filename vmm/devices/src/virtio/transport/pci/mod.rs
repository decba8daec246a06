//! Virtio over PCI, modern devices only (virtio 1.3, 4.1).
//!
//! [`registers`] has the registers that the driver accesses, without I/O. [`interrupt`] and
//! [`notify`] signal the driver and the device. [`device`] is the PCI function that combines them.

mod device;
mod interrupt;
pub mod layout;
mod notify;
mod registers;
#[cfg(test)]
mod tests;

pub use device::{TransportError, VirtioPciDevice};
