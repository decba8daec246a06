//! Speed of erasing chunks, compared with memset() on the same mapping in the same run:
//! `docs/design/benchmarks.md`.

use std::env;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::{Duration, Instant};

use pmem_volume::CHUNK_BYTES;
use pmem_volume::media::{FileMedia, Media};

/// Size of the media, which is many times the size of a cache.
const MEDIA_BYTES: u64 = 512 << 20;
const SMALL_MEDIA_BYTES: u64 = 8 << 20;
/// Number of bytes that are erased or set at a time: one chunk, which fits into a cache, and more
/// than fits into any cache.
const PIECES_BYTES: [u64; 2] = [CHUNK_BYTES, 32 * CHUNK_BYTES];

fn main() {
    // cargo bench passes --bench.
    let whole = env::args().any(|argument| argument == "--bench");
    let (media_bytes, rounds) = if whole { (MEDIA_BYTES, 8) } else { (SMALL_MEDIA_BYTES, 1) };
    let file = || {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(media_bytes).unwrap();
        file
    };
    let file_of_dax = file();
    let map = Map::new(&file_of_dax, media_bytes);
    let dax = FileMedia::new(file_of_dax, media_bytes, true).unwrap().with_dax_persists();
    let volatile = FileMedia::new(file(), media_bytes, true).unwrap();
    // Allocates the pages of both mappings of the first file before the measurement.
    map.set(0..media_bytes, 1);
    erase(&dax, 0..media_bytes);

    for piece_bytes in PIECES_BYTES.into_iter().filter(|bytes| *bytes <= media_bytes) {
        compare(&map, &dax, &volatile, piece_bytes, rounds);
    }
}

fn compare(map: &Map, dax: &FileMedia, volatile: &FileMedia, piece_bytes: u64, rounds: u32) {
    let (mut by_memset, mut by_erase, mut by_hole) = (vec![], vec![], vec![]);
    let ones = vec![1; piece_bytes as usize];
    for _ in 0..rounds {
        for start in (0..map.length).step_by(piece_bytes as usize) {
            let piece = start..start + piece_bytes;
            // Both methods erase the same piece in succession, so that other load on the machine
            // affects both.
            by_memset.push(time(|| map.set(piece.clone(), 0)));
            by_erase.push(time(|| erase(dax, piece.clone())));
            volatile.store(start, &ones).unwrap();
            by_hole.push(time(|| erase(volatile, piece)));
        }
    }
    println!(
        "\n| {} MiB at a time | median | best | of memset |\n|---|---|---|---|",
        piece_bytes >> 20
    );
    let memset = median(&mut by_memset);
    for (name, mut times) in [
        ("memset on the mapping", by_memset),
        ("erase as on dax-sync", by_erase),
        ("erase on tmpfs: a hole for pages", by_hole),
    ] {
        let median = median(&mut times);
        let gb_per_s = |time: Duration| piece_bytes as f64 / time.as_nanos() as f64;
        let (typical, best, ratio) =
            (gb_per_s(median), gb_per_s(times[0]), gb_per_s(median) / gb_per_s(memset));
        println!("| {name} | {typical:.1} GB/s | {best:.1} GB/s | {:.0} % |", ratio * 100.0);
    }
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Sorts the times and returns the median.
fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn erase(media: &FileMedia, range: Range<u64>) {
    media.erase(std::slice::from_ref(&range)).unwrap();
}

/// Mapping of a file, for memset().
struct Map {
    start: *mut libc::c_void,
    length: u64,
}

impl Map {
    fn new(file: &File, length: u64) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length as usize,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start, length }
    }

    fn set(&self, range: Range<u64>, byte: u8) {
        assert!(range.end <= self.length);
        // SAFETY: inside the mapping, which has no references.
        unsafe {
            libc::memset(
                self.start.add(range.start as usize),
                byte.into(),
                (range.end - range.start) as usize,
            )
        };
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped in new() and no longer used.
        unsafe { libc::munmap(self.start, self.length as usize) };
    }
}
