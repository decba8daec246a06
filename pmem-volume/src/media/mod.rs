//! Access to persistent memory.
//!
//! The contract is narrow so that a simulator can implement it:
//!
//! - A store is visible to loads immediately. It may become durable at any time, in any order with
//!   other stores. It is guaranteed to be durable after a [`Media::persist`] of its range. With
//!   [`Media::begin_persist`], it is durable after the following [`Media::end_persist`]. A crash
//!   may tear it at any 8-byte boundary.
//! - [`Media::store_word`] to an aligned address is never torn.
//! - The [`Durability`] of the media defines the events after which durable data is still present.
//!   All media give the same guarantees of order, so a single commit protocol works for all.

mod blocks;
mod content;
mod file;
mod flush;
mod guarded;
mod holes;
mod mapping;
mod media_kind;
mod memory;
mod page_cache;
mod shared_sync;
#[cfg(test)]
pub(crate) mod simulator;
#[cfg(test)]
pub(crate) mod thin;
mod watch;
mod zeroing;

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

use serde::Serialize;
use smallvec::SmallVec;
use thiserror::Error;

pub(crate) use blocks::{
    MissingBlocks, allocate_missing as allocate_missing_blocks, copy_on_write,
};
pub use content::{holds_bytes, is_zero};
pub use file::FileMedia;
pub(crate) use file::allocate;
#[cfg(test)]
pub(crate) use flush::recorded_ops;
pub use guarded::handle_sigbus;
pub(crate) use mapping::MAX_MAPPED_BYTES;
pub use media_kind::len_bytes;
pub(crate) use media_kind::{MediaKind, MediaKindError, sysfs_of};
pub use memory::MemoryMedia;
pub(crate) use page_cache::{drop_clean_pages, forget_clean_pages};
pub use watch::{OnPageLost, TooManyRanges, Watch};

/// Events after which persisted data is still present.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// Persistent memory mapped with MAP_SYNC. A store is durable after a cache-line write-back and
    /// a fence.
    DaxSync,
    /// File or block device with a page cache. A store survives the death of the process
    /// immediately, but survives a power loss only after an msync() of its range.
    PageCache,
    /// tmpfs, RAM disk, or devdax device of volatile memory. A store survives only the death of the
    /// process.
    Volatile,
}

impl Durability {
    /// Name in reports, JSON and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Durability::DaxSync => "dax-sync",
            Durability::PageCache => "page-cache",
            Durability::Volatile => "volatile",
        }
    }

    /// Description in one sentence.
    pub fn meaning(self) -> &'static str {
        match self {
            Durability::DaxSync => {
                "persistent memory, mapped synchronously: a fence makes stores durable"
            }
            Durability::PageCache => "page cache of a disk: flushed data survives a loss of power",
            Durability::Volatile => {
                "volatile memory: survives a crash of the process, but not of the host"
            }
        }
    }
}

/// Stores of a thread that are not persisted yet. Media does not record the ranges if it does not
/// need them, because stores become durable line by line or by themselves. The value belongs to one
/// thread, because a fence orders only stores of its own thread.
#[derive(Debug, Default)]
#[must_use = "stores are durable only after `end_persist`"]
pub struct Pending {
    ranges: SmallVec<[Range<u64>; 4]>,
    _not_send: PhantomData<*mut ()>,
    /// Some stores were non-temporal and are not ordered before later ones yet.
    has_non_temporal_stores: bool,
}

impl Pending {
    /// Adds a range to persist.
    pub fn add(&mut self, range: Range<u64>) {
        self.ranges.push(range);
    }

    /// Returns the added ranges.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }
}

/// Failure of a media operation. After any failure except [`MediaError::Full`], the durability of
/// all earlier stores is unknown. A separate error type, because other crates implement [`Media`].
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum MediaError {
    #[error("{operation} of {length_bytes:#x} bytes at offset {offset_bytes:#x} failed")]
    Io {
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
        #[source]
        source: io::Error,
    },
    #[error("the media is open for reading only")]
    ReadOnly,
    #[error("the pool is read-only because of an earlier failure ({cause})")]
    Latched { cause: String },
    /// The pool has too few free chunks for a store into a hole, so nothing was stored. Stores to
    /// allocated chunks still succeed.
    #[error(
        "the pool has no space for {needed_bytes} bytes of a thin volume; {available_bytes} bytes are available"
    )]
    Full { needed_bytes: u64, available_bytes: u64 },
}

