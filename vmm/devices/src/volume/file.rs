//! Files and devices of the host for `--pmem`. The guest accesses their bytes directly, without a
//! pool.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use foreshore_types::UNIT_BYTES;
use foreshore_types::size::Size;
use pmem_volume::Durability;
use pmem_volume::file_mode::PRIVATE_MODE;
use pmem_volume::media::{self, FileMedia, Media, MediaError};
use pmem_volume::pool::Holder;
use pmem_volume::pool::ownership::{ClaimError, claim};
use thiserror::Error;

use super::pmem_config::PmemConfig;
use crate::guest_file::{self, GuestAccess, GuestFileError};
use crate::memory::backing::Access;
use crate::memory::lost_memory::cut_to_bytes;
use crate::persist::{Persist, PersistError};

#[derive(Debug, Error)]
pub enum PmemFileError {
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot determine or set its size")]
    Length(#[source] io::Error),
    #[error("cannot lock it")]
    Lock(#[source] io::Error),
    #[error("it is in use by {holder}")]
    InUse { holder: Holder },
    #[error("it is in use: {by}")]
    DeviceInUse { by: String },
    #[error(transparent)]
    Pool(#[from] GuestFileError),
    /// A new file has no existing size to use.
    #[error("it is a directory, in which a new file is created; set the file's size with size=")]
    DirectoryWithoutSize,
    #[error(
        "it is a directory, in which an empty file is created; with discard_writes=on the guest could only read zeros"
    )]
    DirectoryWithoutWrites,
    /// The guest would access bytes beyond the end of the file.
    #[error("its size {} is below the {} that size= requests", Size(*file_bytes), Size(*wanted_bytes))]
    Short {
        file_bytes: u64,
        /// Requested size.
        wanted_bytes: u64,
    },
    #[error(
        "its size {} is not a multiple of {}; extend it, or pass a smaller part with size=",
        Size(*file_bytes), Size(UNIT_BYTES)
    )]
    Uneven { file_bytes: u64 },
    /// Some files cannot be mapped, for example those in /proc.
    #[error("cannot map it")]
    Media(#[from] MediaError),
}

/// Open file. It is locked, so that no other VM and no pool uses it.
pub struct PmemFile {
    contents: Contents,
    len_bytes: u64,
    has_name: bool,
    /// Set after a failed flush. All later flushes then fail, because the content of the disk is
    /// unknown.
    failed: Arc<AtomicBool>,
}

/// Destination of the guest's writes.
enum Contents {
    /// Writes go to the file.
    Shared(FileMedia),
    /// Memory of this VM. Writes are lost when the VM ends. The file is open for reading only.
    Private(File),
}

impl PmemFile {
    /// Opens the file of a validated `config`. On an error, no existing data was changed.
    pub fn open(config: &PmemConfig) -> Result<Self, PmemFileError> {
        let is_directory = config.file.is_dir();
        let file = match (is_directory, config.size) {
            (true, None) => return Err(PmemFileError::DirectoryWithoutSize),
            (true, Some(_)) if config.discard_writes => {
                return Err(PmemFileError::DirectoryWithoutWrites);
            }
            (true, Some(bytes)) => new_file(&config.file, bytes)?,
            (false, _) => existing_file(&config.file, !config.discard_writes)?,
        };
        let len_bytes = shown_bytes(&file, config.size)?;
        if !is_directory {
            let access =
                GuestAccess { is_writable: !config.discard_writes, is_declared_raw: false };
            guest_file::check(&file, &config.file, access)?;
        }
        let contents = match config.discard_writes {
            true => Contents::Private(file),
            false => {
                let media = FileMedia::new(file, len_bytes, true)?;
                // A flush may have failed in an earlier VM. The guest's file system check must then
                // read the disk instead of the page cache.
                media.forget_clean_pages();
                if !is_directory {
                    guest_file::mark(media.file(), &config.file);
                }
                Contents::Shared(media)
            }
        };
        Ok(Self { contents, len_bytes, has_name: !is_directory, failed: Arc::default() })
    }

    /// File to map into the guest.
    pub fn file(&self) -> BorrowedFd<'_> {
        match &self.contents {
            Contents::Shared(media) => media.file().as_fd(),
            Contents::Private(file) => file.as_fd(),
        }
    }

    /// Number of bytes that the guest sees, from the start of the file.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns true if a flush has failed or the file was truncated, and the next start should open
    /// the file again. Returns false for an unnamed file, which would be lost.
    pub fn must_be_reopened(&self) -> bool {
        let file = match &self.contents {
            Contents::Shared(media) => media.file(),
            Contents::Private(file) => file,
        };
        let is_cut = cut_to_bytes(file, self.len_bytes).is_some();
        self.has_name && (is_cut || self.failed.load(Ordering::Relaxed))
    }

    /// Flag that is set after a failed flush. Holding the flag does not keep the file open.
    pub fn failure(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.failed)
    }

    /// Access with which to map the file into the guest.
    pub fn access(&self) -> Access {
        match self.durability() {
            None => Access::ReadWritePrivate,
            Some(Durability::DaxSync) => Access::ReadWriteSync,
            Some(Durability::PageCache | Durability::Volatile) => Access::ReadWrite,
        }
    }

    /// Durability of a completed flush. `None` if writes are discarded.
    pub fn durability(&self) -> Option<Durability> {
        match &self.contents {
            Contents::Shared(media) => Some(media.durability()),
            Contents::Private(_) => None,
        }
    }
}

