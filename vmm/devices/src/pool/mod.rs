//! The PM pool behind a trait, so that tests of its users need no pool on the media.

mod block_device;
pub mod btt_loss;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod local;
mod lost_btt;
mod metrics;

use std::fmt::Debug;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use local::LocalPool;
pub use metrics::PoolMetrics;
use pmem_volume::btt::EngineError;
pub use pmem_volume::{CHUNK_BYTES, Durability, PoolError, PoolInfo, VolumeFormat, VolumeInfo};

use crate::disk::BlockDevice;
use crate::persist::Persist;
use crate::pool::btt_loss::BttLoss;

/// A volume that is open; nobody else has it until it is dropped.
pub trait PoolVolume: Persist {
    fn size_bytes(&self) -> u64;

    /// Extents of the volume in the pool's file ([`PmPool`]), in logical order and without gaps.
    fn extents(&self) -> Vec<Range<u64>>;

    /// Does durably what an earlier user of its BTT may have left to recovery. To be called before
    /// a guest is given the media itself.
    fn settle(&self) -> Result<(), EngineError>;

    /// Serves it to a guest that is not given the media itself.
    fn into_disk(self: Box<Self>) -> Result<VolumeDisk, EngineError>;
}

/// A volume as the content of a disk, which keeps the volume open.
pub struct VolumeDisk {
    /// Sectors of its BTT, or the bytes of the volume.
    pub device: Arc<dyn BlockDevice>,
    /// Cause for serving the bytes, without writes. `None`: the BTT is served.
    pub btt_loss: Option<BttLoss>,
}

/// Interface of a pool to the VMM.
///
/// An extent is a byte range of one file, which the VMM maps itself. Both of its ends are multiples
/// of [`CHUNK_BYTES`].
pub trait PmPool: Debug + Send + Sync {
    /// File that contains the extents.
    fn file(&self) -> BorrowedFd<'_>;

    /// Takes `len` bytes, a power-of-two number of chunks, to be memory: in the fewest extents that
    /// the pool has, largest first, each a power of two of chunks and aligned to its own length
    /// in the file. They read as zeros, and have blocks of the file system behind them where
    /// that can run full: a store cannot fail for want of room.
    fn alloc_memory(&self, len: u64) -> Result<Vec<Range<u64>>, PoolError>;

    /// Takes memory back, which waits to be erased from then on, and is free after that; who needs
    /// it earlier does not see the difference. Extents may be any whole chunks of what
    /// [`PmPool::alloc_memory`] gave. The caller has unmapped them everywhere. On an error
    /// nothing is taken back. The caller may try again, in vain where one failed write ends all
    /// (as in a [`LocalPool`]): what is not taken back is erased when the pool is opened again.
    fn free_memory(&self, extents: &[Range<u64>]) -> Result<(), PoolError>;

    /// All volumes of the pool, by name.
    fn volumes(&self) -> Vec<VolumeInfo>;

    /// Creates a volume and formats it.
    fn create_volume(
        &self,
        name: &str,
        size_bytes: u64,
        format: VolumeFormat,
    ) -> Result<(), PoolError>;

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

    /// Bytes erased since the pool was opened.
    fn scrubbed_bytes(&self) -> u64;

    /// Whether a write has failed, after which it takes no more. Asks nobody who may be at work.
    fn has_failed(&self) -> bool;

    /// What a completed flush survives.
    fn durability(&self) -> Durability;
}
