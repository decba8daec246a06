//! Moves lent memory from a pool if a volume needs chunks that the guest does not unplug.
//!
//! Memory is moved while the guest uses it, without a pause ([`PmBacking::spill`]), to a file
//! ([`super::spill_file`]) or to DRAM. A move to DRAM has these steps:
//! 1. Map the same part of the pool's file again, privately. Stores no longer reach the chunk. A
//!    page is copied to DRAM by the first store to it.
//! 2. Copy the remaining pages (MADV_POPULATE_WRITE).
//! 3. Return the chunk to the pool.
//!
//! The kernel carries out each step for all threads and vCPUs at once: it removes the pages of the
//! old mapping from KVM's page tables before it installs the new mapping, and faults wait for both
//! (mm/mmap.c, mmap_region). After step 2, no page of the file is mapped. When the chunk is then
//! erased, the copies stay, even if its blocks are removed from the file (mm/memory.c,
//! unmap_mapping_pages with `even_cows` unset). Only MADV_DONTNEED would remove them, but the
//! virtio balloon refuses pages of PM.
//!
//! Moved memory remains in DRAM or in the file until the guest unplugs it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::{fmt, io};

use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use parking_lot::Mutex;
use thiserror::Error;

use super::host_dram::HostDram;
use super::pm::PmBacking;
use super::spill_file::{MoveError, SpillFile};
use super::{Access, BackingError, MappingBudget, Reservation};
use crate::log::rate_limited;
use crate::pool::{CHUNK_BYTES, PmPool};

/// Maximum number of bytes that are moved in one step. Plugs and unplugs of the zone wait for the
/// end of the step.
pub(super) const STEP_BYTES: u64 = 4 * CHUNK_BYTES;

/// DRAM that moves leave to the host or to the VMM's control group, for threads, page tables and
/// the page cache.
const KEPT_DRAM_BYTES: u64 = 64 << 20;

/// Failure to move memory, which then remains where it is.
#[derive(Debug, Error)]
pub(super) enum SpillError {
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// Without this check, Linux could kill the VMM.
    #[error(
        "the VMM may use {available_bytes} more bytes of DRAM, and a move needs {wanted_bytes} \
         (MemAvailable of the host, or the limit of a control group)"
    )]
    HostDram { wanted_bytes: u64, available_bytes: u64 },
    #[error("cannot copy {len:#x} bytes at offset {offset:#x} of the zone")]
    Copy {
        offset: u64,
        len: u64,
        #[source]
        source: io::Error,
    },
}

/// Limit of the moved memory of all zones of a VM. The pool lends promised bytes only up to the
/// unused part of this limit, so that all of them can be returned.
struct SpillBudget {
    pool: Arc<dyn PmPool>,
    dram: HostDram,
    limit_bytes: u64,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    bytes: u64,
    /// True while a thread moves memory. Only then may memory borrow.
    is_served: bool,
}

impl SpillBudget {
    fn new(pool: Arc<dyn PmPool>, dram: HostDram, limit_bytes: u64) -> Self {
        Self { pool, dram, limit_bytes, used: Mutex::default() }
    }

    /// Changes the use of the budget, and limits what the pool may lend. The lock orders the
    /// updates of the pool.
    fn change(&self, change: impl FnOnce(&mut Used)) {
        let mut used = self.used.lock();
        change(&mut used);
        let unused_bytes = self.limit_bytes.saturating_sub(used.bytes);
        self.pool.set_borrowable_bytes(if used.is_served { unused_bytes } else { 0 });
    }
}

impl fmt::Debug for SpillBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpillBudget")
            .field("limit_bytes", &self.limit_bytes)
            .finish_non_exhaustive()
    }
}

/// Moved memory of a zone.
#[derive(Debug, Default)]
pub struct SpillStatistics {
    pub bytes: AtomicU64,
    /// Part of `bytes` in the spill file.
    pub file_bytes: AtomicU64,
    /// Failed moves to the spill file.
    pub file_failures: AtomicU64,
}

/// Part of a budget that a zone uses.
#[derive(Debug)]
pub struct SpilledMemory {
    budget: Arc<SpillBudget>,
    limit_bytes: u64,
    statistics: Arc<SpillStatistics>,
    pub(super) file: Option<SpillFile>,
}

