//! Tests with real stores. They are skipped if the user cannot open `/dev/userfaultfd`.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;

use pmem_volume::btt::{BttError, GuestAccess};
use pmem_volume::media::Media;
use pmem_volume::pool::VolumeExtent;
use pmem_volume::{OpenMode, Pool};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryMmap};

use super::*;
use crate::bus::Bus;
use crate::memory::MemoryError;
use crate::memory::backing::MappingBudget;
use crate::memory::file_ranges::{FileMapping, FileRanges};
use crate::memory::layout::GuestRange;
use crate::memory::slots::Slots;
use crate::memory::slots::fake::FakeSlots;
use crate::memory::view::GuestView;
use crate::persist::{Persist, PersistError};
use crate::pool::{LocalPool, VolumeDisk, VolumeFormat, VolumeOptions, VolumeSize};

const MIB: u64 = 1 << 20;
const CHUNKS: u64 = 12;

fn is_skipped() -> bool {
    let refusal = UserfaultDevice::default().refusal();
    refusal.inspect(|reason| eprintln!("skipped: {reason}")).is_some()
}

/// Volume without chunks, whose allocations have scripted results.
struct Scripted {
    volume: Arc<dyn PoolVolume>,
    failures: Mutex<VecDeque<MediaError>>,
}

impl Persist for Scripted {
    fn persist(&self) -> Result<(), PersistError> {
        self.volume.persist()
    }
}

impl PoolVolume for Scripted {
    fn size_bytes(&self) -> u64 {
        self.volume.size_bytes()
    }

    fn extents(&self) -> Vec<VolumeExtent> {
        self.volume.extents()
    }

    fn allocated_bytes(&self) -> u64 {
        self.volume.allocated_bytes()
    }

    fn reserve_bytes(&self) -> u64 {
        self.volume.reserve_bytes()
    }

    fn is_thin(&self) -> bool {
        true
    }

    fn chunk_offset(&self, index: u32) -> Option<u64> {
        self.volume.chunk_offset(index)
    }

    fn btt_uuid(&self) -> Option<String> {
        self.volume.btt_uuid()
    }

    fn release_reported(
        &self,
        free: &[Range<u64>],
        access: &mut dyn GuestAccess,
    ) -> Result<u64, MediaError> {
        self.volume.release_reported(free, access)
    }

    fn provision(&self, index: u32) -> Result<u64, MediaError> {
        match self.failures.lock().pop_front() {
            Some(err) => Err(err),
            None => self.volume.provision(index),
        }
    }

    fn release(&self, index: u32) -> Result<(), MediaError> {
        self.volume.release(index)
    }

    fn quiesce(&self) -> Result<(), BttError> {
        self.volume.quiesce()
    }

    fn into_disk(self: Box<Self>) -> Result<VolumeDisk, BttError> {
        unreachable!("the volume is mapped")
    }
}

/// Report of a full pool (`None`) or of a failure, and whether the waiting stores have space.
type Report = (Option<String>, Option<bool>);

/// Mapped thin volume without chunks.
struct Rig {
    pool: Arc<dyn PmPool>,
    volume: Arc<dyn PoolVolume>,
    metrics: Arc<HoleMetrics>,
    waits: Arc<StoreWaits>,
    reservation: Arc<Reservation>,
    reports: mpsc::Receiver<Report>,
    filler: Option<HoleFiller>,
    folder: TempDir,
}

/// Creates a thin volume without chunks, whose allocations have scripted results.
fn source(
    failures: impl IntoIterator<Item = MediaError>,
) -> (HoleSource, mpsc::Receiver<Report>, TempDir) {
    source_with(None, failures)
}

