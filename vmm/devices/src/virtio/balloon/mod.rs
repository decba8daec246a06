//! virtio-balloon (virtio 1.3, 5.5): memory that the guest gives back without hotplug.
//!
//! The device asks for an amount of memory; the driver allocates as many pages, tells which, and
//! leaves them alone until it is asked for less. Beside that the driver may report pages that
//! happen to be free, of which it may use each again whenever it likes, and tell what its kernel
//! counts. Given back are pages of DRAM that is plugged: pages of PM belong to chunks, which come
//! and go by virtio-mem.

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
pub use handle::{BalloonHandle, BalloonObserver, BalloonSizes, Heard, TargetError};
pub use metrics::{BalloonMetrics, Refusal};

impl DeviceHandle for BalloonHandle {}

/// Builds the device of `--balloon`. `observer` is notified of each change.
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
