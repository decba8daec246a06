//! A pool in a temporary file, for tests of those who use one: it checks that they keep to the
//! contract.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{
    CHUNK_BYTES, Durability, Extent, PmPool, PoolError, PoolInfo, PoolVolume, StoredVolume,
};

#[derive(Debug)]
pub(crate) struct FakePool {
    file: File,
    /// By chunk: whether it is memory.
    used: Mutex<Vec<bool>>,
    erased_bytes: AtomicU64,
    /// Makes [`PmPool::free_memory`] fail.
    pub(crate) fail_free: AtomicBool,
}

impl FakePool {
    pub(crate) fn new(chunks: u64) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(chunks * CHUNK_BYTES).unwrap();
        let used = Mutex::new(vec![false; chunks as usize]);
        Self { file, used, erased_bytes: AtomicU64::new(0), fail_free: AtomicBool::new(false) }
    }

    /// What the file takes of its file system.
    pub(crate) fn blocks(&self) -> u64 {
        self.file.metadata().unwrap().blocks() * 512
    }

    /// Bytes of free chunks that are not zero: what a guest would see of another one.
    pub(crate) fn dirty_free_bytes(&self) -> usize {
        let mut chunk = vec![0; CHUNK_BYTES as usize];
        let used = self.used.lock();
        let free = used.iter().enumerate().filter(|(_, used)| !**used);
        free.map(|(index, _)| {
            self.file.read_exact_at(&mut chunk, index as u64 * CHUNK_BYTES).unwrap();
            chunk.iter().filter(|byte| **byte != 0).count()
        })
        .sum()
    }
}

impl PmPool for FakePool {
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn alloc_memory(&self, len: u64) -> Result<Vec<Extent>, PoolError> {
        assert!(
            len.is_power_of_two() && len >= CHUNK_BYTES,
            "a power of two of chunks, not {len:#x}"
        );
        let mut used = self.used.lock();
        let free = used.iter().filter(|used| !**used).count() as u64 * CHUNK_BYTES;
        if free < len {
            return Err(PoolError::Full { wanted_bytes: len, available_bytes: free });
        }
        let mut extents = Vec::new();
        let (mut left, mut count) = ((len / CHUNK_BYTES) as usize, used.len().next_power_of_two());
        while left > 0 {
            let mut starts =
                (0..used.len()).step_by(count).filter(|start| start + count <= used.len());
            let start = starts.find(|&start| used[start..start + count].iter().all(|used| !used));
            match start {
                Some(start) if count <= left => {
                    used[start..start + count].fill(true);
                    left -= count;
                    let (offset, len) = (start as u64 * CHUNK_BYTES, count as u64 * CHUNK_BYTES);
                    extents.push(Extent { offset, len });
                }
                _ => count /= 2,
            }
        }
        Ok(extents)
    }

    fn free_memory(&self, extents: &[Extent]) -> Result<(), PoolError> {
        if self.fail_free.load(Ordering::Relaxed) {
            return Err(PoolError::Failed(Box::new(io::Error::from_raw_os_error(libc::EIO))));
        }
        for extent in extents {
            let (first, count) =
                ((extent.offset / CHUNK_BYTES) as usize, (extent.len / CHUNK_BYTES) as usize);
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (offset, len) = (extent.offset as libc::off_t, extent.len as libc::off_t);
            // SAFETY: a call on a file of our own.
            assert_eq!(unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, len) }, 0);
            self.erased_bytes.fetch_add(extent.len, Ordering::Relaxed);
            let mut used = self.used.lock();
            assert!(used[first..first + count].iter().all(|used| *used), "{extent:?} freed twice");
            used[first..first + count].fill(false);
        }
        Ok(())
    }

    fn volumes(&self) -> Vec<StoredVolume> {
        Vec::new()
    }

    fn create_volume(&self, _: &StoredVolume) -> Result<(), PoolError> {
        Err(no_volumes())
    }

    fn grow_volume(&self, _: &str, _: u64) -> Result<(), PoolError> {
        Err(no_volumes())
    }

    fn delete_volume(&self, _: &str) -> Result<(), PoolError> {
        Err(no_volumes())
    }

    fn open_volume(&self, _: &str) -> Result<Box<dyn PoolVolume>, PoolError> {
        Err(no_volumes())
    }

    fn info(&self) -> PoolInfo {
        let used = self.used.lock();
        let memory_bytes = used.iter().filter(|used| **used).count() as u64 * CHUNK_BYTES;
        let total_bytes = used.len() as u64 * CHUNK_BYTES;
        let free_migrate_bytes = total_bytes - memory_bytes;
        PoolInfo {
            total_bytes,
            free_migrate_bytes,
            memory_bytes,
            lendable_bytes: free_migrate_bytes,
            scrubbed_bytes: self.erased_bytes.load(Ordering::Relaxed),
            ..Default::default()
        }
    }

    fn has_failed(&self) -> bool {
        false
    }

    fn failure(&self) -> Option<String> {
        None
    }

    fn uuid(&self) -> String {
        "00000000-0000-4000-8000-000000000000".to_owned()
    }

    fn set_scrub_bandwidth(&self, _: Option<NonZeroU64>) {}

    fn durability(&self) -> Durability {
        Durability::Volatile
    }
}

fn no_volumes() -> PoolError {
    PoolError::Failed(Box::new(io::Error::from(io::ErrorKind::Unsupported)))
}
