//! How the guest reaches virtio devices.

pub mod pci;
