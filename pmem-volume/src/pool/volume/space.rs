//! Storage of a volume on the media. A volume may have holes, which read as zeros.

use std::ops::Range;

use super::VolumeExtent;
use super::chunk_map::ChunkMap;
use crate::CHUNK_BYTES;
use crate::media::{Durability, Media, MediaError, debug_assert_word, is_zero};
use crate::pool::format::chunk::{ChunkId, Run};

/// Storage of a volume on the media. It has no space for its holes: a store into one may contain
/// only zeros, and changes nothing.
pub(in crate::pool) struct Space<'a> {
    media: &'a dyn Media,
    chunks: Chunks<'a>,
    len_bytes: u64,
}

/// Chunks of a volume by index.
#[derive(Clone, Copy)]
enum Chunks<'a> {
    /// Extents in logical order. The gaps between them are holes.
    Extents(&'a [VolumeExtent]),
    Map(&'a ChunkMap),
}

/// Part of a range of a volume. It is contiguous in the file, or a hole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::pool) struct Piece {
    /// Range in the volume.
    pub(in crate::pool) range: Range<u64>,
    /// Start in the file, or `None` for a hole.
    pub(in crate::pool) file_offset: Option<u64>,
}

impl Piece {
    pub(in crate::pool) fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Returns the range in the file.
    pub(in crate::pool) fn file_range(&self) -> Option<Range<u64>> {
        self.file_offset.map(|start| start..start + self.len_bytes())
    }

    /// Returns true if `next` continues this piece in the volume and in the file.
    fn is_followed_by(&self, next: &Piece) -> bool {
        match (self.file_range(), next.file_offset) {
            (Some(file), Some(start)) => file.end == start,
            (None, None) => true,
            _ => false,
        }
    }
}

impl<'a> Space<'a> {
    /// Returns the storage of a volume without holes.
    pub(in crate::pool) fn new(media: &'a dyn Media, extents: &'a [VolumeExtent]) -> Self {
        let len_bytes = extents.last().map_or(0, |last| last.volume_end_bytes());
        Self::with_holes(media, extents, len_bytes)
    }

    /// Returns the storage of a volume of `len_bytes`. The gaps between the extents and after them
    /// are holes.
    pub(in crate::pool) fn with_holes(
        media: &'a dyn Media,
        extents: &'a [VolumeExtent],
        len_bytes: u64,
    ) -> Self {
        Self { media, chunks: Chunks::Extents(extents), len_bytes }
    }

    /// Returns the storage of an open thin volume. Other threads may fill its holes and release its
    /// chunks.
    pub(super) fn of_map(media: &'a dyn Media, map: &'a ChunkMap) -> Self {
        Self { media, chunks: Chunks::Map(map), len_bytes: map.len_bytes() }
    }

    /// Converts an offset in the volume to an offset in the file.
    ///
    /// # Panics
    /// Panics if the offset is in a hole.
    pub(in crate::pool) fn file_offset(&self, offset_bytes: u64) -> u64 {
        self.locate(offset_bytes..offset_bytes + 1).file_offset.expect("not in a hole")
    }

    /// Converts a range of the volume to ranges of the file, in order. Holes are omitted.
    ///
    /// # Panics
    /// Panics if the range is not inside the volume.
    pub(in crate::pool) fn file_ranges(&self, range: Range<u64>) -> Vec<Range<u64>> {
        self.pieces(range).iter().filter_map(Piece::file_range).collect()
    }

