//! Implementation of the media trait for a volume. The chunks of the volume need not be contiguous.
//!
//! A thin volume may have holes, which read as zeros. A store into a hole allocates a chunk first.
//! Its user may release chunks, which then become holes.
//!
//! The first failed store or persist latches the pool read-only, because it is then unknown which
//! writes are durable. A latched pool can still be read. A failed read affects only that read.

use std::ops::Range;

use super::provision::indexes;
use super::{Space, Volume, VolumeExtent};
use crate::CHUNK_BYTES;
use crate::media::{Durability, Media, MediaError, Pending, debug_assert_word};
use crate::pool::{OpenMode, Pool};

/// Ranges in the file.
type FileRanges = Vec<Range<u64>>;

impl<M: Media> Volume<M> {
    pub(super) fn space(&self) -> Space<'_> {
        self.space_on(self.pool().media())
    }

    /// Returns the storage of the volume on a view of the pool's media.
    fn space_on<'a>(&'a self, media: &'a dyn Media) -> Space<'a> {
        match &self.map {
            None => Space::new(media, &self.extents),
            Some(map) => Space::of_map(media, map),
        }
    }

    /// Returns the offset in the file if the range is contiguous there. Returns `None` if a part of
    /// the range is in a hole.
    ///
    /// # Panics
    /// Panics if the range is not inside the volume.
    // Always inlined. It is called for each word, and takes only a few instructions if the volume
    // has a single extent.
    #[inline(always)]
    fn contiguous_offset(&self, offset_bytes: u64, length_bytes: u64) -> Option<u64> {
        let extent = match self.extents() {
            // Most volumes have a single extent, which therefore begins at offset 0 of the volume.
            [only] if offset_bytes < only.len_bytes() => only,
            extents => {
                let is_before =
                    |e: &VolumeExtent| e.volume_offset_bytes() + e.len_bytes() <= offset_bytes;
                let Some(extent) = extents.get(extents.partition_point(is_before)) else {
                    return self.contiguous_in_map(offset_bytes, length_bytes);
                };
                extent
            }
        };
        let within = offset_bytes - extent.volume_offset_bytes();
        (length_bytes <= extent.len_bytes() - within).then(|| extent.offset_bytes() + within)
    }

    /// Returns the offset in the file if the range is in a single chunk of a thin volume.
    #[inline(never)]
    fn contiguous_in_map(&self, offset_bytes: u64, length_bytes: u64) -> Option<u64> {
        let Some(map) = self.map.as_ref().filter(|map| offset_bytes < map.len_bytes()) else {
            panic!("{offset_bytes:#x} is not inside the volume");
        };
        let within = offset_bytes % CHUNK_BYTES;
        let chunk = map.get((offset_bytes / CHUNK_BYTES) as u32)?;
        (length_bytes <= CHUNK_BYTES - within).then(|| chunk.offset_bytes() + within)
    }

    /// Stores a word into a hole, which a zero leaves unchanged.
    #[inline(never)]
    fn store_word_in_hole(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.provision_store(offset_bytes, &word.to_le_bytes())?;
        self.pool().change(|media| self.space_on(media).store_word(offset_bytes, word))
    }

    /// Stores bytes in bulk to several pieces of the volume. Holes get chunks first, and zeros in
    /// holes are not stored.
    fn store_bulk_in_pieces(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        self.provision_store(offset_bytes, bytes)?;
        let pool = self.pool();
        pool.require_changeable()?;
        let mut rest = bytes;
        let pieces = self.space().pieces(offset_bytes..offset_bytes + bytes.len() as u64);
        pool.record_failure(pieces.into_iter().try_for_each(|piece| {
            let (now, later) = rest.split_at(piece.len_bytes() as usize);
            rest = later;
            piece.file_offset.map_or(Ok(()), |at| pool.media().store_bulk(at, now, pending))
        }))
    }

    /// Converts ranges of the volume to ranges of the file. Holes are omitted.
    #[inline]
    fn to_file_ranges(&self, ranges: &[Range<u64>]) -> FileRanges {
        let mut pieces = FileRanges::new();
        for range in ranges {
            let length_bytes = range.end - range.start;
            match self.contiguous_offset(range.start, length_bytes) {
                Some(start) => pieces.push(start..start + length_bytes),
                None => pieces.extend(self.space().file_ranges(range.clone())),
            }
        }
        pieces
    }
}

impl<M: Media> Pool<M> {
    /// Performs a change of the media unless an earlier write failed. If the change fails, the pool
    /// is latched read-only.
    #[inline]
    fn change(&self, change: impl FnOnce(&M) -> Result<(), MediaError>) -> Result<(), MediaError> {
        self.require_changeable()?;
        self.record_failure(change(self.media()))?;
        // A concurrent failure may have affected this change.
        self.require_not_latched()
    }

