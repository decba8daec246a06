//! Cost of moving the boundary between memory and storage, compared with memset() and memcpy() of a
//! chunk in the same run: `docs/design/benchmarks.md`.

use std::env;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use foreshore_devices::memory::backing::{
    Access, Backing, MappingBudget, PmBacking, Reservation, SpillPlan, Spiller,
};
use foreshore_devices::memory::holes::{HoleFiller, HoleMetrics, HoleSource, UserfaultDevice};
use foreshore_devices::pool::{
    CHUNK_BYTES, LocalPool, PmPool, PoolVolume, VolumeFormat, VolumeOptions, VolumeSize,
};
use parking_lot::Mutex;
use pmem_volume::Pool;
use pmem_volume::btt::Engine;
use pmem_volume::media::FileMedia;
use tempfile::TempDir;

const SECTOR_BYTES: u64 = 4096;
/// Chunks of pools that remain for metadata.
const SPARE_CHUNKS: u64 = 4;
/// Distance between stores for which no chunk is allocated in advance.
const FAR_CHUNKS: u64 = 2;

/// Number of chunks in each measurement.
#[derive(Clone, Copy)]
struct Scale {
    chunks: u64,
}

impl Scale {
    fn len_bytes(self) -> u64 {
        self.chunks * CHUNK_BYTES
    }

    fn indexes(self) -> impl Iterator<Item = u32> {
        0..self.chunks as u32
    }
}

fn main() {
    // cargo bench passes --bench.
    let is_whole = env::args().any(|argument| argument == "--bench");
    let scale = Scale { chunks: if is_whole { 256 } else { 16 } };
    println!(
        "| Per chunk of 2 MiB | median | 99 % | median of memset's | 99 % of memcpy's median |"
    );
    println!("|---|---|---|---|---|");
    let peers = &mut Peers { source: memory(scale), target: memory(scale), scale, turn: 0 };
    lend(scale, peers);
    peers.compare("retrieval of dead content, as on dax-sync", retrieve_dead(scale));
    peers.compare("retrieval of moved content", retrieve_moved(scale));
    peers.compare("its floor: a private copy by Linux", copy_privately(scale));
    store_into_holes(scale, peers);
    write_sectors(scale, peers);
}

/// Work on chunks of DRAM, with which other work is compared. The chunks take turns, and fit into
/// no cache.
struct Peers {
    source: Reservation,
    target: Reservation,
    scale: Scale,
    turn: u64,
}

impl Peers {
    /// Prints times that the iterator measures. After each of them, measures memset() and memcpy(),
    /// so that other load on the machine affects all of them.
    fn compare(&mut self, name: &str, work: impl IntoIterator<Item = Duration>) {
        let (mut times, mut by_memset, mut by_memcpy) = (Vec::new(), Vec::new(), Vec::new());
        for duration in work {
            times.push(duration);
            by_memset.push(self.memset());
            by_memcpy.push(self.memcpy());
        }
        for sorted in [&mut times, &mut by_memset, &mut by_memcpy] {
            sorted.sort_unstable();
        }
        let us = |times: &[Duration], percent: usize| {
            times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6
        };
        let (median, high) = (us(&times, 50), us(&times, 99));
        println!(
            "| {name} | {median:.2} us | {high:.2} us | {:.3} | {:.3} |",
            median / us(&by_memset, 50),
            high / us(&by_memcpy, 50)
        );
    }

    fn next_offset(&mut self) -> u64 {
        self.turn += 1;
        self.turn % self.scale.chunks * CHUNK_BYTES
    }

    fn memset(&mut self) -> Duration {
        let address = self.target.addr() + self.next_offset();
        time(|| fill(address, CHUNK_BYTES, 0))
    }

