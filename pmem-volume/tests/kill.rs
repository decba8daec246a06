//! Repeated kills of a process that performs random operations on a real pool, with a scrubber and
//! a second thread. After a kill, the pool should be in the state that was reported last, or in the
//! state after the operation in progress. Data written to volumes should exist. The content of lent
//! memory should not be readable.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use pmem_volume::pool::{Scrubber, SplitContent};
use pmem_volume::{
    CHUNK_BYTES, Durability, Extent, OpenMode, Pool, Shrink, VolumeFormat, VolumeInfo, VolumeSize,
};

const POOL_VARIABLE: &str = "PMEM_VOLUME_KILL_TEST_POOL";
const SEED_VARIABLE: &str = "PMEM_VOLUME_KILL_TEST_SEED";
const POOL_BYTES: u64 = 96 << 20;
/// Maximum size to which the pool grows, one chunk at a time.
const MAX_POOL_BYTES: u64 = 256 << 20;
/// Size of the smallest BTT volume.
const BTT_CHUNKS: u64 = 9;
/// Number of bytes at each end of a chunk that are compared, and that are written in lent memory.
const PAGE_BYTES: usize = 4096;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

fn report(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").unwrap();
    out.flush().unwrap();
}

/// Origin of the marks in the chunks of a raw volume. The origin is the volume itself, or the split
/// volume if the volume is a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Origin {
    base: u64,
    first: u64,
}

impl Origin {
    fn of(volume: &VolumeInfo) -> Self {
        Self { base: volume.uuid.as_u64_pair().0 | 1, first: 0 }
    }

    /// Returns the mark for the first word of a chunk.
    fn mark(self, index: u64) -> u64 {
        self.base.wrapping_mul(2 * (self.first + index) + 1)
    }
}

/// Offset in a chunk at which BTT volumes of these sizes have only blocks.
const BLOCKS_AT: u64 = CHUNK_BYTES / 2;

/// Returns the offsets of a volume's chunks in the file.
fn chunk_offsets(pool: &Arc<Pool>, name: &str) -> Vec<u64> {
    let volume = pool.open_volume(name).unwrap();
    let chunks = volume.extents().iter().flat_map(|extent| extent.run.ids());
    chunks.map(|chunk| chunk.offset_bytes()).collect()
}

/// Open pool that is used by a scrubber, and by a thread that lends memory, writes to it and
/// returns it.
struct BusyPool {
    pool: Arc<Pool>,
    scrubber: Scrubber,
    ended: Arc<AtomicBool>,
    lender: JoinHandle<()>,
}

impl BusyPool {
    fn start(pool: Arc<Pool>, seed: u64) -> Self {
        let scrubber = Scrubber::start(&pool, None, || ()).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let (lent_from, thread_ended) = (Arc::clone(&pool), Arc::clone(&ended));
        let lender = thread::spawn(move || lend(&lent_from, &thread_ended, Random(seed | 1)));
        Self { pool, scrubber, ended, lender }
    }

    /// Stops the threads without returning lent memory, as when a process exits.
    fn stop(self) {
        self.ended.store(true, Ordering::Relaxed);
        self.lender.join().unwrap();
        drop(self.scrubber);
    }
}

fn lend(pool: &Pool, ended: &AtomicBool, mut random: Random) {
    let mut lent: Vec<Extent> = Vec::new();
    while !ended.load(Ordering::Relaxed) {
        // The pool may be full.
        let extents = pool.alloc_memory((random.below(5) + 1) * CHUNK_BYTES).unwrap_or_default();
        for chunk in
            extents.iter().flat_map(|extent| (0..extent.chunks()).map(|n| extent.start.0 + n))
        {
            let start = u64::from(chunk) * CHUNK_BYTES;
            for at in [start, start + CHUNK_BYTES - PAGE_BYTES as u64] {
                pool.file().write_all_at(&[0x5a; PAGE_BYTES], at).unwrap();
            }
        }
        lent.extend(extents);
        let back = lent.split_off(random.below(lent.len().min(4) as u64 + 1) as usize);
        pool.free_memory(&back).unwrap();
    }
}

