//! The PM pool behind a trait: in this process now; a host daemon that passes file descriptors can come.

#[cfg(test)]
pub(crate) mod fake;

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use thiserror::Error;

/// Bytes in a chunk, the pool's unit.
pub const CHUNK_BYTES: u64 = 2 << 20;

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
    /// Nothing that may be memory is free.
    #[error("No chunk of the pool is free to be memory")]
    Full,
    /// There is no such volume.
    #[error("There is no volume {name:?} in the pool")]
    NoVolume {
        /// The name.
        name: String,
    },
    /// Anything else, in the words of the pool's implementation.
    #[error("{0}")]
    Failed(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// What a "durable" answer of the pool is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Survives the process, not the host: tmpfs, anonymous memory.
    Process,
    /// Survives the host's power loss once written back: msync on a disk file system.
    PageCache,
    /// Survives the host's power loss once flushed from the CPU's caches: DAX.
    Flush,
}

/// The pool's bytes by state; they add up to its size less its metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolInfo {
    /// All chunks.
    pub total_bytes: u64,
    /// Free, and never lent as memory.
    pub free_storage_bytes: u64,
    /// Free to be storage or memory.
    pub free_migrate_bytes: u64,
    /// Plugged into the guest.
    pub memory_bytes: u64,
    /// Owned by volumes.
    pub volume_bytes: u64,
}

/// What the VMM needs of a pool.
///
/// Extents are ranges of one file, which the VMM maps itself: an implementation that asks a daemon passes that
/// file's descriptor on.
pub trait PmPool: Debug + Send + Sync {
    /// What extents are ranges of.
    fn file(&self) -> BorrowedFd<'_>;

    /// Takes the largest free run of chunks of up to `max_len` bytes (a power-of-two number of chunks, aligned
    /// to its own length in the file), zeroed, with blocks of the file system behind it: a store to it cannot
    /// fail for want of room.
    fn alloc_memory(&self, max_len: u64) -> Result<Extent, PoolError>;

    /// Scrubs memory and frees it. It may be a part of what one call of [`PmPool::alloc_memory`] gave. The
    /// caller has unmapped it everywhere. On an error the chunks stay the caller's.
    fn free_memory(&self, extent: Extent) -> Result<(), PoolError>;

    /// The chunks of a volume, in their logical order.
    fn volume_extents(&self, name: &str) -> Result<Vec<Extent>, PoolError>;

    /// Makes stores to a range of the pool's file durable, to the degree of [`PmPool::durability`].
    fn persist(&self, range: Extent) -> Result<(), PoolError>;

    /// Bytes by state.
    fn info(&self) -> PoolInfo;

    /// What durable means here.
    fn durability(&self) -> Durability;
}