impl SpilledMemory {
    pub(super) fn unused_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.statistics.bytes.load(Ordering::Relaxed))
    }

    /// Checks that the host has DRAM for a step.
    pub(super) fn check_dram(&self) -> Result<(), SpillError> {
        let wanted_bytes = STEP_BYTES + KEPT_DRAM_BYTES;
        match self.budget.dram.available_bytes() {
            Some(available_bytes) if available_bytes < wanted_bytes => {
                Err(SpillError::HostDram { wanted_bytes, available_bytes })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn add(&self, bytes: u64) {
        self.statistics.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.budget.change(|used| used.bytes += bytes);
    }

    pub(super) fn remove(&self, bytes: u64) {
        self.statistics.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.change(|used| used.bytes -= bytes);
    }

    pub(super) fn add_to_file(&self, bytes: u64) {
        // In this order, so that no reader finds more bytes in the file than were moved.
        self.add(bytes);
        self.statistics.file_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Removes unmapped memory from the file. If this fails, its space is used again for the same
    /// part of the zone.
    pub(super) fn remove_from_file(&self, offset: u64, bytes: u64) {
        if let Some(Err(err)) = self.file.as_ref().map(|file| file.release(offset, bytes)) {
            rate_limited!(warn, %err, "Cannot remove unplugged memory from the spill file");
        }
        self.statistics.file_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.remove(bytes);
    }

    pub(super) fn report_failure(&self, err: &MoveError) {
        self.statistics.file_failures.fetch_add(1, Ordering::Relaxed);
        let error = foreshore_types::chain(err);
        rate_limited!(warn, error, "Cannot move memory to the spill file; it is moved to DRAM");
    }
}

/// Reason why memory of a pool must not be moved.
#[derive(Debug, Error)]
pub enum SpillPlanError {
    #[error("the pool cannot be mapped privately; a devdax device does not support this")]
    Private(#[source] io::Error),
    #[error(
        "the host limits committed memory (vm.overcommit_memory=2), so moving may fail at any time"
    )]
    Overcommit,
    #[error("cannot start the thread that moves memory")]
    Thread(#[source] io::Error),
}

/// Zones of a VM whose memory may be moved, while they are built.
pub struct SpillPlan {
    budget: Option<Arc<SpillBudget>>,
    zones: Vec<Weak<Mutex<PmBacking>>>,
}

impl SpillPlan {
    /// Checks that memory of the pool can be moved, up to `limit_bytes`. devdax devices refuse
    /// private mappings (drivers/dax/device.c, check_vma).
    pub fn new(pool: Option<&Arc<dyn PmPool>>, limit_bytes: u64) -> Result<Self, SpillPlanError> {
        Self::on_host(HostDram::new(), pool, limit_bytes)
    }

    fn on_host(
        dram: HostDram,
        pool: Option<&Arc<dyn PmPool>>,
        limit_bytes: u64,
    ) -> Result<Self, SpillPlanError> {
        let budget = match pool.filter(|_| limit_bytes > 0) {
            Some(pool) => {
                check_overcommit()?;
                check_private(&**pool).map_err(SpillPlanError::Private)?;
                Some(Arc::new(SpillBudget::new(Arc::clone(pool), dram, limit_bytes)))
            }
            None => None,
        };
        Ok(Self { budget, zones: Vec::new() })
    }

    /// Creates the backing of a zone. Up to `limit_bytes` of its memory may be moved, to `file` if
    /// there is one.
    pub fn add_zone(
        &mut self,
        pool: &Arc<dyn PmPool>,
        reservation: &Arc<Reservation>,
        mappings: &Arc<MappingBudget>,
        limit_bytes: u64,
        file: Option<SpillFile>,
    ) -> (Arc<Mutex<PmBacking>>, Arc<SpillStatistics>) {
        let statistics = Arc::default();
        let spilled = self.budget.as_ref().filter(|_| limit_bytes > 0);
        let spilled = spilled.map(|budget| SpilledMemory {
            budget: Arc::clone(budget),
            limit_bytes,
            statistics: Arc::clone(&statistics),
            file,
        });
        let (pool, reservation) = (Arc::clone(pool), Arc::clone(reservation));
        let backing = PmBacking::new(pool, reservation, Arc::clone(mappings), spilled);
        let backing = Arc::new(Mutex::new(backing));
        self.zones.push(Arc::downgrade(&backing));
        (backing, statistics)
    }

    /// Starts the thread that moves memory, if any memory may be moved. From now on, memory may
    /// borrow.
    pub fn start(self) -> Result<Option<Spiller>, SpillPlanError> {
        let Some(budget) = self.budget else { return Ok(None) };
        Spiller::start(budget, self.zones).map(Some).map_err(SpillPlanError::Thread)
    }
}

/// With this setting, a private mapping counts as committed, although it is not reserved
/// (mm/util.c, __vm_enough_memory).
fn check_overcommit() -> Result<(), SpillPlanError> {
    match std::fs::read_to_string("/proc/sys/vm/overcommit_memory") {
        Ok(mode) if mode.trim() == "2" => Err(SpillPlanError::Overcommit),
        _ => Ok(()),
    }
}

fn check_private(pool: &dyn PmPool) -> io::Result<()> {
    let reservation = Reservation::new(CHUNK_BYTES, CHUNK_BYTES)?;
    reservation.map_file(0, CHUNK_BYTES, pool.file(), 0, Access::ReadWritePrivate)
}

/// Thread that moves memory when the pool recalls it. It ends when the value is dropped.
pub struct Spiller {
    budget: Arc<SpillBudget>,
    thread: Option<JoinHandle<()>>,
}

impl Spiller {
    fn start(budget: Arc<SpillBudget>, zones: Vec<Weak<Mutex<PmBacking>>>) -> io::Result<Self> {
        budget.pool.start_recalls();
        let pool = Arc::clone(&budget.pool);
        // Dropped in case of an error, which ends the recalls.
        let mut spiller = Self { budget, thread: None };
        let serve = move || serve(&*pool, &zones);
        spiller.thread = Some(spawn_confined(ThreadKind::Memory, "_spill", serve)?);
        spiller.budget.change(|used| used.is_served = true);
        Ok(spiller)
    }
}

impl Drop for Spiller {
    fn drop(&mut self) {
        self.budget.change(|used| used.is_served = false);
        self.budget.pool.end_recalls();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(pool: &dyn PmPool, zones: &[Weak<Mutex<PmBacking>>]) {
    while let Some(wanted_bytes) = pool.next_recall() {
        if spill_from(zones, wanted_bytes) == 0 {
            pool.refuse_recall();
        }
    }
}

/// Moves up to `wanted_bytes`, and returns the number of bytes that the pool got back.
fn spill_from(zones: &[Weak<Mutex<PmBacking>>], wanted_bytes: u64) -> u64 {
    let mut spilled_bytes = 0;
    for zone in zones.iter().filter_map(Weak::upgrade) {
        while spilled_bytes < wanted_bytes {
            // Locked for one step only, so that the guest's requests do not wait longer.
            match zone.lock().spill(wanted_bytes - spilled_bytes) {
                Ok(0) => break,
                Ok(bytes) => spilled_bytes += bytes,
                Err(err) => {
                    let error = foreshore_types::chain(&err);
                    rate_limited!(warn, error, "Cannot move memory that a volume needs");
                    break;
                }
            }
        }
    }
    spilled_bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    use tempfile::TempDir;

    use super::super::host_dram::tests::{host, set_available_kib};
    use super::super::spill_file::tests::{barrier, duplicate};
    use super::super::{Backing, MappingBudget};
    use super::*;
    use crate::pool::{LocalPool, VolumeFormat, VolumeOptions, VolumeSize};

    const MIB: u64 = 1 << 20;
    /// Usable bytes of the pool, size of its thin volume, and bytes that memory may borrow.
    const POOL: u64 = 92 * MIB;
    const VOLUME: u64 = 80 * MIB;
    const LIMIT: u64 = 40 * MIB;

    struct Fixture {
        pool: Arc<LocalPool>,
        zone: Arc<Reservation>,
        backing: Arc<Mutex<PmBacking>>,
        statistics: Arc<SpillStatistics>,
        spiller: Option<Spiller>,
        _folder: TempDir,
    }

    fn fixture() -> Option<Fixture> {
        fixture_on(HostDram::new(), None)
    }

    /// Returns a new file for the zone. `None` if the user cannot open /dev/userfaultfd.
    fn spill_file() -> Option<SpillFile> {
        let folder = std::env::temp_dir();
        barrier().map(|barrier| SpillFile::create(&folder, POOL, barrier).unwrap())
    }

    /// Plugs all memory that the pool lends: 52 MiB.
    fn fixture_on(dram: HostDram, file: Option<SpillFile>) -> Option<Fixture> {
        let folder = TempDir::new_in("/dev/shm").ok()?;
        let path = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&path, POOL + 4 * MIB, 0).unwrap());
        let local = LocalPool::open(&path, None).unwrap();
        let size = VolumeSize::Bytes(VOLUME);
        let options =
            VolumeOptions { size, format: VolumeFormat::Raw, thin: true, reserve_bytes: None };
        local.create_volume("thin", options).unwrap();
        local.lend_promised(Some(32 * MIB));
        let pool: Arc<dyn PmPool> = local.clone();
        let mut plan = SpillPlan::on_host(dram, Some(&pool), LIMIT).unwrap();
        let zone = Arc::new(Reservation::new(POOL, 1 << 30).unwrap());
        let mappings = Arc::new(MappingBudget::new(1000));
        let (mut backing, statistics) = plan.add_zone(&pool, &zone, &mappings, LIMIT, file);
        assert_eq!(local.offered_bytes(), POOL - VOLUME);
        let spiller = plan.start().unwrap();
        assert_eq!(local.offered_bytes(), POOL - VOLUME + LIMIT);
        backing.plug(0, POOL - VOLUME + LIMIT).unwrap();
        assert_eq!(local.offered_bytes(), 0);
        Some(Fixture { pool: local, zone, backing, statistics, spiller, _folder: folder })
    }

    impl Fixture {
        fn moved_bytes(&self) -> u64 {
            self.statistics.bytes.load(Ordering::Relaxed)
        }

        fn file_bytes(&self) -> u64 {
            self.statistics.file_bytes.load(Ordering::Relaxed)
        }

        fn word(&self, offset: u64) -> &AtomicU64 {
            assert!(offset < POOL - VOLUME + LIMIT);
            // SAFETY: the test has plugged this part of the zone, and accesses it only as atomic
            // words.
            unsafe { AtomicU64::from_ptr((self.zone.addr() + offset) as *mut u64) }
        }

        /// Writes to each chunk of the volume. It returns when all writes have their chunks.
        fn fill_volume(&self) {
            use pmem_volume::media::Media;
            let volume = self.pool.pool().open_volume("thin").unwrap();
            for offset in (0..VOLUME).step_by(CHUNK_BYTES as usize) {
                volume.store(offset, &[0xff; 64]).unwrap();
            }
        }
    }

    #[test]
    fn content_stays_while_volumes_take_the_chunks() {
        let Some(fixture) = fixture() else { return };
        content_stays(&fixture, 4096);
        assert_eq!(fixture.file_bytes(), 0);
    }

    #[test]
    fn content_stays_while_it_is_moved_to_a_file() {
        let Some(spill) = spill_file() else { return };
        let file = duplicate(&spill);
        let Some(mut fixture) = fixture_on(HostDram::new(), Some(spill)) else { return };
        // Only few blocks of each chunk change, so each chunk can be moved.
        content_stays(&fixture, CHUNK_BYTES / 4);
        assert_eq!(fixture.file_bytes(), LIMIT);
        let failures = &fixture.statistics.file_failures;
        assert_eq!(failures.load(Ordering::Relaxed), 0);
        let blocks = || file.metadata().unwrap().blocks();
        let before = blocks();
        fixture.backing.detach(16 * MIB, 10 * MIB).unwrap();
        fixture.backing.free_detached().unwrap();
        assert_eq!([fixture.moved_bytes(), fixture.file_bytes()], [LIMIT - 10 * MIB; 2]);
        // A disk may need a block for the hole.
        assert!((before - blocks()).abs_diff(10 * MIB / 512) <= 8);
        for at in (4096..16 * MIB).chain(26 * MIB..LIMIT).step_by(4096) {
            assert_eq!(fixture.word(at).load(Ordering::Relaxed), at);
        }
        assert_eq!(fixture.pool.info().borrowable_bytes, 10 * MIB);
    }

    #[test]
    fn memory_is_moved_to_dram_if_the_file_fails() {
        let Some(file) = spill_file() else { return };
        let Some(mut fixture) = fixture_on(HostDram::new(), Some(file)) else { return };
        drop(fixture.spiller.take());
        fixture.word(0).store(5, Ordering::Relaxed);
        fixture.word(2 * CHUNK_BYTES).store(6, Ordering::Relaxed);
        let spill = || fixture.backing.lock().spill(LIMIT).unwrap();
        // The barrier of the second chunk fails.
        fixture.zone.script([true, true, false]);
        assert_eq!(spill(), CHUNK_BYTES);
        fixture.zone.script([false]);
        assert_eq!(spill(), STEP_BYTES);
        assert_eq!([fixture.moved_bytes(), fixture.file_bytes()], [5, 1].map(|n| n * CHUNK_BYTES));
        assert_eq!(fixture.statistics.file_failures.load(Ordering::Relaxed), 2);
        assert_eq!(spill(), STEP_BYTES);
        assert_eq!([fixture.moved_bytes(), fixture.file_bytes()], [9, 5].map(|n| n * CHUNK_BYTES));
        fixture.pool.pool().scrub_all().unwrap();
        let values = [0, 2 * CHUNK_BYTES].map(|at| fixture.word(at).load(Ordering::Relaxed));
        assert_eq!(values, [5, 6]);
        fixture.backing.detach(0, 9 * CHUNK_BYTES).unwrap();
        assert_eq!([fixture.moved_bytes(), fixture.file_bytes()], [0, 0]);
    }

    /// Increments a word every `distance` bytes while memory is moved, as a vCPU does. Then checks
    /// all words.
    fn content_stays(fixture: &Fixture, distance: u64) {
        let words = || (0..POOL - VOLUME + LIMIT).step_by(4096);
        words().for_each(|at| fixture.word(at).store(at, Ordering::Relaxed));
        let ends = AtomicBool::new(false);
        let (started, starts) = mpsc::channel();
        let rounds = thread::scope(|scope| {
            let stores = scope.spawn(|| {
                let mut rounds = 0;
                while !ends.load(Ordering::Relaxed) {
                    (0..POOL - VOLUME + LIMIT).step_by(distance as usize).for_each(|at| {
                        fixture.word(at + 8).fetch_add(1, Ordering::Relaxed);
                    });
                    rounds += 1;
                    let _ = started.send(());
                }
                rounds
            });
            starts.recv().unwrap();
            fixture.fill_volume();
            ends.store(true, Ordering::Relaxed);
            stores.join().unwrap()
        });
        assert_eq!(fixture.moved_bytes(), LIMIT);
        assert_eq!(fixture.pool.info().memory_bytes, POOL - VOLUME);
        for at in words() {
            let values = [0, 8].map(|word| fixture.word(at + word).load(Ordering::Relaxed));
            let increments = if at.is_multiple_of(distance) { rounds } else { 0 };
            assert_eq!(values, [at, increments], "at {at:#x}");
        }
    }

    /// `content_stays_while_volumes_take_the_chunks` relies on this: without the copies, the guest
    /// sees the erasure.
    #[test]
    fn pages_that_were_not_copied_are_lost_with_the_chunk() {
        let Some(fixture) = fixture() else { return };
        fixture.word(0).store(7, Ordering::Relaxed);
        let source = fixture.backing.lock().offset_in_file(0);
        fixture
            .zone
            .map_file(0, CHUNK_BYTES, fixture.pool.file(), source, Access::ReadWritePrivate)
            .unwrap();
        assert_eq!(fixture.word(0).load(Ordering::Relaxed), 7);
        fixture.word(8).store(8, Ordering::Relaxed);
        fixture.word(8192).store(9, Ordering::Relaxed);
        fixture.pool.free_memory(std::slice::from_ref(&(source..source + CHUNK_BYTES))).unwrap();
        fixture.pool.pool().scrub_all().unwrap();
        let values = [8, 8192].map(|at| fixture.word(at).load(Ordering::Relaxed));
        assert_eq!(values, [8, 9], "pages that were copied");
        assert_eq!(fixture.word(4096).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn host_without_dram_fails_the_write() {
        use pmem_volume::media::Media;
        const MAX_KIB: u64 = (STEP_BYTES + KEPT_DRAM_BYTES) / 1024;
        let host = host(MAX_KIB - 1);
        let Some(fixture) = fixture_on(HostDram::in_folder(host.path()), None) else { return };
        let volume = fixture.pool.pool().open_volume("thin").unwrap();
        let store = |chunk: u64| volume.store(chunk * CHUNK_BYTES, &[0xff; 64]);
        fixture.word(8).store(3, Ordering::Relaxed);
        let failed = (0..VOLUME / CHUNK_BYTES).find(|chunk| store(*chunk).is_err()).unwrap();
        assert_eq!(fixture.moved_bytes(), 0);
        set_available_kib(&host, MAX_KIB);
        // The pool waits before it tries again.
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = store(failed) {
            assert!(Instant::now() < deadline, "{error}");
            thread::yield_now();
        }
        assert!(fixture.moved_bytes() > 0);
        assert_eq!(fixture.word(8).load(Ordering::Relaxed), 3);
    }

    #[test]
    fn unplugged_memory_may_be_borrowed_again() {
        let Some(mut fixture) = fixture() else { return };
        fixture.fill_volume();
        assert_eq!(fixture.pool.info().borrowable_bytes, 0);
        // The start of the zone was moved.
        fixture.backing.detach(LIMIT - 10 * MIB, 10 * MIB).unwrap();
        fixture.backing.free_detached().unwrap();
        assert_eq!(fixture.moved_bytes(), LIMIT - 10 * MIB);
        let info = fixture.pool.info();
        assert_eq!((info.borrowable_bytes, info.memory_bytes), (10 * MIB, POOL - VOLUME));
        fixture.backing.detach(LIMIT, 6 * MIB).unwrap();
        fixture.backing.free_detached().unwrap();
        assert_eq!(fixture.pool.info().memory_bytes, POOL - VOLUME - 6 * MIB);
        // Without a thread that moves memory, nothing may be borrowed.
        drop(fixture.spiller.take());
        assert_eq!(fixture.pool.info().borrowable_bytes, 0);
    }

    #[test]
    fn interrupted_move_is_continued() {
        let Some(mut fixture) = fixture() else { return };
        drop(fixture.spiller.take());
        fixture.word(0).store(5, Ordering::Relaxed);
        // The private mapping fails, and the old mapping is restored.
        fixture.zone.script([false, true]);
        assert!(fixture.backing.lock().spill(CHUNK_BYTES).is_err());
        assert_eq!(fixture.moved_bytes(), 0);
        let before = fixture.pool.info().memory_bytes;
        fixture.zone.fail_next_populate();
        assert!(fixture.backing.lock().spill(CHUNK_BYTES).is_err());
        assert_eq!(fixture.pool.info().memory_bytes, before, "a chunk was returned too early");
        fixture.word(8192).store(6, Ordering::Relaxed);
        // A chunk that cannot be copied does not prevent other moves.
        while fixture.moved_bytes() < LIMIT {
            assert!(fixture.backing.lock().spill(LIMIT).unwrap() > 0);
        }
        assert_eq!(fixture.pool.info().memory_bytes, before - LIMIT + CHUNK_BYTES);
        assert_eq!(fixture.backing.lock().spill(CHUNK_BYTES).unwrap(), CHUNK_BYTES);
        fixture.pool.pool().scrub_all().unwrap();
        let values = [0, 8192].map(|at| fixture.word(at).load(Ordering::Relaxed));
        assert_eq!(values, [5, 6]);
        assert_eq!(fixture.pool.info().memory_bytes, before - LIMIT);
        assert_eq!(fixture.backing.lock().spill(CHUNK_BYTES).unwrap(), 0, "the limit is reached");
    }

    #[test]
    fn interrupted_move_is_unplugged() {
        let Some(mut fixture) = fixture() else { return };
        drop(fixture.spiller.take());
        let before = fixture.pool.info().memory_bytes;
        for _ in 0..2 {
            fixture.zone.fail_next_populate();
            assert!(fixture.backing.lock().spill(CHUNK_BYTES).is_err());
        }
        assert_eq!(fixture.moved_bytes(), 2 * CHUNK_BYTES);
        fixture.backing.detach(CHUNK_BYTES, 2 * CHUNK_BYTES).unwrap();
        assert_eq!(fixture.moved_bytes(), CHUNK_BYTES);
        // A recall takes detached chunks first.
        let bytes = fixture.backing.lock().spill(CHUNK_BYTES).unwrap();
        assert_eq!(bytes, 2 * CHUNK_BYTES);
        assert_eq!(fixture.pool.info().memory_bytes, before - 2 * CHUNK_BYTES);
        assert_eq!(fixture.moved_bytes(), CHUNK_BYTES);
        fixture.backing.detach(0, CHUNK_BYTES).unwrap();
        fixture.backing.free_detached().unwrap();
        assert_eq!(fixture.pool.info().memory_bytes, before - 3 * CHUNK_BYTES);
        assert_eq!(fixture.moved_bytes(), 0);
    }
}