    /// Divides a range of the volume into pieces, in order.
    ///
    /// # Panics
    /// Panics if the range is not inside the volume.
    pub(in crate::pool) fn pieces(&self, range: Range<u64>) -> Vec<Piece> {
        assert!(
            range.start <= range.end && range.end <= self.len_bytes,
            "{range:?} is not inside the volume"
        );
        let mut pieces: Vec<Piece> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let next = self.locate(at..range.end);
            at = next.range.end;
            match pieces.last_mut() {
                Some(last) if last.is_followed_by(&next) => last.range.end = next.range.end,
                _ => pieces.push(next),
            }
        }
        pieces
    }

    /// Returns a piece at the start of a range. The range must not be empty.
    fn locate(&self, range: Range<u64>) -> Piece {
        let at = range.start;
        let (end, file_offset) = match self.chunks {
            Chunks::Extents(extents) => {
                let number = extents.partition_point(|e| e.volume_end_bytes() <= at);
                match extents.get(number) {
                    Some(extent) if extent.volume_offset_bytes() <= at => {
                        let within = at - extent.volume_offset_bytes();
                        (extent.volume_end_bytes(), Some(extent.offset_bytes() + within))
                    }
                    next => (next.map_or(u64::MAX, |next| next.volume_offset_bytes()), None),
                }
            }
            Chunks::Map(map) => {
                let index = (at / CHUNK_BYTES) as u32;
                let chunk_end = (u64::from(index) + 1) * CHUNK_BYTES;
                let offset = |chunk: ChunkId| chunk.offset_bytes() + at % CHUNK_BYTES;
                match map.get(index) {
                    Some(chunk) => (chunk_end, Some(offset(chunk))),
                    None => (u64::from(map.hole_end(index)) * CHUNK_BYTES, None),
                }
            }
        };
        Piece { range: at..end.min(range.end), file_offset }
    }
}

impl Media for Space<'_> {
    #[inline]
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn durability(&self) -> Durability {
        self.media.durability()
    }

    fn read(&self, offset_bytes: u64, mut into: &mut [u8]) -> Result<(), MediaError> {
        for piece in self.pieces(offset_bytes..offset_bytes + into.len() as u64) {
            let (now, later) = into.split_at_mut(piece.len_bytes() as usize);
            match piece.file_offset {
                Some(at) => self.media.read(at, now)?,
                None => now.fill(0),
            }
            into = later;
        }
        Ok(())
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        for piece in self.pieces(range) {
            let Some(file) = piece.file_range() else { continue };
            let start = file.start;
            if let Some(data) = self.media.next_data(file)? {
                let offset = piece.range.start + (data.start - start);
                return Ok(Some(offset..offset + (data.end - data.start)));
            }
        }
        Ok(None)
    }

    fn store(&self, offset_bytes: u64, mut bytes: &[u8]) -> Result<(), MediaError> {
        for piece in self.pieces(offset_bytes..offset_bytes + bytes.len() as u64) {
            let (now, later) = bytes.split_at(piece.len_bytes() as usize);
            match piece.file_offset {
                Some(at) => self.media.store(at, now)?,
                None => assert!(is_zero(now), "a store into the hole {:?}", piece.range),
            }
            bytes = later;
        }
        Ok(())
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        debug_assert_word(offset_bytes);
        match self.locate(offset_bytes..offset_bytes + 8).file_offset {
            Some(at) => self.media.load_word(at),
            None => Ok(0),
        }
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        debug_assert_word(offset_bytes);
        match self.locate(offset_bytes..offset_bytes + 8).file_offset {
            Some(at) => self.media.store_word(at, word),
            None => self.store(offset_bytes, &word.to_le_bytes()),
        }
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        let ranges: Vec<_> =
            ranges.iter().flat_map(|range| self.file_ranges(range.clone())).collect();
        self.media.persist(&ranges)
    }
}