impl Persist for PmemFile {
    /// As for a volume, the guest writes back its caches before the request (virtio 1.3, 5.19.6.2).
    fn persist(&self) -> Result<(), PersistError> {
        let Contents::Shared(media) = &self.contents else { return Ok(()) };
        let result = match media.durability() {
            Durability::Volatile => Ok(()),
            Durability::DaxSync => media.persist(&[]),
            Durability::PageCache => media.persist_range(0..self.len_bytes),
        };
        // The text includes all causes, because the error is logged in one line.
        result.map_err(|err| {
            self.failed.store(true, Ordering::Relaxed);
            PersistError::Backing(foreshore_types::chain(&err).into())
        })
    }
}

/// Creates an unnamed file, which disappears when it is closed and unmapped.
fn new_file(directory: &Path, bytes: u64) -> Result<File, PmemFileError> {
    let mut options = File::options();
    let file = options
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .mode(PRIVATE_MODE)
        .open(directory);
    let file = file.map_err(|source| PmemFileError::Open { path: directory.to_owned(), source })?;
    file.set_len(bytes).map_err(PmemFileError::Length)?;
    Ok(file)
}

/// Opens and locks a file. Pools use the same kind of lock, so a VM and a pool cannot use one file
/// at the same time.
fn existing_file(path: &Path, writable: bool) -> Result<File, PmemFileError> {
    // Without O_NONBLOCK, opening a FIFO would wait for its other end.
    claim(path, writable, libc::O_NONBLOCK).map_err(|error| match error {
        ClaimError::Open(source) => PmemFileError::Open { path: path.to_owned(), source },
        ClaimError::Lock(source) => PmemFileError::Lock(source),
        ClaimError::InUse { holder } => PmemFileError::InUse { holder },
        ClaimError::DeviceInUse { by } => PmemFileError::DeviceInUse { by },
    })
}

