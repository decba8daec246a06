//! Block Translation Table (UEFI 2.10, chapter 6): sectors that do not tear, on memory that does.
//!
//! A volume is laid out as Linux's nd_btt driver expects a namespace without labels: version 1.1, the first 4 KiB
//! unused, then one or more arenas. In an arena, each sector that the guest sees (pre-map LBA) is mapped to a block
//! (post-map LBA). A write goes to a block that nobody uses; the log (flog) records the exchange; then the map entry
//! changes, by one aligned store. What a crash leaves half done, the log says how to finish.
//!
//! [`Layout`] writes an empty table, [`check()`] proves from the media alone that a table is consistent, [`Reader`]
//! reads sectors. All work over ranged reads, so that a volume's chunks may lie anywhere.

mod arena;
mod check;
mod extend;
mod flog;
mod layout;
mod mend;
mod reader;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use arena::{ArenaInfo, InfoError, InfoSource};
pub(crate) use check::check_with;
pub use check::{ArenaReport, Finding, Report, check};
pub use extend::{ExtendError, Extension, extend};
pub use layout::{
    ARENA_MAX_BYTES, ARENA_MIN_BYTES, GeometryError, InfoBytes, Layout, MIN_VOLUME_BYTES, SECTOR_BYTES,
    START_BYTES,
};
pub use mend::{DamagedInfo, damaged_info, is_mendable};
pub use reader::{Reader, Sector};

use crate::media::{MediaError, MemoryMedia};

/// Something that can be read in ranges. Offsets count from its start, and ranges outside it are the caller's bug.
pub trait ReadAt {
    /// How long it is.
    fn len_bytes(&self) -> u64;

    /// Copies bytes out.
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError>;
}

/// Something that can be written in ranges, too.
pub trait WriteAt: ReadAt {
    /// Stores bytes. Visible at return, durable after [`WriteAt::persist`].
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError>;

    /// At return everything stored to the ranges before is durable.
    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError>;
}

impl ReadAt for MemoryMedia {
    fn len_bytes(&self) -> u64 {
        crate::media::Media::len_bytes(self)
    }

    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        crate::media::Media::read(self, offset_bytes, into)
    }
}

impl WriteAt for MemoryMedia {
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        crate::media::Media::store(self, offset_bytes, bytes)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        crate::media::Media::persist(self, ranges)
    }
}
