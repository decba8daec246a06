//! virtio-net: Ethernet by a tap interface of the host (virtio 1.3, 5.1).
//!
//! Frames are copied once on their way, between guest memory and a buffer of the worker's: what is sent is checked before
//! the host's kernel sees it, and no guard of guest memory is held while that works. Or the kernel moves them itself ([`vhost`]).

pub mod config;
mod control;
pub mod device;
mod event;
pub mod frames;
pub mod header;
pub mod metrics;
pub mod request;
pub mod state;
pub mod tap;
mod used;
pub mod vhost;

pub use device::Net;
pub use metrics::{NetDeviceMetrics, NetMetrics};
pub use state::NetShape;