/// Number of bytes that the guest can access.
fn shown_bytes(file: &File, wanted: Option<u64>) -> Result<u64, PmemFileError> {
    let file_bytes = media::len_bytes(file).map_err(PmemFileError::Length)?;
    match wanted {
        Some(wanted_bytes) if wanted_bytes > file_bytes => {
            Err(PmemFileError::Short { file_bytes, wanted_bytes })
        }
        Some(wanted_bytes) => Ok(wanted_bytes),
        None if file_bytes == 0 || !file_bytes.is_multiple_of(UNIT_BYTES) => {
            Err(PmemFileError::Uneven { file_bytes })
        }
        None => Ok(file_bytes),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use pmem_volume::Pool;
    use pmem_volume::pool::mark::Mark;
    use tempfile::TempDir;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn folder() -> TempDir {
        TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap()
    }

    fn config(path: &Path, options: &str) -> PmemConfig {
        PmemConfig::parse(&format!("file={}{options}", path.display())).unwrap()
    }

    fn file(folder: &TempDir, len_bytes: u64) -> PathBuf {
        let path = folder.path().join("file");
        File::create(&path).unwrap().set_len(len_bytes).unwrap();
        path
    }

    fn error(config: &PmemConfig) -> String {
        PmemFile::open(config).err().expect("it was opened").to_string()
    }

    #[test]
    fn file_is_shown_completely_or_in_part() {
        let folder = folder();
        let path = file(&folder, 8 * MIB);
        assert_eq!(PmemFile::open(&config(&path, "")).unwrap().len_bytes(), 8 * MIB);
        assert_eq!(PmemFile::open(&config(&path, ",size=4M")).unwrap().len_bytes(), 4 * MIB);
        assert_eq!(
            error(&config(&path, ",size=10M")),
            "its size 8 MiB is below the 10 MiB that size= requests"
        );
        let path = file(&folder, 3 * MIB);
        assert!(error(&config(&path, "")).starts_with("its size 3 MiB is not a multiple of 2 MiB"));
        assert_eq!(PmemFile::open(&config(&path, ",size=2M")).unwrap().len_bytes(), 2 * MIB);
        let path = file(&folder, 0);
        assert!(error(&config(&path, "")).starts_with("its size 0 "));
        assert!(error(&config(&folder.path().join("none"), "")).contains("cannot open"));
        assert!(error(&config(Path::new("/dev/null"), ",size=2M")).contains("cannot determine"));
    }

    #[test]
    fn directory_gets_an_unnamed_file() {
        let folder = folder();
        assert!(error(&config(folder.path(), "")).contains("with size="));
        assert!(
            error(&config(folder.path(), ",size=4M,discard_writes=on")).contains("only read zeros")
        );
        let pmem = PmemFile::open(&config(folder.path(), ",size=4M")).unwrap();
        assert_eq!(pmem.len_bytes(), 4 * MIB);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        // Each VM uses its own file.
        PmemFile::open(&config(folder.path(), ",size=4M")).unwrap();
    }

    #[test]
    fn file_has_one_writer_or_many_readers() {
        let folder = folder();
        let path = file(&folder, 4 * MIB);
        let writer = PmemFile::open(&config(&path, "")).unwrap();
        for options in ["", ",discard_writes=on"] {
            let message = error(&config(&path, options));
            assert!(message.contains(&format!("process {}", std::process::id())), "{message}");
        }
        drop(writer);
        let readers =
            [(); 2].map(|()| PmemFile::open(&config(&path, ",discard_writes=on")).unwrap());
        assert!(error(&config(&path, "")).contains("in use"));
        drop(readers);
        PmemFile::open(&config(&path, "")).unwrap();
    }

    #[test]
    fn discard_writes_needs_no_write_permission() {
        let folder = folder();
        let path = file(&folder, 4 * MIB);
        let pmem = PmemFile::open(&config(&path, ",discard_writes=on")).unwrap();
        assert_eq!((pmem.access(), pmem.durability()), (Access::ReadWritePrivate, None));
        // SAFETY: F_GETFL only reads flags.
        let flags =
            unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&pmem.file()), libc::F_GETFL) };
        assert_eq!(flags & libc::O_ACCMODE, libc::O_RDONLY);
        pmem.persist().unwrap();
    }

    #[test]
    fn pool_is_refused_as_a_file() {
        let folder = folder();
        let path = folder.path().join("pool");
        let pool = Pool::create(&path, 64 * MIB, 16 * MIB).unwrap();
        assert!(error(&config(&path, "")).contains("in use"));
        drop(pool);
        assert!(error(&config(&path, "")).contains("--pm-volume pool="));
        // A pool whose superblocks are lost is refused as well, because it can be repaired.
        let mut bytes = fs::read(&path).unwrap();
        bytes[..4096].fill(0);
        bytes[(2 << 20) - 4096..2 << 20].fill(0);
        fs::write(&path, bytes).unwrap();
        assert!(error(&config(&path, "")).contains("--pm-volume pool="));
    }

    #[test]
    fn file_is_marked_once_a_guest_may_write_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(&folder, 16 * MIB);
        let pool = folder.path().join("pool");
        drop(Pool::create(&pool, 16 * MIB, 0).unwrap());
        let mark = || Mark::of(&File::open(&path).unwrap()).unwrap();
        drop(PmemFile::open(&config(&path, ",discard_writes=on")).unwrap());
        assert_eq!(mark(), None);
        drop(PmemFile::open(&config(&path, "")).unwrap());
        assert_eq!(mark(), Some(Mark::Disk));
        // After the guest has written a pool to its file, the next start succeeds.
        fs::write(&path, fs::read(&pool).unwrap()).unwrap();
        PmemFile::open(&config(&path, "")).unwrap();
    }

    /// Number of pages of a file in the page cache.
    fn cached_pages(path: &Path) -> usize {
        let file = File::open(path).unwrap();
        let len = file.metadata().unwrap().len() as usize;
        let mut resident = vec![0u8; len.div_ceil(4096)];
        // SAFETY: the mapping is new and of the test's own file. Only mincore() uses the mapping,
        // with a byte for each page, before it is unmapped.
        unsafe {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            let at =
                libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mincore(at, len, resident.as_mut_ptr()), 0);
            libc::munmap(at, len);
        }
        resident.iter().filter(|byte| **byte & 1 == 1).count()
    }

    #[test]
    fn open_drops_clean_pages_that_the_disk_may_lack() {
        let folder = tempfile::tempdir_in(".").unwrap();
        let path = file(&folder, 4 * MIB);
        fs::write(&path, vec![0x5a; 4 << 20]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        assert_eq!(cached_pages(&path), 1024);
        let reader = PmemFile::open(&config(&path, ",discard_writes=on")).unwrap();
        assert_eq!(cached_pages(&path), 1024, "a read-only file keeps its cached pages");
        drop(reader);
        let pmem = PmemFile::open(&config(&path, "")).unwrap();
        if pmem.durability() == Some(Durability::PageCache) {
            assert_eq!(cached_pages(&path), 0);
        }
    }

    #[test]
    fn fifo_is_refused_without_waiting() {
        let folder = folder();
        let path = folder.path().join("fifo");
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the name is a valid C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for options in [",size=2M", ",size=2M,discard_writes=on"] {
            assert!(error(&config(&path, options)).contains("cannot determine"));
        }
    }

    #[test]
    fn flush_of_a_truncated_file_fails() {
        let folder = tempfile::tempdir_in(".").unwrap();
        let path = file(&folder, 4 * MIB);
        let pmem = PmemFile::open(&config(&path, "")).unwrap();
        if pmem.durability() != Some(Durability::PageCache) {
            return;
        }
        assert_eq!(pmem.access(), Access::ReadWrite);
        pmem.persist().unwrap();
        let failure = pmem.failure();
        assert!(!failure.load(Ordering::Relaxed));
        File::options().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
        let error = pmem.persist().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("truncated to 0x200000 bytes"), "{text}");
        assert!(failure.load(Ordering::Relaxed));
    }
}
