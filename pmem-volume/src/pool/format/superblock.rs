//! Superblock with verified fields.

use std::ops::Range;

use thiserror::Error;
use uuid::Uuid;
use zerocopy::FromZeros;

use super::layout::{
    CHUNK_ENTRY_BYTES, CHUNK_TABLE_OFFSET, FEATURE_THIN, FEATURE_THIN_VOLUMES, FORMAT_VERSION,
    LOG_BYTES, LOG_OFFSET, MAX_CHUNKS, MAX_LOG_BYTES, MBR_SIGNATURE, SUPERBLOCK_BYTES,
    SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSETS, SuperblockBytes, VOLUME_RECORD_BYTES, VOLUME_SLOTS,
    VOLUME_TABLE_OFFSETS,
};
use super::table::Slot;
use crate::CHUNK_BYTES;
use crate::media::{Media, MediaError};
use crate::pool::format::chunk::ChunkId;
use crate::pool::format::mirrored;

/// Invalid field in a superblock whose checksum is correct.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("superblock field {field} is {value:#x}, but {rule}")]
pub struct SuperblockError {
    /// Name of the field in [`SuperblockBytes`].
    pub field: &'static str,
    /// Value of the field on the media.
    pub value: u64,
    /// Rule that the value violates.
    pub rule: &'static str,
}

/// Superblock with verified fields. Every region is inside the pool, and every number fits its
/// type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) sequence: u64,
    /// True if the pool is a file on a disk whose free chunks are holes.
    pub(crate) is_thin: bool,
    /// True if volumes of the pool may be thin.
    pub(crate) has_thin_volumes: bool,
    pub(crate) uuid: Uuid,
    pub(crate) chunks: u32,
    pub(crate) strg_bytes: u64,
    pub(crate) chunk_table_offset: u64,
    pub(crate) volume_table_offsets: [u64; 2],
    pub(crate) volume_slots: u32,
    pub(crate) log_offset: u64,
    pub(crate) log_bytes: u64,
    pub(crate) created_unix_s: u64,
    /// Zero, or the file size after a growth that is in progress.
    pub(crate) growing_to_bytes: u64,
}

impl Superblock {
    /// Returns the superblock for a new pool. The caller must have checked `chunks` and
    /// `strg_bytes`.
    pub(crate) fn new(uuid: Uuid, created_unix_s: u64, chunks: u32, strg_bytes: u64) -> Self {
        Self {
            sequence: 1,
            is_thin: false,
            has_thin_volumes: false,
            uuid,
            chunks,
            strg_bytes,
            chunk_table_offset: CHUNK_TABLE_OFFSET,
            volume_table_offsets: VOLUME_TABLE_OFFSETS,
            volume_slots: VOLUME_SLOTS,
            log_offset: LOG_OFFSET,
            log_bytes: LOG_BYTES,
            created_unix_s,
            growing_to_bytes: 0,
        }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        u64::from(self.chunks) * CHUNK_BYTES
    }

