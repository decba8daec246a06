//! Tests that a flush of a volume writes back only that volume's part of the pool's file.
//!
//! The kernel reports dirty pages for each mapping. /proc/self/smaps counts pages of a file that
//! have not been written back (Linux Documentation/filesystems/proc.rst). The kernel also writes
//! back dirty pages by itself, earlier on a busy machine. Therefore, it is enough if the pages that
//! should stay dirty are dirty in one of several rounds. Pages that should be clean are checked in
//! every round.

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pmem_volume::{CHUNK_BYTES, Durability, Pool, Volume, VolumeFormat, VolumeSize};

const MIB: u64 = 1 << 20;
const PAGE_BYTES: usize = 4096;
/// Number of rounds, because in any one of them the kernel may write back all pages by itself.
const ROUNDS: u32 = 20;

/// Mapping of a part of the pool's file, like that of a VMM.
struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

impl Mapping {
    fn new(file: &File, offset_bytes: u64, len_bytes: u64) -> Self {
        let (length, offset) = (len_bytes as usize, offset_bytes.cast_signed());
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // A guard page precedes the mapping, because smaps shows adjacent mappings of adjacent
        // parts as one.
        // SAFETY: new mappings at addresses that the kernel chooses. The second one is inside the
        // first.
        let start = unsafe {
            let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let room =
                libc::mmap(ptr::null_mut(), length + PAGE_BYTES, libc::PROT_NONE, anonymous, -1, 0);
            assert_ne!(room, libc::MAP_FAILED);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            let at = room.cast::<u8>().add(PAGE_BYTES).cast::<c_void>();
            libc::mmap(at, length, protection, flags, file.as_raw_fd(), offset)
        };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: NonNull::new(start.cast()).unwrap(), length }
    }

    /// Stores to every page.
    fn dirty(&self, byte: u8) {
        for page in (0..self.length).step_by(PAGE_BYTES) {
            // SAFETY: the page is inside a writable mapping of this test, to which there are no
            // references.
            unsafe { self.start.as_ptr().add(page).write_volatile(byte) };
        }
    }

    /// Returns the number of bytes that have not been written back.
    fn dirty_bytes(&self) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let first = format!("{:x}-", self.start.as_ptr() as usize);
        let lines = smaps.lines().skip_while(|line| !line.starts_with(&first)).skip(1);
        let fields = lines.take_while(|line| !line.starts_with("VmFlags:"));
        let kib = fields.filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            let counts = ["Shared_Dirty", "Private_Dirty"].contains(&name);
            counts.then(|| value.trim().trim_end_matches(" kB").parse::<u64>().unwrap())
        });
        kib.sum::<u64>() * 1024
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: unmaps the whole mapping, which is no longer used, and the guard page before it.
        unsafe {
            libc::munmap(self.start.as_ptr().sub(PAGE_BYTES).cast(), self.length + PAGE_BYTES)
        };
    }
}

/// Parts of a pool: a fragmented volume, a second volume, and lent memory.
struct Parts {
    pool: Arc<Pool>,
    volume: Volume,
    pieces: Vec<Mapping>,
    others: Vec<Mapping>,
    _folder: tempfile::TempDir,
}

fn mapped(volume: &Volume) -> Vec<Mapping> {
    let file = volume.pool().file();
    let map = |extent: &pmem_volume::pool::VolumeExtent| {
        Mapping::new(file, extent.offset_bytes(), extent.len_bytes())
    };
    volume.extents().iter().map(map).collect()
}

/// Creates the pool. Returns `None` if its media is such that a flush has nothing to write.
fn parts() -> Option<Parts> {
    let folder = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
    let pool = Pool::create(&folder.path().join("pool"), 32 * MIB, 0).unwrap();
    if pool.durability() != Durability::PageCache {
        eprintln!("skipped: {} is {}", folder.path().display(), pool.durability().name());
        return None;
    }
    let raw = |name: &str, size_bytes| {
        pool.create_volume(name, VolumeSize::Bytes(size_bytes), VolumeFormat::Raw).unwrap();
    };
    // Only every second chunk is free, so the volume is fragmented.
    let fillers: Vec<_> = (0..8).map(|number| format!("filler-{number}")).collect();
    fillers.iter().for_each(|name| raw(name, CHUNK_BYTES));
    let lent = pool.alloc_memory(2 * CHUNK_BYTES).unwrap();
    let rest = pool.info().free_bytes;
    raw("rest", rest);
    fillers.iter().step_by(2).for_each(|name| pool.delete_volume(name).unwrap());
    pool.scrub_all().unwrap();
    raw("data", 3 * CHUNK_BYTES);
    let volume = pool.open_volume("data").unwrap();
    assert_eq!(volume.extents().len(), 3, "{:?}", volume.extents());
    let neighbor = pool.open_volume("filler-1").unwrap();
    let lent = lent
        .iter()
        .map(|extent| Mapping::new(pool.file(), extent.offset_bytes(), extent.len_bytes()));
    let others = lent.chain(mapped(&neighbor)).collect();
    Some(Parts { pieces: mapped(&volume), others, volume, pool, _folder: folder })
}

fn dirty_bytes(mappings: &[Mapping]) -> u64 {
    mappings.iter().map(Mapping::dirty_bytes).sum()
}

/// Dirties all parts and makes the volume durable with `flush`. Returns true if all other parts
/// remained dirty in one of the rounds.
fn leaves_others_dirty(parts: &Parts, flush: impl Fn(&Parts)) -> bool {
    let others_bytes = parts.others.iter().map(|mapping| mapping.length as u64).sum::<u64>();
    (0..ROUNDS).any(|round| {
        parts.pieces.iter().chain(&parts.others).for_each(|mapping| mapping.dirty(round as u8 + 1));
        flush(parts);
        assert_eq!(dirty_bytes(&parts.pieces), 0, "round {round}: the volume has not been written");
        dirty_bytes(&parts.others) == others_bytes
    })
}

#[test]
fn flush_writes_only_its_volume_and_all_extents_of_it() {
    let Some(parts) = parts() else { return };
    let flush =
        |parts: &Parts| parts.volume.flush_guest_stores(0..parts.volume.size_bytes()).unwrap();
    assert!(leaves_others_dirty(&parts, flush), "every flush wrote lent memory or another volume");
}

/// Proves that the test above is effective.
#[test]
fn flush_of_the_whole_file_is_detected() {
    let Some(parts) = parts() else { return };
    assert!(!leaves_others_dirty(&parts, |parts| parts.pool.file().sync_data().unwrap()));
}

/// Proves that the test above also detects a missing part.
#[test]
#[should_panic(expected = "the volume has not been written")]
fn flush_that_omits_an_extent_is_detected() {
    let Some(parts) = parts() else { panic!("the volume has not been written; this needs a disk") };
    // Repeated for machines that write back pages slowly.
    for _ in 0..ROUNDS {
        leaves_others_dirty(&parts, |parts| {
            parts.volume.flush_guest_stores(0..2 * CHUNK_BYTES).unwrap();
        });
    }
}
