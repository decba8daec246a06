//! File to which memory of a pool is moved (`spill_file=`), at the same offset as in the zone.
//!
//! A chunk is moved while the guest uses it:
//! 1. Allocate space in the file. A full disk is detected here.
//! 2. Copy the chunk. Then copy the blocks that the guest has changed meanwhile, until few of them
//!    remain. Most waits for a slow disk occur here.
//! 3. Raise the barrier, at which all accesses to the chunk wait.
//! 4. Copy the blocks that were changed since.
//! 5. Map the file, and lower the barrier.
//!
//! After a failure, the chunk of the pool is mapped again, and its space in the file is released.
//! Chunks that cannot be moved to the file are moved to DRAM.
//!
//! A thread that waits at the barrier may hold any lock except that of the address space, for
//! example one of guest memory, KVM (SRCU), vhost or the guest. Steps 3 to 5 therefore take no
//! other lock, and only use the spill file and the pool's file. The kernel locks these files, but
//! does not access guest memory under their locks.
//!
//! No request in flight has pinned pages of the chunk: disks use buffers of this process, and
//! vhost-net copies frames unless its module has another setting (`experimental_zcopytx`). For a
//! guest that is a hypervisor (`nested=on`), KVM pins pages such as the virtual-APIC pages of its
//! vCPUs (Linux arch/x86/kvm/vmx/nested.c, nested_get_vmcs12_pages). Linux allocates these pages as
//! kernel memory, which is not in PM that is online as movable.
//!
//! On a disk, the file is page cache that the kernel can write back and reclaim, unlike copies in
//! DRAM.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use pmem_volume::file_mode::PRIVATE_MODE;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{pread, retry_on_intr};
use thiserror::Error;
use tracing::error;

use super::access_barrier::AccessBarrier;
use super::source::punch_hole;
use super::{Access, Reservation};
use crate::log::rate_limited;
use crate::pool::CHUNK_BYTES;

/// Size of a block that is compared and copied. Divides a chunk.
const BLOCK_BYTES: usize = 64 << 10;
/// Maximum number of blocks that the last copy before the barrier may find changed. About as many
/// are copied while accesses wait.
const MAX_CHANGED_BLOCKS: usize = 4;
/// Maximum number of copies before the barrier.
const MAX_COPIES: usize = 4;

/// Reason why a folder cannot be used for the file.
#[derive(Debug, Error)]
pub enum SpillFileError {
    #[error("cannot create an unnamed file in this folder")]
    Create(#[source] io::Error),
    #[error(
        "its file system cannot write to files, allocate their space or punch holes (fallocate)"
    )]
    Unsupported(#[source] io::Error),
}

/// Failure to move a chunk, whose content and mapping have not changed.
#[derive(Debug, Error)]
pub(super) enum MoveError {
    #[error("cannot allocate {CHUNK_BYTES:#x} bytes at offset {offset:#x} of the file")]
    Allocate {
        offset: u64,
        #[source]
        source: io::Error,
    },
    #[error("cannot copy memory at offset {offset:#x} to the file")]
    Copy {
        offset: u64,
        #[source]
        source: io::Error,
    },
    #[error(
        "the last of {MAX_COPIES} copies of the chunk at offset {offset:#x} found {changed} blocks \
         that the guest has changed, more than {MAX_CHANGED_BLOCKS}"
    )]
    Busy { offset: u64, changed: usize },
    #[error("cannot map the file at offset {offset:#x}")]
    Map {
        offset: u64,
        #[source]
        source: io::Error,
    },
}

/// Unnamed file, which disappears at the end of the VM.
#[derive(Debug)]
pub struct SpillFile {
    file: File,
    barrier: Arc<AccessBarrier>,
    /// Called after the copies before the barrier, and after the last copy.
    #[cfg(test)]
    after_copy: tests::Hooks,
    /// Called after each copy before the barrier.
    #[cfg(test)]
    after_early_copy: tests::Hooks,
}

/// Part of a pool's file.
#[derive(Clone, Copy)]
pub(super) struct PoolChunk<'a> {
    pub(super) file: BorrowedFd<'a>,
    pub(super) offset: u64,
}

impl PoolChunk<'_> {
    /// Maps `len` bytes from the pool at `offset` of the zone again, because a failed call may have
    /// removed the mapping.
    pub(super) fn map_again(self, zone: &Reservation, offset: u64, len: u64) {
        if let Err(err) = zone.map_file(offset, len, self.file, self.offset, Access::ReadWrite) {
            error!(offset, len, %err, "Cannot map memory of the guest again");
            // The guest has lost its memory, and another mapping could take its place.
            std::process::abort();
        }
    }
}