    /// Returns the end of the metadata in a new pool, where the metadata precedes all other chunks.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        u64::from(self.metadata_chunks()) * CHUNK_BYTES
    }

    /// Returns true if the chunk contains metadata of the pool.
    pub(crate) fn is_metadata(&self, chunk: ChunkId) -> bool {
        let (start, end) = (chunk.offset_bytes(), chunk.offset_bytes() + CHUNK_BYTES);
        self.regions().iter().any(|region| region.start < end && start < region.end)
    }

    /// Returns the number of chunks for which [`Self::is_metadata`] returns true.
    pub(crate) fn metadata_chunks(&self) -> u32 {
        let mut regions = self.regions();
        regions.sort_by_key(|region| region.start);
        // Counts ranges instead of chunks, because the chunk table of a large pool occupies
        // thousands of chunks.
        let (mut count, mut counted_to) = (0, 0);
        for region in regions.iter().filter(|region| region.start < region.end) {
            let end = region.end.div_ceil(CHUNK_BYTES);
            count += end.saturating_sub(counted_to.max(region.start / CHUNK_BYTES));
            counted_to = counted_to.max(end);
        }
        count as u32
    }

    /// Returns the first chunk after the chunk table.
    pub(crate) fn chunk_table_end_chunk(&self) -> u64 {
        self.tables()[0].end.div_ceil(CHUNK_BYTES)
    }

    /// Returns the offsets of both copies of a volume record.
    pub(crate) fn volume_record_offsets(&self, slot: Slot) -> [u64; 2] {
        assert!(u32::from(slot.0) < self.volume_slots);
        self.volume_table_offsets.map(|table| table + u64::from(slot.0) * VOLUME_RECORD_BYTES)
    }

    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> + use<> {
        (0..self.volume_slots).map(|slot| Slot(slot as u16))
    }

    /// Returns the ranges of the chunk table and the volume tables. Transactions may store to them.
    pub(crate) fn tables(&self) -> [Range<u64>; 3] {
        let table_bytes = u64::from(self.volume_slots) * VOLUME_RECORD_BYTES;
        let [first, second] = self.volume_table_offsets;
        let chunk_table_bytes = u64::from(self.chunks) * CHUNK_ENTRY_BYTES;
        [
            self.chunk_table_offset..self.chunk_table_offset + chunk_table_bytes,
            first..first + table_bytes,
            second..second + table_bytes,
        ]
    }

    /// Returns the ranges of all metadata in the pool.
    pub(crate) fn regions(&self) -> [Range<u64>; 6] {
        let [chunk_table, volumes_a, volumes_b] = self.tables();
        let [superblock_a, superblock_b] = SUPERBLOCK_OFFSETS.map(|at| at..at + SUPERBLOCK_BYTES);
        let log = self.log_offset..self.log_offset + self.log_bytes;
        [superblock_a, superblock_b, chunk_table, volumes_a, volumes_b, log]
    }

    /// Returns the superblock in the media format, with its checksum.
    pub(crate) fn to_bytes(&self) -> SuperblockBytes {
        self.to_bytes_over(SuperblockBytes::new_zeroed())
    }

    /// Returns the superblock in the media format, with its checksum. Unknown parts of `bytes` are
    /// preserved.
    pub(crate) fn to_bytes_over(&self, mut bytes: SuperblockBytes) -> SuperblockBytes {
        bytes.magic = SUPERBLOCK_MAGIC;
        bytes.version.set(FORMAT_VERSION);
        bytes.superblock_bytes.set(SUPERBLOCK_BYTES as u32);
        let other_features = bytes.features_compatible.get() & !FEATURE_THIN;
        bytes.features_compatible.set(other_features | if self.is_thin { FEATURE_THIN } else { 0 });
        // A feature for writers is never removed, even if this superblock is older than `bytes`.
        let thin_volumes = if self.has_thin_volumes { FEATURE_THIN_VOLUMES } else { 0 };
        bytes.features_read_only.set(bytes.features_read_only.get() | thin_volumes);
        bytes.sequence.set(self.sequence);
        bytes.uuid = self.uuid.into_bytes();
        bytes.size_bytes.set(self.size_bytes());
        bytes.chunk_bytes.set(CHUNK_BYTES);
        bytes.strg_bytes.set(self.strg_bytes);
        bytes.chunk_table_offset.set(self.chunk_table_offset);
        bytes.chunk_table_entries.set(u64::from(self.chunks));
        bytes.volume_table_offsets[0].set(self.volume_table_offsets[0]);
        bytes.volume_table_offsets[1].set(self.volume_table_offsets[1]);
        bytes.volume_slots.set(self.volume_slots);
        bytes.volume_record_bytes.set(VOLUME_RECORD_BYTES as u32);
        bytes.log_offset.set(self.log_offset);
        bytes.log_bytes.set(self.log_bytes);
        bytes.created_unix_s.set(self.created_unix_s);
        bytes.growing_to_bytes.set(self.growing_to_bytes);
        bytes.mbr_id.copy_from_slice(&self.uuid.as_bytes()[..4]);
        bytes.mbr_signature = MBR_SIGNATURE;
        mirrored::seal(&mut bytes);
        bytes
    }

    /// Verifies a version 1 superblock whose checksum is correct.
    pub(crate) fn parse(bytes: &SuperblockBytes) -> Result<Self, SuperblockError> {
        check_sizes(bytes)?;
        let superblock = Self {
            sequence: bytes.sequence.get(),
            is_thin: bytes.features_compatible.get() & FEATURE_THIN != 0,
            has_thin_volumes: bytes.features_read_only.get() & FEATURE_THIN_VOLUMES != 0,
            uuid: Uuid::from_bytes(bytes.uuid),
            chunks: u32::try_from(bytes.chunk_table_entries.get())
                .expect("checked against the largest pool"),
            strg_bytes: bytes.strg_bytes.get(),
            chunk_table_offset: bytes.chunk_table_offset.get(),
            volume_table_offsets: bytes.volume_table_offsets.map(|o| o.get()),
            volume_slots: bytes.volume_slots.get(),
            log_offset: bytes.log_offset.get(),
            log_bytes: bytes.log_bytes.get(),
            created_unix_s: bytes.created_unix_s.get(),
            growing_to_bytes: bytes.growing_to_bytes.get(),
        };
        superblock.check_growth()?;
        superblock.check_regions()?;
        superblock.check_strg()?;
        Ok(superblock)
    }

    fn check_growth(&self) -> Result<(), SuperblockError> {
        let to = self.growing_to_bytes;
        let larger = to > self.size_bytes()
            && to.is_multiple_of(CHUNK_BYTES)
            && to <= MAX_CHUNKS * CHUNK_BYTES;
        let rule = "a pool grows to a multiple of 2 MiB, up to 512 TiB";
        require("growing_to_bytes", to, to == 0 || larger, rule)
    }

    fn check_regions(&self) -> Result<(), SuperblockError> {
        let inside = |offset: u64, length: u64| {
            offset.is_multiple_of(8)
                && offset.checked_add(length).is_some_and(|end| end <= self.size_bytes())
        };
        let volume_table_bytes = u64::from(self.volume_slots) * VOLUME_RECORD_BYTES;
        let [volumes_a, volumes_b] = self.volume_table_offsets;
        let places = [
            (
                "chunk_table_offset",
                self.chunk_table_offset,
                u64::from(self.chunks) * CHUNK_ENTRY_BYTES,
            ),
            ("volume_table_offsets", volumes_a, volume_table_bytes),
            ("volume_table_offsets", volumes_b, volume_table_bytes),
            ("log_offset", self.log_offset, self.log_bytes),
        ];
        for (name, offset, length) in places {
            let rule = "each region is aligned to 8 and inside the pool";
            require(name, offset, inside(offset, length), rule)?;
        }
        let mut regions = self.regions();
        regions.sort_by_key(|r| r.start);
        for pair in regions.windows(2) {
            require(
                "offsets",
                pair[1].start,
                pair[0].end <= pair[1].start,
                "regions do not overlap",
            )?;
        }
        Ok(())
    }

    /// Checks the size of the part reserved for volumes. The regions must be checked first, because
    /// the number of their chunks is used.
    fn check_strg(&self) -> Result<(), SuperblockError> {
        let usable_bytes = u64::from(self.chunks - self.metadata_chunks()) * CHUNK_BYTES;
        let fits = self.strg_bytes.is_multiple_of(CHUNK_BYTES) && self.strg_bytes <= usable_bytes;
        let rule = "STRG is a multiple of 2 MiB, at most the capacity of the pool";
        require("strg_bytes", self.strg_bytes, fits, rule)
    }
}

