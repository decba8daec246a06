//! Content that can be made durable, and a record of the first failure.

mod watched;

use thiserror::Error;

pub use self::watched::{FirstFailure, Watched};

#[derive(Debug, Error)]
pub enum PersistError {
    /// An earlier flush has failed. The content of the media is unknown until the pool is opened
    /// again.
    #[error(
        "pool is read-only because an earlier flush has failed; reboot the VM, which opens the pool again"
    )]
    ReadOnly,
    /// The guest may only read the volume, so its stores were discarded.
    #[error("volume is read-only")]
    ReadOnlyVolume,
    #[error("cannot make the backing durable: {0}")]
    Backing(Box<dyn std::error::Error + Send + Sync>),
}

/// Volume that the guest may only read.
///
/// virtio-pmem cannot report that a device is read-only (virtio 1.3, 5.19), so the driver assumes
/// that it can write. Flushes therefore fail, so that no write appears to be durable.
#[derive(Clone, Copy, Debug)]
pub struct ReadOnly;

impl Persist for ReadOnly {
    fn persist(&self) -> Result<(), PersistError> {
        Err(PersistError::ReadOnlyVolume)
    }
}

/// Content that can be made durable.
pub trait Persist: Send + Sync {
    /// Makes all earlier stores durable, as far as the pool's durability class guarantees it
    /// (`pmvol info`).
    fn persist(&self) -> Result<(), PersistError>;
}
