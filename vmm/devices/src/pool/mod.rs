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

/// Open volume, which has no other users until it is dropped.
pub trait PoolVolume: Persist {
    fn size_bytes(&self) -> u64;

    /// Extents of the volume in the pool's file ([`PmPool`]), in logical order and without gaps.
    fn extents(&self) -> Vec<Range<u64>>;

    /// Completes, durably, a recovery that an earlier user of the BTT may have left. Call it before
    /// the guest gets access to the media.
    fn settle(&self) -> Result<(), EngineError>;

    /// Serves the volume to a guest without access to the media.
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

    /// Allocates `len` bytes, a power-of-two number of chunks, as memory. Uses as few extents as
    /// possible, largest first. Each is a power of two of chunks and aligned to its own length in
    /// the file. The extents read as zeros. On file systems that can run full, they have blocks, so
    /// that a store cannot fail for lack of space.
    fn alloc_memory(&self, len: u64) -> Result<Vec<Range<u64>>, PoolError>;

    /// Takes memory back and queues it for erasure. The erasure is invisible to later users.
    /// Extents may be any whole chunks of a result of [`PmPool::alloc_memory`], and must be
    /// unmapped everywhere. On an error, no memory is taken back, and the caller may try again. A
    /// [`LocalPool`] refuses this after a failed write, and erases the memory when it is opened
    /// again.
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

    /// Grows a volume that is not open.
    fn grow_volume(&self, name: &str, size_bytes: u64) -> Result<(), PoolError>;

    /// Deletes a volume that is not open.
    fn delete_volume(&self, name: &str) -> Result<(), PoolError>;

    fn open_volume(&self, name: &str) -> Result<Box<dyn PoolVolume>, PoolError>;

    /// Limits the media's bandwidth for background erasing, in bytes per second. `None`: no limit.
    /// Holes, on tmpfs and in thin pools, are never limited.
    fn set_scrub_bandwidth(&self, bytes_per_s: Option<NonZeroU64>);

    /// Bytes by state.
    fn info(&self) -> PoolInfo;

    /// Bytes that may still be lent as memory: 0 if a write has failed, even if some are free.
    fn offered_bytes(&self) -> u64;

    /// Bytes erased since the pool was opened.
    fn scrubbed_bytes(&self) -> u64;

    /// Returns true after a failed write, which makes the pool read-only. Does not block on
    /// operations in progress.
    fn has_failed(&self) -> bool;

    /// Durability of a completed flush.
    fn durability(&self) -> Durability;
}
