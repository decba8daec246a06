//! Pool of persistent memory: a file or device that is divided into chunks. Guest memory and
//! volumes share these chunks.
//!
//! All state is on the media (`docs/reference/format.md`). The state in memory is derived from it
//! at open: the free chunks by order, and the chunks of each volume by index. Every change ends
//! with a single word or record that commits it. All preparations are made durable before that
//! store.
//!
//! - A free chunk reads as zeros. Chunks are erased before they become free, so the next guest or
//!   volume cannot read data of the previous owner. They are erased by the background thread
//!   ([`Scrubber`]), or by an allocation that needs them.
//! - A chunk is marked as lent before it is handed out. A crash therefore cannot leave a chunk that
//!   is marked as free but contains guest memory.
//! - A chunk belongs to a volume if its owner word contains the volume's slot and the volume's
//!   record covers its index. Therefore, creating a volume marks the chunks first and writes the
//!   record last. Deletion uses the reverse order.

mod alloc;
mod create;
mod error;
mod file;
mod findings;
mod format;
pub mod lock;
mod maintenance;
mod open;
pub mod ownership;
mod redo_log;
mod scan;
#[cfg(test)]
pub(crate) mod tests;
mod volume;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use uuid::Uuid;

pub use alloc::scrubber::{DEFAULT_SCRUB_BYTES_PER_S, Scrubber};
pub use create::{CreateOptions, check_pool_sizes};
pub use error::{PoolError, SplitError};
pub use file::{formats, mark, signature};
pub use findings::{Finding, Severity};
pub use foreshore_types::VolumeFormat;
use foreshore_types::lending::Loan;
pub use format::chunk::{ChunkId, Extent, MAX_ORDER, Run};
pub use format::layout;
pub use format::volume_record::{NameError, VolumeName};
pub use lock::Holder;
pub(crate) use lock::{LockKind, try_lock};
pub use maintenance::check::{CheckReport, VolumeCheck};
pub use maintenance::repair::RepairReport;
pub use volume::damaged_volume::DamagedVolume;
pub use volume::resize::Shrink;
pub use volume::split::{SplitContent, check_parts};
pub use volume::{
    Volume, VolumeExtent, VolumeInfo, VolumeOptions, VolumeSize, check_volume_reserve,
    check_volume_size,
};

use crate::CHUNK_BYTES;
use crate::media::{Durability, FileMedia, MAX_MAPPED_BYTES, Media, MediaError};
use alloc::buddy::Buddy;
use alloc::recall::Recall;
use alloc::scrub_queue::ScrubQueue;
use alloc::scrubber::ScrubWake;
use format::superblock::{self, Superblock};
use format::table::{ChunkTable, Slot};
use redo_log::Redone;
use scan::VolumeEntry;

/// Smallest pool: two chunks of metadata and two usable ones.
pub const MIN_POOL_BYTES: u64 = 4 * CHUNK_BYTES;
/// Largest size of a pool (64 TiB). The whole pool is mapped contiguously, and the address space
/// limits this mapping. The format allows more chunks.
pub const MAX_POOL_BYTES: u64 = MAX_MAPPED_BYTES;
const _: () = assert!(MAX_POOL_BYTES <= layout::MAX_CHUNKS * CHUNK_BYTES);

/// Mode in which a pool is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Opens the pool for reading and writing. Excludes all other writers and readers.
    ReadWrite,
    /// Opens the pool for reading, and changes nothing on the media. Excludes writers.
    ReadOnly,
    /// Opens the pool for reading without a lock, while another process may change it. Suitable for
    /// an approximate overview, such as bytes by state, but not for the content of volumes.
    Peek,
}

/// Open pool. All methods may be called from any thread.
///
/// `M` is the media of the pool. It is a file, except in tests and benchmarks.
pub struct Pool<M: Media = FileMedia> {
    path: PathBuf,
    mode: OpenMode,
    media: M,
    /// Changes only while the state is locked. Never locked during an access to the media.
    superblock: Mutex<Superblock>,
    /// Words of a committed transaction that a crash interrupted. Reads of a pool that is open for
    /// reading use these words instead of the media's. A writer stores them when it opens the pool.
    redo: BTreeMap<u64, u64>,
    /// First media failure. Once it is set, the pool is read-only.
    latched: OnceLock<String>,
    state: Mutex<State>,
    /// Copy of the levels from the last unlock of the state. Readers of this copy need not wait
    /// while a change waits for the media.
    totals: Mutex<Totals>,
    /// Signals that chunks have become clean or wait to be erased, or that erasing or a recall has
    /// failed.
    scrubbed: Condvar,
    /// Signals that thin volumes may need lent chunks.
    recalled: Condvar,
    /// Number of chunks erased since the pool was opened.
    scrubbed_chunks: AtomicU64,
    /// Number of chunks that were erased on demand and that the scrubber has not counted yet.
    on_demand_chunks: AtomicU64,
    /// Wakes the scrubber, if there is one.
    scrub_wake: Arc<ScrubWake>,
}