/// Checks the sizes of the pool and of its records.
fn check_sizes(bytes: &SuperblockBytes) -> Result<(), SuperblockError> {
    let own = u64::from(bytes.superblock_bytes.get());
    require("superblock_bytes", own, own == SUPERBLOCK_BYTES, "a superblock has 4096 bytes")?;
    let chunk = bytes.chunk_bytes.get();
    require("chunk_bytes", chunk, chunk == CHUNK_BYTES, "chunks are 2 MiB")?;
    let size = bytes.size_bytes.get();
    let chunks = size / CHUNK_BYTES;
    let fits = size.is_multiple_of(CHUNK_BYTES) && chunks > 0 && chunks <= MAX_CHUNKS;
    require("size_bytes", size, fits, "a pool is a multiple of 2 MiB, up to 512 TiB")?;
    let entries = bytes.chunk_table_entries.get();
    let rule = "each chunk of the pool has one entry";
    require("chunk_table_entries", entries, entries == chunks, rule)?;
    let record = u64::from(bytes.volume_record_bytes.get());
    require(
        "volume_record_bytes",
        record,
        record == VOLUME_RECORD_BYTES,
        "volume records are 256 bytes",
    )?;
    let slots = u64::from(bytes.volume_slots.get());
    require(
        "volume_slots",
        slots,
        slots <= 1 << 16,
        "a chunk's owner word has 16 bits for a slot",
    )?;
    let log = bytes.log_bytes.get();
    require("log_bytes", log, log <= MAX_LOG_BYTES, "a log has at most 2 MiB")
}

