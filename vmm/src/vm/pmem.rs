//! Attaches the files of `--pmem`.

use std::slice;
use std::sync::Arc;

use super::error::BuildError;
use super::fabric::Fabric;
use super::resources::PmemFiles;
use crate::config::PmemConfig;
use crate::device::NewDevice;
use crate::log::sparsely;
use crate::memory::lost::{GuestRange, LostMemory};
use crate::memory::{MappedRange, Memory, layout};
use crate::persist::Persist;
use crate::virtio::pmem::device::Pmem;
use crate::virtio::pmem::metrics::PmemFileMetrics;
use crate::volume::file::PmemFile;

/// A virtio-pmem device for each file, in their order: the guest numbers them so, behind the
/// volumes. Resources keep the files as long as the VM has them.
pub(super) fn attach(
    files: &PmemFiles,
    memory: &mut Memory,
    fabric: &mut Fabric,
) -> Result<(), BuildError> {
    files
        .list()
        .iter()
        .try_for_each(|(config, file)| attach_file(config, file, files, memory, fabric).map(drop))
}

/// Attaches one file, which has an id (`VmConfig::name_devices`), and returns the device's slot. If
/// that fails, nothing of the file is left in guest memory.
pub(super) fn attach_file(
    config: &PmemConfig,
    file: &Arc<PmemFile>,
    files: &PmemFiles,
    memory: &mut Memory,
    fabric: &mut Fabric,
) -> Result<u8, BuildError> {
    let extent = 0..file.len_bytes();
    let range = memory
        .add_file_range(file.file(), slice::from_ref(&extent), file.access())
        .map_err(BuildError::device(flag(config)))?;
    let watched =
        fabric.lost.watch_file(flag(config), &range.reservation, file.file(), file.len_bytes());
    let watched = match watched.map_err(BuildError::device(flag(config))) {
        Ok(watched) => watched,
        Err(err) => {
            hide(&range, memory);
            return Err(err);
        }
    };
    let mapped = MappedFile { range, watched, lost: Arc::clone(&fabric.lost) };
    let attached = new_device(config, file, mapped.range.guest).and_then(|new| {
        let (id, files, mapped) = (new.id.clone(), files.clone(), mapped.clone());
        let undo = move |memory: &mut Memory| {
            mapped.unmap(memory);
            files.remove(&id);
        };
        fabric.attach(new.undone_by(undo), memory)
    });
    attached.inspect_err(|_| mapped.unmap(memory))
}

/// File in guest memory.
#[derive(Clone)]
struct MappedFile {
    range: MappedRange,
    watched: Arc<GuestRange>,
    lost: Arc<LostMemory>,
}

impl MappedFile {
    /// Takes the file out of guest memory. Its device is not on the bus.
    fn unmap(&self, memory: &mut Memory) {
        self.lost.forget(&self.watched);
        hide(&self.range, memory);
    }
}

fn new_device(
    config: &PmemConfig,
    file: &Arc<PmemFile>,
    guest: layout::GuestRange,
) -> Result<NewDevice, BuildError> {
    let id = config.id.as_deref().expect("a VM's devices have ids");
    let backing = Arc::clone(file) as Arc<dyn Persist>;
    let device = Pmem::raw(format!("pmem-{id}"), guest.start, guest.len, backing)?;
    let source = Arc::new(PmemFileMetrics {
        name: id.to_owned(),
        file: config.file.display().to_string(),
        size_bytes: file.len_bytes(),
        durability: file.durability(),
        failed: file.failure(),
        counters: device.metrics(),
    });
    Ok(NewDevice::removable(id, "pmem", device).exposing(source))
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