/// State derived from the media at open, and kept consistent with it.
struct State {
    buddy: Buddy,
    volumes: BTreeMap<Slot, VolumeEntry>,
    /// Volumes that are open in this process.
    open_volumes: Vec<Slot>,
    volume_sums: VolumeSums,
    counts: Counts,
    recall: Recall,
    /// Chunks to erase. A pool that is open for reading erases none.
    scrub: ScrubQueue,
    /// Findings at open, for reports. A pool that is open for writing has already corrected them.
    findings: Vec<Finding>,
}

/// Lock guard of the state. The lock guard publishes the levels when it unlocks.
struct StateGuard<'a> {
    /// `None` only during [`Self::wait`].
    state: Option<MutexGuard<'a, State>>,
    totals: &'a Mutex<Totals>,
}

impl StateGuard<'_> {
    fn publish(&self) {
        if let Some(state) = &self.state {
            *locked(self.totals) = state.totals();
        }
    }

    /// Unlocks the state until `changed` is signaled.
    fn wait(mut self, changed: &Condvar) -> Self {
        self.publish();
        let state = self.state.take().expect(HELD);
        self.state = Some(changed.wait(state).expect(NO_PANIC));
        self
    }
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect(HELD)
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect(HELD)
    }
}

impl Drop for StateGuard<'_> {
    /// Publishes the levels before it unlocks the state, so that they reflect the last change.
    fn drop(&mut self) {
        self.publish();
    }
}

/// Totals that are available without examining single chunks.
#[derive(Clone, Copy, Debug)]
struct Totals {
    counts: Counts,
    free: u32,
    /// Chunks that will be free after they are erased.
    pending: u32,
    volumes: u32,
    volume_sums: VolumeSums,
    loan: Loan,
}

impl Totals {
    /// Returns the bytes that are free or waiting to be erased.
    fn available_bytes(&self) -> u64 {
        bytes(self.free + self.pending)
    }

    /// Returns the bytes that thin volumes were promised but do not have yet, and the bytes that
    /// volumes lack because of damage.
    fn unallocated_bytes(&self) -> u64 {
        let allocated = u64::from(self.counts.volume);
        let chunks = self.volume_sums.promised_chunks.saturating_sub(allocated);
        chunks.saturating_mul(CHUNK_BYTES)
    }
}

/// Sums over all volumes. Records are untrusted, so the sums may exceed the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct VolumeSums {
    promised_chunks: u64,
    provisioned_chunks: u64,
}

impl VolumeSums {
    fn of(volumes: &BTreeMap<Slot, VolumeEntry>) -> Self {
        let mut sums = Self::default();
        volumes.values().for_each(|entry| sums.add(entry));
        sums
    }

    fn add(&mut self, entry: &VolumeEntry) {
        self.promised_chunks += u64::from(entry.promised());
        self.provisioned_chunks += u64::from(entry.record.chunks);
    }

    fn subtract(&mut self, entry: &VolumeEntry) {
        self.promised_chunks -= u64::from(entry.promised());
        self.provisioned_chunks -= u64::from(entry.record.chunks);
    }
}

/// Number of chunks in each state. The buddy allocator counts the free ones.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// All chunks of the pool.
    total: u32,
    metadata: u32,
    memory: u32,
    volume: u32,
    scrubbing: u32,
    retired: u32,
    /// Chunks with an unknown owner. The chunks occur only in a pool that is open for reading.
    damaged: u32,
}