    #[inline]
    fn require_changeable(&self) -> Result<(), MediaError> {
        match self.mode {
            OpenMode::ReadWrite => self.require_not_latched(),
            _ => Err(MediaError::ReadOnly),
        }
    }

    #[inline]
    fn require_not_latched(&self) -> Result<(), MediaError> {
        match self.latched.get() {
            Some(cause) => Err(MediaError::Latched { cause: cause.clone() }),
            None => Ok(()),
        }
    }
}

impl<M: Media> Media for Volume<M> {
    #[inline]
    fn len_bytes(&self) -> u64 {
        self.size_bytes()
    }

    #[inline]
    fn durability(&self) -> Durability {
        self.pool().media().durability()
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.space_on(&self.pool().view()).read(offset_bytes, into)
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        self.space_on(&self.pool().view()).next_data(range)
    }

    fn is_hole(&self, range: Range<u64>) -> Result<bool, MediaError> {
        match &self.map {
            Some(map) => Ok(map.holes(indexes(&range)).eq(indexes(&range))),
            None => Ok(self.space().file_ranges(range).is_empty()),
        }
    }

    #[inline]
    fn provision(&self, range: Range<u64>) -> Result<(), MediaError> {
        match &self.map {
            Some(map) if !map.has_chunk_of(&range) => self.fill_holes(map, range),
            _ => Ok(()),
        }
    }

    fn release_unit_bytes(&self) -> Option<u64> {
        self.map.is_some().then_some(CHUNK_BYTES)
    }

    fn release(
        &self,
        units: &[Range<u64>],
        is_read: &dyn Fn(&Range<u64>) -> bool,
    ) -> Result<Vec<Range<u64>>, MediaError> {
        self.release_chunks(units, is_read)
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.provision_store(offset_bytes, bytes)?;
        self.pool().change(|media| self.space_on(media).store(offset_bytes, bytes))
    }

    #[inline]
    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.pool().change(|media| media.persist(&self.to_file_ranges(ranges)))
    }

    #[inline]
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        debug_assert_word(offset_bytes);
        match self.contiguous_offset(offset_bytes, 8) {
            Some(at) => self.pool().media().load_word(at),
            // Words do not cross chunks, so the word is in a hole.
            None => Ok(0),
        }
    }

    /// If another operation has failed, the persist that follows the store detects it. The last
    /// store of an exchange, into the map, has no persist, but an earlier persist has committed the
    /// exchange.
    #[inline]
    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        debug_assert_word(offset_bytes);
        let Some(at) = self.contiguous_offset(offset_bytes, 8) else {
            return self.store_word_in_hole(offset_bytes, word);
        };
        let pool = self.pool();
        pool.require_changeable()?;
        pool.record_failure(pool.media().store_word(at, word))
    }

    #[inline(always)]
    fn prefetch_word(&self, offset_bytes: u64) {
        if let Some(at) = self.contiguous_offset(offset_bytes, 8) {
            self.pool().media().prefetch_word(at);
        }
    }

    #[inline]
    fn load(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        match self.contiguous_offset(offset_bytes, into.len() as u64) {
            Some(at) => self.pool().media().load(at, into),
            None => self.space().read(offset_bytes, into),
        }
    }

    #[inline]
    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        let pool = self.pool();
        pool.require_changeable()?;
        match self.contiguous_offset(offset_bytes, bytes.len() as u64) {
            Some(at) => pool.record_failure(pool.media().store_bulk(at, bytes, pending)),
            None => self.store_bulk_in_pieces(offset_bytes, bytes, pending),
        }
    }

    /// `pending` contains offsets in the file.
    #[inline(always)]
    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        let (pool, length_bytes) = (self.pool(), range.end - range.start);
        // Volatile media would do nothing, but this check also saves locating the range.
        if self.durability() == Durability::Volatile {
            return Ok(());
        }
        pool.record_failure(match self.contiguous_offset(range.start, length_bytes) {
            Some(at) => pool.media().begin_persist(at..at + length_bytes, pending),
            None => {
                let mut pieces = self.space().file_ranges(range).into_iter();
                pieces.try_for_each(|piece| pool.media().begin_persist(piece, pending))
            }
        })
    }

    #[inline(always)]
    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        let pool = self.pool();
        pool.require_changeable()?;
        pool.record_failure(pool.media().end_persist(pending))?;
        // A concurrent failure may have affected a pending store.
        pool.require_not_latched()
    }
}
