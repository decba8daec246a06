//! Output files of the VMM: consoles, events and the log. The VMM never writes output to a file
//! that contains a pool, a file system, a partition table or a disk image.
//!
//! The content of a file is checked only when the user specifies it for output for the first time.
//! The file is then marked, and its content is not checked again. Otherwise, a guest that writes a
//! file system to its serial port would prevent the next start of its VMM.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pmem_volume::file_mode::PRIVATE_MODE;
use pmem_volume::pool::Holder;
use pmem_volume::pool::lock::{LockKind, try_lock};
use pmem_volume::pool::mark::Mark;
use pmem_volume::pool::ownership::overwritten_content;
use thiserror::Error;

use crate::{end_signals, file_mark};

/// Reason to refuse a file for output.
#[derive(Debug, Error)]
pub enum OutputFileError {
    #[error(
        "{path:?} holds {content}, which output would destroy; name another file or remove this one"
    )]
    HasContent { path: PathBuf, content: &'static str },
    #[error("{path:?} is a block device; output needs a file, a pipe or a terminal")]
    BlockDevice { path: PathBuf },
    #[error("{path:?} is in use by {holder}")]
    InUse { path: PathBuf, holder: Holder },
    #[error("cannot determine the content of {path:?}")]
    Io {
        path: PathBuf,
        /// Reason of the operating system.
        #[source]
        source: io::Error,
    },
}

impl From<OutputFileError> for io::Error {
    fn from(error: OutputFileError) -> Self {
        Self::other(error)
    }
}

/// Opens a file to append to it, or creates it. Waits until a FIFO has a reader.
///
/// A signal that ends the VMM does so in that wait, although its sockets then remain.
pub(crate) fn open_to_append(path: &Path) -> io::Result<File> {
    let is_fifo = fs::metadata(path).is_ok_and(|file| file.file_type().is_fifo());
    let open = || OpenOptions::new().create(true).append(true).mode(PRIVATE_MODE).open(path);
    if is_fifo { end_signals::unblocked(open) } else { open() }
}

/// Locks an output file, so that it cannot be used as a disk or pool while it is open. Pipes and
/// terminals are not locked.
pub(crate) fn lock(file: &File, path: &Path) -> Result<(), OutputFileError> {
    let failed = |source| OutputFileError::Io { path: path.to_owned(), source };
    if !file.metadata().map_err(failed)?.is_file() {
        return Ok(());
    }
    // The lock is shared, because a serial port and a console may write to the same file.
    match try_lock(file, LockKind::Shared).map_err(failed)? {
        Ok(()) => Ok(()),
        Err(holder) => Err(OutputFileError::InUse { path: path.to_owned(), holder }),
    }
}

/// Checks that an open file may be used for output, locks it and marks it. Pipes and terminals are
/// always accepted.
pub(crate) fn admit(file: &File, path: &Path) -> Result<(), OutputFileError> {
    let failed = |source| OutputFileError::Io { path: path.to_owned(), source };
    let kind = file.metadata().map_err(failed)?.file_type();
    if kind.is_block_device() {
        return Err(OutputFileError::BlockDevice { path: path.to_owned() });
    }
    if !kind.is_file() {
        return Ok(());
    }
    lock(file, path)?;
    if let Some(content) = overwritten_content(Mark::Output, file, path).map_err(failed)? {
        return Err(OutputFileError::HasContent { path: path.to_owned(), content });
    }
    file_mark::set(Mark::Output, file, path);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn append(path: &Path) -> File {
        File::options().append(true).create(true).open(path).unwrap()
    }

    #[test]
    fn content_is_checked_only_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial");
        let mut disk = vec![0; 1 << 20];
        disk[0x438..0x43a].copy_from_slice(b"\x53\xef");
        fs::write(&path, &disk).unwrap();
        let error = admit(&append(&path), &path).unwrap_err().to_string();
        assert!(error.contains("holds an ext2, ext3 or ext4 file system"), "{error}");
        fs::remove_file(&path).unwrap();
        admit(&append(&path), &path).unwrap();
        // A guest may write the same content to its serial port, and its next VMM still starts.
        fs::write(&path, &disk).unwrap();
        admit(&append(&path), &path).unwrap();
        fs::write(&path, "[    0.000000] Linux version").unwrap();
        admit(&append(&path), &path).unwrap();
    }

    #[test]
    fn disk_without_known_content_takes_no_output() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        fs::write(&path, [7; 4096]).unwrap();
        Mark::Disk.set(&append(&path)).unwrap();
        let error = admit(&append(&path), &path).unwrap_err().to_string();
        assert!(error.contains("holds the data of a guest's disk"), "{error}");
        fs::write(&path, "").unwrap();
        admit(&append(&path), &path).unwrap();
        assert_eq!(Mark::of(&append(&path)).unwrap(), Some(Mark::Output));
    }

    #[test]
    fn disks_and_pools_in_use_take_no_output() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        fs::write(&path, [1; 4096]).unwrap();
        let disk = pmem_volume::pool::ownership::claim(&path, true, 0).unwrap();
        let error = admit(&append(&path), &path).unwrap_err().to_string();
        assert!(error.contains(&format!("is in use by process {}", std::process::id())), "{error}");
        drop(disk);
        let [one, two] = [(); 2].map(|()| append(&path));
        admit(&one, &path).unwrap();
        admit(&two, &path).unwrap();
        assert!(pmem_volume::pool::ownership::claim(&path, true, 0).is_err());
        let null = File::options().write(true).open("/dev/null").unwrap();
        admit(&null, Path::new("/dev/null")).unwrap();
    }
}