    fn memcpy(&mut self) -> Duration {
        let offset = self.next_offset();
        let (from, to) = (self.source.addr() + offset, self.target.addr() + offset);
        // SAFETY: both chunks are mapped, and no reference points there.
        time(|| unsafe {
            (from as *const u8).copy_to_nonoverlapping(to as *mut u8, CHUNK_BYTES as usize);
        })
    }
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Memory whose pages are present.
fn memory(scale: Scale) -> Reservation {
    let memory = Reservation::new(scale.len_bytes(), CHUNK_BYTES).unwrap();
    memory.map_anonymous(0, scale.len_bytes()).unwrap();
    fill(memory.addr(), scale.len_bytes(), 1);
    memory
}

/// Sets bytes of a mapped reservation.
fn fill(address: u64, len: u64, byte: u8) {
    // SAFETY: the range is mapped, and no reference points there.
    unsafe { (address as *mut u8).write_bytes(byte, len as usize) }
}

fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: the caller's reservation is mapped there, and outlives the reference.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

fn new_pool(chunks: u64) -> (PathBuf, TempDir) {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let path = folder.path().join("pool");
    drop(Pool::create(&path, (chunks + SPARE_CHUNKS) * CHUNK_BYTES, 0).unwrap());
    (path, folder)
}

fn thin(scale: Scale) -> VolumeOptions {
    let size = VolumeSize::Bytes(scale.len_bytes());
    VolumeOptions { size, format: VolumeFormat::Raw, thin: true, reserve_bytes: None }
}

/// Memory that a pool lends to a VM. Volumes can have chunks of it back.
struct Lent {
    zone: Arc<Reservation>,
    backing: Arc<Mutex<PmBacking>>,
    _spiller: Option<Spiller>,
}

impl Lent {
    fn new(pool: &Arc<dyn PmPool>, scale: Scale) -> Self {
        let mut plan = SpillPlan::new(Some(pool), scale.len_bytes()).unwrap();
        let zone = Arc::new(Reservation::new(scale.len_bytes(), 1 << 30).unwrap());
        let mappings = Arc::new(MappingBudget::of_host());
        let (backing, _) = plan.add_zone(pool, &zone, &mappings, scale.len_bytes(), None);
        Self { zone, backing, _spiller: plan.start().unwrap() }
    }
}

fn lend(scale: Scale, peers: &mut Peers) {
    let (path, _folder) = new_pool(scale.chunks);
    let local = LocalPool::open(&path, None).unwrap();
    let pool: Arc<dyn PmPool> = local.clone();
    let lent = Lent::new(&pool, scale);
    let (mut plugs, mut unplugs) = (Vec::new(), Vec::new());
    for _ in 0..100 {
        let mut backing = lent.backing.lock();
        let per_chunk = |times: Duration| times / scale.chunks as u32;
        plugs.push(per_chunk(time(|| backing.plug(0, scale.len_bytes()).unwrap())));
        unplugs.push(per_chunk(time(|| {
            backing.detach(0, scale.len_bytes()).unwrap();
            backing.free_detached().unwrap();
        })));
        local.pool().scrub_all().unwrap();
    }
    peers.compare("lending, all chunks at once", plugs);
    peers.compare("return, all chunks at once", unplugs);
}

/// Frees lent memory, and allocates its chunks for a volume, which erases them as on persistent
/// memory. Returns the time for each chunk.
fn retrieve_dead(scale: Scale) -> impl Iterator<Item = Duration> {
    let (path, folder) = new_pool(scale.chunks);
    let pool = Pool::open_on(&path, FileMedia::with_dax_persists).unwrap();
    pool.create_volume_with("v", thin(scale)).unwrap();
    pool.lend_promised(Some(0));
    pool.set_borrowable_bytes(scale.len_bytes());
    // Erases all chunks once, so that the pool's mapping of them has its pages.
    pool.free_memory(&pool.alloc_memory(scale.len_bytes()).unwrap()).unwrap();
    pool.scrub_all().unwrap();
    let lent = pool.alloc_memory(scale.len_bytes()).unwrap();
    let zone = Reservation::new(scale.len_bytes(), CHUNK_BYTES).unwrap();
    let mut at = 0;
    for extent in &lent {
        let file = pool.file().as_fd();
        zone.map_file(at, extent.len_bytes(), file, extent.offset_bytes(), Access::ReadWrite)
            .unwrap();
        at += extent.len_bytes();
    }
    fill(zone.addr(), scale.len_bytes(), 1);
    let volume = pool.open_volume("v").unwrap();
    let freed = time(|| pool.free_memory(&lent).unwrap()) / scale.chunks as u32;
    scale.indexes().map(move |index| {
        let _ = &folder;
        freed + time(|| _ = volume.provision_chunk(index).unwrap())
    })
}

/// Memory that the guest keeps is moved to DRAM, and its chunks become chunks of a volume.
fn retrieve_moved(scale: Scale) -> impl Iterator<Item = Duration> {
    let (path, folder) = new_pool(scale.chunks);
    let pool: Arc<dyn PmPool> = LocalPool::open(&path, None).unwrap();
    pool.create_volume("v", thin(scale)).unwrap();
    pool.lend_promised(Some(0));
    let lent = Lent::new(&pool, scale);
    lent.backing.lock().plug(0, scale.len_bytes()).unwrap();
    fill(lent.zone.addr(), scale.len_bytes(), 1);
    let volume = pool.open_volume("v").unwrap();
    scale.indexes().map(move |index| {
        let _ = (&folder, &lent);
        time(|| _ = volume.provision(index).unwrap())
    })
}

/// Linux's part of a move: it copies the pages of a private mapping.
fn copy_privately(scale: Scale) -> impl Iterator<Item = Duration> {
    let (path, folder) = new_pool(scale.chunks);
    let pool = LocalPool::open(&path, None).unwrap();
    let zone = Reservation::new(scale.len_bytes(), CHUNK_BYTES).unwrap();
    let map = move |zone: &Reservation, offset, len, access| {
        let _ = &folder;
        zone.map_file(offset, len, pool.file(), SPARE_CHUNKS * CHUNK_BYTES + offset, access)
    };
    map(&zone, 0, scale.len_bytes(), Access::ReadWrite).unwrap();
    fill(zone.addr(), scale.len_bytes(), 1);
    scale.indexes().map(move |index| {
        let offset = u64::from(index) * CHUNK_BYTES;
        let copied = time(|| {
            map(&zone, offset, CHUNK_BYTES, Access::ReadWritePrivate).unwrap();
            zone.populate(offset, CHUNK_BYTES).unwrap();
        });
        // The next copy uses the same pages. A virtual host may have to get other pages first.
        zone.unmap(offset, CHUNK_BYTES).unwrap();
        copied
    })
}

/// Thin volume whose holes are filled as for a guest that maps it.
struct Mapped {
    reservation: Arc<Reservation>,
    metrics: Arc<HoleMetrics>,
    volume: Arc<dyn PoolVolume>,
    _filler: HoleFiller,
    _folder: TempDir,
}

impl Mapped {
    /// Returns `None` if the user cannot open /dev/userfaultfd.
    fn new(scale: Scale) -> Option<Self> {
        let device = Arc::new(UserfaultDevice::default());
        if let Some(reason) = device.refusal() {
            println!("| stores into holes: {reason} | | | | |");
            return None;
        }
        let (path, folder) = new_pool(scale.chunks);
        let pool: Arc<dyn PmPool> = LocalPool::open(&path, None).unwrap();
        pool.create_volume("v", thin(scale)).unwrap();
        let volume: Arc<dyn PoolVolume> = Arc::from(pool.open_volume("v").unwrap());
        let reservation = Arc::new(Reservation::new(scale.len_bytes(), CHUNK_BYTES).unwrap());
        let metrics: Arc<HoleMetrics> = Arc::default();
        let userfaults = device.create().unwrap();
        userfaults.map_zeros(&reservation, 0, scale.len_bytes()).unwrap();
        let source = HoleSource {
            device,
            pool,
            volume: Arc::clone(&volume),
            metrics: Arc::clone(&metrics),
            on_full: Box::new(|| panic!("the pool has space for the volume")),
            on_failure: Arc::new(|reason| panic!("{reason}")),
            waits: Arc::default(),
        };
        let (of, is_mapped) = (Arc::clone(&reservation), vec![false; scale.chunks as usize]);
        let filler =
            HoleFiller::start(source, userfaults, of, is_mapped, Access::ReadWrite).unwrap();
        Some(Self { reservation, metrics, volume, _filler: filler, _folder: folder })
    }