/// Returns the extents of chunks that are sorted by index. A missing index is a gap between
/// extents.
pub(in crate::pool) fn extents_of(
    chunks: impl IntoIterator<Item = (u32, ChunkId)>,
) -> Vec<VolumeExtent> {
    let mut extents: Vec<VolumeExtent> = Vec::new();
    for (index, chunk) in chunks {
        match extents.last_mut() {
            Some(last) if last.end_index() == index && last.run.end() == chunk => {
                last.run.chunks += 1;
            }
            _ => extents.push(VolumeExtent { index, run: Run { start: chunk, chunks: 1 } }),
        }
    }
    extents
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::MemoryMedia;

    /// Media that supports only loads of words. Each word contains its own offset.
    struct Words;

    impl Media for Words {
        fn len_bytes(&self) -> u64 {
            8 * CHUNK_BYTES
        }

        fn durability(&self) -> Durability {
            Durability::Volatile
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), MediaError> {
            panic!("a word is not read byte by byte")
        }

        fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
            Ok(offset_bytes)
        }
    }

    #[test]
    fn volume_loads_a_word_as_a_word_of_the_media() {
        let extents = extents_of([(0, ChunkId(3)), (1, ChunkId(1))]);
        let space = Space::new(&Words, &extents);
        assert_eq!(space.load_word(8).unwrap(), 3 * CHUNK_BYTES + 8);
        assert_eq!(space.load_word(CHUNK_BYTES).unwrap(), CHUNK_BYTES);
    }

    /// Volume of 6 chunks with holes at the indexes 0, 2 and 5.
    const WITH_HOLES: [(u32, ChunkId); 3] = [(1, ChunkId(7)), (3, ChunkId(2)), (4, ChunkId(3))];

    /// Runs a test on both forms of a volume with holes.
    fn with_holes(test: impl Fn(&dyn Media, Space<'_>)) {
        let media = MemoryMedia::new(8 * CHUNK_BYTES);
        let extents = extents_of(WITH_HOLES);
        assert_eq!(extents.len(), 2);
        test(&media, Space::with_holes(&media, &extents, 6 * CHUNK_BYTES));
        let media = MemoryMedia::new(8 * CHUNK_BYTES);
        let map = ChunkMap::new(6, &WITH_HOLES);
        test(&media, Space::of_map(&media, &map));
    }

    #[test]
    fn range_is_divided_at_holes_and_at_jumps_in_the_file() {
        with_holes(|_, space| {
            let piece = |start: u64, end: u64, file_offset| Piece {
                range: start * CHUNK_BYTES..end * CHUNK_BYTES,
                file_offset,
            };
            let all = [
                piece(0, 1, None),
                piece(1, 2, Some(7 * CHUNK_BYTES)),
                piece(2, 3, None),
                piece(3, 5, Some(2 * CHUNK_BYTES)),
                piece(5, 6, None),
            ];
            assert_eq!(space.pieces(0..6 * CHUNK_BYTES), all);
            assert_eq!(space.pieces(8..8), []);
            let inner = space.file_ranges(CHUNK_BYTES - 8..3 * CHUNK_BYTES + 8);
            let second = 2 * CHUNK_BYTES;
            assert_eq!(inner, [7 * CHUNK_BYTES..8 * CHUNK_BYTES, second..second + 8]);
        });
    }

    #[test]
    fn holes_read_as_zeros_and_keep_no_zeros() {
        with_holes(|media, space| {
            assert_eq!(space.next_data(0..CHUNK_BYTES).unwrap(), None);
            space.store(0, &[0; 64]).unwrap();
            space.store_word(5 * CHUNK_BYTES, 0).unwrap();
            // The store begins in chunk 1, and its zeros end in the hole after it.
            let mut bytes = [1; 16];
            bytes[8..].fill(0);
            space.store(2 * CHUNK_BYTES - 8, &bytes).unwrap();
            space.persist_range(0..6 * CHUNK_BYTES).unwrap();
            let mut read = [9; 16];
            space.read(2 * CHUNK_BYTES - 8, &mut read).unwrap();
            assert_eq!(read, bytes);
            assert_eq!(media.load_word(8 * CHUNK_BYTES - 8).unwrap(), 0x0101_0101_0101_0101);
            assert_eq!(space.load_word(2 * CHUNK_BYTES).unwrap(), 0);
            let data = space.next_data(2 * CHUNK_BYTES..6 * CHUNK_BYTES).unwrap().unwrap();
            assert!(data.start >= 3 * CHUNK_BYTES && data.end <= 5 * CHUNK_BYTES, "{data:?}");
        });
    }

    #[test]
    #[should_panic(expected = "a store into the hole")]
    fn store_into_a_hole_panics() {
        let media = MemoryMedia::new(8 * CHUNK_BYTES);
        Space::with_holes(&media, &extents_of(WITH_HOLES), 6 * CHUNK_BYTES)
            .store_word(8, 1)
            .unwrap();
    }

    #[test]
    #[should_panic(expected = "is not inside the volume")]
    fn range_past_a_hole_at_the_end_panics() {
        with_holes(|_, space| drop(space.pieces(5 * CHUNK_BYTES..6 * CHUNK_BYTES + 1)));
    }
}