/// Properties of a pool and its bytes by state. The states add up to the total.
#[derive(Clone, Debug, Serialize)]
pub struct PoolInfo {
    /// Identity of the pool.
    pub uuid: Uuid,
    /// Version of the pool's format.
    pub format_version: u32,
    /// Events after which flushed data is still present.
    pub durability: Durability,
    /// If true, free chunks are holes, whose blocks or pages other files and programs may use.
    pub thin: bool,
    /// Size of the pool.
    pub total_bytes: u64,
    /// Bytes reserved for volumes, which are never lent as memory (STRG).
    pub reserve_bytes: u64,
    /// Bytes that are not available to memory: `volume_bytes`, and the free part of the reserve or
    /// of the promised bytes, whichever is larger.
    pub reserved_bytes: u64,
    /// Sum of the reserves of all volumes, or of their allocated bytes where these are more. It
    /// exceeds `volume_bytes` if volumes are thin, or if chunks of volumes are missing. The
    /// difference is withheld for these volumes.
    pub promised_bytes: u64,
    /// Sum of the sizes of all volumes. It exceeds `promised_bytes` if volumes are overcommitted.
    pub provisioned_bytes: u64,
    /// Bytes of the pool's own metadata.
    pub metadata_bytes: u64,
    /// Bytes allocated to volumes.
    pub volume_bytes: u64,
    /// Bytes lent as memory.
    pub memory_bytes: u64,
    /// Bytes waiting to be erased.
    pub scrubbing_bytes: u64,
    /// Bytes whose owner is unknown because of damage. The bytes are neither used nor erased.
    pub damaged_bytes: u64,
    /// Bytes that are permanently unused because of bad media, or because a thin volume may have
    /// lost them.
    pub retired_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Bytes that can be lent as memory. Bytes that must be erased first are included, but not the
    /// bytes that are withheld for volumes.
    pub lendable_bytes: u64,
    /// Part of the promised bytes that memory may borrow while no volume uses them.
    pub borrowable_bytes: u64,
    /// Free bytes that memory leaves to volumes if it borrows promised bytes
    /// ([`Pool::lend_promised`]).
    #[serde(skip)]
    pub min_free_bytes: Option<u64>,
    /// Number of volumes.
    pub volumes: u32,
    /// Reason why the pool is read-only, if a write to it failed.
    pub latched: Option<String>,
}

impl PoolInfo {
    /// Free bytes that are reserved for volumes and never lent as memory.
    pub fn free_storage_bytes(&self) -> u64 {
        self.withheld_of(self.free_bytes)
    }

    /// Part of `available_bytes` that is withheld for volumes and never lent as memory.
    pub fn withheld_of(&self, available_bytes: u64) -> u64 {
        let [reserve_bytes, promised_bytes] = [self.reserve_bytes, self.promised_bytes]
            .map(|size_bytes| size_bytes.saturating_sub(self.volume_bytes));
        self.loan().withheld_bytes(available_bytes, reserve_bytes, promised_bytes)
    }

    /// Returns true if promised bytes may be lent as memory.
    pub fn lends_promised(&self) -> bool {
        self.min_free_bytes.is_some()
    }

    fn loan(&self) -> Loan {
        Loan { borrowable_bytes: self.borrowable_bytes, min_free_bytes: self.min_free_bytes }
    }

    /// Free bytes that may become storage or memory.
    pub fn free_migrate_bytes(&self) -> u64 {
        self.free_bytes - self.free_storage_bytes()
    }

    /// Bytes that are neither metadata nor permanently unused.
    pub fn usable_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.metadata_bytes + self.retired_bytes)
    }

    /// Bytes available for new and growing volumes, including chunks that must be erased first, but
    /// not the bytes that existing volumes were promised.
    pub fn available_bytes(&self) -> u64 {
        (self.free_bytes + self.scrubbing_bytes).saturating_sub(self.needed_bytes())
    }

    /// Lent bytes that volumes can get back at any time, because the borrower moves its memory.
    pub fn recallable_bytes(&self) -> u64 {
        self.borrowable_bytes.min(self.memory_bytes)
    }

    /// Bytes that existing volumes were promised, but have not allocated.
    pub fn needed_bytes(&self) -> u64 {
        self.promised_bytes.saturating_sub(self.volume_bytes)
    }
}

/// Contiguity of the free space in a pool.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FreeSpace {
    /// Largest free power-of-two extent, up to 2 GiB.
    pub largest_free_extent_bytes: u64,
    /// Longest run of free chunks.
    pub longest_free_run_bytes: u64,
}

impl Pool {
    /// Returns the file of the pool. Map its extents with MAP_SHARED at [`Extent::offset_bytes`].
    pub fn file(&self) -> &File {
        self.media.file()
    }

    /// Returns the process that has the pool open for writing, or else one of its readers, which
    /// may be this process.
    pub fn holder(&self) -> Option<Holder> {
        lock::holder(self.file())
    }
}

