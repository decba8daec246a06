//! virtio-pmem (virtio 1.3, 5.19): storage as a range of guest-physical memory with a flush queue.
//!
//! The guest reads and writes the range without exits. Its driver uses the queue to make writes
//! durable. How and when flushes are answered depends on how the guest uses the range
//! ([`device::Pmem`]).

pub mod device;
mod event;
pub mod metrics;
mod request;
