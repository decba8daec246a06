//! Block Translation Table (UEFI 2.10, chapter 6): sectors that do not tear, on memory that does.
//!
//! A volume is laid out as Linux's nd_btt driver expects a namespace without labels: version 1.1, the first 4 KiB
//! unused, then one or more arenas. In an arena, each sector that the guest sees (pre-map LBA) is mapped to a block
//! (post-map LBA). A write goes to a block that nobody uses; the log (flog) records the exchange; then the map entry
//! changes, by one aligned store. What a crash leaves half done, the log says how to finish.
//!
//! [`Layout`] writes an empty table, [`check()`] proves from the media alone that a table is consistent, [`Reader`]
//! reads sectors of a volume that nobody writes, and [`Engine`] serves one. All work over ranges of the volume, so that
//! its chunks may lie anywhere.

mod arena;
mod check;
mod content;
mod engine;
mod extend;
mod flog;
mod layout;
mod plain;
mod reader;
mod repair;
#[cfg(test)]
mod tests;
mod torn;
mod walk;

use std::ops::Range;

pub use arena::{ArenaInfo, InfoError, InfoSource};
pub use check::{ArenaReport, Finding, Report, check, check_with};
pub use content::holds_data;
pub use engine::{ArenaStatus, Engine, EngineError, Fault};
pub use extend::{ExtendError, Extension, extend};
pub use layout::{
    ARENA_MAX_BYTES, ARENA_MIN_BYTES, GeometryError, InfoBytes, Layout, MIN_VOLUME_BYTES, SECTOR_BYTES,
    START_BYTES,
};
pub use plain::{PlainError, PlainFile};
pub use reader::{Lost, Reader, Sector, Trouble};
pub use repair::{GiveUp, Mending, Repair, plan_repair};
pub use walk::{Missing, Place, arenas, is_replaced};

use crate::media::{MediaError, MemoryMedia};

pub use crate::media::Pending;

/// Something that can be read in ranges. Offsets count from its start, and ranges outside it are the caller's bug.
pub trait ReadAt {
    /// How long it is.
    fn len_bytes(&self) -> u64;

    /// Copies bytes out.
    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError>;

    /// Finds the first part of a range that may hold bytes other than zeros. `None`: all of the
    /// range reads as zeros. The file system reports holes of a file, so they are not read.
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        Ok(Some(range).filter(|range| !range.is_empty()))
    }
}

/// Something that can be written in ranges, too.
pub trait WriteAt: ReadAt {
    /// Stores bytes. Visible at return, durable after [`WriteAt::persist`].
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError>;

    /// At return everything stored to the ranges before is durable.
    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError>;
}

/// Something that the [`Engine`] can serve a BTT from, by any number of threads at once.
pub trait Words: WriteAt + Send + Sync {
    /// Loads a little-endian word; `offset_bytes` is a multiple of 8. Never torn.
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError>;

    /// Stores a little-endian word; `offset_bytes` is a multiple of 8. Never torn. Visible at return, not durable.
    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError>;

    /// [`ReadAt::read_at`] of what was written before: the quickest way, which may take memory for what never was.
    fn load(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.read_at(offset_bytes, into)
    }

    /// This word will be asked for soon. Says nothing of what it is then.
    fn expect_word(&self, _offset_bytes: u64) {}

    /// Stores bytes that nobody looks at before [`Words::end_persist`] has returned, which makes them durable: until then
    /// they need not even be visible to others.
    fn store_bulk(&self, offset_bytes: u64, bytes: &[u8], pending: &mut Pending) -> Result<(), MediaError> {
        self.write_at(offset_bytes, bytes)?;
        self.begin_persist(offset_bytes..offset_bytes + bytes.len() as u64, pending)
    }

    /// Begins to make durable what was stored in a range before the call. It is once [`Words::end_persist`] has returned.
    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        pending.add(range);
        Ok(())
    }

    /// [`WriteAt::persist`] of everything that this thread has begun to persist.
    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        self.persist(pending.ranges())
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn len_bytes(&self) -> u64 {
        (**self).len_bytes()
    }

    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        (**self).read_at(offset_bytes, into)
    }
}

impl<T: WriteAt + ?Sized> WriteAt for &T {
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        (**self).write_at(offset_bytes, bytes)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        (**self).persist(ranges)
    }
}

impl<T: Words + ?Sized> Words for &T {
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        (**self).load_word(offset_bytes)
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        (**self).store_word(offset_bytes, word)
    }

    fn load(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        (**self).load(offset_bytes, into)
    }

    fn expect_word(&self, offset_bytes: u64) {
        (**self).expect_word(offset_bytes);
    }

    fn store_bulk(&self, offset_bytes: u64, bytes: &[u8], pending: &mut Pending) -> Result<(), MediaError> {
        (**self).store_bulk(offset_bytes, bytes, pending)
    }

    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        (**self).begin_persist(range, pending)
    }

    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        (**self).end_persist(pending)
    }
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

impl Words for MemoryMedia {
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        crate::media::Media::load_word(self, offset_bytes)
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        crate::media::Media::store_word(self, offset_bytes, word)
    }
}