impl<M: Media> Pool<M> {
    /// Path that was used to open the pool.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Identity of the pool.
    pub fn uuid(&self) -> Uuid {
        self.superblock().uuid
    }

    /// Events after which flushed data is still present.
    pub fn durability(&self) -> Durability {
        self.media().durability()
    }

    /// Returns true if free chunks are holes. On tmpfs they always are.
    fn is_thin(&self) -> bool {
        self.superblock().is_thin || self.makes_holes()
    }

    /// Returns true if erasing creates holes. Some file systems do not support holes, even if the
    /// pool was created as thin.
    fn makes_holes(&self) -> bool {
        self.media.as_file().map_or(self.superblock().is_thin, FileMedia::makes_holes)
    }

    /// Returns true if the pool is open for writing and no write to it has failed.
    pub fn is_writable(&self) -> bool {
        self.check_writable().is_ok()
    }

    /// Returns the bytes by state. Never waits for the media, so the result does not include a
    /// change in progress.
    pub fn info(&self) -> PoolInfo {
        let totals = *locked(&self.totals);
        let Totals { counts, free, volumes, volume_sums, .. } = totals;
        let superblock = self.superblock();
        PoolInfo {
            uuid: superblock.uuid,
            format_version: layout::FORMAT_VERSION,
            durability: self.durability(),
            thin: self.is_thin(),
            total_bytes: bytes(counts.total),
            reserve_bytes: superblock.strg_bytes,
            reserved_bytes: bytes(counts.volume) + self.withheld_bytes(totals),
            promised_bytes: volume_sums.promised_chunks.saturating_mul(CHUNK_BYTES),
            provisioned_bytes: volume_sums.provisioned_chunks.saturating_mul(CHUNK_BYTES),
            metadata_bytes: bytes(counts.metadata),
            volume_bytes: bytes(counts.volume),
            memory_bytes: bytes(counts.memory),
            scrubbing_bytes: bytes(counts.scrubbing),
            damaged_bytes: bytes(counts.damaged),
            retired_bytes: bytes(counts.retired),
            free_bytes: bytes(free),
            lendable_bytes: self.lendable_bytes(totals),
            borrowable_bytes: totals.loan.borrowable_bytes,
            min_free_bytes: totals.loan.min_free_bytes,
            volumes,
            latched: self.latched.get().cloned(),
        }
    }

    /// Returns the bytes that may still be lent as memory. After a failed write, it is 0 even if
    /// some are free. Never waits for the media.
    pub fn offered_bytes(&self) -> u64 {
        match self.latched.get() {
            Some(_) => 0,
            None => self.lendable_bytes(*locked(&self.totals)),
        }
    }

    fn lendable_bytes(&self, totals: Totals) -> u64 {
        totals.available_bytes() - self.withheld_bytes(totals)
    }

    /// Returns the contiguity of the free space. Waits for changes in progress.
    pub fn free_space(&self) -> FreeSpace {
        let state = self.lock_state();
        FreeSpace {
            largest_free_extent_bytes: state
                .buddy
                .largest_order()
                .map_or(0, |order| bytes(1 << order)),
            longest_free_run_bytes: bytes(state.buddy.longest_run()),
        }
    }

    /// Findings of the check when the pool was opened. In a pool that is open for writing, they
    /// have been corrected if possible.
    pub fn findings_at_open(&self) -> Vec<Finding> {
        self.lock_state().findings.clone()
    }

    /// Returns the available bytes that memory does not get ([`Loan::withheld_bytes`]).
    fn withheld_bytes(&self, totals: Totals) -> u64 {
        let volume_bytes = bytes(totals.counts.volume);
        totals.loan.withheld_bytes(
            totals.available_bytes(),
            self.superblock().strg_bytes.saturating_sub(volume_bytes),
            totals.unallocated_bytes(),
        )
    }

    #[inline]
    fn media(&self) -> &M {
        &self.media
    }

