//! Content that can be made durable, and the record of a failure.

mod watched;

use thiserror::Error;

pub use self::watched::{FirstFailure, Watched};

/// Why a volume's content is not durable.
#[derive(Debug, Error)]
pub enum PersistError {
    /// An earlier persist has failed: nobody knows any more what is on the media until the pool is
    /// reopened.
    #[error("The pool is read-only since a persist failed")]
    ReadOnly,
    /// The guest may only read the volume: what it stored went nowhere.
    #[error("The volume is read-only")]
    ReadOnlyVolume,
    #[error("The backing cannot be made durable: {0}")]
    Backing(Box<dyn std::error::Error + Send + Sync>),
}

/// A volume that the guest may only read.
///
/// virtio-pmem has no way to say so (virtio 1.3, 5.19): the driver believes it can write. So its
/// flushes fail, and with them every write that it takes for durable.
#[derive(Clone, Copy, Debug)]
pub struct ReadOnly;

impl Persist for ReadOnly {
    fn persist(&self) -> Result<(), PersistError> {
        Err(PersistError::ReadOnlyVolume)
    }
}

/// Something whose content can be made durable.
pub trait Persist: Send + Sync {
    /// When this returns, everything that was stored before the call survives to the degree that
    /// the pool's durability class says (`pmvol info`).
    fn persist(&self) -> Result<(), PersistError>;
}
