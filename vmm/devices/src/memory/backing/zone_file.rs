//! File of `--memory-zone file=`, which provides the boot memory of a zone.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use foreshore_types::size::Size;
use pmem_volume::file_mode::PRIVATE_MODE;
use pmem_volume::pool::mark::Mark;
use pmem_volume::pool::ownership::overwritten_content;
use rustix::fs::{SeekFrom, fstatfs, seek};
use rustix::io::Errno;
use thiserror::Error;
use tracing::warn;

use super::Access;
use super::source::punch_hole;
use crate::file_mark;

#[derive(Debug, Error)]
pub enum ZoneFileError {
    #[error("cannot open it")]
    Open(#[source] io::Error),
    #[error("it is {file_kind}, not a file or a directory")]
    NotAFile { file_kind: &'static str },
    #[error("it is locked by another process")]
    InUse(#[source] io::Error),
    #[error("its size {} is below the zone's size {}", Size(*file_bytes), Size(*size_bytes))]
    TooShort { file_bytes: u64, size_bytes: u64 },
    #[error(
        "it has data at offset {at}, but guest memory starts as zeros; name an empty file, or let shared=on discard the data"
    )]
    HasData {
        /// Offset in bytes.
        at: u64,
    },
    #[error(
        "it holds {content}, which guest memory would overwrite; name another file or remove this one"
    )]
    HasContent { content: &'static str },
    #[error("its file system cannot punch a hole (fallocate)")]
    Empty(#[source] io::Error),
}

/// Open file. The bytes that the zone uses read as zeros.
#[derive(Debug)]
pub struct ZoneFile {
    file: Arc<File>,
    access: Access,
    huge_page_bytes: Option<u64>,
}

impl ZoneFile {
    /// Opens `path` for a zone of `size_bytes`. If `path` is a directory, creates an unnamed file,
    /// which disappears with its last mapping. It has no other users, so it need not be mapped
    /// privately. A `shared` file is emptied, and the guest writes to it. Other files are only
    /// read, and the guest's writes remain in memory.
    pub fn open(path: &Path, size_bytes: u64, shared: bool) -> Result<Self, ZoneFileError> {
        let kind = path.metadata().map_err(ZoneFileError::Open)?.file_type();
        let file_kind = [
            (kind.is_block_device() || kind.is_char_device(), "a device"),
            (kind.is_fifo(), "a pipe"),
            (kind.is_socket(), "a socket"),
        ];
        if let Some((_, file_kind)) = file_kind.into_iter().find(|(is_so, _)| *is_so) {
            return Err(ZoneFileError::NotAFile { file_kind });
        }
        let mut options = OpenOptions::new();
        options.read(true).write(shared || kind.is_dir());
        if kind.is_dir() {
            options.custom_flags(libc::O_TMPFILE).mode(PRIVATE_MODE);
        } else {
            // The file may have been replaced since the check, for example by a pipe. Opening a
            // pipe must not block.
            options.custom_flags(libc::O_NONBLOCK);
        }
        let file = options.open(path).map_err(ZoneFileError::Open)?;
        if !file.metadata().map_err(ZoneFileError::Open)?.is_file() {
            return Err(ZoneFileError::NotAFile { file_kind: "another type of file now" });
        }
        let huge_page_bytes = huge_page_bytes(&file).map_err(ZoneFileError::Open)?;
        if kind.is_dir() {
            // hugetlbfs supports only multiples of its page size. The caller checks the length
            // against the zone and the page size.
            let len = size_bytes.next_multiple_of(huge_page_bytes.unwrap_or(1));
            file.set_len(len).map_err(ZoneFileError::Open)?;
        } else {
            Self::check(&file, path, size_bytes, shared)?;
        }
        let access =
            if shared || kind.is_dir() { Access::ReadWrite } else { Access::ReadWritePrivate };
        Ok(Self { file: Arc::new(file), access, huge_page_bytes })
    }

    fn check(file: &File, path: &Path, size_bytes: u64, shared: bool) -> Result<(), ZoneFileError> {
        let file_bytes = file.metadata().map_err(ZoneFileError::Open)?.len();
        if file_bytes < size_bytes {
            return Err(ZoneFileError::TooShort { file_bytes, size_bytes });
        }
        if !shared {
            return match first_data(file)
                .map_err(ZoneFileError::Open)?
                .filter(|at| *at < size_bytes)
            {
                Some(at) => Err(ZoneFileError::HasData { at }),
                None => Ok(()),
            };
        }
        // The lock is released when the last mapping of the file is removed, at the end of the
        // machine.
        file.try_lock().map_err(|err| ZoneFileError::InUse(err.into()))?;
        // The contents of an earlier guest's memory may be discarded. Files on hugetlbfs only serve
        // as memory and need no mark.
        if huge_page_bytes(file).map_err(ZoneFileError::Open)?.is_none() {
            let content =
                overwritten_content(Mark::Memory, file, path).map_err(ZoneFileError::Open)?;
            if let Some(content) = content {
                return Err(ZoneFileError::HasContent { content });
            }
            file_mark::set(Mark::Memory, file, path);
        }
        if let Some(at) =
            first_data(file).map_err(ZoneFileError::Open)?.filter(|at| *at < size_bytes)
        {
            warn!(%at, "--memory-zone file=: data in the file is discarded, because guest memory starts as zeros");
        }
        punch_hole(file, 0, size_bytes).map_err(ZoneFileError::Empty)
    }

    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Access rights of the mapping.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Page size of the file, if it is on hugetlbfs.
    pub fn huge_page_bytes(&self) -> Option<u64> {
        self.huge_page_bytes
    }
}

/// Offset of the first data in a file. `None` if the file has only holes.
fn first_data(file: &File) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(0)) {
        Ok(offset) => Ok(Some(offset)),
        // The file has no data.
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn huge_page_bytes(file: &File) -> io::Result<Option<u64>> {
    let system = fstatfs(file)?;
    let is_huge = system.f_type == libc::HUGETLBFS_MAGIC;
    Ok(is_huge.then_some(system.f_bsize as u64))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    const SIZE: u64 = 1 << 20;

    fn error(path: &Path, shared: bool) -> String {
        ZoneFile::open(path, SIZE, shared).unwrap_err().to_string()
    }

    #[test]
    fn directory_gets_an_unnamed_file() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        for shared in [false, true] {
            let zone = ZoneFile::open(folder.path(), SIZE, shared).unwrap();
            assert_eq!(
                (zone.file().metadata().unwrap().len(), zone.access()),
                (SIZE, Access::ReadWrite)
            );
            assert_eq!(zone.huge_page_bytes(), None);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn shared_file_is_zeroed_and_locked_for_one_vm() {
        let mut file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        file.write_all(&[7; 4096]).unwrap();
        assert!(error(file.path(), true).contains("its size 4 KiB is below the zone's size 1 MiB"));
        file.as_file().set_len(2 * SIZE).unwrap();
        let zone = ZoneFile::open(file.path(), SIZE, true).unwrap();
        assert_eq!(zone.access(), Access::ReadWrite);
        let mut bytes = [0xff; 4096];
        File::open(file.path()).unwrap().read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, [0; 4096]);
        assert!(error(file.path(), true).contains("locked"));
        drop(zone);
        ZoneFile::open(file.path(), SIZE, true).unwrap();
    }

    #[test]
    fn only_files_without_foreign_content_are_emptied() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&path, 16 << 20, 0).unwrap());
        let before = std::fs::read(&path).unwrap();
        assert!(
            error(&path, true).starts_with("it holds a pool, which guest memory would overwrite")
        );
        assert!(std::fs::read(&path).unwrap() == before);
        let memory = folder.path().join("memory");
        File::create(&memory).unwrap().set_len(SIZE).unwrap();
        drop(ZoneFile::open(&memory, SIZE, true).unwrap());
        // Memory of a guest that contained a pool.
        std::fs::write(&memory, &before).unwrap();
        ZoneFile::open(&memory, SIZE, true).unwrap();
        assert!(std::fs::read(&memory).unwrap()[..SIZE as usize].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn disk_without_known_content_is_not_emptied() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, vec![7; SIZE as usize]).unwrap();
        for (mark, content) in
            [(Mark::Disk, "the data of a guest's disk"), (Mark::Pool, "the data of a pool")]
        {
            mark.set(&File::open(&path).unwrap()).unwrap();
            assert!(error(&path, true).starts_with(&format!("it holds {content}")));
            assert!(std::fs::read(&path).unwrap() == vec![7; SIZE as usize]);
        }
    }

    #[test]
    fn private_file_is_not_changed() {
        let mut file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        file.as_file().set_len(SIZE).unwrap();
        let zone = ZoneFile::open(file.path(), SIZE, false).unwrap();
        assert_eq!(zone.access(), Access::ReadWritePrivate);
        file.write_all(b"data").unwrap();
        assert!(error(file.path(), false).starts_with("it has data at offset 0"));
    }

    #[test]
    fn device_or_pipe_is_refused_by_name() {
        assert!(error(Path::new("/dev/null"), true).contains("it is a device"));
        assert!(error(Path::new("/nowhere/at/all"), true).contains("cannot open it"));
    }
}
