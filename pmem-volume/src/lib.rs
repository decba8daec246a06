//! Pools of persistent memory and the volumes in them.
//!
//! A [`Pool`] is a file (on tmpfs, a disk file system or a DAX file system), a block device or a
//! devdax device, cut into chunks of 2 MiB. A chunk is lent as memory, belongs to a volume, or is
//! free. Everything the pool knows is on the media, in the format that `docs/reference/format.md`
//! describes; [`pool::layout`] is the same thing as types.
//!
//! Nothing but [`media`] touches persistent memory. Nothing here knows of KVM.

#![deny(missing_docs)]

pub mod btt;
pub mod btt_file;
pub mod file_mode;
pub mod media;
pub mod pool;
pub mod progress;
#[cfg(test)]
mod test_image;
pub mod unnamed_file;

pub use media::Durability;
pub use pool::{
    ChunkId, CreateOptions, Extent, OpenMode, Pool, PoolError, PoolInfo, Shrink, Volume,
    VolumeFormat, VolumeInfo, VolumeSize,
};

/// Bytes in a chunk: the unit in which a pool is lent and owned.
pub const CHUNK_BYTES: u64 = 2 << 20;
