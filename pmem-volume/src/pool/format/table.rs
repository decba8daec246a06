//! Chunk table. It records the owner of each chunk and the number of its uses.
//!
//! An entry consists of two words. Each word has its own checksum, and its store cannot tear.
//! Therefore, a change of a single entry needs no log. A crash leaves either the old or the new
//! word.

use std::ops::Range;

use super::layout::{CHUNK_ENTRY_BYTES, MAX_CHUNKS};
use super::superblock::Superblock;
use crate::media::{Media, MediaError};
use crate::pool::format::chunk::{ChunkId, Run};

const INDEX_BITS: u32 = 28;
const SLOT_SHIFT: u32 = 28;
const STATE_SHIFT: u32 = 44;
const CHECK_SHIFT: u32 = 48;
const USES_BITS: u32 = 18;
/// Maximum number of counted uses of a chunk.
pub(crate) const MAX_USES: u32 = (1 << USES_BITS) - 1;
/// Bits of the index in the copy of an owner, or of the state if the owner is not a volume.
const COPY_INDEX_BITS: u32 = 20;
/// Bits that contain the slot plus one in the copy of an owner, [`COPY_OF_STATE`] if the owner is
/// not a volume, and zero if there is no copy.
const COPY_PLACE_BITS: u32 = 10;
const COPY_OF_STATE: u64 = (1 << COPY_PLACE_BITS) - 1;
/// Bits of the number of uses in a word without a copy.
const OLDER_USES_BITS: u32 = 32;
const _: () = assert!(USES_BITS + COPY_INDEX_BITS + COPY_PLACE_BITS == CHECK_SHIFT);
// The first programs detect a word with a copy as damaged. None of their counts is decoded as a
// copy.
const _: () = assert!(USES_BITS + COPY_INDEX_BITS >= OLDER_USES_BITS);
const _: () = assert!(MAX_CHUNKS == 1 << INDEX_BITS);

// Zero is not a valid state. Therefore, a lost table that reads as zeros is detected as damage, and
// not taken for a table of free chunks.
const STATE_FREE: u64 = 1;
const STATE_METADATA: u64 = 2;
const STATE_VOLUME: u64 = 3;
const STATE_MEMORY: u64 = 4;
const STATE_SCRUB: u64 = 5;
const STATE_RETIRED: u64 = 6;

/// Index of a volume in the volume table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(pub(crate) u16);

/// Owner of a chunk, with its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The chunk has no owner and reads as zeros.
    Free,
    /// The chunk contains metadata of the pool.
    Metadata,
    /// The chunk belongs to a volume.
    Volume {
        slot: Slot,
        /// Index of the chunk in the volume.
        index: u32,
    },
    /// The chunk is lent as memory. The next open treats it like `Scrub`.
    Memory,
    /// The chunk has no owner, but its old content is not erased yet.
    Scrub,
    /// The chunk is permanently unused because its media is bad.
    Retired,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Owner::Free => f.write_str("free"),
            Owner::Metadata => f.write_str("pool metadata"),
            Owner::Volume { slot, index } => {
                write!(f, "chunk {index} of the volume in slot {}", slot.0)
            }
            Owner::Memory => f.write_str("lent memory"),
            Owner::Scrub => f.write_str("waiting for erasure"),
            Owner::Retired => f.write_str("retired"),
        }
    }
}

/// Word of the chunk table with a wrong checksum or invalid content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadWord(pub(crate) u64);

/// CRC-16 (CCITT polynomial 0x1021) of the low 48 bits of a word, its chunk's number, and its kind.
/// It detects damaged words, and words that belong to other chunks.
///
/// A CRC is linear. The CRC of 11 bytes is the sum of one contribution per byte, which depends on
/// its position, and a contribution of the initial value (all ones). Therefore, all bytes can be
/// looked up in parallel.
fn word_checksum(chunk: ChunkId, kind: u8, low: u64) -> u64 {
    let words = u128::from(low)
        | u128::from(chunk.0) << CHECK_SHIFT
        | u128::from(kind) << (CHECK_SHIFT + 32);
    let bytes = words.to_le_bytes();
    let of_bytes =
        CRC16_TABLES.iter().zip(bytes).fold(0, |crc, (table, byte)| crc ^ table[usize::from(byte)]);
    u64::from(CRC16_OF_INITIAL ^ of_bytes)
}

