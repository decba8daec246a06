//! Kind of file or device that contains the media. The kind determines how the media is read,
//! erased and enlarged. It also determines the events after which flushed data is still present.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{FsWord, fstatfs, major, minor};
use thiserror::Error;

use crate::CHUNK_BYTES;

/// Kind of file or device that contains the media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MediaKind {
    /// File on tmpfs, ramfs or hugetlbfs. The file is sparse, and is lost when the host shuts down.
    Memory,
    /// File on any other file system, with or without DAX.
    Disk,
    /// Block device, accessed through its page cache.
    BlockDevice {
        /// True for a RAM disk.
        is_volatile: bool,
    },
    /// devdax character device. It can be mapped, but does not support read(), fallocate() or
    /// msync().
    DevDax {
        /// True unless the device belongs to an NVDIMM. Volatile devices are memory reserved by
        /// firmware, CXL regions of RAM, and virtio-pmem.
        is_volatile: bool,
    },
}

/// Reason why a file or device cannot contain media.
#[derive(Debug, Error)]
pub(crate) enum MediaKindError {
    #[error("a character device of subsystem `{subsystem}` is not a devdax device")]
    NotDax { subsystem: String },
    #[error(
        "the alignment {align_bytes} of the devdax device exceeds the {CHUNK_BYTES} bytes of a chunk"
    )]
    Align { align_bytes: u64 },
    #[error("neither a file nor a device")]
    Other,
    #[error("cannot inspect {inspected}")]
    Io {
        inspected: String,
        #[source]
        source: io::Error,
    },
}

impl MediaKind {
    /// Determines the kind of an open file. Its type is checked first, because the device node
    /// itself is in a tmpfs.
    pub(crate) fn of(file: &File) -> Result<Self, MediaKindError> {
        let metadata = file.metadata().map_err(|e| inspect_error("the file or device", e))?;
        let kind = metadata.file_type();
        if kind.is_file() {
            let in_memory = is_in_memory(file).map_err(|e| inspect_error("the file system", e))?;
            Ok(if in_memory { MediaKind::Memory } else { MediaKind::Disk })
        } else if kind.is_block_device() {
            let is_volatile = is_ram_disk(&sysfs_of("block", metadata.rdev()));
            Ok(MediaKind::BlockDevice { is_volatile })
        } else if kind.is_char_device() {
            Self::of_character_device(&sysfs_of("char", metadata.rdev()))
        } else {
            Err(MediaKindError::Other)
        }
    }

    /// Determines the kind of a character device. `entry` is its directory in sysfs.
    pub(crate) fn of_character_device(entry: &Path) -> Result<Self, MediaKindError> {
        let link = entry.join("subsystem");
        let subsystem = fs::read_link(&link).map_err(|e| inspect_error(link.display(), e))?;
        let name = subsystem.file_name().unwrap_or_default().to_string_lossy();
        if name != "dax" {
            return Err(MediaKindError::NotDax { subsystem: name.into_owned() });
        }
        let align_bytes = attribute(entry, "align")?;
        if align_bytes > CHUNK_BYTES {
            return Err(MediaKindError::Align { align_bytes });
        }
        let device = fs::canonicalize(entry).map_err(|e| inspect_error(entry.display(), e))?;
        Ok(MediaKind::DevDax { is_volatile: !is_on_nvdimm(&device) })
    }

    /// Returns true for a device. Writing cannot change the length of a device.
    pub(crate) fn is_device(self) -> bool {
        matches!(self, MediaKind::BlockDevice { .. } | MediaKind::DevDax { .. })
    }

    /// Returns true if the content is lost when the host shuts down.
    pub(crate) fn is_volatile(self) -> bool {
        match self {
            MediaKind::Memory => true,
            MediaKind::Disk => false,
            MediaKind::BlockDevice { is_volatile } | MediaKind::DevDax { is_volatile } => {
                is_volatile
            }
        }
    }

    /// Length of the file or device.
    pub(crate) fn len_bytes(self, file: &File) -> io::Result<u64> {
        match self {
            MediaKind::Memory | MediaKind::Disk => Ok(file.metadata()?.len()),
            // stat() returns a size of 0 for a device. The file's position is not used otherwise.
            MediaKind::BlockDevice { .. } => {
                let mut device = file;
                device.seek(SeekFrom::End(0))
            }
            MediaKind::DevDax { .. } => {
                let entry = sysfs_of("char", file.metadata()?.rdev());
                attribute(&entry, "size").map_err(io::Error::other)
            }
        }
    }
}

/// Returns the length of a file or device that can contain media.
pub fn len_bytes(file: &File) -> io::Result<u64> {
    MediaKind::of(file).map_err(io::Error::other)?.len_bytes(file)
}

fn inspect_error(inspected: impl Display, source: io::Error) -> MediaKindError {
    MediaKindError::Io { inspected: inspected.to_string(), source }
}

/// Returns the directory of a device in sysfs. `kind` is `block` or `char`.
pub(crate) fn sysfs_of(kind: &str, device: u64) -> PathBuf {
    format!("/sys/dev/{kind}/{}:{}", major(device), minor(device)).into()
}

