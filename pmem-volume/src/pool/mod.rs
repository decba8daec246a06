//! The pool: a file or device of persistent memory, cut into chunks that memory and volumes share.
//!
//! What the pool knows is on the media (`docs/reference/format.md`); what is kept in memory is
//! derived from it at open: the free chunks by order, and each volume's chunks by index. Every
//! change follows one rule: what it leads to is durable before the one word or record that makes it
//! count.
//!
//! - A free chunk reads as zeros. So chunks are erased before they become free, and whoever gets
//!   one next, guest or volume, reads nothing of the last owner's. That is done in the background
//!   ([`Scrubber`]), or by who needs them.
//! - A chunk is marked as lent before anybody gets it. So a crash leaves no chunk that holds memory
//!   and looks clean.
//! - A chunk belongs to a volume when its owner word says so and the volume's record covers its
//!   index. So a volume is made by marking chunks first and writing the record last, and deleted
//!   the other way round.

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

/// Smallest pool: two chunks of metadata and two to use.
pub const MIN_POOL_BYTES: u64 = 4 * CHUNK_BYTES;
/// Largest pool, 64 TiB: all of it is mapped at once. A chunk number on the media can count more.
pub const MAX_POOL_BYTES: u64 = MAX_MAPPED_BYTES;
const _: () = assert!(MAX_POOL_BYTES <= layout::MAX_CHUNKS * CHUNK_BYTES);

/// Purpose for which a pool is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// To change it. One at a time, and nobody reads meanwhile.
    ReadWrite,
    /// To look at it as it is: nothing is put right. Readers share.
    ReadOnly,
    /// To look at it while somebody else may change it: no lock is taken. Good for a rough picture,
    /// such as bytes by state; not for volumes' content.
    Peek,
}

/// An open pool. All methods may be called from any thread.
///
/// `M` is its media: a file, except in tests and benchmarks.
pub struct Pool<M: Media = FileMedia> {
    path: PathBuf,
    mode: OpenMode,
    media: M,
    superblock: Superblock,
    table: ChunkTable,
    /// What a committed transaction stores, in a pool that is only looked at; a writer has redone
    /// it.
    redo: BTreeMap<u64, u64>,
    /// The first failure of the media; set once, and then the pool is read-only.
    latched: OnceLock<String>,
    state: Mutex<State>,
    /// As they were when the state was last unlocked: who asks does not wait for a change that
    /// waits for the media.
    levels: Mutex<Levels>,
    /// Chunks became clean, or it is known that they will not.
    scrubbed: Condvar,
    /// How many were erased since the pool was opened.
    scrubbed_chunks: AtomicU64,
    /// Chunks erased on demand that the scrubber has not counted yet.
    awaited_chunks: AtomicU64,
    /// Wakes the scrubber, if there is one.
    scrub_wake: Arc<ScrubWake>,
}

/// What is derived from the media at open, and kept in step with it.
struct State {
    buddy: Buddy,
    volumes: BTreeMap<Slot, VolumeEntry>,
    /// Volumes that somebody in this process has open.
    open_volumes: Vec<Slot>,
    counts: Counts,
    /// What waits to be erased. In a pool that is only looked at it waits for somebody else.
    scrub: ScrubQueue,
    /// What was found at open. For reports; a pool open for writing has put it right.
    findings: Vec<Finding>,
}

/// The state, locked. Unlocking it publishes the levels.
struct StateGuard<'a> {
    /// None only while it waits.
    state: Option<MutexGuard<'a, State>>,
    levels: &'a Mutex<Levels>,
}

impl StateGuard<'_> {
    fn publish(&self) {
        if let Some(state) = &self.state {
            *locked(self.levels) = state.levels();
        }
    }

    /// Unlocks the state until something has changed.
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
    /// Before the state is unlocked, so that the last change is the one that counts.
    fn drop(&mut self) {
        self.publish();
    }
}

/// What is found out without looking at single chunks.
#[derive(Clone, Copy, Debug)]
struct Levels {
    counts: Counts,
    free: u32,
    /// Free as soon as they are erased: they wait for it, or it is under way.
    pending: u32,
    volumes: u32,
}

/// Chunks by state, except the free ones, which the buddy counts.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    metadata: u32,
    memory: u32,
    volume: u32,
    scrubbing: u32,
    retired: u32,
    /// Whose nobody can say. Only in a pool that is looked at: with such chunks none is changed.
    damaged: u32,
}

