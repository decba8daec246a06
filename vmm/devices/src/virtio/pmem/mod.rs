//! virtio-pmem (virtio 1.3, 5.19): a range of guest-physical memory for storage, with a flush
//! queue.
//!
//! The guest reads and writes the range without exits. Its driver requests durability through the
//! queue. The use of the range in the guest determines how and when flushes are answered
//! ([`device::Pmem`]).

pub mod device;
mod event;
pub mod metrics;
mod request;