/// Number of bytes that the checksum of a word covers.
const CHECKED_BYTES: usize = 11;

/// Returns the CRC after one more byte. The byte is zero, or has already been added to `crc`.
const fn crc16_step(crc: u16) -> u16 {
    let mut crc = crc;
    let mut bit = 0;
    while bit < 8 {
        crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
        bit += 1;
    }
    crc
}

/// Contribution of each byte to a CRC of [`CHECKED_BYTES`] with initial value 0, indexed by
/// position and value.
static CRC16_TABLES: [[u16; 256]; CHECKED_BYTES] = {
    let mut tables = [[0u16; 256]; CHECKED_BYTES];
    let mut position = CHECKED_BYTES;
    while position > 0 {
        position -= 1;
        let mut byte = 0;
        while byte < 256 {
            let of_last = crc16_step((byte as u16) << 8);
            let is_last = position == CHECKED_BYTES - 1;
            tables[position][byte] =
                if is_last { of_last } else { crc16_step(tables[position + 1][byte]) };
            byte += 1;
        }
    }
    tables
};

/// Contribution of the CRC's initial value.
const CRC16_OF_INITIAL: u16 = {
    let mut crc = 0xffff;
    let mut position = 0;
    while position < CHECKED_BYTES {
        crc = crc16_step(crc);
        position += 1;
    }
    crc
};

/// Kind of a word. The kind is included in the checksum, so that the two words of an entry cannot
/// be confused.
const KIND_OWNER: u8 = 0;
const KIND_WEAR: u8 = 1;

/// Maximum number of repeated reads of words that look damaged. If they keep changing, the last
/// copy is used.
const MAX_REREADS: u32 = 8;

fn decode_entries(run: Run, bytes: &[u8]) -> Vec<Entry> {
    let (words, _) = bytes.as_chunks::<8>();
    let (pairs, _) = words.as_chunks::<2>();
    let entry = |(chunk, [owner, wear]): (ChunkId, &[[u8; 8]; 2])| Entry {
        owner: decode_owner(chunk, u64::from_le_bytes(*owner)),
        wear: decode_wear(chunk, u64::from_le_bytes(*wear)),
    };
    run.ids().zip(pairs).map(entry).collect()
}

/// Encodes an owner word. Bits 0 to 27 contain the index, 28 to 43 the slot, 44 to 47 the state,
/// and 48 to 63 the checksum.
pub(crate) fn encode_owner(chunk: ChunkId, owner: Owner) -> u64 {
    let low = owner_bits(owner);
    word_checksum(chunk, KIND_OWNER, low) << CHECK_SHIFT | low
}

/// Returns the low 48 bits of an owner word.
fn owner_bits(owner: Owner) -> u64 {
    match owner {
        Owner::Free => STATE_FREE << STATE_SHIFT,
        Owner::Metadata => STATE_METADATA << STATE_SHIFT,
        Owner::Volume { slot, index } => {
            assert!(u64::from(index) < MAX_CHUNKS);
            STATE_VOLUME << STATE_SHIFT | u64::from(slot.0) << SLOT_SHIFT | u64::from(index)
        }
        Owner::Memory => STATE_MEMORY << STATE_SHIFT,
        Owner::Scrub => STATE_SCRUB << STATE_SHIFT,
        Owner::Retired => STATE_RETIRED << STATE_SHIFT,
    }
}

