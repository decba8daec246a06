//! Interface of PM pools. The interface is a trait, so that tests of the pool's users need no real
//! pool.

mod block_device;
pub mod btt_loss;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
mod local;
mod lost_btt;
mod metrics;
mod sharded_lock;
mod usage;

use std::fmt::Debug;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use local::LocalPool;
pub use metrics::PoolMetrics;
use pmem_volume::btt::{BttError, GuestAccess};
use pmem_volume::media::MediaError;
pub use pmem_volume::pool::VolumeExtent;
pub use pmem_volume::{
    CHUNK_BYTES, Durability, PoolError, PoolInfo, VolumeFormat, VolumeInfo, VolumeOptions,
    VolumeSize,
};
pub use usage::UsageMonitor;

use crate::disk::BlockDevice;
use crate::persist::Persist;
use crate::pool::btt_loss::BttLoss;

/// Open volume. It has no other users until it is dropped.
pub trait PoolVolume: Persist {
    fn size_bytes(&self) -> u64;

    /// Present extents of the volume in the pool's file ([`PmPool`]), in logical order. Only a thin
    /// volume may have gaps, which are holes.
    fn extents(&self) -> Vec<VolumeExtent>;

    /// Bytes of the pool that the volume occupies.
    fn allocated_bytes(&self) -> u64;

    /// Guaranteed bytes of the volume.
    fn reserve_bytes(&self) -> u64;

    /// Returns true if chunks of the volume can become holes.
    fn is_thin(&self) -> bool;

    /// Allocates the chunk of a thin volume at an index if it is a hole, durably. A new chunk reads
    /// as zeros. Returns the offset in the pool's file. Takes no lock if the chunk is present.
    fn provision(&self, index: u32) -> Result<u64, MediaError>;

    /// Makes the chunk at an index a hole. It must not be mapped.
    fn release(&self, index: u32) -> Result<(), MediaError>;

    /// Offset in the pool's file of the chunk at an index. `None` for a hole.
    fn chunk_offset(&self, index: u32) -> Option<u64>;

    /// UUID of the BTT. `None` if the volume has no intact BTT.
    fn btt_uuid(&self) -> Option<String>;

    /// Releases chunks that contain nothing except `free` bytes of the disk of a guest that uses
    /// the BTT itself ([`release_reported`](pmem_volume::btt::release_reported)).
    fn release_reported(
        &self,
        free: &[Range<u64>],
        access: &mut dyn GuestAccess,
    ) -> Result<u64, MediaError>;

    /// Completes the recovery of a BTT that an earlier user may have left unfinished, and makes the
    /// result durable. Call this before the guest can access the media.
    fn quiesce(&self) -> Result<(), BttError>;

    /// Converts the volume to a disk, for a guest without direct access to the media.
    fn into_disk(self: Box<Self>) -> Result<VolumeDisk, BttError>;
}

/// Disk whose content is a volume. Its device keeps the volume open.
pub struct VolumeDisk {
    /// Device with the sectors of the BTT, or with the raw bytes of the volume.
    pub device: Arc<dyn BlockDevice>,
    /// Reason for serving the raw bytes, read-only. `None` if the BTT is served.
    pub btt_loss: Option<BttLoss>,
}

/// Interface of a pool to the VMM.
///
/// An extent is a byte range of the pool's file, which the VMM maps. Its start and end are
/// multiples of [`CHUNK_BYTES`].
pub trait PmPool: Debug + Send + Sync {
    /// File that contains the extents.
    fn file(&self) -> BorrowedFd<'_>;

    /// Allocates `len` bytes, a power-of-two number of chunks, as memory. Returns as few extents as
    /// possible, largest first. The length of each extent is a power-of-two number of chunks, and
    /// the extent is aligned to its length in the file. The extents read as zeros. On file systems
    /// that can run full, their blocks are allocated, so that a store cannot fail for lack of
    /// space.
    fn alloc_memory(&self, len: u64) -> Result<Vec<Range<u64>>, PoolError>;

    /// Frees memory and queues it for erasure, which completes before the memory is reused. Extents
    /// may be any whole chunks that [`PmPool::alloc_memory`] has returned, and must not be mapped
    /// anywhere. On an error, no memory is freed, and the caller may retry. A [`LocalPool`] refuses
    /// this after a failed write, and erases the memory when it is opened again.
    fn free_memory(&self, extents: &[Range<u64>]) -> Result<(), PoolError>;

    /// Grows the pool to a size, or to that of its device. Data that the device has after the pool
    /// is erased only with `force`.
    fn grow(&self, size_bytes: Option<u64>, force: bool) -> Result<(), PoolError>;

    /// Sets the number of bytes promised to thin volumes that memory may borrow. The borrower must
    /// be able to return them at any time.
    fn set_borrowable_bytes(&self, borrowable_bytes: u64);

    /// Announces a thread that calls [`PmPool::next_recall`]. From now on, a write to a thin volume
    /// that finds no free chunk waits for this thread.
    fn start_recalls(&self);

    /// Waits until volumes need lent memory back, and returns its size. The caller returns that
    /// much, or a part, by [`PmPool::free_memory`]. Returns `None` after [`PmPool::end_recalls`].
    fn next_recall(&self) -> Option<u64>;

    /// Reports that no memory can be returned. Writes that wait for it fail.
    fn refuse_recall(&self);

    /// Ends [`PmPool::next_recall`].
    fn end_recalls(&self);

    /// All volumes in the pool, sorted by name.
    fn volumes(&self) -> Vec<VolumeInfo>;

    /// Creates a volume and formats it.
    fn create_volume(&self, name: &str, options: VolumeOptions) -> Result<(), PoolError>;

    /// Grows a volume that is not open.
    fn grow_volume(&self, name: &str, size_bytes: u64) -> Result<(), PoolError>;

    /// Deletes a volume that is not open.
    fn delete_volume(&self, name: &str) -> Result<(), PoolError>;

    fn open_volume(&self, name: &str) -> Result<Box<dyn PoolVolume>, PoolError>;

    /// Limits the media bandwidth for background erasure, in bytes per second. `None` means no
    /// limit. Punching holes, on tmpfs and in thin pools, is never limited.
    fn set_scrub_bandwidth(&self, bytes_per_s: Option<NonZeroU64>);

    /// Allows memory to borrow bytes that thin volumes were promised, as long as volumes can still
    /// allocate `min_free_bytes`. `None` lends none of them.
    fn lend_promised(&self, min_free_bytes: Option<u64>);

    /// Size of the pool, and its bytes in each state.
    fn info(&self) -> PoolInfo;

    /// Bytes that may still be lent as memory. 0 after a failed write, even if chunks are free.
    fn offered_bytes(&self) -> u64;

    /// Bytes erased since the pool was opened.
    fn scrubbed_bytes(&self) -> u64;

    /// Returns true after a failed write, which makes the pool read-only. Does not wait for
    /// operations in progress.
    fn has_failed(&self) -> bool;

    /// Durability of a completed flush.
    fn durability(&self) -> Durability;
}