fn source_with(
    reserve_chunks: Option<u64>,
    failures: impl IntoIterator<Item = MediaError>,
) -> (HoleSource, mpsc::Receiver<Report>, TempDir) {
    let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
    let path = folder.path().join("pool");
    drop(Pool::create(&path, 64 * MIB, 0).unwrap());
    let pool: Arc<dyn PmPool> = LocalPool::open(&path, None).unwrap();
    let size = VolumeSize::Bytes(CHUNKS * CHUNK_BYTES);
    let reserve_bytes = reserve_chunks.map(|chunks| chunks * CHUNK_BYTES);
    let options = VolumeOptions { size, format: VolumeFormat::Raw, thin: true, reserve_bytes };
    pool.create_volume("data", options).unwrap();
    let volume: Arc<dyn PoolVolume> = Arc::from(pool.open_volume("data").unwrap());
    let failures = Mutex::new(failures.into_iter().collect());
    let (sender, reports) = mpsc::channel();
    let metrics = Arc::<HoleMetrics>::default();
    let counted = Arc::clone(&metrics);
    let report = move |reason| sender.send((reason, counted.has_space_for_waiting())).unwrap();
    let full = report.clone();
    let source = HoleSource {
        device: Arc::default(),
        pool,
        volume: Arc::new(Scripted { volume, failures }),
        metrics,
        waits: Arc::default(),
        on_full: Box::new(move || full(None)),
        on_failure: Arc::new(move |reason| report(Some(reason))),
    };
    (source, reports, folder)
}

impl Rig {
    fn new(failures: impl IntoIterator<Item = MediaError>) -> Self {
        Self::of(source(failures))
    }

    /// Overcommitted volume in a pool in which `free_chunks` are free, and the rest belongs to the
    /// volume `other`.
    fn overcommitted(reserve_chunks: u64, free_chunks: u64) -> Self {
        Self::of(Self::overcommitted_source(reserve_chunks, free_chunks))
    }

    fn overcommitted_source(
        reserve_chunks: u64,
        free_chunks: u64,
    ) -> (HoleSource, mpsc::Receiver<Report>, TempDir) {
        let source = source_with(Some(reserve_chunks), []);
        let pool = &source.0.pool;
        let other_bytes = pool.info().available_bytes() - free_chunks * CHUNK_BYTES;
        let options = VolumeOptions::thick(other_bytes, VolumeFormat::Raw);
        pool.create_volume("other", options).unwrap();
        source
    }

    fn of(source: (HoleSource, mpsc::Receiver<Report>, TempDir)) -> Self {
        Self::with_zeros(source, false)
    }

    /// The holes have pages of zeros if `is_populated`, as before Linux 6.4.
    fn with_zeros(
        (source, reports, folder): (HoleSource, mpsc::Receiver<Report>, TempDir),
        is_populated: bool,
    ) -> Self {
        let pool = Arc::clone(&source.pool);
        let (volume, metrics) = (Arc::clone(&source.volume), Arc::clone(&source.metrics));
        let waits = Arc::clone(&source.waits);
        let reservation = Arc::new(Reservation::new(volume.size_bytes(), CHUNK_BYTES).unwrap());
        let mut userfaults = source.device.create().unwrap();
        userfaults.protects_absent &= !is_populated;
        userfaults.map_zeros(&reservation, 0, volume.size_bytes()).unwrap();
        let (of, is_mapped) = (Arc::clone(&reservation), vec![false; CHUNKS as usize]);
        let filler = HoleFiller::start(source, userfaults, of, is_mapped, Access::ReadWrite);
        let filler = Some(filler.unwrap());
        Self { pool, volume, metrics, waits, reservation, reports, filler, folder }
    }

    fn store(&self, offset: u64, word: u64) {
        store(self.reservation.addr() + offset, word);
    }

    /// Stores a word as a vCPU does, which waits in user space while the pool is full.
    fn vcpu(&self, offset: u64, word: u64) -> std::thread::JoinHandle<usize> {
        let (at, waits) = (self.reservation.addr() + offset, Arc::clone(&self.waits));
        std::thread::spawn(move || store_as_vcpu(at, word, &waits))
    }

    /// Returns the number of attempts.
    fn store_as_vcpu(&self, offset: u64, word: u64) -> usize {
        self.vcpu(offset, word).join().unwrap()
    }

    fn wait_for_waiting(&self, holes: u64) {
        wait_until(|| self.metrics.waiting.load(Ordering::SeqCst) == holes);
    }

    fn break_as(&self, broken: Broken) {
        self.filler.as_ref().unwrap().stocked.state.lock().broken = Some(broken);
    }

    fn load(&self, offset: u64) -> u64 {
        load(self.reservation.addr() + offset)
    }