/// Returns the owner if a wear word can contain a copy of it. The exceptions are chunks beyond 2
/// TiB of a volume, and volumes in slots above 1021.
pub(crate) fn copy_of(owner: Owner) -> Option<Owner> {
    Some(owner).filter(|owner| copy_bits(*owner) != 0)
}

/// Encodes the copy of an owner, without checksum. Returns zero for an owner without a copy.
fn copy_bits(owner: Owner) -> u64 {
    let Owner::Volume { slot, index } = owner else {
        return COPY_OF_STATE << COPY_INDEX_BITS | owner_bits(owner) >> STATE_SHIFT;
    };
    let (place, index) = (u64::from(slot.0) + 1, u64::from(index));
    let fits = place < COPY_OF_STATE && index >> COPY_INDEX_BITS == 0;
    if fits { place << COPY_INDEX_BITS | index } else { 0 }
}

/// Decodes the copy of an owner, whose place is not 0.
fn decode_copy(bits: u64) -> Option<Owner> {
    let index = bits & ((1 << COPY_INDEX_BITS) - 1);
    match bits >> COPY_INDEX_BITS {
        COPY_OF_STATE => unowned(index),
        place => Some(Owner::Volume { slot: Slot((place - 1) as u16), index: index as u32 }),
    }
}

/// Returns the owner with a state that has neither slot nor index.
fn unowned(state: u64) -> Option<Owner> {
    match state {
        STATE_FREE => Some(Owner::Free),
        STATE_METADATA => Some(Owner::Metadata),
        STATE_MEMORY => Some(Owner::Memory),
        STATE_SCRUB => Some(Owner::Scrub),
        STATE_RETIRED => Some(Owner::Retired),
        _ => None,
    }
}

/// Content of a wear word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WearWord {
    /// Number of uses, at most [`MAX_USES`].
    pub(crate) uses: u32,
    /// Copy of the owner, from which a repair restores a lost owner word. A crash may leave the old
    /// value of either word.
    pub(crate) owner: Option<Owner>,
}

pub(crate) fn decode_owner(chunk: ChunkId, word: u64) -> Result<Owner, BadWord> {
    let low = word & ((1 << CHECK_SHIFT) - 1);
    if word >> CHECK_SHIFT != word_checksum(chunk, KIND_OWNER, low) {
        return Err(BadWord(word));
    }
    let index = (low & ((1 << INDEX_BITS) - 1)) as u32;
    let slot = Slot((low >> SLOT_SHIFT) as u16);
    match low >> STATE_SHIFT {
        STATE_VOLUME => Ok(Owner::Volume { slot, index }),
        state if index == 0 && slot.0 == 0 => unowned(state).ok_or(BadWord(word)),
        _ => Err(BadWord(word)),
    }
}

/// Encodes a wear word. Bits 0 to 17 contain the number of uses, 18 to 37 the index or the state of
/// the owner, 38 to 47 its place, and 48 to 63 the checksum.
pub(crate) fn encode_wear(chunk: ChunkId, word: WearWord) -> u64 {
    let copy = word.owner.map_or(0, copy_bits);
    let low = copy << USES_BITS | u64::from(word.uses.min(MAX_USES));
    word_checksum(chunk, KIND_WEAR, low) << CHECK_SHIFT | low
}

pub(crate) fn decode_wear(chunk: ChunkId, word: u64) -> Result<WearWord, BadWord> {
    let low = word & ((1 << CHECK_SHIFT) - 1);
    if word >> CHECK_SHIFT != word_checksum(chunk, KIND_WEAR, low) {
        return Err(BadWord(word));
    }
    let copy = low >> USES_BITS;
    if copy >> COPY_INDEX_BITS == 0 {
        return match low >> OLDER_USES_BITS {
            0 => Ok(WearWord { uses: (low as u32).min(MAX_USES), owner: None }),
            _ => Err(BadWord(word)),
        };
    }
    let owner = decode_copy(copy).ok_or(BadWord(word))?;
    Ok(WearWord { uses: low as u32 & MAX_USES, owner: Some(owner) })
}

