//! virtio-pmem (virtio 1.3, 5.19): a range of guest-physical memory that is storage, with a queue
//! of flushes.
//!
//! The guest reads and writes the range without an exit. Its driver asks for durability through the
//! queue. Who answers, and when, depends on what the guest makes of the range: see
//! [`device::Pmem`].

pub mod device;
mod event;
pub mod metrics;
mod request;