    fn allocated_chunks(&self) -> u64 {
        self.volume.allocated_bytes() / CHUNK_BYTES
    }

    /// Waits until the stock has nothing to do. Returns the number of its chunks.
    fn idle_stock(&self) -> usize {
        let stocked = &self.filler.as_ref().unwrap().stocked;
        wait_until(|| stocked.state.lock().stock.is_idle());
        stocked.state.lock().stock.len()
    }

    /// Ends the filling, and returns words of the stored volume.
    fn stored(mut self, offsets: &[u64]) -> Vec<u64> {
        self.filler = None;
        let Self { pool, volume, reservation, folder, .. } = self;
        // The mapping also keeps the file and its lock.
        drop((pool, volume, reservation));
        let pool = Pool::open(&folder.path().join("pool"), OpenMode::ReadOnly).unwrap();
        let volume = pool.open_volume("data").unwrap();
        offsets.iter().map(|offset| volume.load_word(*offset).unwrap()).collect()
    }
}

/// Stores a word in a mapped reservation.
fn store(address: u64, word: u64) {
    // SAFETY: the address is mapped, and no reference points there.
    unsafe { (address as *mut u64).write_volatile(word) }
}

/// Result of a vCPU's attempt to store.
#[derive(Debug, PartialEq, Eq)]
enum Attempt {
    Stored,
    LacksSpace,
    Unexplained,
}

/// Lets the kernel store a word, as KVM does.
fn try_store(address: u64, word: u64, waits: &StoreWaits) -> Attempt {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&word.to_ne_bytes(), 0).unwrap();
    let (stored, lacked_space) = waits.attempt(|| {
        // SAFETY: the kernel writes to a mapped word, to which no reference points.
        unsafe { libc::pread(file.as_raw_fd(), address as *mut _, 8, 0) }
    });
    if stored == 8 {
        return Attempt::Stored;
    }
    assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
    if lacked_space { Attempt::LacksSpace } else { Attempt::Unexplained }
}

/// Repeats a store as a vCPU does while it lacks space. Returns the number of attempts.
fn store_as_vcpu(address: u64, word: u64, waits: &StoreWaits) -> usize {
    for attempts in 1.. {
        match try_store(address, word, waits) {
            Attempt::Stored => return attempts,
            Attempt::LacksSpace => waits.wait(),
            Attempt::Unexplained => panic!("nothing explains the failure"),
        }
    }
    unreachable!("a store succeeds or fails")
}

fn wait_until(mut is_reached: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_reached() {
        assert!(Instant::now() < end, "the state is never reached");
        std::thread::yield_now();
    }
}

fn load(address: u64) -> u64 {
    // SAFETY: as above.
    unsafe { (address as *const u64).read_volatile() }
}

fn full() -> MediaError {
    MediaError::Full { needed_bytes: CHUNK_BYTES, available_bytes: 0 }
}

#[test]
fn only_stores_allocate_and_reach_the_pool() {
    if is_skipped() {
        return;
    }
    let rig = Rig::new([]);
    for offset in (0..CHUNKS * CHUNK_BYTES).step_by(4096) {
        assert_eq!(rig.load(offset), 0);
    }
    assert_eq!(rig.allocated_chunks(), 0);
    let offsets = [8, 5 * CHUNK_BYTES + 4096, 6 * CHUNK_BYTES - 8];
    for (word, offset) in (1..).zip(offsets) {
        rig.store(offset, word);
        assert_eq!((rig.load(offset), rig.load(offset - 8)), (word, 0));
    }
    assert_eq!((rig.allocated_chunks(), rig.metrics.fills.count()), (2, 2));
    assert_eq!(rig.stored(&offsets), [1, 2, 3]);
}

