//! Access to persistent memory.
//!
//! The contract is narrow so that a simulator can implement it:
//!
//! - A store is visible to loads at once. It may become durable at any time, in any order with
//!   other stores. It is certainly durable after a [`Media::persist`] that covers it, or after
//!   [`Media::end_persist`] if a [`Media::begin_persist`] after the store covers it. A crash may
//!   tear it at any 8-byte boundary.
//! - [`Media::store_word`] to an aligned address is never torn.
//! - [`Durability`] of the media defines which events durable data survives. The order in which
//!   stores become durable is the same for all media, so one commit protocol works for all.

mod blocks;
mod content;
mod file;
mod flush;
mod guarded;
mod holes;
mod memory;
mod page_cache;
mod place;
mod shared_sync;
#[cfg(test)]
pub(crate) mod simulator;
mod watch;
mod zeroing;

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

use serde::Serialize;
use smallvec::SmallVec;
use thiserror::Error;

pub(crate) use blocks::{Lacking, copy_on_write, take as take_lacking};
pub use content::{holds_bytes, is_zero};
pub use file::FileMedia;
pub(crate) use file::{MAX_MAPPED_BYTES, allocate};
#[cfg(test)]
pub(crate) use flush::noted;
pub use guarded::handle_sigbus;
pub use memory::MemoryMedia;
pub(crate) use page_cache::{drop_clean_pages, forget_clean_pages};
pub use place::len_bytes;
pub(crate) use place::{Place, PlaceError, sysfs_of};
pub use watch::{OnPageLost, TooManyRanges, Watch};

/// Events that a completed [`Media::persist`] survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// Persistent memory mapped with MAP_SYNC: a cache-line write-back and a fence make a store
    /// durable.
    DaxSync,
    /// File or block device in the page cache: stores survive the death of the process at once, and
    /// a loss of power after a ranged msync.
    PageCache,
    /// tmpfs, RAM disks, devdax of volatile memory: stores survive only the death of the process.
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

/// Stores of a thread that are not persisted yet, if its media needs to know them: not if stores
/// become durable line by line, or by themselves. The value stays with the thread, because a fence
/// orders only the stores of its own thread.
#[derive(Debug, Default)]
#[must_use = "stores are durable only after `end_persist`"]
pub struct Pending {
    ranges: SmallVec<[Range<u64>; 4]>,
    _of_this_thread: PhantomData<*mut ()>,
    /// Some stores have bypassed the caches and are not ordered before later ones.
    is_past_caches: bool,
}

impl Pending {
    /// Adds a range to persist.
    pub fn add(&mut self, range: Range<u64>) {
        self.ranges.push(range);
    }

    /// Added ranges.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }
}

/// Failure of a media operation. The durability of all earlier stores is unknown.
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
}

/// Persistent memory or a substitute: a pool, or a range of one such as a volume. Offsets count
/// from its start.
///
/// Ranges must be inside the media. An offset outside is a bug of the caller and panics.
/// Implementations allow concurrent calls, but the caller must avoid concurrent stores to the same
/// bytes. Read-only media implements the reads and refuses other calls.
pub trait Media: Send + Sync {
    /// Length of the media.
    fn len_bytes(&self) -> u64;

    /// Events that a completed persist survives.
    fn durability(&self) -> Durability;

    /// Media itself if it is a file, for properties that only files have: holes, blocks and a page
    /// cache.
    fn as_file(&self) -> Option<&FileMedia> {
        None
    }

    /// Copies bytes out. Not atomic with concurrent stores.
    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError>;

    /// First part of a range that may have data other than zeros. Everything before it reads as
    /// zeros, and all of the range if the result is `None`. The part is never empty, and is the
    /// whole range if holes are unknown.
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        Ok(Some(range).filter(|range| !range.is_empty()))
    }

    /// Loads a little-endian word. `offset_bytes` is a multiple of 8. Atomic if the media allows
    /// stores.
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        debug_assert_word(offset_bytes);
        let mut word = [0; 8];
        self.read(offset_bytes, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Prefetches the word at `offset_bytes`. Never fails.
    fn expect_word(&self, _offset_bytes: u64) {}

    /// Stores bytes. At return they are visible but not durable.
    fn store(&self, _offset_bytes: u64, _bytes: &[u8]) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    /// Stores a little-endian word, which is never torn. `offset_bytes` is a multiple of 8. At
    /// return it is visible but not durable.
    fn store_word(&self, _offset_bytes: u64, _word: u64) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    /// Reads bytes that were stored before, like [`Media::read`]. It is the fastest way, but may
    /// allocate memory for bytes that were never stored.
    fn load(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.read(offset_bytes, into)
    }

    /// Stores bytes that are not read before [`Media::end_persist`] has returned, which makes them
    /// durable. Until then they need not be visible to other threads.
    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        self.store(offset_bytes, bytes)?;
        self.begin_persist(offset_bytes..offset_bytes + bytes.len() as u64, pending)
    }

    /// Begins to persist earlier stores to a range. They are durable after [`Media::end_persist`]
    /// has returned.
    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        pending.add(range);
        Ok(())
    }

    /// Persists all ranges whose persist this thread has begun, like [`Media::persist`].
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

    /// Erases `ranges`, which then read as zeros, also after any crash. On sparse media (tmpfs,
    /// thin files), their blocks are freed. Ranges are multiples of the chunk size.
    fn erase(&self, _ranges: &[Range<u64>]) -> Result<(), MediaError> {
        Err(MediaError::ReadOnly)
    }

    /// Truncates a file to the end of the media, durably. A device keeps its length, because space
    /// behind the media is not part of it.
    fn cut_tail(&self) -> Result<(), MediaError> {
        Ok(())
    }
}

/// References and boxes pass on all calls.
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

    #[inline]
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        (**self).load_word(offset_bytes)
    }

    #[inline]
    fn expect_word(&self, offset_bytes: u64) {
        (**self).expect_word(offset_bytes);
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

    #[inline]
    fn cut_tail(&self) -> Result<(), MediaError> {
        (**self).cut_tail()
    }
}

/// Joins adjacent and overlapping ranges, so that each is flushed once. The input need not be
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

    /// Media with the trait's default word operations.
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