/// Persistent memory or a substitute. It may be a pool, or a part of one such as a volume. Offsets
/// are relative to its start.
///
/// Ranges must be inside the media. An offset outside of it is a bug in the caller and panics.
/// Methods may be called concurrently, but callers must avoid concurrent stores to the same bytes.
/// Read-only media implements the reads and refuses other calls.
pub trait Media: Send + Sync {
    /// Length of the media.
    fn len_bytes(&self) -> u64;

    /// Events after which persisted data is still present.
    fn durability(&self) -> Durability;

    /// Returns the media as a file if it is one. Only files have holes, blocks and a page cache.
    fn as_file(&self) -> Option<&FileMedia> {
        None
    }

    /// Copies bytes out of the media. Not atomic with respect to concurrent stores.
    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError>;

    /// Returns the first part of a range that may contain nonzero bytes. All bytes before this part
    /// are zeros. If the result is `None`, the whole range is zeros. The part is never empty. If
    /// holes are unknown, it is the whole range.
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        Ok(Some(range).filter(|range| !range.is_empty()))
    }

    /// Returns true if a range has no space. Space that reads as zeros is not a hole.
    fn is_hole(&self, range: Range<u64>) -> Result<bool, MediaError> {
        Ok(self.next_data(range)?.is_none())
    }

    /// Loads a little-endian word. `offset_bytes` is a multiple of 8. The load is atomic if the
    /// media allows stores.
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        debug_assert_word(offset_bytes);
        let mut word = [0; 8];
        self.read(offset_bytes, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Prefetches the word at `offset_bytes`. Never fails.
    fn prefetch_word(&self, _offset_bytes: u64) {}

    /// Allocates space for the holes in a range, durably. New space reads as zeros. A store into a
    /// hole would allocate space too, but might fail after other stores of the same change. If the
    /// result is [`MediaError::Full`], a part of the range may have received space.
    fn provision(&self, _range: Range<u64>) -> Result<(), MediaError> {
        Ok(())
    }

    /// Stores bytes. When the call returns, they are visible but not durable.
    fn store(&self, _offset_bytes: u64, _bytes: &[u8]) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    /// Stores a little-endian word, which is never torn. `offset_bytes` is a multiple of 8. When
    /// the call returns, it is visible but not durable.
    fn store_word(&self, _offset_bytes: u64, _word: u64) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    /// Reads bytes that were stored earlier, like [`Media::read`]. It is the fastest way to read,
    /// but may allocate memory for bytes that were never stored.
    fn load(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.read(offset_bytes, into)
    }

    /// Stores bytes in bulk. They are durable after [`Media::end_persist`] has returned, and must
    /// not be read before. Until then, other threads may still see the old bytes.
    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        self.store(offset_bytes, bytes)?;
        self.begin_persist(offset_bytes..offset_bytes + bytes.len() as u64, pending)
    }

    /// Begins to persist earlier stores to a range. The stores are durable after
    /// [`Media::end_persist`] has returned.
    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        pending.add(range);
        Ok(())
    }

    /// Completes all persists that this thread has begun, like [`Media::persist`].
    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        self.persist(pending.ranges())
    }

    /// Makes all earlier stores to `ranges` durable, by any thread or process and through any
    /// mapping of the media. Other stores may become durable too.
    fn persist(&self, _ranges: &[Range<u64>]) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    /// Persists a single range, like [`Media::persist`].
    fn persist_range(&self, range: Range<u64>) -> Result<(), MediaError> {
        self.persist(std::slice::from_ref(&range))
    }

    /// Erases `ranges`. From then on, they read as zeros, even after a crash. On sparse media
    /// (tmpfs, thin files), their blocks are freed. Ranges are multiples of the chunk size.
    fn erase(&self, _ranges: &[Range<u64>]) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    /// Returns the size of the units that [`Media::release`] releases, a power of two. `None` if
    /// the media never gets holes.
    fn release_unit_bytes(&self) -> Option<u64> {
        None
    }

    /// Turns units into holes, durably. Their space goes to other users of the pool. Units that are
    /// holes are unchanged. The caller must prevent stores to the units during the call.
    ///
    /// When `is_read` is called, the unit is a hole for every read that begins later. While it
    /// returns true, an earlier read may still access the old space. If such a read does not end
    /// soon, the unit keeps its space. Returns the units that were not released.
    fn release(
        &self,
        _units: &[Range<u64>],
        _is_read: &dyn Fn(&Range<u64>) -> bool,
    ) -> Result<Vec<Range<u64>>, MediaError> {
        Err(MediaError::ReadOnly)
    }

    /// Truncates a file to the length of the media, durably. A device is not changed, because the
    /// space after the media does not belong to it.
    fn truncate_tail(&self) -> Result<(), MediaError> {
        Ok(())
    }
}