/// Not a test of its own, but the process to be killed. It never exits by itself.
#[test]
fn process_to_be_killed() {
    let Some(path) = std::env::var_os(POOL_VARIABLE).map(PathBuf::from) else { return };
    let mut random = Random(std::env::var(SEED_VARIABLE).unwrap().parse().unwrap());
    let mut busy =
        BusyPool::start(Pool::open(&path, OpenMode::ReadWrite).unwrap(), random.below(1 << 30));
    loop {
        let pool = Arc::clone(&busy.pool);
        match random.below(14) {
            0 => {
                let bytes = pool.info().total_bytes + CHUNK_BYTES;
                drop(pool);
                busy.stop();
                let pool = match bytes <= MAX_POOL_BYTES {
                    true => Pool::grow(&path, bytes).unwrap(),
                    false => Pool::open(&path, OpenMode::ReadWrite).unwrap(),
                };
                busy = BusyPool::start(pool, random.below(1 << 30));
                report("reopened");
            }
            1..=3 => make(&pool, &mut random),
            4..=6 => resize(&pool, &mut random),
            7 | 8 => rename(&pool, &mut random),
            12 | 13 => split(&pool, &mut random),
            9 => {
                pool.scrub_some((random.below(8) + 1) * CHUNK_BYTES).unwrap();
                report("scrubbed");
            }
            _ => {
                if let Some(volume) = pick(&pool, &mut random) {
                    report(&format!("delete {}", volume.name));
                    pool.delete_volume(&volume.name).unwrap();
                    report("done");
                }
            }
        }
    }
}

/// Returns a free name. The names of BTT volumes begin with b, and all others with v.
fn free_name(pool: &Pool, kind: char, random: &mut Random) -> Option<String> {
    let name = format!("{kind}{}", random.below(if kind == 'b' { 2 } else { 5 }));
    pool.volumes().iter().all(|volume| volume.name != name).then_some(name)
}

fn make(pool: &Arc<Pool>, random: &mut Random) {
    let (kind, format) =
        [('v', VolumeFormat::Raw), ('v', VolumeFormat::Raw), ('b', VolumeFormat::Btt)]
            [random.below(3) as usize];
    let Some(name) = free_name(pool, kind, random) else { return };
    let chunks = if kind == 'b' { BTT_CHUNKS } else { random.below(3) + 1 };
    report(&format!("make {name} {chunks}"));
    let made = pool.create_volume(&name, VolumeSize::Bytes(chunks * CHUNK_BYTES), format);
    report(if made.is_ok() { "done" } else { "refused" });
    if let Ok(info) = made {
        mark(pool, &info, 0);
    }
}

/// Splits a volume into two parts. The first part keeps the name.
fn split(pool: &Arc<Pool>, random: &mut Random) {
    let Some(volume) = pick(pool, random) else { return };
    let (kind, first) = match volume.format {
        VolumeFormat::Btt => ('b', BTT_CHUNKS),
        VolumeFormat::Raw => ('v', random.below(2) + 1),
    };
    let Some(other) = free_name(pool, kind, random) else { return };
    let chunks = volume.size_bytes / CHUNK_BYTES;
    report(&format!(
        "split {} {first} {other} {} {}",
        volume.name,
        chunks.saturating_sub(first),
        Origin::of(&volume).base
    ));
    let parts = [
        (volume.name.clone(), VolumeSize::Bytes(first * CHUNK_BYTES)),
        (other, VolumeSize::Remaining),
    ];
    // The split is refused if the volume is too small.
    let parts = pool.split_volume(&volume.name, &parts, SplitContent::Discard);
    report(if parts.is_ok() { "done" } else { "refused" });
    parts.iter().flatten().for_each(|part| mark(pool, part, 0));
}

