//! Pool: a file or device of persistent memory, divided into chunks that memory and volumes share.
//!
//! All state is on the media (`docs/reference/format.md`). The state in memory is derived from it
//! at open: the free chunks by order, and the chunks of each volume by index. Every change follows
//! one rule: its preparations are durable before the one word or record that commits it.
//!
//! - A free chunk reads as zeros. Chunks are erased before they become free, so their next owner, a
//!   guest or a volume, cannot read data of the previous one. The background thread erases them
//!   ([`Scrubber`]), or an allocation that needs them.
//! - A chunk is marked as lent before it is handed out. A crash therefore leaves no chunk that
//!   contains memory and looks clean.
//! - A chunk belongs to a volume if its owner word has the volume's slot and the volume's record
//!   covers its index. Creation of a volume therefore marks the chunks first and writes the record
//!   last. Deletion does the reverse.

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
pub use create::CreateOptions;
pub use error::{PoolError, SplitError};
pub use file::{formats, mark, signature};
pub use findings::{Finding, Severity};
pub use foreshore_types::VolumeFormat;
pub use format::chunk::{ChunkId, Extent, MAX_ORDER, Run};
pub use format::layout;
pub use format::superblock::SuperblockError;
pub use format::volume_record::{NameError, VolumeName};
pub use lock::Holder;
pub(crate) use lock::{LockKind, try_lock};
pub use maintenance::check::{CheckReport, VolumeCheck};
pub use maintenance::repair::RepairReport;
pub use volume::damaged_volume::DamagedVolume;
pub use volume::resize::Shrink;
pub use volume::split::SplitContent;
pub use volume::{Volume, VolumeExtent, VolumeInfo, VolumeSize};

use crate::CHUNK_BYTES;
use crate::media::{Durability, FileMedia, MAX_MAPPED_BYTES, Media, MediaError};
use alloc::buddy::Buddy;
use alloc::scrub_queue::ScrubQueue;
use alloc::scrubber::ScrubWake;
use format::superblock::Superblock;
use format::table::{ChunkTable, Slot};
use redo_log::Redone;
use scan::VolumeEntry;

/// Smallest pool: two chunks of metadata and two usable ones.
pub const MIN_POOL_BYTES: u64 = 4 * CHUNK_BYTES;
/// Largest pool, 64 TiB, because the whole pool is mapped at once. The format allows more chunks.
pub const MAX_POOL_BYTES: u64 = MAX_MAPPED_BYTES;
const _: () = assert!(MAX_POOL_BYTES <= layout::MAX_CHUNKS * CHUNK_BYTES);

/// Purpose for which a pool is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Read and write. Excludes all other writers and readers.
    ReadWrite,
    /// Read only, and change nothing on the media. Excludes writers.
    ReadOnly,
    /// Read only, without a lock, while another process may change the pool. Suitable for an
    /// approximate overview, such as bytes by state, but not for the content of volumes.
    Peek,
}

/// Open pool. All methods may be called from any thread.
///
/// `M` is its media: a file, except in tests and benchmarks.
pub struct Pool<M: Media = FileMedia> {
    path: PathBuf,
    mode: OpenMode,
    media: M,
    superblock: Superblock,
    table: ChunkTable,
    /// Words of a committed transaction, in a pool that is open for reading. A writer has stored
    /// them.
    redo: BTreeMap<u64, u64>,
    /// First failure of the media. Once set, the pool is read-only.
    latched: OnceLock<String>,
    state: Mutex<State>,
    /// Levels when the state was last unlocked. Readers of levels do not wait for a change that
    /// waits for the media.
    levels: Mutex<Levels>,
    /// Signals that chunks have become clean, or that erasing has failed.
    scrubbed: Condvar,
    /// Chunks erased since the pool was opened.
    scrubbed_chunks: AtomicU64,
    /// Chunks erased on demand that the scrubber has not counted yet.
    awaited_chunks: AtomicU64,
    /// Wakes the scrubber, if there is one.
    scrub_wake: Arc<ScrubWake>,
}

/// State derived from the media at open, and kept consistent with it.
struct State {
    buddy: Buddy,
    volumes: BTreeMap<Slot, VolumeEntry>,
    /// Volumes that are open in this process.
    open_volumes: Vec<Slot>,
    counts: Counts,
    /// Chunks that wait to be erased. A pool that is open for reading does not erase them.
    scrub: ScrubQueue,
    /// Findings at open, for reports. A pool that is open for writing has corrected them.
    findings: Vec<Finding>,
}