fn require(
    field: &'static str,
    value: u64,
    holds: bool,
    rule: &'static str,
) -> Result<(), SuperblockError> {
    if holds { Ok(()) } else { Err(SuperblockError { field, value, rule }) }
}

/// Updates the superblock. Unknown parts, such as compatible features, are preserved. The sequence
/// number always increases, even if `superblock` is older than the media.
pub(in crate::pool) fn rewrite(
    media: &dyn Media,
    superblock: &Superblock,
) -> Result<(), MediaError> {
    let current = read_current(media, superblock)?;
    let next = current.sequence.get().wrapping_add(1);
    let updated = Superblock { sequence: superblock.sequence.max(next), ..superblock.clone() };
    mirrored::write(media, SUPERBLOCK_OFFSETS, &updated.to_bytes_over(current))
}

/// Sets the feature bit for thin volumes, unless it is set. When the call returns, it is durable in
/// both copies. It must be set before the first record of a thin volume is written, so that
/// programs without the feature never change a pool with a thin volume. It is never cleared.
///
/// Everything else is taken from the media, because `superblock` may be older.
pub(in crate::pool) fn allow_thin_volumes(
    media: &dyn Media,
    superblock: &Superblock,
) -> Result<Superblock, MediaError> {
    let mut bytes = read_current(media, superblock)?;
    let features = bytes.features_read_only.get();
    if features & FEATURE_THIN_VOLUMES == 0 {
        bytes.features_read_only.set(features | FEATURE_THIN_VOLUMES);
        bytes.sequence.set(bytes.sequence.get().wrapping_add(1));
        mirrored::seal(&mut bytes);
    }
    let offsets = mirrored::copy_in_use_last::<SuperblockBytes>(media, SUPERBLOCK_OFFSETS)?;
    mirrored::write(media, offsets, &bytes)?;
    let sequence = bytes.sequence.get();
    Ok(Superblock { has_thin_volumes: true, sequence, ..superblock.clone() })
}