/// Adds the correct checksum to the low bits of an owner or wear word.
#[cfg(test)]
pub(crate) fn seal_for_test(chunk: ChunkId, is_wear: bool, low: u64) -> u64 {
    let low = low & ((1 << CHECK_SHIFT) - 1);
    word_checksum(chunk, if is_wear { KIND_WEAR } else { KIND_OWNER }, low) << CHECK_SHIFT | low
}

/// Decoded entry of the chunk table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) owner: Result<Owner, BadWord>,
    pub(crate) wear: Result<WearWord, BadWord>,
}

/// Number of entries that are read at a time: 16 KiB, which fit into the L1 cache until they are
/// decoded.
const PIECE_ENTRIES: u32 = 1024;

/// Chunk table at a position on the media. Loads and stores single words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkTable {
    offset: u64,
    entries: u32,
}

impl ChunkTable {
    pub(crate) fn new(superblock: &Superblock) -> Self {
        Self { offset: superblock.chunk_table_offset, entries: superblock.chunks }
    }

    /// Returns the number of entries, one for each chunk of the pool.
    pub(crate) fn entries(self) -> u32 {
        self.entries
    }

    fn entry_offset(self, chunk: ChunkId) -> u64 {
        assert!(chunk.0 < self.entries, "{chunk} is outside a table of {}", self.entries);
        self.offset + u64::from(chunk.0) * CHUNK_ENTRY_BYTES
    }

    /// Returns the range of bytes that contains the entries of a run.
    pub(crate) fn byte_range(self, run: Run) -> Range<u64> {
        let start = self.entry_offset(run.start);
        start..start + u64::from(run.chunks) * CHUNK_ENTRY_BYTES
    }

    pub(crate) fn owner(
        self,
        media: &dyn Media,
        chunk: ChunkId,
    ) -> Result<Result<Owner, BadWord>, MediaError> {
        Ok(decode_owner(chunk, media.load_word(self.entry_offset(chunk))?))
    }

    pub(crate) fn wear(
        self,
        media: &dyn Media,
        chunk: ChunkId,
    ) -> Result<Result<WearWord, BadWord>, MediaError> {
        Ok(decode_wear(chunk, media.load_word(self.entry_offset(chunk) + 8)?))
    }

    /// Divides the table into pieces, which are read one after the other.
    pub(crate) fn pieces(self) -> impl Iterator<Item = Run> {
        (0..self.entries).step_by(PIECE_ENTRIES as usize).map(move |start| Run {
            start: ChunkId(start),
            chunks: PIECE_ENTRIES.min(self.entries - start),
        })
    }

    /// Reads the entries of a run as a copy. The mapping is not accessed, so holes in a file that
    /// is only read remain holes. If another process stores concurrently, a copy may be torn.
    /// Therefore, words that look damaged are read again until two reads are equal.
    pub(crate) fn read_entries(
        self,
        media: &dyn Media,
        run: Run,
    ) -> Result<Vec<Entry>, MediaError> {
        let range = self.byte_range(run);
        let read = || {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            media.read(range.start, &mut bytes).map(|()| bytes)
        };
        let mut bytes = read()?;
        for _ in 0..MAX_REREADS {
            let entries = decode_entries(run, &bytes);
            if entries.iter().all(|entry| entry.owner.is_ok() && entry.wear.is_ok()) {
                return Ok(entries);
            }
            let again = read()?;
            if again == bytes {
                return Ok(entries);
            }
            bytes = again;
        }
        Ok(decode_entries(run, &bytes))
    }

    /// Copies a chunk's words to another table without decoding them. The copies are not durable
    /// when the call returns.
    pub(crate) fn copy_entry(
        self,
        media: &dyn Media,
        chunk: ChunkId,
        to: Self,
    ) -> Result<(), MediaError> {
        for word in [0, 8] {
            media.store_word(
                to.entry_offset(chunk) + word,
                media.load_word(self.entry_offset(chunk) + word)?,
            )?;
        }
        Ok(())
    }

