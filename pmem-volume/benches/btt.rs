//! Cost of the BTT engine, compared with memcpy(), with non-temporal copies, and with the minimum
//! that the format requires. All of them access the same amount of data at random places with the
//! same number of threads, in the same run and the same memory: `docs/design/benchmarks.md`.

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid_count, __m128i, __m512i, _mm_clflush, _mm_loadu_si128, _mm_sfence, _mm_stream_si128,
    _mm512_loadu_si512, _mm512_stream_si512,
};
use std::cell::Cell;
use std::env;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, LazyLock};
use std::thread;
use std::time::Instant;

use pmem_volume::btt::{Engine, arenas};
use pmem_volume::{OpenMode, Pool, Volume, VolumeFormat, VolumeSize};

/// Size of the volume, which is several times the size of a cache.
const VOLUME_BYTES: u64 = 1 << 30;
const SMALL_VOLUME_BYTES: u64 = 64 << 20;
const SECTOR_BYTES: usize = 4096;
const THREADS: [usize; 2] = [1, 2];

/// Kind of access that is measured.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    ReadRandom,
    WriteRandom,
    /// Blocks are in the order of their sectors, as in a volume that was written sequentially.
    ReadInOrder,
    WriteInOrder,
    /// Blocks are in random order, as after random writes.
    ReadScattered,
    WriteScattered,
}

#[derive(Clone, Copy, PartialEq)]
enum Peer {
    Engine,
    Memcpy,
    /// Minimum work of any BTT implementation ([`BenchVolume::minimal_write`]). The engine can
    /// improve by at most the difference to it.
    Minimum,
    /// Non-temporal copy, for stores.
    Stream,
}

const PEERS: [Peer; 4] = [Peer::Engine, Peer::Memcpy, Peer::Minimum, Peer::Stream];

/// The order matters, because each kind of access uses the volume that the previous kind has left.
const WORK: [(Work, &str, usize); 6] = [
    (Work::ReadInOrder, "1 MiB sequential read, in order", 1 << 20),
    (Work::WriteInOrder, "1 MiB sequential write, in order", 1 << 20),
    (Work::WriteRandom, "4 KiB random write", SECTOR_BYTES),
    (Work::ReadRandom, "4 KiB random read", SECTOR_BYTES),
    (Work::ReadScattered, "1 MiB sequential read, scattered", 1 << 20),
    (Work::WriteScattered, "1 MiB sequential write, scattered", 1 << 20),
];

fn main() {
    // cargo bench passes --bench. Further arguments such as "random read" may follow.
    let arguments: Vec<String> = env::args().skip(1).collect();
    let is_whole = arguments.iter().any(|argument| argument == "--bench");
    let wanted = arguments.iter().find(|argument| !argument.starts_with("--"));
    let (volume_bytes, round_bytes, rounds) =
        if is_whole { (VOLUME_BYTES, 8 << 20, 200) } else { (SMALL_VOLUME_BYTES, 4 << 20, 1u64) };
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let bench_volumes = ["volatile", "dax-sync"].map(|class| {
        (class, BenchVolume::new(&folder.path().join(class), volume_bytes, class == "dax-sync"))
    });
    println!(
        "| median, best | class | threads | GB/s | of memcpy | of non-temporal memcpy | of the least \
         | the least of memcpy | the least of non-temporal memcpy | of one thread's | memcpy's |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (work, name, at_once) in WORK {
        if wanted.is_some_and(|wanted| !name.contains(wanted.as_str())) {
            continue;
        }
        for (class, bench_volume) in &bench_volumes {
            let mut rates = Rates::default();
            for round in 0..rounds {
                for threads in THREADS {
                    for (turn, peer) in (0..).zip(PEERS) {
                        // Each [`Peer`] uses different places, so that none finds data in a cache
                        // that another has just read.
                        let seed = round * PEERS.len() as u64 + turn;
                        let operation =
                            |at, buffer: &mut [u8]| bench_volume.work(peer, work, at, buffer);
                        let rate = gb_per_s(
                            threads,
                            at_once,
                            round_bytes,
                            volume_bytes,
                            (work, seed),
                            &operation,
                        );
                        rates.of(peer, threads).push(rate);
                    }
                }
            }
            rates.print(name, class);
        }
    }
}

/// Rates of each peer for each number of threads, one rate per round.
#[derive(Default)]
struct Rates([[Vec<f64>; PEERS.len()]; THREADS.len()]);

impl Rates {
    fn of(&mut self, peer: Peer, threads: usize) -> &mut Vec<f64> {
        &mut self.0[threads - 1][peer as usize]
    }