fn read_current(media: &dyn Media, superblock: &Superblock) -> Result<SuperblockBytes, MediaError> {
    Ok(match mirrored::read::<SuperblockBytes>(media, SUPERBLOCK_OFFSETS)? {
        mirrored::Copies::Agree(bytes)
        | mirrored::Copies::Stale { current: bytes, .. }
        | mirrored::Copies::Damaged { current: bytes, .. } => bytes,
        // Both copies were damaged after the pool was opened. The content that was read at that
        // time is used.
        mirrored::Copies::Lost => superblock.to_bytes(),
    })
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    fn sample() -> Superblock {
        Superblock::new(Uuid::from_u128(7), 1_700_000_000, 512, 64 << 20)
    }

    #[test]
    fn superblock_survives_encoding_and_decoding() {
        for (is_thin, has_thin_volumes) in [(false, false), (true, false), (false, true)] {
            let superblock = Superblock { is_thin, has_thin_volumes, ..sample() };
            assert_eq!(Superblock::parse(&superblock.to_bytes()), Ok(superblock));
        }
    }

    #[test]
    fn first_sector_is_an_mbr_without_partitions() {
        let superblock = Superblock { uuid: Uuid::from_u128(0x0102_0304 << 96), ..sample() };
        let bytes = superblock.to_bytes();
        let sector = &bytes.as_bytes()[..512];
        assert_eq!(sector[440..446], [1, 2, 3, 4, 0, 0]);
        assert!(sector[446..510].iter().all(|byte| *byte == 0));
        assert_eq!(sector[510..], [0x55, 0xaa]);
        // Pools of older programs contain zeros there, and get the MBR when they grow.
        let old = SuperblockBytes { mbr_id: [0; 4], mbr_signature: [0; 2], ..bytes.clone() };
        assert_eq!(Superblock::parse(&old), Ok(superblock.clone()));
        assert!(superblock.to_bytes_over(old).as_bytes() == bytes.as_bytes());
    }

    #[test]
    fn unknown_features_are_kept() {
        let mut bytes = sample().to_bytes();
        bytes.features_compatible.set(0b1010);
        let rewritten = |is_thin| Superblock { is_thin, ..sample() }.to_bytes_over(bytes.clone());
        assert_eq!(rewritten(true).features_compatible.get(), 0b1011);
        assert_eq!(rewritten(false).features_compatible.get(), 0b1010);
    }

    #[test]
    fn feature_for_writers_is_never_removed() {
        let thin = Superblock { has_thin_volumes: true, ..sample() };
        let mut bytes = sample().to_bytes();
        bytes.features_read_only.set(0b100);
        let with_thin = thin.to_bytes_over(bytes);
        assert_eq!(with_thin.features_read_only.get(), 0b101);
        assert_eq!(sample().to_bytes_over(with_thin).features_read_only.get(), 0b101);
    }

    #[test]
    fn first_chunks_up_to_the_end_of_the_table_are_metadata() {
        assert_eq!(sample().metadata_chunks(), 2);
        let large = Superblock::new(Uuid::nil(), 0, 131_073, 0);
        assert_eq!(large.metadata_chunks(), 3);
        assert!(large.is_metadata(ChunkId(2)) && !large.is_metadata(ChunkId(3)));
    }

    #[test]
    fn error_names_the_impossible_field() {
        let broken = |change: fn(&mut SuperblockBytes)| {
            let mut bytes = sample().to_bytes();
            change(&mut bytes);
            Superblock::parse(&bytes).unwrap_err().field
        };
        assert_eq!(broken(|b| b.superblock_bytes.set(512)), "superblock_bytes");
        assert_eq!(broken(|b| b.chunk_bytes.set(4096)), "chunk_bytes");
        assert_eq!(broken(|b| b.size_bytes.set(12345)), "size_bytes");
        assert_eq!(broken(|b| b.size_bytes.set(0)), "size_bytes");
        assert_eq!(broken(|b| b.size_bytes.set(u64::MAX - CHUNK_BYTES + 1)), "size_bytes");
        assert_eq!(broken(|b| b.chunk_table_entries.set(511)), "chunk_table_entries");
        assert_eq!(broken(|b| b.volume_slots.set(1 << 17)), "volume_slots");
        assert_eq!(broken(|b| b.volume_record_bytes.set(512)), "volume_record_bytes");
        assert_eq!(broken(|b| b.chunk_table_offset.set(u64::MAX - 7)), "chunk_table_offset");
        assert_eq!(broken(|b| b.log_offset.set(4)), "log_offset");
        assert_eq!(broken(|b| b.log_offset.set(0)), "offsets");
        assert_eq!(broken(|b| b.log_bytes.set(MAX_LOG_BYTES + 8)), "log_bytes");
        assert_eq!(broken(|b| b.volume_table_offsets[1].set(1 << 30)), "volume_table_offsets");
        assert_eq!(broken(|b| b.growing_to_bytes.set(512 * CHUNK_BYTES)), "growing_to_bytes");
        assert_eq!(
            broken(|b| b.growing_to_bytes.set(u64::MAX - CHUNK_BYTES + 1)),
            "growing_to_bytes"
        );
        assert_eq!(broken(|b| b.growing_to_bytes.set(513 * CHUNK_BYTES + 8)), "growing_to_bytes");
        assert_eq!(broken(|b| b.strg_bytes.set(1)), "strg_bytes");
        assert_eq!(broken(|b| b.strg_bytes.set(1 << 40)), "strg_bytes");
    }
}
