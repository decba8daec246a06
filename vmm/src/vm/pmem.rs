//! Attaches the files of `--pmem`.

use std::sync::Arc;

use super::error::BuildError;
use super::fabric::Fabric;
use super::resources::Resources;
use crate::config::PmemConfig;
use crate::memory::Memory;
use crate::metrics::PmemFileMetrics;
use crate::pool::Extent;
use crate::virtio::pmem::device::Pmem;
use crate::volume::Persist;

/// A virtio-pmem device for each file, in their order: the guest numbers them so, behind the volumes. Resources keep the
/// files as long as the VMM lives.
pub(super) fn attach(
    resources: &Resources,
    memory: &mut Memory,
    fabric: &mut Fabric,
) -> Result<Vec<PmemFileMetrics>, BuildError> {
    let mut metrics = Vec::new();
    for (nth, (config, file)) in resources.pmem().iter().enumerate() {
        let extent = Extent { offset: 0, len: file.len_bytes() };
        let range = memory
            .add_file_range(file.file(), &[extent], file.access())
            .map_err(BuildError::device(flag(config)))?;
        fabric
            .lost
            .watch_file(flag(config), &range.reservation, file.file(), file.len_bytes())
            .map_err(BuildError::device(flag(config)))?;
        let (name, backing) = (config.name(nth), Arc::clone(file) as Arc<dyn Persist>);
        let device = Pmem::raw(format!("pmem-{name}"), range.guest.start, range.guest.len, backing)?;
        metrics.push(PmemFileMetrics {
            name,
            file: config.file.display().to_string(),
            size_bytes: file.len_bytes(),
            durability: file.durability(),
            failed: file.failure(),
            counters: device.metrics(),
        });
        fabric.attach(Box::new(device), memory)?;
    }
    Ok(metrics)
}

/// How errors name a device.
fn flag(config: &PmemConfig) -> String {
    format!("--pmem file={}", config.file.display())
}
