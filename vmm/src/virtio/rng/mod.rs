//! virtio-rng: entropy for the guest (virtio 1.3, 5.4).

mod device;
mod event;
pub mod metrics;
mod source;

pub use device::Rng;
pub use metrics::RngMetrics;
pub use source::{EntropySource, SourceError};
