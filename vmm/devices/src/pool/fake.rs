//! Pool in a temporary file, for tests of the pool's users. The pool checks that they follow the
//! contract of [`PmPool`].

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pmem_volume::pool::layout::FORMAT_VERSION;
use rustix::fs::{FallocateFlags, fallocate};
use uuid::Uuid;

use super::{
    CHUNK_BYTES, Durability, PmPool, PoolError, PoolInfo, PoolVolume, VolumeInfo, VolumeOptions,
};

#[derive(Debug)]
pub struct FakePool {
    file: File,
    /// True for each chunk that is lent as memory.
    used: Mutex<Vec<bool>>,
    erased_bytes: AtomicU64,
    /// Bytes that `info` reports as allocated to a thin volume as large as the pool.
    pub volume_bytes: AtomicU64,
    /// Makes [`PmPool::free_memory`] fail.
    pub fail_free: AtomicBool,
    /// [`PmPool::grow`] waits for this lock, at most for a minute.
    pub growth: Mutex<()>,
}

impl FakePool {
    pub fn new(chunks: u64) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(chunks * CHUNK_BYTES).unwrap();
        let used = Mutex::new(vec![false; chunks as usize]);
        Self {
            file,
            used,
            erased_bytes: AtomicU64::new(0),
            volume_bytes: AtomicU64::new(0),
            fail_free: AtomicBool::new(false),
            growth: Mutex::default(),
        }
    }

    /// Bytes that the file occupies in its file system.
    pub fn blocks(&self) -> u64 {
        self.file.metadata().unwrap().blocks() * 512
    }

    /// Number of nonzero bytes in free chunks. Another guest could read these bytes.
    pub fn dirty_free_bytes(&self) -> usize {
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

    fn alloc_memory(&self, len: u64) -> Result<Vec<Range<u64>>, PoolError> {
        assert!(
            len.is_power_of_two() && len >= CHUNK_BYTES,
            "a power of two of chunks, not {len:#x}"
        );
        let mut used = self.used.lock();
        let free = used.iter().filter(|used| !**used).count() as u64 * CHUNK_BYTES;
        if free < len {
            return Err(PoolError::PoolFull {
                requested_bytes: len,
                free_bytes: free,
                withheld_bytes: 0,
            });
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
                    let start = start as u64 * CHUNK_BYTES;
                    extents.push(start..start + count as u64 * CHUNK_BYTES);
                }
                _ => count /= 2,
            }
        }
        Ok(extents)
    }

    fn free_memory(&self, extents: &[Range<u64>]) -> Result<(), PoolError> {
        if self.fail_free.load(Ordering::Relaxed) {
            let source = io::Error::from_raw_os_error(libc::EIO);
            return Err(PoolError::File { path: "fake".into(), action: "write to", source });
        }
        for extent in extents {
            let len = extent.end - extent.start;
            let (first, count) =
                ((extent.start / CHUNK_BYTES) as usize, (len / CHUNK_BYTES) as usize);
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, mode, extent.start, len).unwrap();
            self.erased_bytes.fetch_add(len, Ordering::Relaxed);
            let mut used = self.used.lock();
            assert!(used[first..first + count].iter().all(|used| *used), "{extent:?} freed twice");
            used[first..first + count].fill(false);
        }
        Ok(())
    }

    fn grow(&self, size_bytes: Option<u64>, _: bool) -> Result<(), PoolError> {
        let _growth =
            self.growth.try_lock_for(Duration::from_secs(60)).expect("unlocked by the test");
        let size_bytes = size_bytes.expect("the pool is in a file");
        self.file.set_len(size_bytes).unwrap();
        self.used.lock().resize((size_bytes / CHUNK_BYTES) as usize, false);
        Ok(())
    }

    fn set_borrowable_bytes(&self, _: u64) {}

    fn start_recalls(&self) {}

    fn next_recall(&self) -> Option<u64> {
        None
    }

    fn refuse_recall(&self) {}

    fn end_recalls(&self) {}

    fn volumes(&self) -> Vec<VolumeInfo> {
        Vec::new()
    }

    fn create_volume(&self, name: &str, _: VolumeOptions) -> Result<(), PoolError> {
        Err(no_volume(name))
    }

    fn grow_volume(&self, name: &str, _: u64) -> Result<(), PoolError> {
        Err(no_volume(name))
    }

    fn delete_volume(&self, name: &str) -> Result<(), PoolError> {
        Err(no_volume(name))
    }

    fn open_volume(&self, name: &str) -> Result<Box<dyn PoolVolume>, PoolError> {
        Err(no_volume(name))
    }

    fn info(&self) -> PoolInfo {
        let used = self.used.lock();
        let memory_bytes = used.iter().filter(|used| **used).count() as u64 * CHUNK_BYTES;
        let total_bytes = used.len() as u64 * CHUNK_BYTES;
        let volume_bytes = self.volume_bytes.load(Ordering::Relaxed);
        let free_bytes = total_bytes - memory_bytes - volume_bytes;
        PoolInfo {
            total_bytes,
            promised_bytes: if volume_bytes > 0 { total_bytes } else { 0 },
            provisioned_bytes: if volume_bytes > 0 { total_bytes } else { 0 },
            volume_bytes,
            free_bytes,
            memory_bytes,
            lendable_bytes: free_bytes,
            ..empty_info()
        }
    }

    fn offered_bytes(&self) -> u64 {
        self.info().lendable_bytes
    }

    fn scrubbed_bytes(&self) -> u64 {
        self.erased_bytes.load(Ordering::Relaxed)
    }

    fn has_failed(&self) -> bool {
        false
    }

    fn set_scrub_bandwidth(&self, _: Option<NonZeroU64>) {}

    fn lend_promised(&self, _: Option<u64>) {}

    fn durability(&self) -> Durability {
        Durability::Volatile
    }
}

/// Information about an empty pool, for tests that set only the fields they need.
pub fn empty_info() -> PoolInfo {
    PoolInfo {
        uuid: Uuid::nil(),
        format_version: FORMAT_VERSION,
        durability: Durability::Volatile,
        thin: false,
        total_bytes: 0,
        reserve_bytes: 0,
        reserved_bytes: 0,
        promised_bytes: 0,
        provisioned_bytes: 0,
        metadata_bytes: 0,
        volume_bytes: 0,
        memory_bytes: 0,
        scrubbing_bytes: 0,
        damaged_bytes: 0,
        retired_bytes: 0,
        free_bytes: 0,
        lendable_bytes: 0,
        borrowable_bytes: 0,
        min_free_bytes: None,
        volumes: 0,
        latched: None,
    }
}

fn no_volume(name: &str) -> PoolError {
    PoolError::NoSuchVolume { name: name.to_owned(), existing: Vec::new() }
}
