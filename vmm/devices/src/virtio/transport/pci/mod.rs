//! Virtio over PCI, modern only (virtio 1.3, 4.1).
//!
//! [`registers`] is the device as the driver sees it, without any I/O; [`interrupt`] and [`notify`]
//! are the two ways between driver and device; [`device`] is the PCI function that brings them
//! together.

mod device;
mod interrupt;
pub mod layout;
mod notify;
mod registers;
#[cfg(test)]
mod tests;

pub use device::{TransportError, VirtioPciDevice};