fn resize(pool: &Arc<Pool>, random: &mut Random) {
    let Some(volume) = pick(pool, random) else { return };
    let chunks =
        if volume.format == VolumeFormat::Btt { 2 * BTT_CHUNKS } else { random.below(5) + 1 };
    report(&format!("resize {} {chunks}", volume.name));
    let size = VolumeSize::Bytes(chunks * CHUNK_BYTES);
    // The resize is refused if the pool is full or if the volume already has that size.
    let resized = pool.resize_volume(&volume.name, size, Shrink::Allow);
    report(if resized.is_ok() { "done" } else { "refused" });
    let old_chunks = volume.size_bytes / CHUNK_BYTES;
    if resized.is_ok() && old_chunks < chunks {
        mark(pool, &volume, old_chunks);
    }
}

fn rename(pool: &Arc<Pool>, random: &mut Random) {
    let Some(volume) = pick(pool, random) else { return };
    let kind = if volume.format == VolumeFormat::Btt { 'b' } else { 'v' };
    let Some(new_name) = free_name(pool, kind, random) else { return };
    report(&format!("rename {} {new_name}", volume.name));
    pool.rename_volume(&volume.name, &new_name).unwrap();
    report("done");
}

/// Marks the chunks of a volume starting with `first`, as a guest would. In a BTT volume, it writes
/// to blocks that the map does not use.
fn mark(pool: &Arc<Pool>, volume: &VolumeInfo, first: u64) {
    let chunk_offsets = chunk_offsets(pool, &volume.name);
    report(&format!("mark {} {}", volume.name, chunk_offsets.len()));
    let within = if volume.format == VolumeFormat::Btt { BLOCKS_AT } else { 0 };
    for (index, at) in (0..).zip(chunk_offsets).skip(first as usize) {
        pool.file()
            .write_all_at(&Origin::of(volume).mark(index).to_le_bytes(), at + within)
            .unwrap();
    }
    report("done");
}

fn pick(pool: &Pool, random: &mut Random) -> Option<VolumeInfo> {
    let mut volumes = pool.volumes();
    (!volumes.is_empty()).then(|| volumes.swap_remove(random.below(volumes.len() as u64) as usize))
}

