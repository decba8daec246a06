//! virtio-balloon (virtio 1.3, 5.5): the guest returns boot memory to the host without hotplug.
//!
//! The device requests a balloon size. The driver allocates that many pages, sends a list of them,
//! and leaves them unused until the device requests a smaller balloon. The driver may also report
//! free pages, which it may use again at any time, and statistics of the guest's kernel. Only pages
//! of plugged DRAM are returned to the host. Pages of PM belong to chunks, which virtio-mem plugs
//! and unplugs.

pub mod config;
mod device;
mod event;
mod handle;
mod metrics;
pub mod request;
mod state;
#[cfg(test)]
mod tests;

use self::config::BalloonConfig;
use super::new_device;
use crate::device::{DeviceContext, DeviceHandle, SetupResult};
use crate::memory::Memory;

pub use device::{Balloon, BalloonOptions};
pub use handle::{BalloonHandle, BalloonObserver, BalloonSizes, ReceivedStatistics, TargetError};
pub use metrics::{BalloonMetrics, Refusal};

impl DeviceHandle for BalloonHandle {}

/// Builds the `--balloon` device. `observer` is called after each change of sizes or statistics.
pub fn build(
    config: &BalloonConfig,
    memory: &Memory,
    observer: BalloonObserver,
    context: &DeviceContext,
) -> SetupResult {
    let boot_bytes = memory.zones().iter().map(|zone| zone.boot_bytes).sum();
    let options = BalloonOptions {
        max_bytes: config.max_bytes(boot_bytes),
        target_bytes: config.size,
        deflate_on_oom: config.deflate_on_oom,
        free_page_reporting: config.free_page_reporting,
        statistics: config.statistics,
    };
    let id = config.id_or_default();
    let event_loop = context.machine.event_loop.clone();
    let (device, handle) = Balloon::new(id, options, memory, event_loop, observer)?;
    let new = new_device(device, context)?.exposing(handle.metrics()).with_handle(handle);
    Ok(new.attach(context)?)
}
