//! Disk of a file system.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{fstat, fstatfs, major, minor};
use thiserror::Error;

/// Size of the sectors in which the kernel describes partitions.
const SECTOR_BYTES: u64 = 512;
/// Value of `f_type` of Btrfs. Its FIEMAP returns logical addresses instead of offsets on a disk.
const BTRFS: u64 = 0x9123_683e;

#[derive(Debug, Error)]
pub(crate) enum DiskError {
    #[error(
        "{path} is on a file system of type {kind:#x}, but trim supports only ext4, XFS and F2FS{}",
        if *kind == BTRFS { " (Btrfs does not tell where on its disk a file is)" } else { "" }
    )]
    FileSystem { path: PathBuf, kind: u64 },
    #[error(
        "{path} is on {device}, which is not a BTT disk of a volume (/dev/pmem*s) or its partition"
    )]
    NoBtt { path: PathBuf, device: String },
    #[error(
        "the free space of {path} ends at byte {end_bytes} of {disk}, whose size is {size_bytes} \
         bytes, so another device contains a part of it"
    )]
    OtherDevice { path: PathBuf, end_bytes: u64, disk: String, size_bytes: u64 },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileSystem {
    Ext4,
    Xfs,
    F2fs,
}

impl FileSystem {
    /// Values of `f_type` (Linux uapi/linux/magic.h).
    const TYPES: [(u64, Self); 3] =
        [(0xef53, Self::Ext4), (0x5846_5342, Self::Xfs), (0xf2f5_2010, Self::F2fs)];
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Disk {
    pub file_system: FileSystem,
    /// Name of the disk, as in /dev.
    pub name: String,
    pub btt_uuid: String,
    /// Offset of the file system on the disk.
    pub offset_bytes: u64,
    /// Size of the partition or disk with the file system.
    pub size_bytes: u64,
}

impl Disk {
    /// Finds the disk with the file system of an open folder. `sys` is /sys.
    pub(super) fn of(folder: impl AsFd, path: &Path, sys: &Path) -> Result<Self, DiskError> {
        let read =
            |error: rustix::io::Errno| DiskError::Read { path: path.into(), source: error.into() };
        let kind = fstatfs(&folder).map_err(read)?.f_type.cast_unsigned();
        let known = FileSystem::TYPES.iter().find(|(known, _)| *known == kind);
        let Some((_, file_system)) = known else {
            return Err(DiskError::FileSystem { path: path.into(), kind });
        };
        let number = fstat(&folder).map_err(read)?.st_dev;
        let device = format!("{}:{}", major(number), minor(number));
        Self::find(*file_system, &device, path, sys)
    }

    /// Returns the ranges of the disk that contain `extents`, which are offsets and lengths in the
    /// file system at `path`. An extent after the end of the partition or disk is on another device
    /// of the file system.
    pub(super) fn ranges(
        &self,
        extents: &[[u64; 2]],
        path: &Path,
    ) -> Result<Vec<[u64; 2]>, DiskError> {
        let range = |[offset_bytes, length_bytes]: &[u64; 2]| {
            let end_bytes = offset_bytes.saturating_add(*length_bytes);
            if end_bytes > self.size_bytes {
                let (path, disk) = (path.into(), self.name.clone());
                let size_bytes = self.size_bytes;
                return Err(DiskError::OtherDevice { path, end_bytes, disk, size_bytes });
            }
            Ok([self.offset_bytes.saturating_add(*offset_bytes), *length_bytes])
        };
        extents.iter().map(range).collect()
    }

