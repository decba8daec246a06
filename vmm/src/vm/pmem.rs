//! Attaches the files of `--pmem`.

use std::sync::Arc;

use super::error::BuildError;
use super::fabric::Fabric;
use super::resources::PmemFiles;
use crate::config::PmemConfig;
use crate::log::sparsely;
use crate::memory::lost::GuestRange;
use crate::memory::{MappedRange, Memory};
use crate::pool::Extent;
use crate::virtio::pmem::device::Pmem;
use crate::virtio::pmem::metrics::PmemFileMetrics;
use crate::volume::Persist;
use crate::volume::file::PmemFile;

/// A file that the guest has in its memory.
pub(super) struct AttachedPmem {
    /// What the API calls it.
    pub(super) id: String,
    range: MappedRange,
    watched: Arc<GuestRange>,
}

/// A virtio-pmem device for each file, in their order: the guest numbers them so, behind the volumes. Resources keep the
/// files as long as the VM has them.
pub(super) fn attach(
    files: &PmemFiles,
    memory: &mut Memory,
    fabric: &mut Fabric,
) -> Result<Vec<AttachedPmem>, BuildError> {
    let files = files.list();
    files.iter().map(|(config, file)| attach_file(config, file, memory, fabric)).collect()
}

/// One of them, which has an id (`VmConfig::name_devices`). Of one that cannot be attached nothing is left.
pub(super) fn attach_file(
    config: &PmemConfig,
    file: &Arc<PmemFile>,
    memory: &mut Memory,
    fabric: &mut Fabric,
) -> Result<AttachedPmem, BuildError> {
    let extent = Extent { offset: 0, len: file.len_bytes() };
    let range = memory
        .add_file_range(file.file(), &[extent], file.access())
        .map_err(BuildError::device(flag(config)))?;
    let watched = fabric.lost.watch_file(flag(config), &range.reservation, file.file(), file.len_bytes());
    let watched = match watched.map_err(BuildError::device(flag(config))) {
        Ok(watched) => watched,
        Err(err) => {
            hide(&range, memory);
            return Err(err);
        }
    };
    let id = config.id.clone().expect("a VM's devices have ids");
    let attached = AttachedPmem { id, range, watched };
    match show(config, file, &attached, memory, fabric) {
        Ok(()) => Ok(attached),
        Err(err) => {
            detach(&attached, memory, fabric);
            Err(err)
        }
    }
}

fn show(
    config: &PmemConfig,
    file: &Arc<PmemFile>,
    attached: &AttachedPmem,
    memory: &Memory,
    fabric: &mut Fabric,
) -> Result<(), BuildError> {
    let (id, guest) = (&attached.id, attached.range.guest);
    let backing = Arc::clone(file) as Arc<dyn Persist>;
    let device = Pmem::raw(format!("pmem-{id}"), guest.start, guest.len, backing)?;
    let metrics = PmemFileMetrics {
        name: id.clone(),
        file: config.file.display().to_string(),
        size_bytes: file.len_bytes(),
        durability: file.durability(),
        failed: file.failure(),
        counters: device.metrics(),
    };
    fabric.attach_removable(id, "pmem", Box::new(device), Arc::new(metrics), memory)?;
    Ok(())
}

/// Takes a file out of guest memory again; its device is not on the bus any more.
pub(super) fn detach(attached: &AttachedPmem, memory: &mut Memory, fabric: &Fabric) {
    fabric.lost.forget(&attached.watched);
    hide(&attached.range, memory);
}

fn hide(range: &MappedRange, memory: &mut Memory) {
    if let Err(err) = memory.remove_file_range(range) {
        sparsely!(error, %err, "A file stays in guest memory");
    }
}

/// How errors name a device.
fn flag(config: &PmemConfig) -> String {
    format!("--pmem file={}", config.file.display())
}
