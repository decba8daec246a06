//! Transports between the guest and virtio devices.

pub mod pci;