    /// Stores the owner and its copy, which are not durable when the call returns. After a crash,
    /// either of them may still name the previous owner.
    pub(crate) fn set_owner(
        self,
        media: &dyn Media,
        chunk: ChunkId,
        owner: Owner,
    ) -> Result<(), MediaError> {
        let uses = self.uses(media, chunk)?;
        self.set_entry(media, chunk, owner, uses)
    }

    /// Stores the owner of a chunk, as [`Self::set_owner`] does, and increments the number of its
    /// uses.
    pub(crate) fn set_user(
        self,
        media: &dyn Media,
        chunk: ChunkId,
        owner: Owner,
    ) -> Result<(), MediaError> {
        let uses = self.uses(media, chunk)?;
        self.set_entry(media, chunk, owner, uses.saturating_add(1))
    }

    /// Returns the number of uses of a chunk. An unreadable number restarts at zero, because it is
    /// only a hint.
    pub(crate) fn uses(self, media: &dyn Media, chunk: ChunkId) -> Result<u32, MediaError> {
        Ok(self.wear(media, chunk)?.map_or(0, |word| word.uses))
    }

    /// Stores both words of a chunk, which are not durable when the call returns.
    pub(crate) fn set_entry(
        self,
        media: &dyn Media,
        chunk: ChunkId,
        owner: Owner,
        uses: u32,
    ) -> Result<(), MediaError> {
        let at = self.entry_offset(chunk);
        media.store_word(at, encode_owner(chunk, owner))?;
        media.store_word(at + 8, encode_wear(chunk, WearWord { uses, owner: Some(owner) }))
    }

