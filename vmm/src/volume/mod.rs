//! Volumes of PM pools as a VM sees them: which interface is safe, how their chunks are mapped, and what makes
//! them durable.

pub mod interface;

use thiserror::Error;

/// Why a volume's content is not durable.
#[derive(Debug, Error)]
pub enum PersistError {
    /// An earlier persist has failed: nobody knows any more what is on the media until the pool is reopened.
    #[error("The pool is read-only since a persist failed")]
    ReadOnly,
    /// The backing reports an error.
    #[error("The backing cannot be made durable: {0}")]
    Backing(Box<dyn std::error::Error + Send + Sync>),
}

/// Something whose content can be made durable.
pub trait Persist: Send + Sync {
    /// When this returns, everything that was stored before the call survives to the degree that the pool's
    /// durability class says (`pmvol info`).
    fn persist(&self) -> Result<(), PersistError>;
}
