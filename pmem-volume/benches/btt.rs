//! What the BTT engine costs beside memcpy(), and memcpy() past the cache, of as much to as random places by as many
//! threads, in the same run: `docs/benchmarks.md`.

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
use std::env;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use pmem_volume::btt::Engine;
use pmem_volume::media::{FileMedia, Media};
use pmem_volume::{Pool, Volume, VolumeFormat, VolumeSize};

/// Several times what a cache holds.
const VOLUME_BYTES: u64 = 1 << 30;
const SMALL_VOLUME_BYTES: u64 = 64 << 20;
const SECTOR_BYTES: usize = 4096;
const THREADS: [usize; 2] = [1, 2];

/// What is done, of how much at a time.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    ReadRandom,
    WriteRandom,
    ReadSequential,
    WriteSequential,
}

const WORK: [(Work, &str, usize); 4] = [
    (Work::ReadRandom, "4 KiB random read", SECTOR_BYTES),
    (Work::WriteRandom, "4 KiB random write", SECTOR_BYTES),
    (Work::ReadSequential, "1 MiB sequential read", 1 << 20),
    (Work::WriteSequential, "1 MiB sequential write", 1 << 20),
];

fn main() {
    // cargo bench says --bench.
    let whole = env::args().any(|argument| argument == "--bench");
    let (volume_bytes, round_bytes, rounds) =
        if whole { (VOLUME_BYTES, 64 << 20, 25) } else { (SMALL_VOLUME_BYTES, 4 << 20, 1u64) };
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let engines = ["volatile", "dax-sync"].map(|class| {
        let engine = new_engine(&folder.path().join(class), volume_bytes, class == "dax-sync");
        (class, engine)
    });
    let map = Map::new(volume_bytes);
    println!("| median, best | threads | class | GB/s | of memcpy | of non-temporal memcpy |");
    println!("|---|---|---|---|---|---|");
    for (work, name, at_once) in WORK {
        for threads in THREADS {
            let mut compared = Compared::default();
            for round in 0..rounds {
                // Other places for each, so that nobody finds in a cache what somebody else has just read.
                let turn = AtomicU64::new(round * 4);
                let run = |operation: &(dyn Fn(u64, &mut [u8]) + Sync)| {
                    let seed = turn.fetch_add(1, Ordering::Relaxed);
                    gb_per_s(threads, at_once, round_bytes, volume_bytes, (work, seed), operation)
                };
                let mut engine = |number: usize| {
                    let (_, engine) = &engines[number];
                    compared.engines[number].push(run(&|at, buffer| do_work(engine, work, at, buffer)));
                };
                // Each peer next to an engine.
                engine(0);
                compared.memcpy.push(run(&|at, buffer| map.copy(work, at, buffer)));
                engine(1);
                compared.stream.push(run(&|at, buffer| map.stream(work, at, buffer)));
            }
            compared.print(name, threads, engines.each_ref().map(|(class, _)| *class));
        }
    }
}

/// Rates, round by round.
#[derive(Default)]
struct Compared {
    memcpy: Vec<f64>,
    stream: Vec<f64>,
    engines: [Vec<f64>; 2],
}