#[test]
fn consecutive_stores_use_the_stock_and_its_rest_is_released() {
    if is_skipped() {
        return;
    }
    let mut rig = Rig::new([]);
    rig.store(0, 1);
    rig.store(CHUNK_BYTES, 2);
    wait_until(|| rig.metrics.stocked.load(Ordering::Relaxed) == 4);
    assert_eq!(rig.metrics.unstocked.load(Ordering::Relaxed), 2);
    let mut offset = 2 * CHUNK_BYTES;
    while offset < 6 * CHUNK_BYTES {
        rig.store(offset, 3);
        offset += CHUNK_BYTES;
    }
    assert_eq!(rig.metrics.unstocked.load(Ordering::Relaxed), 2);
    rig.filler = None;
    assert_eq!((rig.metrics.fills.count(), rig.allocated_chunks()), (6, 6));
    let offsets: Vec<_> = (0..CHUNKS).map(|index| index * CHUNK_BYTES).collect();
    assert_eq!(rig.stored(&offsets), [1, 2, 3, 3, 3, 3, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn stores_of_several_threads_to_one_hole_are_all_kept() {
    if is_skipped() {
        return;
    }
    let rig = Rig::new([]);
    let start = rig.reservation.addr();
    let offsets: Vec<_> = (0..8).map(|nth| 3 * CHUNK_BYTES + nth * 4096).collect();
    std::thread::scope(|scope| {
        for offset in &offsets {
            scope.spawn(move || {
                for word in 1..=100 {
                    store(start + offset + word * 8, word);
                }
            });
        }
    });
    assert_eq!((rig.metrics.fills.count(), rig.allocated_chunks()), (1, 1));
    let words: Vec<_> =
        offsets.iter().flat_map(|offset| (1..=100).map(move |word| offset + word * 8)).collect();
    let expected: Vec<_> = (0..8).flat_map(|_| 1..=100).collect();
    assert_eq!(rig.stored(&words), expected);
}

#[test]
fn store_waits_while_the_pool_is_full() {
    if is_skipped() {
        return;
    }
    let rig = Rig::new([full(), full()]);
    assert_eq!(rig.metrics.has_space_for_waiting(), None);
    assert!(rig.store_as_vcpu(CHUNK_BYTES, 7) > 1);
    assert_eq!(rig.reports.try_recv(), Ok((None, Some(false))));
    rig.wait_for_waiting(0);
    assert_eq!(rig.metrics.has_space_for_waiting(), None);
    assert!(rig.reports.try_recv().is_err(), "the second attempt follows within a second");
    assert_eq!(rig.stored(&[CHUNK_BYTES]), [7]);
}

#[test]
fn store_beyond_the_reserve_waits_until_the_pool_has_space() {
    if is_skipped() {
        return;
    }
    for (broken, word, is_repeated) in [
        (None, 7, true),
        (Some(Broken::IgnoresFull), 0, false),
        (Some(Broken::WaitsInKernel), 7, false),
    ] {
        let rig = Rig::of(source_with(Some(0), [full(), full()]));
        broken.into_iter().for_each(|broken| rig.break_as(broken));
        assert_eq!(rig.store_as_vcpu(CHUNK_BYTES, 7) > 1, is_repeated, "{broken:?}");
        assert_eq!(rig.stored(&[CHUNK_BYTES]), [word], "{broken:?}");
    }
    let rig = Rig::overcommitted(2, 1);
    for index in 0..3 {
        rig.store(4 * index * CHUNK_BYTES, 1);
    }
    assert!(rig.reports.try_recv().is_err());
    let waiting = [8, 16].map(|offset| rig.vcpu(6 * CHUNK_BYTES + offset, 7));
    for _ in 0..2 {
        let report = rig.reports.recv_timeout(Duration::from_secs(20));
        assert_eq!(report, Ok((None, Some(false))));
    }
    assert_eq!(rig.metrics.waiting.load(Ordering::SeqCst), 1, "one hole lacks space");
    assert_eq!((rig.allocated_chunks(), rig.load(6 * CHUNK_BYTES + 8)), (3, 0));
    rig.pool.delete_volume("other").unwrap();
    let attempts = waiting.into_iter().map(|thread| thread.join().unwrap());
    assert!(attempts.sum::<usize>() > 2, "no vCPU repeated its store");
    rig.wait_for_waiting(0);
    assert_eq!(rig.metrics.full_writes.load(Ordering::Relaxed), 1);
    let offsets = [0, 4, 8, 6].map(|index| index * CHUNK_BYTES);
    let words = offsets.map(|offset| if offset == 6 * CHUNK_BYTES { offset + 8 } else { offset });
    assert_eq!(rig.stored(&words), [1, 1, 1, 7]);
}

#[test]
fn store_that_no_vcpu_repeats_is_forgotten_after_a_resume() {
    if is_skipped() {
        return;
    }
    for (is_populated, is_broken) in [(false, false), (true, false), (false, true), (true, true)] {
        let rig = Rig::with_zeros(Rig::overcommitted_source(0, 0), is_populated);
        if is_broken {
            rig.break_as(Broken::FailsAfterWait);
        }
        let at = rig.reservation.addr() + CHUNK_BYTES;
        assert_eq!(try_store(at, 7, &rig.waits), Attempt::LacksSpace);
        rig.wait_for_waiting(1);
        rig.waits.vcpus_will_run();
        rig.wait_for_waiting(0);
        assert_eq!((rig.waits.attempt(|| ()).1, rig.allocated_chunks()), (false, 0));
        // Another store there waits again, and reaches the pool.
        if is_broken {
            assert_eq!(try_store(at, 8, &rig.waits), Attempt::Unexplained);
            continue;
        }
        let waiting = rig.vcpu(CHUNK_BYTES, 8);
        rig.wait_for_waiting(1);
        rig.pool.delete_volume("other").unwrap();
        waiting.join().unwrap();
        assert_eq!(rig.stored(&[CHUNK_BYTES]), [8]);
    }
}

#[test]
fn store_that_waits_does_not_outlive_the_volume() {
    if is_skipped() {
        return;
    }
    let mut rig = Rig::overcommitted(0, 0);
    assert_eq!(try_store(rig.reservation.addr(), 7, &rig.waits), Attempt::LacksSpace);
    assert!(rig.waits.attempt(|| ()).1);
    rig.filler = None;
    assert!(!rig.waits.attempt(|| ()).1);
}

#[test]
fn stock_does_not_exceed_the_reserve() {
    if is_skipped() {
        return;
    }
    for (is_broken, stocked) in [(false, 1), (true, 4)] {
        let rig = Rig::overcommitted(3, 3);
        if is_broken {
            rig.break_as(Broken::IgnoresReserve);
        }
        rig.store(0, 1);
        rig.store(CHUNK_BYTES, 1);
        assert_eq!(rig.idle_stock(), stocked);
    }
}

#[test]
fn store_gets_the_space_of_the_stock_in_a_full_pool() {
    if is_skipped() {
        return;
    }
    let rig = Rig::overcommitted(6, 0);
    rig.store(0, 1);
    rig.store(CHUNK_BYTES, 1);
    assert_eq!(rig.idle_stock(), 4);
    let far = [8, 9, 10, 11].map(|index| index * CHUNK_BYTES);
    for (stores, offset) in (1..).zip(far) {
        rig.store(offset, 2);
        // The oldest chunk is released.
        assert_eq!(
            (rig.idle_stock(), rig.volume.chunk_offset(1 + stores)),
            (4 - stores as usize, None)
        );
    }
    assert!(rig.reports.try_recv().is_err(), "the stock has space for the stores");
    assert_eq!((rig.idle_stock(), rig.allocated_chunks()), (0, 6));
    assert_eq!(rig.stored(&far), [2; 4]);
}

#[test]
fn failure_is_reported_before_the_store_continues() {
    if is_skipped() {
        return;
    }
    let rig = Rig::new([MediaError::ReadOnly, MediaError::ReadOnly]);
    rig.store(CHUNK_BYTES, 7);
    rig.store(3 * CHUNK_BYTES, 7);
    let reason = rig.reports.try_recv().unwrap().0.unwrap();
    assert!(reason.contains("for reading only"), "{reason}");
    assert!(rig.reports.try_recv().is_err(), "the guest is stopped only once");
    assert_eq!((rig.load(CHUNK_BYTES), rig.allocated_chunks()), (7, 0));
    assert_eq!(rig.stored(&[CHUNK_BYTES]), [0]);
}

#[test]
fn kernel_without_protection_of_absent_pages_gets_pages_of_zeros() {
    if is_skipped() {
        return;
    }
    let reservation = Reservation::new(CHUNK_BYTES, CHUNK_BYTES).unwrap();
    let mut userfaults = UserfaultDevice::default().create().unwrap();
    userfaults.protects_absent = false;
    userfaults.map_zeros(&reservation, 0, CHUNK_BYTES).unwrap();
    let at = reservation.addr();
    std::thread::scope(|scope| {
        scope.spawn(|| store(at, 7));
        let fault = loop {
            match userfaults.next().unwrap() {
                Some(fault) => break fault,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!((fault / 4096, load(at)), (at / 4096, 0));
        reservation.map_anonymous(0, CHUNK_BYTES).unwrap();
        userfaults.wake(at, CHUNK_BYTES).unwrap();
    });
    assert_eq!(load(at), 7);
}

#[test]
fn store_of_zeros_before_protection_is_detected() {
    if is_skipped() {
        return;
    }
    let reservation = Reservation::new(CHUNK_BYTES, CHUNK_BYTES).unwrap();
    let mut userfaults = UserfaultDevice::default().create().unwrap();
    if !userfaults.protects_absent {
        eprintln!("skipped: Linux is older than 6.4");
        return;
    }
    let last = reservation.addr() + CHUNK_BYTES - 8;
    let mut is_noticed = |word: Option<u64>| {
        reservation.map_anonymous(0, CHUNK_BYTES).unwrap();
        word.into_iter().for_each(|word| store(last, word));
        userfaults.protects_absent = true;
        userfaults.protect(&reservation, 0, CHUNK_BYTES).unwrap();
        // The broken variant compares the content.
        [true, false].map(|by_presence| {
            userfaults.protects_absent = by_presence;
            !userfaults.accessed_pages(&reservation, 0, CHUNK_BYTES).unwrap().is_empty()
        })
    };
    assert_eq!(is_noticed(Some(7)), [true, true]);
    assert_eq!(is_noticed(None), [false, false]);
    assert_eq!(is_noticed(Some(0)), [true, false]);
}

#[test]
fn withdrawn_chunk_keeps_its_data_or_becomes_a_hole() {
    if is_skipped() {
        return;
    }
    let rig = Rig::new([]);
    let access = rig.filler.as_ref().unwrap().chunk_access();
    let chunk = |index: u64| index * CHUNK_BYTES..(index + 1) * CHUNK_BYTES;
    rig.store(chunk(3).start, 3);
    rig.store(chunk(5).start, 5);
    access.withdraw(&[chunk(3), chunk(5)]).unwrap();
    assert_eq!((rig.load(chunk(3).start), rig.load(chunk(5).start)), (0, 0));
    let at = rig.reservation.addr() + chunk(5).start + 8;
    let waiting = std::thread::spawn(move || store(at, 6));
    // The stock does not prepare withdrawn chunks for stores that continue the first one.
    rig.store(chunk(0).start, 1);
    rig.store(chunk(1).start, 1);
    rig.store(chunk(2).start, 1);
    wait_until(|| rig.metrics.stocked.load(Ordering::Relaxed) == 4);
    rig.volume.release(5).unwrap();
    assert!(!waiting.is_finished(), "the store waits");
    access.give_back(&[chunk(3), chunk(5)]).unwrap();
    waiting.join().unwrap();
    assert_eq!(rig.load(chunk(3).start), 3);
    assert_eq!((rig.load(chunk(5).start), rig.load(chunk(5).start + 8)), (0, 6));
    let stored = [chunk(3).start, chunk(5).start, chunk(5).start + 8];
    assert_eq!(rig.stored(&stored), [3, 0, 6]);
    let ended = access.withdraw(&[chunk(3)]).unwrap_err();
    assert!(foreshore_types::chain(&ended).contains("is being removed"), "{ended}");
}

#[test]
fn chunk_that_is_given_back_leaves_the_stock() {
    if is_skipped() {
        return;
    }
    for is_broken in [false, true] {
        let rig = Rig::new([]);
        let filler = rig.filler.as_ref().unwrap();
        if is_broken {
            rig.break_as(Broken::KeepsWithdrawn);
        }
        rig.store(0, 1);
        rig.store(CHUNK_BYTES, 1);
        wait_until(|| rig.metrics.stocked.load(Ordering::Relaxed) == 4);
        let (access, chunk) = (filler.chunk_access(), 3 * CHUNK_BYTES..4 * CHUNK_BYTES);
        access.withdraw(std::slice::from_ref(&chunk)).unwrap();
        access.give_back(std::slice::from_ref(&chunk)).unwrap();
        // The chunk is mapped, so this store is not reported. The end of the filling releases the
        // stock.
        rig.store(chunk.start, 3);
        assert_eq!((rig.load(chunk.start), rig.metrics.fills.count()), (3, 2));
        assert_eq!(rig.stored(&[chunk.start]), [if is_broken { 0 } else { 3 }]);
    }
}

/// Ranges of files in guest memory that may use `mappings` mappings for holes.
fn ranges(mappings: usize) -> (Arc<FileRanges>, GuestView, Arc<MappingBudget>) {
    let view = GuestView::new(GuestMemoryMmap::new());
    let slots = Arc::new(Slots::new(Arc::<FakeSlots>::default(), 8));
    let budget = Arc::new(MappingBudget::new(mappings));
    (FileRanges::new(view.clone(), slots, Arc::clone(&budget)), view, budget)
}

const RANGE: GuestRange = GuestRange { start: 1 << 32, len: CHUNKS * CHUNK_BYTES };

#[test]
fn devices_do_not_reach_holes_that_the_guest_fills() {
    if is_skipped() {
        return;
    }
    let (ranges, view, budget) = ranges(CHUNKS as usize);
    let (source, _reports, _folder) = source([]);
    let (pool, metrics) = (Arc::clone(&source.pool), Arc::clone(&source.metrics));
    let mapping = FileMapping {
        file: pool.file(),
        len_bytes: RANGE.len,
        parts: Vec::new(),
        access: Access::ReadWrite,
        holes: Some(source),
    };
    let range = ranges.add(RANGE, mapping).unwrap();
    view.memory().write_obj(7u8, GuestAddress(RANGE.start)).unwrap_err();
    assert_eq!(view.memory().regions().memory.num_regions(), 0, "vhost does not reach them");
    assert_eq!(metrics.fills.count(), 0);
    store(range.reservation.addr(), 7);
    assert_eq!(metrics.fills.count(), 1, "the guest does");
    assert_eq!(budget.used(), CHUNKS as usize);
    drop(range);
    assert_eq!(budget.used(), 0);
}

#[test]
fn emulated_stores_are_reported_until_the_guest_loses_the_range() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(RANGE.len).unwrap();
    for (calls_left, count) in [(None, 0), (Some(1), 1)] {
        let table = FakeSlots { calls_left: Mutex::new(calls_left), ..FakeSlots::default() };
        let (view, slots) =
            (GuestView::new(GuestMemoryMmap::new()), Slots::new(Arc::new(table), 8));
        let ranges = FileRanges::new(view, Arc::new(slots), Arc::new(MappingBudget::new(1)));
        let mapping = FileMapping::of_file(file.as_fd(), RANGE.len, Access::ReadWrite);
        let mut range = ranges.add(RANGE, mapping).unwrap();
        let (bus, (source, ..)) = (Arc::new(Bus::default()), source([]));
        let stores = Arc::new(EmulatedStores::new(&source));
        range.hold_emulated_stores(bus.attach(RANGE.start, RANGE.len, stores).unwrap());
        drop(range);
        assert_eq!(bus.count(), count);
    }
}

#[test]
fn parts_and_holes_that_the_guest_only_reads_count_as_mappings() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(RANGE.len).unwrap();
    // Two parts and two holes.
    let mapping = || FileMapping {
        parts: vec![(CHUNK_BYTES, 0..CHUNK_BYTES), (3 * CHUNK_BYTES, 0..CHUNK_BYTES)],
        ..FileMapping::of_file(file.as_fd(), 4 * CHUNK_BYTES, Access::Read)
    };
    let (few, ..) = ranges(3);
    let Err(MemoryError::Mappings { needed: 4, used: 0, limit: 3 }) = few.add(RANGE, mapping())
    else {
        panic!("the limit is too low");
    };
    let (enough, _, budget) = ranges(4);
    let range = enough.add(RANGE, mapping()).unwrap();
    assert_eq!(budget.used(), 4);
    drop(range);
    assert_eq!(budget.used(), 0);
}
