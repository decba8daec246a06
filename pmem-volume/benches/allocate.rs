//! Cost of lending and returning a chunk, compared with a persist of 64 bytes:
//! `docs/design/benchmarks.md`.

use std::hint::black_box;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::Criterion;
use pmem_volume::media::{FileMedia, Media, MediaError};
use pmem_volume::{CHUNK_BYTES, ChunkId, Durability, Extent, Pool};

const POOL_BYTES: u64 = 8 << 30;
/// Number of extents that are lent in succession. They are parts of one large extent, so lending
/// one of them splits two extents on average.
const BATCH: u64 = 128;

/// File in memory whose chunks are not erased, so that only the cost of returning chunks is
/// measured.
struct WithoutErase(FileMedia);

impl Media for WithoutErase {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }
    fn durability(&self) -> Durability {
        self.0.durability()
    }
    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.0.read(offset_bytes, into)
    }
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        self.0.load_word(offset_bytes)
    }
    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.0.store(offset_bytes, bytes)
    }
    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.0.store_word(offset_bytes, word)
    }
    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.0.persist(ranges)
    }
    fn erase(&self, _: &[Range<u64>]) -> Result<(), MediaError> {
        Ok(())
    }
}

/// Returns `media` on tmpfs, which is volatile. For `DaxSync`, it persists stores as persistent
/// memory does.
fn media_of_class(durability: Durability, media: FileMedia) -> FileMedia {
    if durability == Durability::DaxSync { media.with_dax_persists() } else { media }
}

/// Creates a pool on tmpfs that persists stores as media of the durability class does.
fn new_pool(durability: Durability) -> (Arc<Pool<WithoutErase>>, tempfile::TempDir) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path: PathBuf = folder.path().join("pool");
    drop(Pool::create(&path, POOL_BYTES, 0).unwrap());
    let media = |media| WithoutErase(media_of_class(durability, media));
    (Pool::open_on(&path, media).unwrap(), folder)
}

/// Lends the whole pool except for single chunks, so that no extent can be split or merged. Returns
/// the lent extents.
fn fragment(pool: &Pool<WithoutErase>) -> Vec<Extent> {
    let free_bytes = pool.info().free_bytes;
    let chunks = |extent: &Extent| -> Vec<Extent> {
        let start = extent.start.0;
        (start..start + extent.chunks()).map(|chunk| Extent::chunk(ChunkId(chunk))).collect()
    };
    let lent: Vec<Extent> =
        pool.alloc_memory(free_bytes).unwrap().iter().flat_map(chunks).collect();
    let (kept, given): (Vec<_>, Vec<_>) =
        lent.into_iter().partition(|extent| extent.start.0.is_multiple_of(2));
    pool.free_memory(&given).unwrap();
    pool.scrub_all().unwrap();
    kept
}

/// Time per call of one benchmark in ns, for each batch. A batch is shorter than a time slice, so
/// most batches are undisturbed even on a busy machine.
struct Samples {
    name: String,
    batches_ns: Vec<f64>,
}

/// Runs batches with `rounds` calls in total. `batch` receives its number of calls, and returns the
/// measured time.
fn in_batches(
    rounds: u64,
    samples: &mut Samples,
    mut batch: impl FnMut(u64) -> Duration,
) -> Duration {
    let mut total = Duration::ZERO;
    for first in (0..rounds).step_by(BATCH as usize) {
        let calls = (rounds - first).min(BATCH);
        let taken = batch(calls);
        if calls == BATCH {
            samples.batches_ns.push(taken.as_nanos() as f64 / calls as f64);
        }
        total += taken;
    }
    total
}

#[derive(Clone, Copy, PartialEq)]
enum Timed {
    Allocate,
    Free,
}

/// Lends an extent `calls` times in succession, and then returns all of them.
fn lend_and_return(
    pool: &Pool<WithoutErase>,
    calls: u64,
    size_bytes: u64,
    timed: Timed,
) -> Duration {
    let mut extents = Vec::with_capacity(BATCH as usize);
    let start = Instant::now();
    for _ in 0..calls {
        extents.push(black_box(pool.alloc_memory(size_bytes).unwrap()));
    }
    let allocated = Instant::now();
    for extent in &extents {
        pool.free_memory(extent).unwrap();
    }
    let freed = Instant::now();
    // Outside of benchmarks, a background thread does this.
    pool.scrub_all().unwrap();
    if timed == Timed::Free { freed - allocated } else { allocated - start }
}