    fn find(
        file_system: FileSystem,
        device: &str,
        path: &Path,
        sys: &Path,
    ) -> Result<Self, DiskError> {
        let link = sys.join("dev/block").join(device);
        let no_btt = || DiskError::NoBtt { path: path.into(), device: device.to_owned() };
        let device = fs::canonicalize(&link).map_err(|_| no_btt())?;
        let is_partition = device.join("partition").exists();
        let disk = if is_partition { device.parent().unwrap_or(&device) } else { &device };
        let uuid_path = disk.join("device/uuid");
        let btt_uuid = fs::read_to_string(&uuid_path).map_err(|_| no_btt())?.trim().to_owned();
        let start = if is_partition { read_number(&device.join("start"))? } else { 0 };
        let size = read_number(&device.join("size"))?;
        let name = disk.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(Self {
            file_system,
            name: name.unwrap_or_default(),
            btt_uuid,
            offset_bytes: start.saturating_mul(SECTOR_BYTES),
            size_bytes: size.saturating_mul(SECTOR_BYTES),
        })
    }
}

fn read_number(path: &Path) -> Result<u64, DiskError> {
    let error = |source| DiskError::Read { path: path.into(), source };
    let text = fs::read_to_string(path).map_err(error)?;
    text.trim().parse().map_err(|_| error(std::io::ErrorKind::InvalidData.into()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::tree::Tree;

    #[test]
    fn btt_disk_is_found_and_its_partition_too() {
        let tree = Tree::new(&[
            ("devices/btt0.0/uuid", "0a0b\n"),
            ("devices/btt0.0/block/pmem0s/size", "99\n"),
            ("devices/btt0.0/block/pmem0s/pmem0s1/partition", "1\n"),
            ("devices/btt0.0/block/pmem0s/pmem0s1/start", "2048\n"),
            ("devices/btt0.0/block/pmem0s/pmem0s1/size", "80\n"),
            ("devices/virtual/block/dm-0/size", "99\n"),
            ("dev/block/none", ""),
        ]);
        symlink("../..", tree.at("devices/btt0.0/block/pmem0s/device")).unwrap();
        for (number, target) in [
            ("259:0", "btt0.0/block/pmem0s"),
            ("259:1", "btt0.0/block/pmem0s/pmem0s1"),
            ("254:0", "virtual/block/dm-0"),
        ] {
            let link = tree.at(&format!("dev/block/{number}"));
            symlink(format!("../../devices/{target}"), link).unwrap();
        }
        let find = |number| Disk::find(FileSystem::Xfs, number, Path::new("/mnt"), tree.path());
        let disk = |offset_bytes, size_bytes| Disk {
            file_system: FileSystem::Xfs,
            name: "pmem0s".to_owned(),
            btt_uuid: "0a0b".to_owned(),
            offset_bytes,
            size_bytes,
        };
        assert_eq!(find("259:0").unwrap(), disk(0, 99 * 512));
        assert_eq!(find("259:1").unwrap(), disk(1 << 20, 80 * 512));
        for number in ["254:0", "0:39"] {
            let error = find(number).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("/mnt is on {number}, which is not a BTT")),
                "{error}"
            );
        }
    }

    #[test]
    fn extent_after_the_end_of_the_partition_is_refused() {
        let disk = Disk {
            file_system: FileSystem::F2fs,
            name: "pmem0s".to_owned(),
            btt_uuid: "0a0b".to_owned(),
            offset_bytes: 1 << 20,
            size_bytes: 40960,
        };
        let ranges = |extents: &[[u64; 2]]| disk.ranges(extents, Path::new("/mnt"));
        let placed = vec![[1 << 20, 4096], [(1 << 20) + 8192, 32768]];
        assert_eq!(ranges(&[[0, 4096], [8192, 32768]]).unwrap(), placed);
        let error = ranges(&[[0, 4096], [8192, 32769]]).unwrap_err().to_string();
        assert_eq!(
            error,
            "the free space of /mnt ends at byte 40961 of pmem0s, whose size is 40960 bytes, so \
             another device contains a part of it"
        );
        assert!(ranges(&[[u64::MAX, 4096]]).is_err());
    }

    #[test]
    fn file_system_without_known_extents_is_refused() {
        let folder = fs::File::open("/proc").unwrap();
        let error = Disk::of(&folder, Path::new("/proc"), Path::new("/sys")).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("/proc is on a file system of type 0x9fa0, but trim"), "{text}");
        let btrfs = DiskError::FileSystem { path: "/mnt".into(), kind: BTRFS }.to_string();
        assert!(
            btrfs.ends_with("F2FS (Btrfs does not tell where on its disk a file is)"),
            "{btrfs}"
        );
    }
}
