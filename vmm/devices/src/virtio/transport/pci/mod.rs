//! Virtio over PCI, modern devices only (virtio 1.3, 4.1).
//!
//! [`registers`] implements the registers that the driver accesses, and does no I/O itself.
//! [`interrupt`] signals the driver, and [`notify`] signals the device. With [`register_page`], the
//! driver reads registers without exits. [`device`] is the PCI function that combines them.

mod device;
mod interrupt;
pub mod layout;
mod notify;
mod register_page;
mod registers;
#[cfg(test)]
mod tests;

pub use device::{TransportError, VirtioPciDevice};