    /// Prints the ratios of the best rates, and the medians of the ratios in each round. Other load
    /// on the machine affects all peers in a round.
    fn print(&mut self, name: &str, class: &str) {
        for threads in THREADS {
            let mut rates = |peer, threads| self.of(peer, threads).clone();
            let [engine, memcpy, least, stream] = PEERS.map(|peer| rates(peer, threads));
            let [engine_alone, memcpy_alone] =
                [Peer::Engine, Peer::Memcpy].map(|peer| rates(peer, 1));
            println!(
                "| {name} | {class} | {threads} | {:.1}, {:.1} | {} | {} | {} | {} | {} | {} | {} |",
                median(engine.clone()),
                best(&engine),
                ratio(&engine, &memcpy),
                ratio(&engine, &stream),
                ratio(&engine, &least),
                ratio(&least, &memcpy),
                ratio(&least, &stream),
                ratio(&engine, &engine_alone),
                ratio(&memcpy, &memcpy_alone),
            );
        }
    }
}

fn ratio(rates: &[f64], peer: &[f64]) -> String {
    let median = median(rates.iter().zip(peer).map(|(rate, peer)| rate / peer).collect());
    format!("{median:.2}, {:.2}", best(rates) / best(peer))
}

fn best(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(0.0, f64::max)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Volume of an engine, and the memory of its blocks. Each [`Peer`] uses the same physical pages,
/// because these affect the results. The engine does not depend on data that the others leave
/// there.
struct BenchVolume {
    engine: Engine<Volume>,
    /// One mapping for each [`Peer`] except the engine, so that their page tables are equally cold.
    blocks: [Map; PEERS.len() - 1],
    /// Substitutes for the map and the flog of the format in [`BenchVolume::minimal_write`]. There
    /// is one map with blocks in order, and one with scattered blocks.
    in_order: Map,
    scattered: Map,
    records: Map,
    is_dax: bool,
}

/// Number of lines for records like those of the flog. Each of four threads has as many records as
/// it has lanes in the engine.
const RECORDS: u64 = 4 * THREAD_RECORDS;
const THREAD_RECORDS: u64 = 64;
const RECORD_BYTES: u64 = 64;

thread_local! {
    /// First record of this thread, and the sector whose map word the thread changed last.
    static RECORDS_AT: Cell<u64> = {
        static THREADS: AtomicU64 = AtomicU64::new(0);
        Cell::new(THREADS.fetch_add(1, Ordering::Relaxed) * THREAD_RECORDS % RECORDS)
    };
    static LAST_SECTOR: Cell<u64> = const { Cell::new(0) };
}

impl BenchVolume {
    /// Writes every sector, so that all of them have memory.
    fn new(path: &Path, volume_bytes: u64, is_dax: bool) -> Self {
        drop(Pool::create(path, volume_bytes + (16 << 20), 0).unwrap());
        let pool = match is_dax {
            true => Pool::open_with_dax_persists(path).unwrap(),
            false => Pool::open(path, OpenMode::ReadWrite).unwrap(),
        };
        pool.create_volume("v", VolumeSize::Bytes(volume_bytes), VolumeFormat::Btt).unwrap();
        let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
        let bytes = vec![1; 1 << 20];
        for first in (0..engine.sectors() - 256).step_by(256) {
            engine.write(first, &bytes).unwrap();
        }
        let file = File::options().read(true).write(true).open(path).unwrap();
        let volume = engine.space();
        let (info, _) = arenas(volume).swap_remove(0).unwrap();
        let [extent] = volume.extents() else { panic!("a new volume is in one piece") };
        let (at, length) = (extent.offset_bytes() + info.data_at, u64::from(info.blocks) * 4096);
        let blocks = [(); PEERS.len() - 1].map(|()| Map::new(&file, at, length));
        let records = tempfile::tempfile_in("/dev/shm").unwrap();
        records.set_len(RECORDS * RECORD_BYTES).unwrap();
        let records = Map::new(&records, 0, RECORDS * RECORD_BYTES);
        let [in_order, scattered] =
            [false, true].map(|is_shuffled| numbers(u64::from(info.blocks), is_shuffled));
        Self { engine, blocks, in_order, scattered, records, is_dax }
    }

    fn work(&self, peer: Peer, work: Work, at: u64, buffer: &mut [u8]) {
        let is_read = matches!(work, Work::ReadRandom | Work::ReadInOrder | Work::ReadScattered);
        let is_in_order = matches!(work, Work::ReadInOrder | Work::WriteInOrder);
        let table = if is_in_order { &self.in_order } else { &self.scattered };
        let [plain, mapped, stream] = &self.blocks;
        match peer {
            Peer::Engine if is_read => self.engine.read(at / SECTOR_BYTES as u64, buffer).unwrap(),
            Peer::Engine => self.engine.write(at / SECTOR_BYTES as u64, buffer).unwrap(),
            Peer::Memcpy => plain.copy(is_read, at, buffer),
            Peer::Minimum if is_read => self.minimal_read(table, mapped, at, buffer),
            Peer::Minimum => self.minimal_write(table, mapped, at, buffer),
            Peer::Stream if is_read => stream.copy(is_read, at, buffer),
            Peer::Stream => {
                stream.stream(at, buffer);
                fence();
            }
        }
    }

    /// Performs the steps of a read in the format without error handling: look up each sector,
    /// announce the read, look up again, and copy. It needs one locked instruction, because writers
    /// must see the announcement before the second lookup.
    fn minimal_read(&self, table: &Map, blocks: &Map, at: u64, buffer: &mut [u8]) {
        for (sector, piece) in
            (at / SECTOR_BYTES as u64..).zip(buffer.chunks_exact_mut(SECTOR_BYTES))
        {
            let block = table.word(sector);
            with_locked_instruction(u64::from(block), || {
                assert_eq!(table.word(sector), block);
                blocks.copy(true, u64::from(block) * SECTOR_BYTES as u64, piece);
            });
        }
    }

    /// Performs the steps of a write in the format (`pmem_volume::btt`, exchange). It needs one
    /// locked instruction, for the lock of the map. It has no checks, lanes or free blocks. Data is
    /// made durable only at the points where the engine does so.
    fn minimal_write(&self, table: &Map, blocks: &Map, at: u64, buffer: &[u8]) {
        with_locked_instruction(1, || self.minimal_exchange(table, blocks, at, buffer));
    }

    fn minimal_exchange(&self, table: &Map, blocks: &Map, at: u64, buffer: &[u8]) {
        let first = at / SECTOR_BYTES as u64;
        let sectors = first..first + (buffer.len() / SECTOR_BYTES) as u64;
        let write_back = |map: &Map, at| {
            if self.is_dax {
                map.write_back(at);
            }
        };
        let record_at =
            |sector: u64| (RECORDS_AT.get() + (sector - first) % THREAD_RECORDS) * RECORD_BYTES;
        // 1. Store the data in the block from the map, and half of the record. Persist them and two
        //    map words: this sector's, and the one that was changed last.
        for (sector, piece) in sectors.clone().zip(buffer.chunks_exact(SECTOR_BYTES)) {
            let block = table.word(sector);
            blocks.stream(u64::from(block) * SECTOR_BYTES as u64, piece);
            self.records.set_word(record_at(sector) / 4, block);
            write_back(&self.records, record_at(sector));
            write_back(table, sector * 4);
            write_back(table, LAST_SECTOR.replace(sector) * 4);
        }
        fence();
        // 2. Store the second half, which commits the record.
        for sector in sectors.clone() {
            self.records.set_word(record_at(sector) / 4 + 2, sector as u32);
            write_back(&self.records, record_at(sector));
        }
        if self.is_dax {
            fence();
        }
        // 3. Store the words of the map.
        for sector in sectors {
            table.set_word(sector, table.word(sector));
        }
    }
}

/// Runs `work` between a locked instruction and a store. Other threads see the locked instruction
/// before later accesses.
fn with_locked_instruction(value: u64, work: impl FnOnce()) {
    thread_local! {
        static CLAIM: AtomicU64 = const { AtomicU64::new(0) };
    }
    CLAIM.with(|claim| {
        claim.swap(value, Ordering::SeqCst);
        work();
        claim.store(0, Ordering::Release);
    });
}

fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { _mm_sfence() }
}