impl SpillFile {
    /// Creates a file for a zone of `len_bytes`.
    pub fn create(
        folder: &Path,
        len_bytes: u64,
        barrier: Arc<AccessBarrier>,
    ) -> Result<Self, SpillFileError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_TMPFILE).mode(PRIVATE_MODE);
        let file = options.open(folder).map_err(SpillFileError::Create)?;
        let spill = Self::new(file, barrier);
        spill.file.set_len(len_bytes).map_err(SpillFileError::Create)?;
        // Files on hugetlbfs cannot be written.
        let is_usable = spill
            .file
            .write_all_at(&[0], 0)
            .and_then(|()| spill.allocate(0, 4096))
            .and_then(|()| spill.release(0, 4096));
        is_usable.map(|()| spill).map_err(SpillFileError::Unsupported)
    }

    fn new(file: File, barrier: Arc<AccessBarrier>) -> Self {
        Self {
            file,
            barrier,
            #[cfg(test)]
            after_copy: Default::default(),
            #[cfg(test)]
            after_early_copy: Default::default(),
        }
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        retry_on_intr(|| fallocate(&self.file, FallocateFlags::empty(), offset, len))
            .map_err(io::Error::from)
    }

    /// Removes unmapped memory.
    pub(super) fn release(&self, offset: u64, len: u64) -> io::Result<()> {
        punch_hole(&self.file, offset, len)
    }

    /// Moves the chunk at `offset` of the zone from the pool to the file.
    pub(super) fn take(
        &self,
        zone: &Reservation,
        offset: u64,
        from: PoolChunk<'_>,
    ) -> Result<(), MoveError> {
        let moved = self.copy_and_replace(zone, offset, from);
        if moved.is_err()
            && let Err(err) = self.release(offset, CHUNK_BYTES)
        {
            rate_limited!(warn, %err, "Cannot remove unused space from the spill file");
        }
        moved
    }

    fn copy_and_replace(
        &self,
        zone: &Reservation,
        offset: u64,
        from: PoolChunk<'_>,
    ) -> Result<(), MoveError> {
        let mut copier = Copier::new(self, from, offset);
        self.allocate(offset, CHUNK_BYTES)
            .map_err(|source| MoveError::Allocate { offset, source })?;
        self.copy_until_little_changes(&mut copier)?;
        #[cfg(test)]
        self.after_copy.call();
        let moved = self.replace(zone, offset, &mut copier);
        if moved.is_err() {
            from.map_again(zone, offset, CHUNK_BYTES);
        }
        self.barrier.lower(zone, offset);
        moved
    }

    fn copy_until_little_changes(&self, copier: &mut Copier<'_>) -> Result<(), MoveError> {
        copier.copy()?;
        let mut changed = 0;
        for _ in 1..MAX_COPIES {
            #[cfg(test)]
            self.after_early_copy.call();
            changed = copier.copy()?;
            if changed <= MAX_CHANGED_BLOCKS {
                return Ok(());
            }
        }
        Err(MoveError::Busy { offset: copier.offset, changed })
    }

    fn replace(
        &self,
        zone: &Reservation,
        offset: u64,
        copier: &mut Copier<'_>,
    ) -> Result<(), MoveError> {
        let not_mapped = |source| MoveError::Map { offset, source };
        self.barrier.raise(zone, offset).map_err(not_mapped)?;
        copier.copy()?;
        #[cfg(test)]
        self.after_copy.call();
        let access = Access::ReadWrite;
        zone.map_file(offset, CHUNK_BYTES, self.file.as_fd(), offset, access).map_err(not_mapped)
    }
}

/// Copies a chunk. All buffers are allocated before the barrier is raised.
struct Copier<'a> {
    from: PoolChunk<'a>,
    to: &'a File,
    /// Offset in the file.
    offset: u64,
    source: Vec<u8>,
    target: Vec<u8>,
}

impl<'a> Copier<'a> {
    fn new(spill: &'a SpillFile, from: PoolChunk<'a>, offset: u64) -> Self {
        let block = || vec![0; BLOCK_BYTES];
        Self { from, to: &spill.file, offset, source: block(), target: block() }
    }

