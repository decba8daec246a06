//! Background compaction of a thin volume that the VMM serves as a disk.

use std::io;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use parking_lot::{Condvar, Mutex};

use crate::disk::BlockDevice;
use crate::log::rate_limited;
use crate::pool::PmPool;

/// Limit of moved bytes per second. Each moved byte is read once and written twice, so compaction
/// uses less than a tenth of the bandwidth of a persistent memory module (about 2 GiB/s). It still
/// releases at least 128 MiB per second.
const MOVED_BYTES_PER_S: u64 = 64 << 20;

/// Number of moved bytes after which the limit is enforced.
const BURST_BYTES: u64 = 256 << 10;

/// Interval between checks of the free space.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Interval after a pass that has released nothing, because each pass reads the whole map.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Compacts a disk while its pool has little free space. The thread ends when this is dropped.
pub struct Compactor {
    end: Arc<End>,
    thread: Option<JoinHandle<()>>,
}

/// Request to end the thread.
#[derive(Default)]
struct End {
    is_requested: Mutex<bool>,
    changed: Condvar,
}

impl Compactor {
    /// Starts the thread. It compacts while fewer than `min_free_bytes` of the pool are free or
    /// being erased.
    pub fn start(
        disk: Weak<dyn BlockDevice>,
        pool: Arc<dyn PmPool>,
        min_free_bytes: u64,
    ) -> io::Result<Self> {
        let end = Arc::<End>::default();
        let work = Worker { disk, pool, min_free_bytes, end: Arc::clone(&end) };
        // The thread makes the same system calls as a queue of the disk.
        let thread = spawn_confined(ThreadKind::Queue, "_compact", move || work.run())?;
        Ok(Self { end, thread: Some(thread) })
    }
}

impl Drop for Compactor {
    fn drop(&mut self) {
        *self.end.is_requested.lock() = true;
        self.end.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl End {
    /// Waits until `until`. Returns true if the thread must end.
    fn wait_until(&self, until: Instant) -> bool {
        let mut is_requested = self.is_requested.lock();
        self.changed.wait_while_until(&mut is_requested, |is_requested| !*is_requested, until);
        *is_requested
    }
}

struct Worker {
    disk: Weak<dyn BlockDevice>,
    pool: Arc<dyn PmPool>,
    min_free_bytes: u64,
    end: Arc<End>,
}

impl Worker {
    fn run(self) {
        let mut pause = LOOK_INTERVAL;
        while !self.end.wait_until(Instant::now() + pause) {
            let Some(disk) = self.disk.upgrade() else { return };
            pause = match self.needs_space(&*disk).then(|| self.compact(&*disk)) {
                None => LOOK_INTERVAL,
                Some(Ok(0)) => RETRY_INTERVAL,
                Some(Ok(_)) => Duration::ZERO,
                Some(Err(err)) if err.kind() == io::ErrorKind::Interrupted => LOOK_INTERVAL,
                Some(Err(err)) => {
                    let error = foreshore_types::chain(&err);
                    rate_limited!(warn, error, "Cannot compact a thin volume");
                    RETRY_INTERVAL
                }
            };
        }
    }

    /// Returns true if little space is free, or if all free space is promised to other volumes and
    /// a write has found none.
    fn needs_space(&self, disk: &dyn BlockDevice) -> bool {
        let info = self.pool.info();
        let is_scarce = info.free_bytes + info.scrubbing_bytes < self.min_free_bytes;
        info.latched.is_none() && (is_scarce || !disk.has_space())
    }

    /// Performs a pass at the limited rate. Returns the number of released bytes.
    fn compact(&self, disk: &dyn BlockDevice) -> io::Result<u64> {
        let (mut next, mut moved_bytes) = (Instant::now(), 0);
        disk.compact(&mut |bytes| {
            moved_bytes += bytes;
            if moved_bytes >= BURST_BYTES {
                let burst = Duration::from_secs(moved_bytes) / MOVED_BYTES_PER_S as u32;
                next = next.max(Instant::now()) + burst;
                moved_bytes = 0;
            }
            !self.end.wait_until(next)
        })
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::disk::range::DiskRange;
    use crate::pool::{LocalPool, VolumeFormat, VolumeOptions};

    const MIB: u64 = 1 << 20;

    /// A disk with 8 of 10 sectors discarded in each chunk, in a pool with little free space.
    fn sparse_disk() -> (Arc<dyn BlockDevice>, Arc<dyn PmPool>, TempDir) {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&path, 64 * MIB, 0).unwrap());
        let pool: Arc<dyn PmPool> = LocalPool::open(&path, None).unwrap();
        let options =
            VolumeOptions { thin: true, ..VolumeOptions::thick(56 * MIB, VolumeFormat::Btt) };
        pool.create_volume("v", options).unwrap();
        let disk = pool.open_volume("v").unwrap().into_disk().unwrap().device;
        for offset in (0..40 * MIB).step_by(4096) {
            disk.write(offset, &sector(offset)).unwrap();
        }
        for offset in (0..40 * MIB).step_by(40960) {
            disk.discard(DiskRange::at(offset + 8192, 32768)).unwrap();
        }
        (disk, pool, folder)
    }

    fn sector(offset: u64) -> Vec<u8> {
        (1 + offset).to_le_bytes().repeat(512)
    }

    #[test]
    fn disk_is_compacted_only_while_space_is_scarce() {
        let (disk, pool, _folder) = sparse_disk();
        let free_bytes = |pool: &dyn PmPool| {
            let info = pool.info();
            info.free_bytes + info.scrubbing_bytes
        };
        let before_bytes = free_bytes(&*pool);
        let worker = |min_free_bytes| Worker {
            disk: Arc::downgrade(&disk),
            pool: Arc::clone(&pool),
            min_free_bytes,
            end: Arc::default(),
        };
        assert!(!worker(before_bytes).needs_space(&*disk));
        assert!(worker(before_bytes + 1).needs_space(&*disk));
        let compactor =
            Compactor::start(Arc::downgrade(&disk), Arc::clone(&pool), before_bytes + 16 * MIB);
        let compactor = compactor.unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while free_bytes(&*pool) < before_bytes + 16 * MIB {
            assert!(Instant::now() < deadline, "{:?}", pool.info());
            std::thread::yield_now();
        }
        // The thread does not keep the volume open.
        drop(compactor);
        let moved_bytes = disk.compacted_bytes().unwrap();
        assert!((1..=16 * MIB).contains(&moved_bytes), "{moved_bytes}");
        for offset in (0..40 * MIB).step_by(4096) {
            let mut bytes = vec![1; 4096];
            disk.read(offset, &mut bytes).unwrap();
            let expected = if offset % 40960 < 8192 { sector(offset) } else { vec![0; 4096] };
            assert!(bytes == expected, "{offset:#x}");
        }
        drop(disk);
        pool.open_volume("v").unwrap();
    }
}