/// Lends one extent, returns it and waits until it is free, `calls` times.
fn alternate(pool: &Pool<WithoutErase>, calls: u64, size_bytes: u64) -> Duration {
    let start = Instant::now();
    for _ in 0..calls {
        pool.free_memory(&black_box(pool.alloc_memory(size_bytes).unwrap())).unwrap();
        pool.scrub_all().unwrap();
    }
    start.elapsed()
}

/// Stores and persists one line repeatedly.
fn persist_line(media: &FileMedia, calls: u64) -> Duration {
    let mut line = [0u8; 64];
    let start = Instant::now();
    for _ in 0..calls {
        line[0] = line[0].wrapping_add(1);
        media.store(0, &line).unwrap();
        media.persist_range(0..64).unwrap();
    }
    start.elapsed()
}

/// Stores a word repeatedly, either through the routines that survive a lost page or directly.
fn store_words(calls: u64, mut store: impl FnMut(u64)) -> Duration {
    let start = Instant::now();
    (0..calls).for_each(&mut store);
    start.elapsed()
}

type Batch<'a> = Box<dyn FnMut(u64) -> Duration + 'a>;

fn run(criterion: &mut Criterion, class: &str, durability: Durability) -> Vec<Samples> {
    let mut group = criterion.benchmark_group(class);
    let mut all = Vec::new();
    let mut bench = |name: &str, mut batch: Batch<'_>| {
        let mut samples = Samples { name: name.to_owned(), batches_ns: Vec::new() };
        group.bench_function(name, |b| {
            b.iter_custom(|rounds| in_batches(rounds, &mut samples, &mut batch))
        });
        all.push(samples);
    };

    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(CHUNK_BYTES).unwrap();
    let media = media_of_class(durability, FileMedia::new(file, CHUNK_BYTES, true).unwrap());
    bench("persist 64 bytes", Box::new(|calls| persist_line(&media, calls)));

    let store = |word| media.store_word(64, word).unwrap();
    bench("store a word of the media", Box::new(|calls| store_words(calls, store)));
    let plain = AtomicU64::new(0);
    let store = |word| black_box(&plain).store(word, Ordering::Release);
    bench("store a word of the process", Box::new(|calls| store_words(calls, store)));

    let (pool, _folder) = new_pool(durability);
    let pool = &pool;
    for (size, size_bytes) in [("2 MiB", CHUNK_BYTES), ("4 MiB", 2 * CHUNK_BYTES)] {
        for (name, timed) in [("allocate", Timed::Allocate), ("free", Timed::Free)] {
            let batch = Box::new(move |calls| lend_and_return(pool, calls, size_bytes, timed));
            bench(&format!("{name} {size}"), batch);
        }
        let batch = Box::new(move |calls| alternate(pool, calls, size_bytes));
        bench(&format!("allocate and free {size}, through all orders"), batch);
    }
    let _kept = fragment(pool);
    for (name, timed) in [("allocate", Timed::Allocate), ("free", Timed::Free)] {
        let batch = Box::new(move |calls| lend_and_return(pool, calls, CHUNK_BYTES, timed));
        bench(&format!("{name} 2 MiB, fragmented"), batch);
    }
    group.finish();
    all
}

/// Prints the table for a durability class: median and minimum of the batches, and their ratio to a
/// plain persist.
fn print_table(class: &str, all: &mut [Samples]) {
    println!("\n| {class} | median | least | persists of 64 bytes |\n|---|---|---|---|");
    let mut persist_ns = None;
    for Samples { name, batches_ns } in all {
        batches_ns.sort_by(f64::total_cmp);
        let (Some(least), Some(median)) =
            (batches_ns.first(), batches_ns.get(batches_ns.len() / 2))
        else {
            continue;
        };
        let persist_ns = *persist_ns.get_or_insert(*median);
        println!("| {name} | {median:.1} ns | {least:.1} ns | {:.2} |", median / persist_ns);
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for (class, durability) in
        [("write-back", Durability::DaxSync), ("volatile", Durability::Volatile)]
    {
        let mut all = run(&mut criterion, class, durability);
        print_table(class, &mut all);
    }
    criterion.final_summary();
}
