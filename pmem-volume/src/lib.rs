//! Pools of persistent memory and their volumes.
//!
//! A [`Pool`] is a file (on tmpfs, a disk file system or a DAX file system), a block device or a
//! devdax device, divided into chunks of 2 MiB. A chunk is lent as memory, belongs to a volume, or
//! is free. All state is on the media, in the format that `docs/reference/format.md` describes.
//! [`pool::layout`] defines the types of this format.
//!
//! Only [`media`] accesses persistent memory. This crate does not depend on KVM.

#![deny(missing_docs)]

pub mod btt;
pub mod btt_file;
pub mod file_mode;
pub mod media;
pub mod pool;
pub mod progress;
mod sparse_table;
#[cfg(test)]
mod test_image;
pub mod unnamed_file;

pub use media::Durability;
pub use pool::{
    ChunkId, CreateOptions, Extent, OpenMode, Pool, PoolError, PoolInfo, Shrink, Volume,
    VolumeFormat, VolumeInfo, VolumeOptions, VolumeSize,
};

/// Size of a chunk in bytes. A chunk is the unit in which a pool lends memory and allocates
/// volumes.
pub const CHUNK_BYTES: u64 = 2 << 20;
