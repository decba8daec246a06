//! virtio-pmem (virtio 1.3, 5.19): a range of guest-physical memory that is storage, with a queue of flushes.
//!
//! The guest reads and writes the range without an exit. Its driver asks for durability through the queue, and
//! our answer comes before the guest's vCPU goes on: see [`device::Pmem`].

pub mod device;
pub mod metrics;
pub mod request;
