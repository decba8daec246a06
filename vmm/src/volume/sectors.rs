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

/// Cause for showing the bytes of a volume, read-only, instead of the sectors of its BTT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BttLoss {
    /// Content of the guest in place of the BTT.
    Replaced {
        /// Difference from a BTT.
        reason: String,
    },
    /// Damage of an arena behind the first one, whose end is unknown.
    Damaged {
        /// Damaged arena, and the kind of the damage.
        reason: String,
    },
}

impl BttLoss {
    /// Reason why the BTT cannot be served.
    pub fn reason(&self) -> &str {
        match self {
            Self::Replaced { reason } | Self::Damaged { reason } => reason,
        }
    }
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

    /// Cause for serving the bytes of the volume as they are, without writes. `None` if the BTT is
    /// served.
    fn btt_loss(&self) -> Option<&BttLoss> {
        None
    }

    /// Makes everything written durable, as far as the pool's durability class goes.
    fn flush(&self) -> Result<(), SectorError>;
}