fn start(path: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "process_to_be_killed", "--nocapture"])
        .env(POOL_VARIABLE, path)
        .env(SEED_VARIABLE, seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Known state of a volume. Sizes are in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VolumeState {
    chunks: u64,
    /// Number of marked chunks.
    marked: u64,
    /// Set if the chunks have the marks of another volume.
    origin: Option<Origin>,
}

impl VolumeState {
    fn new(chunks: u64) -> Self {
        Self { chunks, marked: 0, origin: None }
    }

    /// Returns the origin of the marks, which is the volume itself if they were renewed.
    fn origin(&self, volume: &VolumeInfo) -> Origin {
        self.origin.unwrap_or(Origin::of(volume))
    }
}

type State = BTreeMap<String, VolumeState>;

/// Records a split. Parts of a raw volume keep its marks, and parts of a BTT volume are empty.
fn apply_split(state: &mut State, words: &[&str]) {
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    let (first, rest, base) = (number(1), number(3), number(4));
    let whole = state.remove(words[0]).expect("the volume exists");
    let marked = if words[0].starts_with('b') { 0 } else { whole.marked };
    let origin = |first| Some(Origin { base, first });
    let parts = [
        (words[0], VolumeState { chunks: first, marked: marked.min(first), origin: origin(0) }),
        (
            words[2],
            VolumeState {
                chunks: rest,
                marked: marked.saturating_sub(first),
                origin: origin(first),
            },
        ),
    ];
    state.extend(parts.map(|(name, expected)| (name.to_owned(), expected)));
}

/// State that the process reported before it was killed.
#[derive(Default)]
struct ReportedState {
    state: State,
    /// State after the operation that was in progress.
    next: Option<State>,
    done: u32,
}

impl ReportedState {
    fn parse_line(&mut self, line: &str) {
        let Some((_, line)) = line.split_once('@') else { return };
        let words: Vec<&str> = line.split(' ').collect();
        let chunks = || words[2].parse::<u64>().unwrap();
        let mut next = self.state.clone();
        match words[0] {
            "make" => drop(next.insert(words[1].to_owned(), VolumeState::new(chunks()))),
            "resize" => {
                let volume = next.get_mut(words[1]).expect("the volume exists");
                *volume = VolumeState {
                    chunks: chunks(),
                    marked: volume.marked.min(chunks()),
                    ..*volume
                };
            }
            "mark" => {
                let volume = next.get_mut(words[1]).expect("the volume exists");
                *volume = VolumeState { marked: chunks(), origin: None, ..*volume };
            }
            "split" => apply_split(&mut next, &words[1..]),
            "rename" => {
                let volume = next.remove(words[1]).expect("the volume exists");
                next.insert(words[2].to_owned(), volume);
            }
            "delete" => drop(next.remove(words[1])),
            "done" => {
                self.state = self.next.take().expect("an operation was begun");
                self.done += 1;
                return;
            }
            "refused" => {
                self.next = None;
                return;
            }
            _ => return,
        }
        self.next = Some(next);
    }

    /// Returns the possible states that match the volumes that were found.
    fn resolve(&mut self, found: &BTreeMap<String, u64>) -> [State; 2] {
        let is = |state: &State| {
            state
                .iter()
                .map(|(name, expected)| (name, expected.chunks))
                .eq(found.iter().map(|(n, c)| (n, *c)))
        };
        let before = std::mem::take(&mut self.state);
        let after = self.next.take().unwrap_or_else(|| before.clone());
        // Marking does not change sizes, so both states are possible.
        match (is(&before), is(&after)) {
            (true, true) => [before, after],
            (true, false) => [before.clone(), before],
            (false, true) => [after.clone(), after],
            (false, false) => panic!("{found:?} is neither {before:?} nor {after:?}"),
        }
    }
}

/// Compares the content of volumes with the marks. It should contain at least the marks of the
/// first state, and at most those of the second.
fn verify_content(pool: &Arc<Pool>, [least, most]: &[State; 2]) {
    for volume in pool.volumes() {
        let (least, most) = (&least[&volume.name], &most[&volume.name]);
        let is_raw = volume.format == VolumeFormat::Raw;
        for (index, at) in (0..).zip(chunk_offsets(pool, &volume.name)) {
            let mut pages = [[0; PAGE_BYTES]; 2];
            // The rest of a BTT volume is metadata.
            let compared = match is_raw {
                true => [at, at + CHUNK_BYTES - PAGE_BYTES as u64],
                false => [at + BLOCKS_AT, at + BLOCKS_AT + PAGE_BYTES as u64],
            };
            pages
                .iter_mut()
                .zip(compared)
                .for_each(|(page, at)| pool.file().read_exact_at(page, at).unwrap());
            let (word, rest) = pages[0].split_first_chunk::<8>().unwrap();
            let word = u64::from_le_bytes(*word);
            let is_mark = |expected: &VolumeState| {
                index < expected.marked && word == expected.origin(&volume).mark(index)
            };
            let is_zero = word == 0 && index >= least.marked;
            let case = format!("chunk {index} of {}: {word:#x}", volume.name);
            assert!(is_mark(least) || is_mark(most) || is_zero, "{case}: lost, or foreign content");
            assert!(
                rest.iter().chain(&pages[1]).all(|byte| *byte == 0),
                "{case}: content of lent memory"
            );
        }
    }
}

/// Returns the chunks of a file on tmpfs that have blocks.
fn chunks_with_data(file: &File) -> BTreeSet<u64> {
    let mut chunks = BTreeSet::new();
    let mut at = 0;
    loop {
        // SAFETY: lseek() takes only numbers.
        let data = unsafe { libc::lseek(file.as_raw_fd(), at, libc::SEEK_DATA) };
        if data < 0 {
            return chunks;
        }
        // SAFETY: lseek() takes only numbers.
        let hole = unsafe { libc::lseek(file.as_raw_fd(), data, libc::SEEK_HOLE) };
        chunks.extend(data as u64 / CHUNK_BYTES..(hole as u64).div_ceil(CHUNK_BYTES));
        at = hole;
    }
}

/// Opens and verifies the pool of a killed process. Returns true if memory was still lent.
fn verify(path: &Path, reported: &mut ReportedState) -> bool {
    let report = Pool::open(path, OpenMode::ReadOnly).unwrap().check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    let pool = Pool::open(path, OpenMode::ReadWrite).unwrap();
    let found = pool.volumes().into_iter().map(|v| (v.name, v.size_bytes / CHUNK_BYTES)).collect();
    let states = reported.resolve(&found);
    verify_content(&pool, &states);
    pool.scrub_all().unwrap();
    let info = pool.info();
    assert_eq!(info.memory_bytes + info.scrubbing_bytes, 0);
    assert_eq!(info.free_bytes, info.total_bytes - (2 + found.values().sum::<u64>()) * CHUNK_BYTES);
    let owned: BTreeSet<u64> = found
        .keys()
        .flat_map(|name| chunk_offsets(&pool, name))
        .map(|at| at / CHUNK_BYTES)
        .collect();
    if info.durability == Durability::Volatile {
        let mut stray = chunks_with_data(pool.file());
        stray.retain(|chunk| *chunk >= 2 && !owned.contains(chunk));
        assert!(stray.is_empty(), "free chunks {stray:?} still have pages");
    }
    // The check includes that free chunks read as zeros.
    assert_eq!(pool.check().unwrap().pool, []);
    // Completes marks that were interrupted, so that the next round starts with a known state.
    for volume in pool.volumes() {
        let within = if volume.format == VolumeFormat::Btt { BLOCKS_AT } else { 0 };
        for (index, at) in (0..).zip(chunk_offsets(&pool, &volume.name)) {
            pool.file()
                .write_all_at(&Origin::of(&volume).mark(index).to_le_bytes(), at + within)
                .unwrap();
        }
    }
    let marked = |(name, chunks): (String, u64)| {
        (name, VolumeState { marked: chunks, ..VolumeState::new(chunks) })
    };
    reported.state = found.into_iter().map(marked).collect();
    report.waiting_bytes() > 0
}

fn kill_repeatedly(folder: &Path, rounds: u64) {
    let folder = tempfile::TempDir::new_in(folder).unwrap();
    let path = folder.path().join("pool");
    drop(Pool::create(&path, POOL_BYTES, 0).unwrap());
    let (mut reported, mut random, mut with_memory) = (ReportedState::default(), Random(77), 0);
    for round in 1..=rounds {
        let mut child = start(&path, round * 7919);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut enough = 5 + random.below(60);
        while enough > 0 {
            let line = lines.next().expect("the process runs until it is killed").unwrap();
            reported.parse_line(&line);
            enough -= u64::from(line.contains('@'));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        lines.for_each(|line| reported.parse_line(&line.unwrap()));
        let _round = Round(round);
        with_memory += u64::from(verify(&path, &mut reported));
    }
    assert!(u64::from(reported.done) > 5 * rounds, "only {} operations", reported.done);
    assert!(with_memory > rounds / 2, "memory was lent in {with_memory} of {rounds} rounds only");
}

/// Prints the number of the round if it fails.
struct Round(u64);

impl Drop for Round {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("round {}", self.0);
        }
    }
}

#[test]
fn pool_on_tmpfs_survives_repeated_kills() {
    kill_repeatedly(Path::new("/dev/shm"), 160);
}

/// The current folder of the tests is probably on a disk.
#[test]
fn pool_on_a_disk_survives_repeated_kills() {
    kill_repeatedly(&std::env::current_dir().unwrap(), 40);
}
