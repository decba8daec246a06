//! virtio-rng: entropy for the guest (virtio 1.3, 5.4).

pub mod config;
mod device;
mod event;
mod metrics;
mod source;

use self::config::RngConfig;
pub use device::Rng;
pub use metrics::RngMetrics;
pub use source::{EntropySource, SourceError};

use super::new_device;
use crate::device::{DeviceContext, SetupResult};

/// Builds the `--rng` device.
pub fn build(config: &RngConfig, context: &DeviceContext) -> SetupResult {
    let device = Rng::new(EntropySource::open(&config.src)?, context.machine.event_loop.clone());
    let metrics = device.metrics();
    Ok(new_device(device, context)?.exposing(metrics).attach(context)?)
}
