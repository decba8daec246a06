//! The PM pool behind a trait: in this process now; a host daemon that passes file descriptors can
//! come.

pub mod block_device;
pub mod btt_loss;
#[cfg(test)]
pub(crate) mod fake;
mod local;
mod lost_btt;
mod metrics;

use std::fmt::Debug;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use foreshore_types::size::Size;

pub use local::LocalPool;
pub use metrics::PoolMetrics;
pub use pmem_volume::Durability;
use thiserror::Error;

use crate::disk::BlockDevice;
use crate::persist::Persist;
use crate::pool::btt_loss::BttLoss;
use pmem_volume::VolumeFormat;

/// Bytes in a chunk, the pool's unit.
pub const CHUNK_BYTES: u64 = pmem_volume::CHUNK_BYTES;

/// Consecutive chunks, as a range of the pool's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// Offset in the file, a multiple of [`CHUNK_BYTES`].
    pub offset: u64,
    /// Length, a multiple of [`CHUNK_BYTES`].
    pub len: u64,
}

/// Why a pool does not do what it is asked.
#[derive(Debug, Error)]
pub enum PoolError {
    /// There is less that may be memory than what was asked for.
    #[error("The pool has {} left for memory, {} are wanted", Size(*available_bytes), Size(*wanted_bytes))]
    Full {
        /// What was asked for.
        wanted_bytes: u64,
        available_bytes: u64,
    },
    /// The host has no thread left.
    #[error("The thread that erases what is given back cannot be started")]
    Scrubber(#[source] io::Error),
    /// Anything else, in the words of the pool's implementation.
    #[error(transparent)]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

/// The pool's bytes by state, which add up to its size, and what follows from them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolInfo {
    pub total_bytes: u64,
    /// Kept for volumes: never lent as memory, whether volumes have it already or not.
    pub strg_bytes: u64,
    /// The pool's own data.
    pub metadata_bytes: u64,
    /// Bad media, out of use.
    pub retired_bytes: u64,
    /// Free, and kept for volumes: never lent as memory.
    pub free_storage_bytes: u64,
    /// Free to be storage or memory, and clean.
    pub free_migrate_bytes: u64,
    pub memory_bytes: u64,
    /// Waiting to be erased. It is available: whoever needs it gets it erased.
    pub scrubbing_bytes: u64,
    pub volume_bytes: u64,
    /// How many volumes there are.
    pub volumes: u32,
    /// Beside the states: what would be lent if it were asked for, at once or after what waits has
    /// been erased.
    pub lendable_bytes: u64,
    /// Erased since the pool was opened.
    pub scrubbed_bytes: u64,
    /// A write has failed: nothing of the pool changes before it is opened again.
    pub failed: bool,
}

impl PoolInfo {
    /// Bytes that are neither the pool's own data nor bad media.
    pub fn usable_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.metadata_bytes + self.retired_bytes)
    }

    /// Bytes available for volumes, including chunks that have to be erased first.
    pub fn available_bytes(&self) -> u64 {
        self.free_storage_bytes + self.free_migrate_bytes + self.scrubbing_bytes
    }
}

/// Volume of a pool, open or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredVolume {
    pub name: String,
    pub format: VolumeFormat,
    pub size_bytes: u64,
}

/// A volume that is open; nobody else has it until it is dropped.
pub trait PoolVolume: Persist {
    fn size_bytes(&self) -> u64;

    /// Where it lies in the pool's file, in its logical order and without gaps.
    fn extents(&self) -> Vec<Extent>;

    /// Does durably what an earlier user of its BTT may have left to recovery. To be called before
    /// a guest is given the media itself.
    fn settle(&self) -> Result<(), PoolError>;

    /// Serves it to a guest that is not given the media itself.
    fn into_disk(self: Box<Self>) -> Result<VolumeDisk, PoolError>;
}

/// A volume as the content of a disk, which keeps the volume open.
pub struct VolumeDisk {
    /// Sectors of its BTT, or the bytes of the volume.
    pub device: Arc<dyn BlockDevice>,
    /// Cause for serving the bytes, without writes. `None`: the BTT is served.
    pub btt_loss: Option<BttLoss>,
}

/// What the VMM needs of a pool.
///
/// Extents are ranges of one file, which the VMM maps itself: an implementation that asks a daemon
/// passes that file's descriptor on.
pub trait PmPool: Debug + Send + Sync {
    /// What extents are ranges of.
    fn file(&self) -> BorrowedFd<'_>;

    /// Takes `len` bytes, a power-of-two number of chunks, to be memory: in the fewest extents that
    /// the pool has, largest first, each a power of two of chunks and aligned to its own length
    /// in the file. They read as zeros, and have blocks of the file system behind them where
    /// that can run full: a store cannot fail for want of room.
    fn alloc_memory(&self, len: u64) -> Result<Vec<Extent>, PoolError>;

    /// Takes memory back, which waits to be erased from then on, and is free after that; who needs
    /// it earlier does not see the difference. Extents may be any whole chunks of what
    /// [`PmPool::alloc_memory`] gave. The caller has unmapped them everywhere. On an error
    /// nothing is taken back. The caller may try again, in vain where one failed write ends all
    /// (as in a [`LocalPool`]): what is not taken back is erased when the pool is opened again.
    fn free_memory(&self, extents: &[Extent]) -> Result<(), PoolError>;

    /// All volumes of the pool, by name.
    fn volumes(&self) -> Vec<StoredVolume>;

    /// Creates a volume and formats it.
    fn create_volume(&self, volume: &StoredVolume) -> Result<(), PoolError>;

    /// Gives a volume that is not open a larger size.
    fn grow_volume(&self, name: &str, size_bytes: u64) -> Result<(), PoolError>;

    /// Deletes a volume that is not open.
    fn delete_volume(&self, name: &str) -> Result<(), PoolError>;

    fn open_volume(&self, name: &str) -> Result<Box<dyn PoolVolume>, PoolError>;

    /// Bounds, in bytes per second, what erasing in the background takes of the media's bandwidth.
    /// `None`: no bound. Holes, on tmpfs and in thin pools, are never bounded.
    fn set_scrub_bandwidth(&self, bytes_per_s: Option<NonZeroU64>);

    /// Bytes by state.
    fn info(&self) -> PoolInfo;

    /// Whether a write has failed, after which it takes no more. Asks nobody who may be at work.
    fn has_failed(&self) -> bool;

    /// Why it has: what failed first.
    fn failure(&self) -> Option<String>;

    /// Its identity, whatever its path is: a UUID.
    fn uuid(&self) -> String;

    /// What a completed flush survives.
    fn durability(&self) -> Durability;
}
