//! Files and devices that a VM's configuration names more than once.
//!
//! Locks would refuse the second use as well, but the error would name only the process that has
//! the file, which is the VMM itself.

use std::path::Path;

use thiserror::Error;

use super::request::VmError;
use crate::config::{DeviceConfig, VmConfig};
use crate::file_id::FileId;

/// Two flags name one file or device, and at least one of them writes to it.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{first} and {second} name the same file or device, and can have it twice only if both only read it (readonly=on of a disk, \
     discard_writes=on of a pmem file)"
)]
pub struct NamedTwice {
    first: String,
    second: String,
}

/// Use of a file or device by a VM.
struct Use<'a> {
    flag: &'static str,
    path: &'a Path,
    /// Kind of uses that may share the file.
    shared: Option<Sharing>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// All uses only read.
    Readers,
    /// All uses are volumes or memory of one pool.
    Pool,
}

impl Use<'_> {
    fn name(&self) -> String {
        format!("{}={}", self.flag, self.path.display())
    }

    fn goes_with(&self, other: &Self) -> bool {
        self.shared.is_some() && self.shared == other.shared
    }
}

/// Checks that `config` names no file or device twice, under whatever paths. Kernels and firmware
/// do not count, because they are only read once.
pub fn check(config: &VmConfig) -> Result<(), NamedTwice> {
    let mut seen: Vec<(FileId, Use<'_>)> = Vec::new();
    for this in uses(config) {
        // For a directory, each use creates a file of its own. A missing file is reported when it
        // is opened.
        let Some(id) = FileId::of(this.path).filter(|_| !this.path.is_dir()) else { continue };
        if let Some((_, first)) = seen.iter().find(|(other, first)| *other == id && !first.goes_with(&this)) {
            return Err(NamedTwice { first: first.name(), second: this.name() });
        }
        seen.push((id, this));
    }
    Ok(())
}

/// Adds a device to `config`, after a check that nothing else in `config` uses its file. Returns
/// the device's id.
pub fn add_device(config: &mut VmConfig, device: DeviceConfig, in_use: &[String]) -> Result<String, VmError> {
    let id = config.add_device(device, in_use)?;
    check(config).map_err(|error| VmError::BadRequest(error.to_string()))?;
    Ok(id)
}

/// All files and devices of `config` that are opened for as long as the VM runs.
fn uses(config: &VmConfig) -> impl Iterator<Item = Use<'_>> {
    let readers = |only_reads: bool| only_reads.then_some(Sharing::Readers);
    let zones = config.memory.zones.iter().filter_map(move |zone| {
        let path = zone.file.as_deref()?;
        Some(Use { flag: "--memory-zone file", path, shared: readers(!zone.host.shared) })
    });
    let pool = |flag, path| Use { flag, path, shared: Some(Sharing::Pool) };
    let memory = config.pm_memory.iter().map(move |zone| pool("--pm-memory pool", zone.pool.as_path()));
    let volumes = config.pm_volumes.iter().map(move |volume| pool("--pm-volume pool", volume.pool.as_path()));
    let disks = config.disks.iter().map(move |disk| Use {
        flag: "--disk path",
        path: &disk.path,
        shared: readers(disk.readonly),
    });
    let pmem = config.pmem.iter().map(move |pmem| Use {
        flag: "--pmem file",
        path: &pmem.file,
        shared: readers(pmem.discard_writes),
    });
    zones.chain(memory).chain(volumes).chain(disks).chain(pmem)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;
    use crate::config::{
        DiskConfig, MemoryZoneConfig, PmMemoryConfig, PmVolumeConfig, PmemConfig, test_config,
    };

    /// Adds the use of a file to a configuration.
    type Add = fn(&mut VmConfig, &Path);

    const DISK: Add = |config, path| {
        config.disks.push(DiskConfig::parse(&format!("path={}", path.display())).unwrap());
    };
    const READONLY_DISK: Add = |config, path| {
        config.disks.push(DiskConfig::parse(&format!("path={},readonly=on", path.display())).unwrap());
    };
    const PMEM: Add = |config, path| {
        config.pmem.push(PmemConfig::parse(&format!("file={},size=2M", path.display())).unwrap());
    };
    const PRIVATE_PMEM: Add = |config, path| {
        let text = format!("file={},size=2M,discard_writes=on", path.display());
        config.pmem.push(PmemConfig::parse(&text).unwrap());
    };
    const ZONE: Add = |config, path| {
        let text = format!("id=z,size=2M,file={},shared=on", path.display());
        config.memory.zones.push(MemoryZoneConfig::parse(&text).unwrap());
    };
    const PM_MEMORY: Add = |config, path| {
        config.pm_memory.push(PmMemoryConfig::parse(&format!("pool={},size=2M", path.display())).unwrap());
    };
    const PM_VOLUME: Add = |config, path| {
        config.pm_volumes.push(PmVolumeConfig::parse(&format!("pool={},name=a", path.display())).unwrap());
    };

    fn checked(uses: &[(Add, &Path)]) -> Result<(), NamedTwice> {
        let mut config = test_config();
        uses.iter().for_each(|(add, path)| add(&mut config, path));
        check(&config)
    }

    /// A folder with a file, and other paths of it.
    fn one_file() -> (tempfile::TempDir, PathBuf, [PathBuf; 3]) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        File::create(&file).unwrap();
        let [soft, hard] = ["soft", "hard"].map(|name| folder.path().join(name));
        symlink("file", &soft).unwrap();
        fs::hard_link(&file, &hard).unwrap();
        let dotted = PathBuf::from(format!("{}/./file", folder.path().display()));
        (folder, file, [soft, hard, dotted])
    }

    #[test]
    fn one_file_has_one_writer_under_all_its_paths() {
        let (_folder, file, others) = one_file();
        for other in others.iter().chain([&file]) {
            for first in [DISK, PMEM, ZONE, PM_MEMORY, PM_VOLUME] {
                for second in [DISK, PMEM, READONLY_DISK, PRIVATE_PMEM, ZONE] {
                    let error = checked(&[(first, &file), (second, other)]).unwrap_err();
                    let text = error.to_string();
                    for path in [&file, other] {
                        assert!(text.contains(&path.display().to_string()), "{text}");
                    }
                    assert!(text.contains("--") && text.contains("readonly=on"), "{text}");
                }
            }
        }
    }

    #[test]
    fn readers_share_a_file_and_users_of_a_pool_the_pool() {
        let (_folder, file, [soft, hard, _]) = one_file();
        checked(&[(READONLY_DISK, &file), (READONLY_DISK, &soft), (PRIVATE_PMEM, &hard)]).unwrap();
        checked(&[(PM_MEMORY, &file), (PM_VOLUME, &soft), (PM_MEMORY, &hard)]).unwrap();
    }

    #[test]
    fn files_that_are_two_or_missing_and_directories_are_no_conflict() {
        let (folder, file, _) = one_file();
        let [copy, missing] = ["copy", "missing"].map(|name| folder.path().join(name));
        fs::copy(&file, &copy).unwrap();
        checked(&[(DISK, &file), (DISK, &copy), (DISK, &missing), (PMEM, &missing)]).unwrap();
        checked(&[(PMEM, folder.path()), (PMEM, folder.path()), (ZONE, folder.path())]).unwrap();
    }

    #[test]
    fn file_that_a_vm_has_is_not_added_to_it_again() {
        let (_folder, file, [soft, ..]) = one_file();
        let mut config = test_config();
        DISK(&mut config, &file);
        let disk = DiskConfig::parse(&format!("path={}", soft.display())).unwrap();
        let error = add_device(&mut config, DeviceConfig::Disk(disk), &[]).unwrap_err();
        let VmError::BadRequest(text) = error else { panic!("{error}") };
        for path in [file, soft] {
            assert!(text.contains(&path.display().to_string()), "{text}");
        }
    }
}