/// Lock guard of the state. Unlocking publishes the levels.
struct StateGuard<'a> {
    /// `None` only during [`Self::wait`].
    state: Option<MutexGuard<'a, State>>,
    levels: &'a Mutex<Levels>,
}

impl StateGuard<'_> {
    fn publish(&self) {
        if let Some(state) = &self.state {
            *locked(self.levels) = state.levels();
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
    /// Publishes before the state is unlocked, so that the levels are those of the last change.
    fn drop(&mut self) {
        self.publish();
    }
}

/// Numbers that are available without a look at single chunks.
#[derive(Clone, Copy, Debug)]
struct Levels {
    counts: Counts,
    free: u32,
    /// Chunks that are being erased, or wait for it, and are free after that.
    pending: u32,
    volumes: u32,
}

/// Chunks by state, except the free ones, which the buddy allocator counts.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    metadata: u32,
    memory: u32,
    volume: u32,
    scrubbing: u32,
    retired: u32,
    /// Chunks with an unknown owner. Only a pool that is open for reading can have them.
    damaged: u32,
}

/// Bytes of a pool by state, and its properties. The states add up to the total.
#[derive(Clone, Debug, Serialize)]
pub struct PoolInfo {
    /// Identity of the pool.
    pub uuid: Uuid,
    /// Version of its format.
    pub format_version: u32,
    /// Events that a completed flush survives.
    pub durability: Durability,
    /// Free chunks are holes. Other files and programs may use their blocks or pages.
    pub thin: bool,
    /// Size of the pool.
    pub total_bytes: u64,
    /// Reserved for volumes, never lent as memory.
    pub strg_bytes: u64,
    /// Metadata of the pool.
    pub metadata_bytes: u64,
    /// Owned by volumes.
    pub volume_bytes: u64,
    /// Lent as memory.
    pub memory_bytes: u64,
    /// Waiting to be erased.
    pub scrubbing_bytes: u64,
    /// With an unknown owner because of damage. They are neither used nor erased.
    pub damaged_bytes: u64,
    /// Permanently unused because of bad media.
    pub retired_bytes: u64,
    /// Free.
    pub free_bytes: u64,
    /// Available to be lent as memory: free bytes and those that wait to be erased, without the
    /// part that is reserved for volumes (STRG).
    pub lendable_bytes: u64,
    /// Number of volumes.
    pub volumes: u32,
    /// Reason why the pool is read-only, if a write to it failed.
    pub latched: Option<String>,
}

impl PoolInfo {
    /// Free bytes that are reserved for volumes and never lent as memory.
    pub fn free_storage_bytes(&self) -> u64 {
        self.strg_bytes.saturating_sub(self.volume_bytes).min(self.free_bytes)
    }

    /// Free bytes that may become storage or memory.
    pub fn free_migrate_bytes(&self) -> u64 {
        self.free_bytes - self.free_storage_bytes()
    }

    /// Bytes that are neither metadata nor bad media.
    pub fn usable_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.metadata_bytes + self.retired_bytes)
    }

    /// Bytes available for volumes, including chunks that must be erased first.
    pub fn available_bytes(&self) -> u64 {
        self.free_bytes + self.scrubbing_bytes
    }
}

/// Contiguity of a pool's free bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FreeSpace {
    /// Largest free power-of-two extent, up to 2 GiB.
    pub largest_free_extent_bytes: u64,
    /// Longest run of free chunks.
    pub longest_free_run_bytes: u64,
}

impl Pool {
    /// File of the pool, for mappings of its extents (MAP_SHARED, at [`Extent::offset_bytes`]).
    pub fn file(&self) -> &File {
        self.media.file()
    }

    /// Process that has the pool open for writing, this one included, or one of its readers.
    pub fn holder(&self) -> Option<Holder> {
        lock::holder(self.file())
    }
}

impl<M: Media> Pool<M> {
    /// Path with which the pool was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Identity of the pool.
    pub fn uuid(&self) -> Uuid {
        self.superblock.uuid
    }

    /// Events that a completed flush survives.
    pub fn durability(&self) -> Durability {
        self.media().durability()
    }

    /// Returns true if free chunks are holes, as always on tmpfs.
    fn is_thin(&self) -> bool {
        self.superblock.is_thin || self.makes_holes()
    }

    /// Returns true if erasing makes holes. Some file systems cannot, even for a pool that was
    /// created as thin.
    fn makes_holes(&self) -> bool {
        self.media.as_file().map_or(self.superblock.is_thin, FileMedia::makes_holes)
    }