/// Returns the numbers below `count`, in order or shuffled, in a mapping like that of a volume.
fn numbers(count: u64, is_shuffled: bool) -> Map {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(count * 4).unwrap();
    let mut numbers: Vec<u32> = (0..count as u32).collect();
    let mut random = 1u64;
    for last in (1..if is_shuffled { count } else { 1 }).rev() {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        numbers.swap(last as usize, ((random >> 33) % (last + 1)) as usize);
    }
    let bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
    file.write_all_at(&bytes, 0).unwrap();
    Map::new(&file, 0, count * 4)
}

/// Runs `operation` on pieces of the volume, `round_bytes` in total per thread, and returns the
/// rate.
fn gb_per_s(
    threads: usize,
    at_once: usize,
    round_bytes: usize,
    volume_bytes: u64,
    (work, seed): (Work, u64),
    operation: &(dyn Fn(u64, &mut [u8]) + Sync),
) -> f64 {
    let start = Barrier::new(threads);
    // Excludes the end of the volume, which contains the metadata of the BTT.
    let pieces = (volume_bytes - (4 << 20)) / at_once as u64;
    let times: Vec<_> = thread::scope(|scope| {
        let thread = |thread: u64| {
            let start = &start;
            scope.spawn(move || {
                // Aligned to a page, like the buffers of a guest.
                let mut bytes = vec![thread as u8; at_once + SECTOR_BYTES];
                let start_at = bytes.as_ptr().align_offset(SECTOR_BYTES);
                let buffer = &mut bytes[start_at..start_at + at_once];
                let mut random = seed * 2 + thread + 1;
                let mut number = random.wrapping_mul(0x5851_f42d_4c95_7f2d) % pieces;
                start.wait();
                let begin = Instant::now();
                for _ in 0..round_bytes / at_once {
                    number = match work {
                        Work::ReadRandom | Work::WriteRandom => {
                            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                            (random >> 33) % pieces
                        }
                        _ => (number + 1) % pieces,
                    };
                    operation(number * at_once as u64, buffer);
                }
                (begin, Instant::now())
            })
        };
        let running: Vec<_> = (0..threads as u64).map(thread).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let begin = times.iter().map(|(begin, _)| *begin).min().expect("a thread");
    let end = times.iter().map(|(_, end)| *end).max().expect("a thread");
    (threads * round_bytes) as f64 / (end - begin).as_nanos() as f64
}

/// Mapping of a file on tmpfs, like the media of the engine.
struct Map {
    start: *mut u8,
    length: usize,
}

// SAFETY: the mapping is raw memory without references. Concurrent stores to the same place are
// expected.
unsafe impl Sync for Map {}

impl Map {
    fn new(file: &File, offset: u64, length: u64) -> Self {
        let length = length as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // All pages are in the page tables before the measurement starts.
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let offset = libc::off_t::try_from(offset).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(ptr::null_mut(), length, protection, flags, file.as_raw_fd(), offset)
        };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: start.cast(), length }
    }

    fn at(&self, at: u64, length: usize) -> *mut u8 {
        assert!(at as usize + length <= self.length);
        // SAFETY: inside the mapping.
        unsafe { self.start.add(at as usize) }
    }

    fn word(&self, number: u64) -> u32 {
        // SAFETY: inside the mapping, and aligned like it.
        unsafe { self.at(number * 4, 4).cast::<u32>().read_volatile() }
    }

    fn set_word(&self, number: u64, word: u32) {
        // SAFETY: inside the mapping, and aligned like it.
        unsafe { self.at(number * 4, 4).cast::<u32>().write_volatile(word) }
    }

    /// Writes back the cache line that contains a byte, with clwb if the CPU has it.
    fn write_back(&self, at: u64) {
        let line = self.at(at, 1);
        // CPUID leaf 7, EBX bit 24 (Intel SDM).
        static HAS_CLWB: LazyLock<bool> =
            LazyLock::new(|| __cpuid_count(7, 0).ebx & (1 << 24) != 0);
        // SAFETY: inside the mapping. The content does not change, and the CPU has the instruction.
        unsafe {
            match *HAS_CLWB {
                true => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
                false => _mm_clflush(line),
            }
        }
    }

    fn copy(&self, is_read: bool, at: u64, buffer: &mut [u8]) {
        let (map, length) = (self.at(at, buffer.len()), buffer.len());
        if is_read {
            // SAFETY: inside the mapping, and another buffer.
            unsafe { libc::memcpy(buffer.as_mut_ptr().cast(), map.cast(), length) };
        } else {
            // SAFETY: as above.
            unsafe { libc::memcpy(map.cast(), buffer.as_ptr().cast(), length) };
        }
    }

    /// Copies with non-temporal stores of the CPU's maximum width. The caller must fence.
    fn stream(&self, at: u64, buffer: &[u8]) {
        let map = self.at(at, buffer.len());
        // SAFETY: the range is inside the mapping, which has the alignment of its offsets. The CPU
        // has the instructions.
        unsafe {
            if is_x86_feature_detected!("avx512f") {
                stream_by_64(map.cast(), buffer);
            } else {
                for (number, piece) in buffer.chunks_exact(16).enumerate() {
                    let bytes = _mm_loadu_si128(piece.as_ptr().cast());
                    _mm_stream_si128(map.cast::<__m128i>().add(number), bytes);
                }
            }
        }
    }
}

/// # Safety
/// `bytes.len()` bytes are writable at `to`, which is a multiple of 64.
#[target_feature(enable = "avx512f")]
unsafe fn stream_by_64(to: *mut __m512i, bytes: &[u8]) {
    for (number, piece) in bytes.chunks_exact(64).enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_stream_si512(to.add(number), _mm512_loadu_si512(piece.as_ptr().cast())) };
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped in new() and no longer used.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}