/// References and boxes forward all calls.
impl<P: Deref<Target: Media> + Send + Sync> Media for P {
    #[inline]
    fn len_bytes(&self) -> u64 {
        (**self).len_bytes()
    }

    #[inline]
    fn durability(&self) -> Durability {
        (**self).durability()
    }

    fn as_file(&self) -> Option<&FileMedia> {
        (**self).as_file()
    }

    #[inline]
    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        (**self).read(offset_bytes, into)
    }

    #[inline]
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        (**self).next_data(range)
    }

    fn is_hole(&self, range: Range<u64>) -> Result<bool, MediaError> {
        (**self).is_hole(range)
    }

    #[inline]
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        (**self).load_word(offset_bytes)
    }

    #[inline]
    fn prefetch_word(&self, offset_bytes: u64) {
        (**self).prefetch_word(offset_bytes);
    }

    #[inline]
    fn provision(&self, range: Range<u64>) -> Result<(), MediaError> {
        (**self).provision(range)
    }

    #[inline]
    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        (**self).store(offset_bytes, bytes)
    }

    #[inline]
    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        (**self).store_word(offset_bytes, word)
    }

    #[inline]
    fn load(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        (**self).load(offset_bytes, into)
    }

    #[inline]
    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        (**self).store_bulk(offset_bytes, bytes, pending)
    }

    #[inline]
    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        (**self).begin_persist(range, pending)
    }

    #[inline]
    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        (**self).end_persist(pending)
    }

    #[inline]
    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        (**self).persist(ranges)
    }

    #[inline]
    fn erase(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        (**self).erase(ranges)
    }

    fn release_unit_bytes(&self) -> Option<u64> {
        (**self).release_unit_bytes()
    }

    fn release(
        &self,
        units: &[Range<u64>],
        is_read: &dyn Fn(&Range<u64>) -> bool,
    ) -> Result<Vec<Range<u64>>, MediaError> {
        (**self).release(units, is_read)
    }

    #[inline]
    fn truncate_tail(&self) -> Result<(), MediaError> {
        (**self).truncate_tail()
    }
}

/// Merges adjacent and overlapping ranges, so that each is flushed only once. The input need not be
/// sorted.
pub(crate) fn coalesce(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted: Vec<_> = ranges.iter().filter(|r| r.start < r.end).cloned().collect();
    sorted.sort_by_key(|r| r.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// Maximum number of times that a release checks for reads of a unit. A read of memory ends within
/// microseconds. The pool is locked in the meantime.
const READ_CHECKS: u32 = 100;

/// Waits until `is_read` returns false, but not for long. Returns true if it did.
pub(crate) fn wait_for_reads(is_read: impl Fn() -> bool) -> bool {
    for _ in 0..READ_CHECKS {
        if !is_read() {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

/// Panics unless `offset..offset + length` is inside the media.
#[inline]
fn assert_inside(offset_bytes: u64, length_bytes: u64, media_bytes: u64) {
    let end = offset_bytes.checked_add(length_bytes);
    assert!(
        end.is_some_and(|end| end <= media_bytes),
        "{length_bytes:#x} bytes at {offset_bytes:#x} are outside media of {media_bytes:#x} bytes"
    );
}

/// Panics in debug builds if the offset is not a multiple of 8.
#[inline(always)]
pub(crate) fn debug_assert_word(offset_bytes: u64) {
    debug_assert!(offset_bytes.is_multiple_of(8), "{offset_bytes:#x} is not aligned to a word");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Media that uses the trait's default word operations.
    struct ReadOnly;

    impl Media for ReadOnly {
        fn len_bytes(&self) -> u64 {
            64
        }

        fn durability(&self) -> Durability {
            Durability::Volatile
        }

        fn read(&self, _: u64, into: &mut [u8]) -> Result<(), MediaError> {
            into.fill(7);
            Ok(())
        }
    }

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "0x4 is not aligned to a word")]
    fn word_at_unaligned_offset_is_refused() {
        let _ = ReadOnly.load_word(4);
    }

    #[test]
    fn adjacent_ranges_are_joined() {
        assert_eq!(coalesce(&[8..16, 0..8, 32..40, 12..20, 5..5]), vec![0..20, 32..40]);
    }
}