    /// Returns true if the pool is open for writing and no write to it has failed.
    pub fn is_writable(&self) -> bool {
        self.check_writable().is_ok()
    }

    /// Bytes by state. Never waits for the media, so a change in progress is not visible yet.
    pub fn info(&self) -> PoolInfo {
        let levels = *locked(&self.levels);
        let Levels { counts, free, volumes, .. } = levels;
        PoolInfo {
            uuid: self.superblock.uuid,
            format_version: layout::FORMAT_VERSION,
            durability: self.durability(),
            thin: self.is_thin(),
            total_bytes: self.superblock.size_bytes(),
            strg_bytes: self.superblock.strg_bytes,
            metadata_bytes: bytes(counts.metadata),
            volume_bytes: bytes(counts.volume),
            memory_bytes: bytes(counts.memory),
            scrubbing_bytes: bytes(counts.scrubbing),
            damaged_bytes: bytes(counts.damaged),
            retired_bytes: bytes(counts.retired),
            free_bytes: bytes(free),
            lendable_bytes: self.lendable_bytes(levels),
            volumes,
            latched: self.latched.get().cloned(),
        }
    }

    /// Bytes that may still be lent as memory: 0 if a write has failed, even if some are free.
    /// Never waits for the media.
    pub fn offered_bytes(&self) -> u64 {
        match self.latched.get() {
            Some(_) => 0,
            None => self.lendable_bytes(*locked(&self.levels)),
        }
    }

    fn lendable_bytes(&self, levels: Levels) -> u64 {
        bytes(levels.free + levels.pending - self.reserved_chunks(levels))
    }

    /// Contiguity of the free bytes. Waits for changes in progress.
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

    /// Findings on the media at open. A pool that is open for writing has corrected them if
    /// possible.
    pub fn findings_at_open(&self) -> Vec<Finding> {
        self.lock_state().findings.clone()
    }

    /// Chunks that are free, or will be after erasing, and that STRG reserves for volumes: its size
    /// minus the chunks that volumes already have.
    fn reserved_chunks(&self, levels: Levels) -> u32 {
        let strg_chunks = (self.superblock.strg_bytes / CHUNK_BYTES) as u32;
        strg_chunks.saturating_sub(levels.counts.volume).min(levels.free + levels.pending)
    }

    #[inline]
    fn media(&self) -> &M {
        &self.media
    }

    /// Media as it will be after a committed transaction is redone.
    fn view(&self) -> Redone<'_> {
        Redone::with(self.media(), &self.redo)
    }

    fn lock_state(&self) -> StateGuard<'_> {
        StateGuard { state: Some(locked(&self.state)), levels: &self.levels }
    }

    /// Locks the state for a change. The pool is checked with the lock held, because a change that
    /// held it may have failed.
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

    /// Latches the pool read-only at the first failure of the media, because from then on it is
    /// unknown which writes are durable. Returns an error if another change has failed meanwhile,
    /// so that all changes in progress end before their next step.
    fn latch<T>(&self, result: Result<T, MediaError>) -> Result<T, PoolError> {
        let value = self.latch_failure(result)?;
        self.check_not_latched()?;
        Ok(value)
    }

    /// Like [`Self::latch`] for readers, which a latched pool allows.
    fn latch_failure<T>(&self, result: Result<T, MediaError>) -> Result<T, PoolError> {
        self.noted(result).map_err(PoolError::Media)
    }

    /// Like [`Self::latch_failure`], but keeps the type of the error.
    // Always inlined, because a result is as large as its error and would be returned in memory.
    #[inline(always)]
    fn noted<T>(&self, result: Result<T, MediaError>) -> Result<T, MediaError> {
        if let Err(error) = &result {
            self.note(error);
        }
        result
    }

    #[cold]
    fn note(&self, error: &MediaError) {
        // Only the first cause is kept.
        let _ = self.latched.set(foreshore_types::chain(error));
    }

    fn persist_entries(&self, runs: &[Run]) -> Result<(), MediaError> {
        let ranges: Vec<_> = runs.iter().map(|run| self.table.byte_range(*run)).collect();
        self.media().persist(&ranges)
    }
}

impl State {
    fn levels(&self) -> Levels {
        Levels {
            counts: self.counts,
            free: self.buddy.free_chunks(),
            pending: self.scrub.pending(),
            volumes: self.volumes.len() as u32,
        }
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