    /// Returns the media as it will be after a committed transaction has been redone.
    fn view(&self) -> Redone<'_> {
        Redone::with(self.media(), &self.redo)
    }

    fn lock_state(&self) -> StateGuard<'_> {
        StateGuard { state: Some(locked(&self.state)), totals: &self.totals }
    }

    /// Locks the state for a change. Checks for errors while it holds the lock, because the
    /// previous holder's change may have failed.
    fn lock_for_change(&self) -> Result<StateGuard<'_>, PoolError> {
        let state = self.lock_state();
        self.check_writable()?;
        Ok(state)
    }

    fn check_writable(&self) -> Result<(), PoolError> {
        if self.mode != OpenMode::ReadWrite {
            return Err(PoolError::ReadOnly { path: self.path.clone() });
        }
        self.check_not_latched()
    }

    fn check_not_latched(&self) -> Result<(), PoolError> {
        match self.latched.get() {
            Some(cause) => {
                Err(PoolError::Latched { path: self.path.clone(), cause: cause.clone() })
            }
            None => Ok(()),
        }
    }

    /// Sets the feature bit for thin volumes. It must be called before the first record of a thin
    /// volume is written.
    fn allow_thin_volumes(&self, _locked: &mut State) -> Result<(), PoolError> {
        let superblock = self.superblock();
        if !superblock.has_thin_volumes {
            let changed = self.latch(superblock::allow_thin_volumes(self.media(), &superblock))?;
            self.set_superblock(changed);
        }
        Ok(())
    }

    /// Returns the superblock as it is now. If both copies on the media have been damaged since the
    /// pool was opened, they are rewritten from it.
    fn superblock(&self) -> Superblock {
        locked(&self.superblock).clone()
    }

    fn set_superblock(&self, superblock: Superblock) {
        *locked(&self.superblock) = superblock;
    }

    fn table(&self) -> ChunkTable {
        ChunkTable::new(&locked(&self.superblock))
    }

    /// Latches the pool read-only at the first media failure, because the durability of writes is
    /// unknown from then on. Also returns an error if another change has failed in the meantime, so
    /// that every change in progress stops before its next step.
    fn latch<T>(&self, result: Result<T, MediaError>) -> Result<T, PoolError> {
        let value = self.latch_failure(result)?;
        self.check_not_latched()?;
        Ok(value)
    }

    /// Latches the pool read-only if a read has failed. Unlike [`Self::latch`], it returns no error
    /// if only another operation has failed, because reads are allowed in a latched pool.
    fn latch_failure<T>(&self, result: Result<T, MediaError>) -> Result<T, PoolError> {
        self.record_failure(result).map_err(PoolError::Media)
    }

    /// Latches the pool read-only if `result` is an error, and returns `result` unchanged.
    // Always inlined. The result is as large as its error, so a call would return it in memory.
    #[inline(always)]
    fn record_failure<T>(&self, result: Result<T, MediaError>) -> Result<T, MediaError> {
        if let Err(error) = &result {
            self.set_latched(error);
        }
        result
    }

    #[cold]
    fn set_latched(&self, error: &MediaError) {
        // Only the first failure is recorded.
        let _ = self.latched.set(foreshore_types::chain(error));
    }

    fn persist_entries(&self, runs: &[Run]) -> Result<(), MediaError> {
        let table = self.table();
        let ranges: Vec<_> = runs.iter().map(|run| table.byte_range(*run)).collect();
        self.media().persist(&ranges)
    }
}

impl State {
    fn totals(&self) -> Totals {
        debug_assert_eq!(self.volume_sums, VolumeSums::of(&self.volumes));
        Totals {
            counts: self.counts,
            free: self.buddy.free_chunks(),
            pending: self.scrub.pending(),
            volumes: self.volumes.len() as u32,
            volume_sums: self.volume_sums,
            loan: self.recall.loan,
        }
    }

    fn insert_volume(&mut self, entry: VolumeEntry) {
        self.volume_sums.add(&entry);
        self.volumes.insert(entry.record.slot, entry);
    }

    fn remove_volume(&mut self, slot: Slot) -> VolumeEntry {
        let entry = self.volumes.remove(&slot).expect(FOUND);
        self.volume_sums.subtract(&entry);
        entry
    }

    /// Changes a volume, and updates the sums of all volumes.
    fn change_volume(&mut self, slot: Slot, change: impl FnOnce(&mut VolumeEntry)) {
        let entry = self.volumes.get_mut(&slot).expect(FOUND);
        self.volume_sums.subtract(entry);
        change(entry);
        self.volume_sums.add(entry);
    }
}

fn bytes(chunks: u32) -> u64 {
    u64::from(chunks) * CHUNK_BYTES
}

fn unix_now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect(NO_PANIC)
}

const NO_PANIC: &str = "no code panics while holding the pool's state";
const FOUND: &str = "the caller has found the volume under the same lock";
const HELD: &str = "a guard outside a wait holds the state";

impl<M: Media> Drop for Pool<M> {
    fn drop(&mut self) {
        self.scrub_wake.end();
    }
}

impl<M: Media> std::fmt::Debug for Pool<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("path", &self.path)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}
