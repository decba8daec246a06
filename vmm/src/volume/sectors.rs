//! A volume's sectors, for who serves them to a guest that does not translate by itself.

use std::ops::Range;

use thiserror::Error;

/// Why sectors could not be read or written.
#[derive(Debug, Error)]
pub enum SectorError {
    /// Nothing can be written: the part of the volume, or all of its pool, has had an error.
    #[error("{0}")]
    ReadOnly(String),
    /// Anything else, in the words of the volume.
    #[error(transparent)]
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

/// Sectors that are old or new after a crash, never torn. All calls take any number of threads.
pub trait Sectors: Send + Sync {
    /// Bytes of one: 512 or 4096.
    fn sector_bytes(&self) -> u32;

    /// How many there are.
    fn sectors(&self) -> u64;

    /// Reads whole sectors.
    fn read(&self, first_sector: u64, into: &mut [u8]) -> Result<(), SectorError>;

    /// Writes whole sectors.
    fn write(&self, first_sector: u64, bytes: &[u8]) -> Result<(), SectorError>;

    /// Makes sectors read as zeros.
    fn discard(&self, sectors: Range<u64>) -> Result<(), SectorError>;

    /// How many parts of the volume take no writes: something about them is wrong.
    fn read_only_arenas(&self) -> usize;

    /// Returns true if the guest has replaced the volume's BTT. Its bytes are served as they are,
    /// and take no writes.
    fn is_btt_replaced(&self) -> bool {
        false
    }

    /// Makes everything written durable, as far as the pool's durability class goes.
    fn flush(&self) -> Result<(), SectorError>;
}