    fn store(&self, chunk: u64) -> Duration {
        let word = word(self.reservation.addr() + chunk * CHUNK_BYTES);
        time(|| word.store(1, Ordering::Relaxed))
    }
}

fn store_into_holes(scale: Scale, peers: &mut Peers) {
    let Some(mapped) = Mapped::new(scale) else { return };
    let far = (0..scale.chunks).step_by(FAR_CHUNKS as usize);
    let stores = far.map(|chunk| mapped.store(chunk));
    peers.compare("store into a hole, without stock", stores);
    let Some(mapped) = Mapped::new(scale) else { return };
    mapped.store(0);
    mapped.store(1);
    let stores = (2..scale.chunks).map(|chunk| {
        while mapped.volume.chunk_offset(chunk as u32).is_none() {
            thread::yield_now();
        }
        mapped.store(chunk)
    });
    peers.compare("store into a hole, with stock", stores);
    let fills = mapped.metrics.fills.count();
    let stores = (0..scale.chunks).map(|chunk| mapped.store(chunk));
    peers.compare("store into a filled chunk", stores);
    assert_eq!(mapped.metrics.fills.count(), fills, "a filled chunk causes no fault");
}

/// Writes a sector of each chunk by the BTT engine. A thin volume has its chunks after the first
/// round.
fn write_sectors(scale: Scale, peers: &mut Peers) {
    for (name, thin) in [("full", false), ("thin", true)] {
        let (path, _folder) = new_pool(scale.chunks);
        let pool = Pool::open_on(&path, FileMedia::with_dax_persists).unwrap();
        let size = VolumeSize::Bytes(scale.len_bytes());
        let options = VolumeOptions { size, format: VolumeFormat::Btt, thin, reserve_bytes: None };
        pool.create_volume_with("v", options).unwrap();
        let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
        let step = (CHUNK_BYTES / SECTOR_BYTES) as usize;
        for round in ["first write of a chunk's sectors", "later writes"] {
            let sectors = (0..engine.sectors()).step_by(step);
            let write = |sector| engine.write(sector, &[round.len() as u8; 4096]).unwrap();
            let writes = sectors.map(|sector| time(|| write(sector)));
            peers.compare(&format!("{round}, {name} volume"), writes);
        }
    }
}