    /// Makes the wear word of a chunk match its owner word. A damaged owner word is not copied.
    pub(crate) fn correct_wear(self, media: &dyn Media, chunk: ChunkId) -> Result<(), MediaError> {
        let owner = self.owner(media, chunk)?.ok();
        let wear = WearWord { uses: self.uses(media, chunk)?, owner };
        media.store_word(self.entry_offset(chunk) + 8, encode_wear(chunk, wear))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNERS: [Owner; 7] = [
        Owner::Free,
        Owner::Metadata,
        Owner::Volume { slot: Slot(0), index: 0 },
        Owner::Volume { slot: Slot(u16::MAX), index: (1 << INDEX_BITS) - 1 },
        Owner::Memory,
        Owner::Scrub,
        Owner::Retired,
    ];

    /// Reference implementation of the CRC, bit by bit.
    fn reference_checksum(chunk: ChunkId, kind: u8, low: u64) -> u64 {
        let mut crc: u16 = 0xffff;
        for byte in low.to_le_bytes()[..6].iter().chain(&chunk.0.to_le_bytes()).chain(&[kind]) {
            crc ^= u16::from(*byte) << 8;
            for _ in 0..8 {
                crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
            }
        }
        u64::from(crc)
    }

    proptest::proptest! {
        #[test]
        fn word_checksums_are_crc16(chunk: u32, kind: u8, low in 0u64..1 << 48) {
            proptest::prop_assert_eq!(word_checksum(ChunkId(chunk), kind, low), reference_checksum(ChunkId(chunk), kind, low));
        }
    }

    #[test]
    fn words_survive_encoding_and_decoding() {
        for chunk in [0, 1, 77, u32::MAX].map(ChunkId) {
            for owner in OWNERS {
                assert_eq!(decode_owner(chunk, encode_owner(chunk, owner)), Ok(owner));
            }
            for (uses, owner) in
                [0, 1, MAX_USES].into_iter().flat_map(|uses| OWNERS.map(|o| (uses, o)))
            {
                let word = encode_wear(chunk, WearWord { uses, owner: Some(owner) });
                let owner = copy_of(owner);
                assert_eq!(decode_wear(chunk, word), Ok(WearWord { uses, owner }));
            }
        }
    }

    #[test]
    fn flipped_bit_in_any_word_is_detected() {
        let chunk = ChunkId(77);
        for owner in OWNERS {
            let word = encode_owner(chunk, owner);
            for bit in 0..64 {
                assert!(decode_owner(chunk, word ^ 1 << bit).is_err(), "{owner:?} bit {bit}");
            }
        }
        let wear = WearWord { uses: 12345, owner: Some(Owner::Scrub) };
        let word = encode_wear(chunk, wear);
        for bit in 0..64 {
            assert!(decode_wear(chunk, word ^ 1 << bit).is_err(), "wear bit {bit}");
        }
    }

    #[test]
    fn word_of_another_chunk_is_invalid() {
        let word = encode_owner(ChunkId(5), Owner::Free);
        assert!(decode_owner(ChunkId(6), word).is_err());
        assert!(decode_wear(ChunkId(5), word).is_err());
        assert!(decode_owner(ChunkId(0), 0).is_err());
        assert!(decode_wear(ChunkId(0), 0).is_err());
    }

    #[test]
    fn uses_saturate_below_the_copy() {
        let wear = WearWord { uses: u32::MAX, owner: Some(Owner::Free) };
        let decoded = decode_wear(ChunkId(3), encode_wear(ChunkId(3), wear)).unwrap();
        assert_eq!(decoded, WearWord { uses: MAX_USES, ..wear });
    }

    #[test]
    fn copy_of_an_owner_is_exact_or_missing() {
        let chunk = |slot, index| Owner::Volume { slot: Slot(slot), index };
        let decoded = |owner| {
            let word = encode_wear(ChunkId(3), WearWord { uses: 5, owner: Some(owner) });
            decode_wear(ChunkId(3), word).unwrap().owner
        };
        for owner in [chunk(0, 0), chunk(1021, (1 << 20) - 1), Owner::Retired] {
            assert_eq!((decoded(owner), copy_of(owner)), (Some(owner), Some(owner)));
        }
        for owner in [chunk(1022, 0), chunk(1023, 4), chunk(0, 1 << 20), chunk(u16::MAX, 5)] {
            assert_eq!((decoded(owner), copy_of(owner)), (None, None));
        }
        for state in [0, STATE_VOLUME, 7, (1 << COPY_INDEX_BITS) - 1] {
            let low = (COPY_OF_STATE << COPY_INDEX_BITS | state) << USES_BITS;
            let word = seal_for_test(ChunkId(3), true, low);
            assert_eq!(decode_wear(ChunkId(3), word), Err(BadWord(word)), "{state}");
        }
        assert!((0..1 << 17).all(|chunk| decode_wear(ChunkId(chunk), !0).is_err()));
    }

    /// The first programs count with 32 bits, and accept only words whose bits 32 to 47 are zero.
    #[test]
    fn copy_and_counter_of_the_first_programs_are_not_confused() {
        let chunk = ChunkId(3);
        for uses in [0, 1, MAX_USES, MAX_USES + 1, 300_000, 1 << 20, 1 << 31, u32::MAX] {
            let word = seal_for_test(chunk, true, u64::from(uses));
            let expected = WearWord { uses: uses.min(MAX_USES), owner: None };
            assert_eq!(decode_wear(chunk, word), Ok(expected));
        }
        for low in [1 << 32, 1 << 37, u64::MAX >> 26] {
            assert!(decode_wear(chunk, seal_for_test(chunk, true, low)).is_err());
        }
        for owner in OWNERS.into_iter().filter_map(copy_of) {
            let low = encode_wear(chunk, WearWord { uses: 0, owner: Some(owner) }) << 16 >> 16;
            assert!(low >> OLDER_USES_BITS != 0, "{owner}");
        }
    }
}
