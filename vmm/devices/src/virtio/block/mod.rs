//! virtio-blk (virtio 1.3, 5.2): disks on image files and block devices.
//!
//! [`request`] parses a request, [`job`] divides it into steps, and a [disk](crate::disk) executes
//! them. Each queue has a worker (`event`), which uses blocking calls (`calls`) or io_uring
//! (`ring`). docs/design/decisions/0008-disks.md explains this design.

mod calls;
pub mod config;
mod device;
mod event;
mod flush;
pub mod job;
mod metrics;
pub mod request;
mod ring;
mod segments;
pub mod serial;
mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::config::{DiskConfig, ImageType};
use super::new_device_with_id;
use crate::device::{DeviceContext, SetupResult};
use crate::disk::image::{ImageOptions, RawImage};

pub use self::device::{Block, BlockHandle};
pub use self::metrics::{BlockMetrics, DiskMetrics, Kind};
pub use self::state::{DiskShape, FullHandler};

/// Builds the `--disk` device for an image file or a block device. The configuration must have an
/// id.
pub fn build(config: &DiskConfig, context: &DeviceContext) -> SetupResult {
    let options = ImageOptions {
        readonly: config.readonly,
        direct: config.direct,
        sparse: config.sparse,
        is_called_raw: config.image_type == ImageType::Raw,
        guest_block_bytes: config.guest_block_size,
    };
    let image = RawImage::open(&config.path, options)?;
    let id = config.id.clone().expect("a VM's devices have ids");
    let shape = DiskShape {
        serial: config.serial.clone().unwrap_or_else(|| id.clone()),
        id: id.clone(),
        queues: config.num_queues,
        queue_size: config.queue_size,
        read_only: config.readonly,
    };
    let device = Block::new(shape, image)?;
    let handle = device.handle();
    let source = DiskMetrics { disk: id.clone(), counters: handle.metrics() };
    let new = new_device_with_id(&id, device, context)?
        .removable(DiskConfig::KIND)
        .at(config.pci_device_id);
    Ok(new.exposing(Arc::new(source)).with_handle(handle).attach(context)?)
}