/// Bytes of a pool by state, and what is known about it. The states add up to the total.
#[derive(Clone, Debug, Serialize)]
pub struct PoolInfo {
    /// Identity of the pool.
    pub uuid: Uuid,
    /// Version of its format.
    pub format_version: u32,
    /// What a completed flush survives.
    pub durability: Durability,
    /// Are free chunks holes, whose blocks or pages go to whoever needs them first?
    pub thin: bool,
    /// The whole pool.
    pub total_bytes: u64,
    /// Kept for volumes, never lent as memory.
    pub strg_bytes: u64,
    /// The pool's own data.
    pub metadata_bytes: u64,
    /// Owned by volumes.
    pub volume_bytes: u64,
    /// Lent as memory.
    pub memory_bytes: u64,
    /// Waiting to be erased.
    pub scrubbing_bytes: u64,
    /// Nobody can say whose, because something of the pool is damaged. They stay as they are.
    pub damaged_bytes: u64,
    /// Taken out of use: bad media.
    pub retired_bytes: u64,
    /// Free.
    pub free_bytes: u64,
    /// How much may be lent as memory: what is free or waits to be erased, but for what STRG still
    /// has to keep for volumes.
    pub lendable_bytes: u64,
    /// Number of volumes.
    pub volumes: u32,
    /// Why the pool is read-only, if a write to it failed.
    pub latched: Option<String>,
}

impl PoolInfo {
    /// Free bytes that are kept for volumes and never lent as memory.
    pub fn free_storage_bytes(&self) -> u64 {
        self.strg_bytes.saturating_sub(self.volume_bytes).min(self.free_bytes)
    }

    /// Free bytes that may become storage or memory.
    pub fn free_migrate_bytes(&self) -> u64 {
        self.free_bytes - self.free_storage_bytes()
    }

    /// Bytes that are neither the pool's own data nor bad media.
    pub fn usable_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.metadata_bytes + self.retired_bytes)
    }

    /// Bytes available for volumes, including chunks that have to be erased first.
    pub fn available_bytes(&self) -> u64 {
        self.free_bytes + self.scrubbing_bytes
    }
}

/// In which pieces a pool's free bytes lie.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FreeSpace {
    /// The largest power-of-two extent that is free, up to 2 GiB.
    pub largest_free_extent_bytes: u64,
    /// The longest run of free chunks.
    pub longest_free_run_bytes: u64,
}

impl Pool {
    /// The pool's file, to map extents of it (MAP_SHARED, at [`Extent::offset_bytes`]).
    pub fn file(&self) -> &File {
        self.media.file()
    }

    /// Who has the pool open for writing, this process included, or somebody who reads it.
    pub fn holder(&self) -> Option<Holder> {
        lock::holder(self.file())
    }
}

impl<M: Media> Pool<M> {
    /// The path that the pool was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Identity of the pool.
    pub fn uuid(&self) -> Uuid {
        self.superblock.uuid
    }

    /// What a completed flush survives.
    pub fn durability(&self) -> Durability {
        self.media().durability()
    }

    /// Are free chunks holes? On tmpfs they always are.
    fn is_thin(&self) -> bool {
        self.superblock.is_thin || self.makes_holes()
    }

    /// Does erasing make holes? Not every file system can, whatever the pool was made for.
    fn makes_holes(&self) -> bool {
        self.media.as_file().map_or(self.superblock.is_thin, FileMedia::makes_holes)
    }

    /// Is the pool open for writing, and has no write to it failed?
    pub fn is_writable(&self) -> bool {
        self.check_writable().is_ok()
    }

    /// Bytes by state. Never waits for the media: a change that is under way is not seen before it
    /// is over.
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

    /// In which pieces the free bytes lie. Waits for changes that are under way.
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

    /// What was found on the media at open. A pool open for writing has put right what could be.
    pub fn findings_at_open(&self) -> Vec<Finding> {
        self.lock_state().findings.clone()
    }

    /// Of the chunks that are free, or will be when they are erased, those that STRG still has to
    /// keep: its size less what volumes have already. The others may be lent.
    fn reserved_chunks(&self, levels: Levels) -> u32 {
        let strg_chunks = (self.superblock.strg_bytes / CHUNK_BYTES) as u32;
        strg_chunks.saturating_sub(levels.counts.volume).min(levels.free + levels.pending)
    }

    #[inline]
    fn media(&self) -> &M {
        &self.media
    }

    /// The media as it will be once a committed transaction has been redone.
    fn view(&self) -> Redone<'_> {
        Redone::with(self.media(), &self.redo)
    }

    fn lock_state(&self) -> StateGuard<'_> {
        StateGuard { state: Some(locked(&self.state)), levels: &self.levels }
    }

    /// Locks the state to change it. Whether the pool may still be changed is known only then: who
    /// waits for the lock waits for somebody whose change may fail.
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

    /// Passes a result of the media on to who changes the pool; the first failure latches the pool
    /// read-only, because from then on nobody knows what is durable. So what has succeeded
    /// since does not count either: a failure elsewhere ends every change that is under way
    /// before its next step.
    fn latch<T>(&self, result: Result<T, MediaError>) -> Result<T, PoolError> {
        let value = self.latch_failure(result)?;
        self.check_not_latched()?;
        Ok(value)
    }

    /// The same for who only reads, which a latched pool allows.
    fn latch_failure<T>(&self, result: Result<T, MediaError>) -> Result<T, PoolError> {
        self.noted(result).map_err(PoolError::Media)
    }

    /// The same, of errors that stay what they are.
    // Always: a result is as large as its error, and would go through memory.
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

    /// Persists the table entries of runs.
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

const NO_PANIC: &str = "no code panics while it holds the pool's state";
const HELD: &str = "a guard that does not wait holds the state";

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