    /// Copies the blocks that differ, and returns their number. Reads files instead of mappings,
    /// because a bad page is then an error instead of a signal.
    fn copy(&mut self) -> Result<usize, MoveError> {
        (0..CHUNK_BYTES).step_by(BLOCK_BYTES).try_fold(0, |changed, at| {
            let offset = self.offset + at;
            let differs =
                self.copy_block(at).map_err(|source| MoveError::Copy { offset, source })?;
            Ok(changed + usize::from(differs))
        })
    }

    /// Returns true if the block differed.
    fn copy_block(&mut self, at: u64) -> io::Result<bool> {
        read_exact(self.from.file, self.from.offset + at, &mut self.source)?;
        read_exact(self.to.as_fd(), self.offset + at, &mut self.target)?;
        let differs = self.source != self.target;
        if differs {
            self.to.write_all_at(&self.source, self.offset + at)?;
        }
        Ok(differs)
    }
}

fn read_exact(file: BorrowedFd<'_>, mut offset: u64, mut buffer: &mut [u8]) -> io::Result<()> {
    while !buffer.is_empty() {
        match retry_on_intr(|| pread(file, &mut *buffer, offset))? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                buffer = &mut buffer[read..];
                offset += read as u64;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::VecDeque;
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc;
    use std::thread::{self, JoinHandle};
    use std::{fmt, fs};

    use parking_lot::Mutex;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use tempfile::TempDir;

    use super::*;
    use crate::memory::holes::UserfaultDevice;

    /// Functions that are called once, in this order.
    #[derive(Default)]
    pub(super) struct Hooks(Mutex<VecDeque<Box<dyn FnOnce() + Send>>>);

    impl Hooks {
        pub(super) fn call(&self) {
            if let Some(call) = self.0.lock().pop_front() {
                call();
            }
        }
    }

    impl fmt::Debug for Hooks {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Hooks")
        }
    }

    /// `None` if the user cannot open /dev/userfaultfd.
    fn device() -> Option<UserfaultDevice> {
        let device = UserfaultDevice::default();
        let refusal = device.refusal().inspect(|reason| eprintln!("skipped: {reason}"));
        refusal.is_none().then_some(device)
    }

    /// `None` if the user cannot open /dev/userfaultfd.
    pub(in super::super) fn barrier() -> Option<Arc<AccessBarrier>> {
        device().map(|device| Arc::new(AccessBarrier::new(&device).unwrap()))
    }

    /// Returns a descriptor of the same file.
    pub(in super::super) fn duplicate(spill: &SpillFile) -> File {
        spill.file.try_clone().unwrap()
    }

    fn blocks(file: &File) -> u64 {
        file.metadata().unwrap().blocks()
    }

    /// Zone with one chunk of a pool, whose words are 5.
    struct Fixture {
        pool: File,
        zone: Arc<Reservation>,
        barrier: Arc<AccessBarrier>,
    }

    /// Position of the chunk in the pool.
    const IN_POOL: u64 = CHUNK_BYTES;
    const EARLY: u64 = 64;
    const LATE: u64 = 0;

    impl Fixture {
        fn new() -> Option<Self> {
            let barrier = barrier()?;
            let pool = tempfile::tempfile_in("/dev/shm").unwrap();
            pool.set_len(IN_POOL + CHUNK_BYTES).unwrap();
            let zone = Arc::new(Reservation::new(2 * CHUNK_BYTES, CHUNK_BYTES).unwrap());
            let fixture = Self { pool, zone, barrier };
            fixture.chunk().map_again(&fixture.zone, CHUNK_BYTES, CHUNK_BYTES);
            let words = (0..CHUNK_BYTES).step_by(8);
            words.for_each(|at| word(&fixture.zone, at).store(5, Ordering::Relaxed));
            Some(fixture)
        }

        fn chunk(&self) -> PoolChunk<'_> {
            PoolChunk { file: self.pool.as_fd(), offset: IN_POOL }
        }

        fn take(&self, spill: &SpillFile) -> Result<(), MoveError> {
            spill.take(&self.zone, CHUNK_BYTES, self.chunk())
        }

        /// Stores 6 to word `EARLY` after the copies before the barrier, and 7 to word `LATE` after
        /// the last copy, by a thread that is returned.
        fn store_after_copies(&self, spill: &SpillFile) -> mpsc::Receiver<JoinHandle<()>> {
            let (sender, stores) = mpsc::channel();
            let (early, late) = (Arc::clone(&self.zone), Arc::clone(&self.zone));
            let mut hooks = spill.after_copy.0.lock();
            hooks.push_back(Box::new(move || word(&early, EARLY).store(6, Ordering::Relaxed)));
            hooks.push_back(Box::new(move || sender.send(start_store(late)).unwrap()));
            stores
        }

        /// Values of `EARLY` and `LATE` in the zone.
        fn values(&self) -> [u64; 2] {
            [EARLY, LATE].map(|at| word(&self.zone, at).load(Ordering::Relaxed))
        }
    }

    fn value(file: &File, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, offset).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// Word in the second chunk of the zone.
    fn word(zone: &Reservation, at: u64) -> &AtomicU64 {
        assert!(at < CHUNK_BYTES);
        // SAFETY: the test maps this chunk, and accesses it only as atomic words.
        unsafe { AtomicU64::from_ptr((zone.addr() + CHUNK_BYTES + at) as *mut u64) }
    }

    /// Starts a thread that stores, and returns when it has stored or waits at the barrier.
    fn start_store(zone: Arc<Reservation>) -> JoinHandle<()> {
        let (started, starts) = mpsc::channel();
        let thread = thread::spawn(move || {
            started.send(rustix::thread::gettid()).unwrap();
            word(&zone, LATE).store(7, Ordering::Relaxed);
        });
        let id = starts.recv().unwrap().as_raw_nonzero();
        let waits = || {
            let waits_in = fs::read_to_string(format!("/proc/self/task/{id}/wchan"));
            waits_in.is_ok_and(|function| function == "handle_userfault")
        };
        while !thread.is_finished() && !waits() {
            thread::yield_now();
        }
        thread
    }

    fn folders() -> Vec<TempDir> {
        // Memory, and usually a disk.
        vec![TempDir::new_in("/dev/shm").unwrap(), TempDir::new().unwrap()]
    }

    #[test]
    fn stores_wait_and_reach_the_file() {
        let Some(fixture) = Fixture::new() else { return };
        for folder in folders() {
            fixture.chunk().map_again(&fixture.zone, CHUNK_BYTES, CHUNK_BYTES);
            for at in [EARLY, LATE] {
                word(&fixture.zone, at).store(5, Ordering::Relaxed);
            }
            let barrier = Arc::clone(&fixture.barrier);
            let spill = SpillFile::create(folder.path(), 2 * CHUNK_BYTES, barrier).unwrap();
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
            let stores = fixture.store_after_copies(&spill);
            fixture.take(&spill).unwrap();
            stores.recv().unwrap().join().unwrap();
            assert_eq!(fixture.values(), [6, 7]);
            assert_eq!(value(&spill.file, CHUNK_BYTES + LATE), 7);
            assert_eq!(value(&fixture.pool, IN_POOL + LATE), 5, "the pool was changed");
            let others = (0..CHUNK_BYTES).step_by(8).filter(|at| ![EARLY, LATE].contains(at));
            let is_5 = |at| word(&fixture.zone, at).load(Ordering::Relaxed) == 5;
            assert!(others.into_iter().all(is_5));
            let before = blocks(&spill.file);
            fixture.zone.unmap(CHUNK_BYTES, CHUNK_BYTES).unwrap();
            spill.release(CHUNK_BYTES, CHUNK_BYTES).unwrap();
            assert_eq!(blocks(&spill.file), before - CHUNK_BYTES / 512);
        }
    }

    fn value_after_a_store_at(barrier: Arc<AccessBarrier>) -> [u64; 2] {
        let fixture = Fixture::new().unwrap();
        let folder = TempDir::new_in("/dev/shm").unwrap();
        let spill = SpillFile::create(folder.path(), 2 * CHUNK_BYTES, barrier).unwrap();
        let stores = fixture.store_after_copies(&spill);
        fixture.take(&spill).unwrap();
        stores.recv().unwrap().join().unwrap();
        fixture.values()
    }

    #[test]
    fn store_is_lost_without_the_barrier() {
        let Some(device) = device() else { return };
        let barrier = || Arc::new(AccessBarrier::new(&device).unwrap());
        assert_eq!(value_after_a_store_at(barrier()), [6, 7]);
        let open = barrier();
        open.is_open.store(true, Ordering::Relaxed);
        assert_eq!(value_after_a_store_at(open), [6, 5]);
        let unregistered = AccessBarrier::with_features(&device, 0).unwrap();
        assert_eq!(value_after_a_store_at(Arc::new(unregistered)), [6, 5]);
    }

    #[test]
    fn chunk_that_the_guest_keeps_changing_remains() {
        let Some(fixture) = Fixture::new() else { return };
        let folder = TempDir::new_in("/dev/shm").unwrap();
        let barrier = Arc::clone(&fixture.barrier);
        let spill = SpillFile::create(folder.path(), 2 * CHUNK_BYTES, barrier).unwrap();
        let change = |blocks: usize, copies: usize| {
            for _ in 0..copies {
                let zone = Arc::clone(&fixture.zone);
                let ends = (1..=blocks).map(|block| (block * BLOCK_BYTES - 8) as u64);
                let change = move || {
                    ends.for_each(|at| {
                        word(&zone, at).fetch_add(1, Ordering::Relaxed);
                    });
                };
                spill.after_early_copy.0.lock().push_back(Box::new(change));
            }
        };
        change(MAX_CHANGED_BLOCKS + 1, MAX_COPIES - 1);
        let (changed, before) = (MAX_CHANGED_BLOCKS + 1, blocks(&spill.file));
        let err = fixture.take(&spill).unwrap_err();
        assert!(matches!(err, MoveError::Busy { changed: n, .. } if n == changed), "{err}");
        assert_eq!(blocks(&spill.file), before);
        change(MAX_CHANGED_BLOCKS + 1, MAX_COPIES - 2);
        fixture.take(&spill).unwrap();
        let counts = [1, changed + 1].map(|block| (block * BLOCK_BYTES - 8) as u64);
        let counts = counts.map(|at| word(&fixture.zone, at).load(Ordering::Relaxed));
        assert_eq!(counts, [5 + (MAX_COPIES - 1 + MAX_COPIES - 2) as u64, 5]);
    }

    #[test]
    fn chunk_of_the_pool_remains_after_each_failure() {
        let Some(fixture) = Fixture::new() else { return };
        let sealed = |seals: SealFlags, len: u64| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = File::from(memfd_create("spill", flags).unwrap());
            file.set_len(len).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            SpillFile::new(file, Arc::clone(&fixture.barrier))
        };
        let full = sealed(SealFlags::GROW, CHUNK_BYTES);
        assert!(matches!(fixture.take(&full), Err(MoveError::Allocate { .. })));
        let unwritable = sealed(SealFlags::WRITE, 2 * CHUNK_BYTES);
        assert!(matches!(fixture.take(&unwritable), Err(MoveError::Copy { .. })));
        let spill = sealed(SealFlags::empty(), 2 * CHUNK_BYTES);
        // The last copy fails.
        let (file, zone) = (duplicate(&spill), Arc::clone(&fixture.zone));
        let seal = move || {
            word(&zone, EARLY).store(8, Ordering::Relaxed);
            fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        };
        spill.after_copy.0.lock().push_back(Box::new(seal));
        assert!(matches!(fixture.take(&spill), Err(MoveError::Copy { .. })));
        assert_eq!([fixture.values()[0], value(&fixture.pool, IN_POOL + EARLY)], [8, 8]);
        let spill = sealed(SealFlags::empty(), 2 * CHUNK_BYTES);
        // The barrier fails, and the pool is mapped again.
        fixture.zone.script([false, true]);
        assert!(matches!(fixture.take(&spill), Err(MoveError::Map { .. })));
        // The mapping of the file fails while a store waits.
        fixture.zone.script([true, false, true]);
        let stores = fixture.store_after_copies(&spill);
        assert!(matches!(fixture.take(&spill), Err(MoveError::Map { .. })));
        stores.recv().unwrap().join().unwrap();
        assert_eq!(fixture.values(), [6, 7]);
        assert_eq!([EARLY, LATE].map(|at| value(&fixture.pool, IN_POOL + at)), [6, 7]);
        assert_eq!(blocks(&spill.file), 0);
    }

    #[test]
    fn unusable_folder_is_refused() {
        let Some(barrier) = barrier() else { return };
        let error = |path: &str| {
            let error = SpillFile::create(Path::new(path), CHUNK_BYTES, Arc::clone(&barrier));
            foreshore_types::chain(&error.unwrap_err())
        };
        for path in ["/nowhere/at/all", "/proc", "/dev/null"] {
            let text = error(path);
            assert!(text.starts_with("cannot create an unnamed file in this folder: "), "{text}");
        }
    }
}
