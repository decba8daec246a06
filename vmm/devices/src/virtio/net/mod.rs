//! virtio-net (virtio 1.3, 5.1): Ethernet through a tap interface of the host.
//!
//! The worker copies each frame once, between guest memory and its own buffer. It checks frames
//! from the guest before it passes them to the host's kernel, and it holds no guard of guest memory
//! during system calls. Alternatively, the kernel transfers the frames itself ([`vhost`]).

pub mod config;
mod control;
mod device;
mod event;
pub mod frames;
pub mod header;
mod metrics;
mod mover;
pub mod request;
mod state;
pub mod tap;
mod used;
mod vhost;

use std::sync::Arc;

use tracing::info;

use self::config::NetConfig;
use self::tap::{HostInterface, Tap};
use super::new_device_with_id;
use crate::device::{DeviceContext, SetupResult};

pub use device::Net;
pub use metrics::{NetDeviceMetrics, NetMetrics};
pub use state::NetShape;
pub use vhost::VhostFiles;

/// Builds the `--net` device on `tap`. The configuration must have an id and an address. If the
/// kernel transfers the frames, the device uses `files` first.
pub fn build(
    config: &NetConfig,
    tap: &Arc<Tap>,
    files: &VhostFiles,
    context: &DeviceContext,
) -> SetupResult {
    let id = config.id.clone().expect("a VM's devices have ids");
    info!(net = id, tap = tap.name(), "Network interface attached to a host interface");
    let shape = NetShape {
        id: id.clone(),
        mac: config.mac.expect("a VM's interfaces have addresses").bytes(),
        mtu: tap.mtu(),
        pairs: config.pairs(),
        queue_size: config.queue_size,
        csum: config.offload_csum,
        tso: config.offload_tso,
        ufo: config.offload_ufo,
    };
    let is_kernel_used = mover::is_kernel_used(config.vhost, &id, || vhost::probe(files))?;
    let host = Arc::clone(tap) as Arc<dyn HostInterface>;
    let device = match is_kernel_used {
        true => Net::moved_by_kernel(shape, host, files)?,
        false => Net::new(shape, host)?,
    };
    let metrics = NetDeviceMetrics { net: id.clone(), counters: device.metrics() };
    let source = Arc::new(metrics.clone());
    let new = new_device_with_id(&id, device, context)?.removable(NetConfig::KIND);
    Ok(new.exposing(source).with_handle(metrics).attach(context)?)
}