fn attribute(entry: &Path, name: &str) -> Result<u64, MediaKindError> {
    let path = entry.join(name);
    let text = fs::read_to_string(&path).map_err(|e| inspect_error(path.display(), e))?;
    u64::from_str(text.trim()).map_err(|e| inspect_error(path.display(), io::Error::other(e)))
}

/// Recognizes RAM disks of Linux (brd, zram) by their names. Without sysfs, the device is assumed
/// to be a disk.
fn is_ram_disk(entry: &Path) -> bool {
    let Ok(device) = fs::canonicalize(entry) else { return false };
    let name = device.file_name().unwrap_or_default().to_string_lossy();
    ["ram", "zram"].iter().any(|kind| {
        name.strip_prefix(kind)
            .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// Returns true if a devdax device belongs to an NVDIMM (Linux
/// Documentation/driver-api/nvdimm/nvdimm.rst). Other drivers, such as dax_hmem and dax_cxl, create
/// devdax devices of volatile memory. virtio-pmem also has an nvdimm bus below its virtio device,
/// but the page cache of the host backs it. Its stores become durable only after a flush request
/// (virtio 1.3, 5.19.6), which a mapping of devdax cannot issue.
fn is_on_nvdimm(device: &Path) -> bool {
    let has = |prefix: &[u8]| {
        device.components().any(|part| part.as_os_str().as_encoded_bytes().starts_with(prefix))
    };
    has(b"ndbus") && !has(b"virtio")
}

/// Returns true if the file system of a regular file keeps its data in memory.
fn is_in_memory(file: &File) -> io::Result<bool> {
    const RAMFS_MAGIC: FsWord = 0x8584_58f6;
    let magic = fstatfs(file)?.f_type;
    Ok([libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC, RAMFS_MAGIC].contains(&magic))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Creates a copy of a character device's sysfs directory, with `attributes`.
    fn sysfs(
        device: &str,
        subsystem: &str,
        attributes: &[(&str, &str)],
    ) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        let entry = folder.path().join(device);
        fs::create_dir_all(&entry).unwrap();
        symlink(folder.path().join("bus").join(subsystem), entry.join("subsystem")).unwrap();
        for (name, value) in attributes {
            fs::write(entry.join(name), format!("{value}\n")).unwrap();
        }
        (folder, entry)
    }

    #[test]
    fn devdax_of_an_nvdimm_is_persistent_and_other_devdax_is_not() {
        let align = [("align", "2097152")];
        let (_folder, entry) =
            sysfs("platform/e820_pmem/ndbus0/region0/dax0.1/dax0.0", "dax", &align);
        assert_eq!(
            MediaKind::of_character_device(&entry).unwrap(),
            MediaKind::DevDax { is_volatile: false }
        );
        let virtio = "pci0000:00/0000:00:05.0/virtio2/ndbus0/region0/dax0.1/dax0.0";
        for other in ["platform/hmem.0/dax0.0", virtio] {
            let (_folder, entry) = sysfs(other, "dax", &align);
            let media_kind = MediaKind::of_character_device(&entry).unwrap();
            assert_eq!(media_kind, MediaKind::DevDax { is_volatile: true }, "{other}");
        }
    }

    #[test]
    fn devdax_with_larger_pages_than_chunks_is_refused() {
        let (_folder, entry) = sysfs("ndbus0/dax0.0", "dax", &[("align", "1073741824")]);
        let error = MediaKind::of_character_device(&entry).unwrap_err();
        assert!(matches!(error, MediaKindError::Align { align_bytes: 0x4000_0000 }), "{error}");
        let (_folder, entry) = sysfs("ndbus0/dax0.0", "dax", &[("align", "4096")]);
        assert!(MediaKind::of_character_device(&entry).is_ok());
    }

    #[test]
    fn other_character_devices_are_named() {
        let error = MediaKind::of(&File::open("/dev/null").unwrap()).unwrap_err();
        assert!(
            matches!(&error, MediaKindError::NotDax { subsystem } if subsystem == "mem"),
            "{error}"
        );
    }

    #[test]
    fn kind_of_a_file_takes_precedence_over_its_file_system() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(12345).unwrap();
        let media_kind = MediaKind::of(&file).unwrap();
        assert_eq!((media_kind, media_kind.len_bytes(&file).unwrap()), (MediaKind::Memory, 12345));
        assert!(matches!(
            MediaKind::of(&File::open("/dev/shm").unwrap()),
            Err(MediaKindError::Other)
        ));
    }

    #[test]
    fn ram_disks_are_recognized_by_their_names() {
        let folder = tempfile::TempDir::new_in("/dev/shm").unwrap();
        for (name, expected) in [("ram0", true), ("zram12", true), ("sda", false), ("ramp", false)]
        {
            let entry = folder.path().join(name);
            fs::create_dir(&entry).unwrap();
            assert_eq!(is_ram_disk(&entry), expected, "{name}");
        }
        assert!(!is_ram_disk(&folder.path().join("nothing")));
    }
}