impl Compared {
    /// The medians of the rounds' ratios: what else the machine did, it did to a whole round.
    fn print(&self, name: &str, threads: usize, classes: [&str; 2]) {
        for (class, rates) in classes.iter().zip(&self.engines) {
            let ratio =
                |peer: &[f64]| median(rates.iter().zip(peer).map(|(rate, peer)| rate / peer).collect());
            let (memcpy, stream) = (ratio(&self.memcpy), ratio(&self.stream));
            let best = rates.iter().copied().fold(0.0, f64::max);
            let of_best = |peer: &[f64]| best / peer.iter().copied().fold(0.0, f64::max);
            println!(
                "| {name} | {threads} | {class} | {:.1}, {best:.1} | {memcpy:.2}, {:.2} | {stream:.2}, {:.2} |",
                median(rates.clone()),
                of_best(&self.memcpy),
                of_best(&self.stream),
            );
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// An engine on a volume of which every sector was written, so that all of it has memory.
fn new_engine(path: &Path, volume_bytes: u64, is_dax: bool) -> Engine<Volume> {
    drop(Pool::create(path, volume_bytes + (16 << 20), 0).unwrap());
    let media = |media: FileMedia| -> Box<dyn Media> {
        Box::new(if is_dax { media.at_the_cost_of_dax() } else { media })
    };
    let pool: Arc<Pool> = Pool::open_on(path, media).unwrap();
    pool.create_volume("v", VolumeSize::Bytes(volume_bytes), VolumeFormat::Btt).unwrap();
    let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
    let bytes = vec![1; 1 << 20];
    for first in (0..engine.sectors() - 256).step_by(256) {
        engine.write(first, &bytes).unwrap();
    }
    engine
}

fn do_work(engine: &Engine<Volume>, work: Work, at: u64, buffer: &mut [u8]) {
    let sector = at / SECTOR_BYTES as u64;
    match work {
        Work::ReadRandom | Work::ReadSequential => engine.read(sector, buffer).unwrap(),
        Work::WriteRandom | Work::WriteSequential => engine.write(sector, buffer).unwrap(),
    }
}

/// Lets threads do an operation on pieces of the volume, of all together `round_bytes` each, and returns the rate.
fn gb_per_s(
    threads: usize,
    at_once: usize,
    round_bytes: usize,
    volume_bytes: u64,
    (work, seed): (Work, u64),
    operation: &(dyn Fn(u64, &mut [u8]) + Sync),
) -> f64 {
    let start = Barrier::new(threads);
    // Not up to its end, where the BTT's own data is.
    let pieces = (volume_bytes - (4 << 20)) / at_once as u64;
    let times: Vec<_> = thread::scope(|scope| {
        let thread = |thread: u64| {
            let start = &start;
            scope.spawn(move || {
                let mut buffer = vec![thread as u8; at_once];
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
                        Work::ReadSequential | Work::WriteSequential => (number + 1) % pieces,
                    };
                    operation(number * at_once as u64, &mut buffer);
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

/// A mapping of a file on tmpfs, as the engine's media is.
struct Map {
    start: *mut u8,
    length: usize,
}

// SAFETY: raw memory, of which nobody makes references; that threads may store to the same place at once is known.
unsafe impl Sync for Map {}

impl Map {
    fn new(length: u64) -> Self {
        let file: File = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(length).unwrap();
        let length = length as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: all of the mapping; every page is there before anything is timed.
        unsafe { libc::memset(start, 1, length) };
        Self { start: start.cast(), length }
    }

    fn at(&self, at: u64, buffer: &[u8]) -> *mut u8 {
        assert!(at as usize + buffer.len() <= self.length);
        // SAFETY: inside the mapping.
        unsafe { self.start.add(at as usize) }
    }

    fn copy(&self, work: Work, at: u64, buffer: &mut [u8]) {
        let (map, length) = (self.at(at, buffer), buffer.len());
        match work {
            // SAFETY: inside the mapping, and elsewhere.
            Work::ReadRandom | Work::ReadSequential => unsafe {
                libc::memcpy(buffer.as_mut_ptr().cast(), map.cast(), length);
            },
            // SAFETY: as above.
            Work::WriteRandom | Work::WriteSequential => unsafe {
                libc::memcpy(map.cast(), buffer.as_ptr().cast(), length);
            },
        }
    }

    /// Past the cache where there is such a thing, which is for stores.
    fn stream(&self, work: Work, at: u64, buffer: &mut [u8]) {
        if matches!(work, Work::ReadRandom | Work::ReadSequential) {
            return self.copy(work, at, buffer);
        }
        let map = self.at(at, buffer).cast::<__m128i>();
        for (number, piece) in buffer.chunks_exact(16).enumerate() {
            // SAFETY: inside the mapping, which is aligned as its offsets are.
            unsafe { _mm_stream_si128(map.add(number), _mm_loadu_si128(piece.as_ptr().cast())) };
        }
        // SAFETY: takes no operands.
        unsafe { _mm_sfence() };
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped in new() and used no more.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}
