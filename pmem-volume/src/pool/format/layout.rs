//! Format v1 of a pool, as it lies on the media. `docs/reference/format.md` has the byte map and
//! the commit arguments.
//!
//! Everything is little-endian. Nothing here touches media, and nothing here is trusted: these are
//! the bytes, to be turned into verified types by [`super::superblock`], [`super::table`],
//! [`super::volume_record`] and [`crate::pool::redo_log`].

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::CHUNK_BYTES;

/// First bytes of both superblocks.
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"FSHRPOOL";
/// First bytes of every copy of a volume record.
pub const VOLUME_MAGIC: [u8; 8] = *b"FSHRVOLM";
/// First bytes of the log area.
pub const LOG_MAGIC: [u8; 8] = *b"FSHRRLOG";
/// The version that this code writes and the only one that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// Compatible feature: the pool is a file on a disk whose free chunks are holes. Who does not know
/// it zeroes them, which costs blocks and nothing else.
pub const FEATURE_THIN: u64 = 1;

/// Where the two superblocks lie. Fixed for all versions: everything else is found through them.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, CHUNK_BYTES - SUPERBLOCK_BYTES];
/// Bytes of a superblock.
pub const SUPERBLOCK_BYTES: u64 = 4096;

/// Where a new pool has the first copies of its volume records; the superblock says where an old
/// one has them.
pub const VOLUME_TABLE_OFFSETS: [u64; 2] = [64 << 10, 1 << 20];
/// Bytes of one copy of a volume record.
pub const VOLUME_RECORD_BYTES: u64 = 256;
/// Volumes that a new pool has room for.
pub const VOLUME_SLOTS: u32 = 1024;
/// Where a new pool has its log.
pub const LOG_OFFSET: u64 = 512 << 10;
/// Bytes of a new pool's log.
pub const LOG_BYTES: u64 = 64 << 10;
/// Most that a log may have: it is read into memory, and a superblock may say anything.
pub const MAX_LOG_BYTES: u64 = 2 << 20;
const _: () = assert!(LOG_BYTES <= MAX_LOG_BYTES);
/// Where a new pool has its chunk table.
pub const CHUNK_TABLE_OFFSET: u64 = CHUNK_BYTES;
/// Bytes of a chunk's entry: owner word, wear word.
pub const CHUNK_ENTRY_BYTES: u64 = 16;

/// Chunks that an owner word can number, and so the largest pool and the largest volume (512 TiB).
pub const MAX_CHUNKS: u64 = 1 << 28;
/// Longest volume name, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 64;

/// A superblock. Two copies, at [`SUPERBLOCK_OFFSETS`].
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SuperblockBytes {
    /// [`SUPERBLOCK_MAGIC`].
    pub magic: [u8; 8],
    /// [`FORMAT_VERSION`].
    pub version: U32,
    /// 4096. The checksum is in the last eight of these, in every version.
    pub superblock_bytes: U32,
    /// Features that a reader may ignore: [`FEATURE_THIN`].
    pub features_compatible: U64,
    /// Features that a writer must know.
    pub features_read_only: U64,
    /// Features that a reader must know.
    pub features_incompatible: U64,
    /// Grows by one with each change; the valid copy with the larger number counts.
    pub sequence: U64,
    /// Identity of the pool.
    pub uuid: [u8; 16],
    /// Bytes of the pool, and of the file; a device may be longer.
    pub size_bytes: U64,
    /// Bytes of a chunk: 2 MiB.
    pub chunk_bytes: U64,
    /// Bytes kept for volumes and never lent as memory.
    pub strg_bytes: U64,
    /// Where the chunk table starts.
    pub chunk_table_offset: U64,
    /// Entries in it: one for each chunk of the pool, those of the metadata included.
    pub chunk_table_entries: U64,
    /// Where the two copies of the volume table start.
    pub volume_table_offsets: [U64; 2],
    /// Records in each of them.
    pub volume_slots: U32,
    /// Bytes of a record: 256.
    pub volume_record_bytes: U32,
    /// Where the log starts.
    pub log_offset: U64,
    /// Bytes of the log.
    pub log_bytes: U64,
    /// When the pool was made, in seconds since 1970.
    pub created_unix_s: U64,
    /// Zero, or bytes that the file may have while the pool is being grown.
    pub growing_to_bytes: U64,
    /// Zero.
    pub reserved: [u8; 3928],
    /// CRC-32 (IEEE 802.3) of all bytes before it.
    pub checksum: U64,
}

/// One copy of a volume record. Two copies, in two tables.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VolumeRecordBytes {
    /// [`VOLUME_MAGIC`], also in an empty slot.
    pub magic: [u8; 8],
    /// Grows by one with each change; the valid copy with the larger number counts.
    pub sequence: U64,
    /// This record's place in the table, which the chunks' owner words name.
    pub slot: U32,
    /// 0: empty, 1: live.
    pub state: u8,
    /// 1: BTT, 2: raw; 0 in an empty slot.
    pub format: u8,
    /// Bytes of the name.
    pub name_bytes: u8,
    /// Zero.
    pub reserved0: u8,
    /// Bit 0: thin, an index may have no chunk. Bit 1: a part of a volume that was split, and bit
    /// 2, with it: its BTT is still to be written. Other bits are zero, and a reader refuses
    /// what it does not know.
    pub flags: U64,
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// Bytes of the volume, a multiple of the chunk size.
    pub size_bytes: U64,
    /// When the volume was made, in seconds since 1970.
    pub created_unix_s: U64,
    /// UTF-8, zero-filled.
    pub name: [u8; MAX_NAME_BYTES],
    /// With flag bit 1, the slot of the volume that was split; else zero.
    pub origin_slot: U32,
    /// With flag bit 1, the index of the part's first chunk in it; else zero.
    pub origin_index: U32,
    /// Zero.
    pub reserved1: [u8; 112],
    /// CRC-32 (IEEE 802.3) of all bytes before it.
    pub checksum: U64,
}

/// Volume record: the slot is empty.
pub const VOLUME_EMPTY: u8 = 0;
/// Volume record: the volume exists.
pub const VOLUME_LIVE: u8 = 1;
/// Volume record: formatted with BTT.
pub const VOLUME_FORMAT_BTT: u8 = 1;
/// Volume record: no format.
pub const VOLUME_FORMAT_RAW: u8 = 2;
/// Volume record flag: an index may have no chunk.
pub const VOLUME_FLAG_THIN: u64 = 1;
/// Volume record flag: a part of a volume that was split. Its chunks may still be named as the
/// other's.
pub const VOLUME_FLAG_PART: u64 = 2;
/// Volume record flag: a part whose BTT is still to be written.
pub const VOLUME_FLAG_UNFORMATTED: u64 = 4;

/// The head of the log. [`LogEntryBytes`] follow it.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogHeaderBytes {
    /// [`LOG_MAGIC`].
    pub magic: [u8; 8],
    /// Entries of the transaction.
    pub entries: U64,
    /// CRC-32 (IEEE 802.3) of magic, number of entries and all entries.
    pub checksum: U64,
    /// 0: no transaction. [`LOG_COMMITTED`] plus the checksum: the transaction counts, and is
    /// redone at open.
    pub commit: U64,
    /// Zero.
    pub reserved: [u8; 32],
}

/// High half of the log's commit word; the checksum is the low half.
pub const LOG_COMMITTED: u64 = 0x434f_4d4d << 32;

/// One word to store, of a transaction.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogEntryBytes {
    /// Where: a multiple of 8 inside the chunk table, a volume table, or a chunk that a volume
    /// has.
    pub offset: U64,
    /// What.
    pub word: U64,
}

const _: () = {
    assert!(size_of::<SuperblockBytes>() as u64 == SUPERBLOCK_BYTES);
    assert!(offset_of!(SuperblockBytes, sequence) == 40);
    assert!(offset_of!(SuperblockBytes, uuid) == 48);
    assert!(offset_of!(SuperblockBytes, size_bytes) == 64);
    assert!(offset_of!(SuperblockBytes, strg_bytes) == 80);
    assert!(offset_of!(SuperblockBytes, chunk_table_offset) == 88);
    assert!(offset_of!(SuperblockBytes, volume_table_offsets) == 104);
    assert!(offset_of!(SuperblockBytes, volume_slots) == 120);
    assert!(offset_of!(SuperblockBytes, log_offset) == 128);
    assert!(offset_of!(SuperblockBytes, growing_to_bytes) == 152);
    assert!(offset_of!(SuperblockBytes, reserved) == 160);
    assert!(offset_of!(SuperblockBytes, checksum) == 4088);
    assert!(size_of::<VolumeRecordBytes>() as u64 == VOLUME_RECORD_BYTES);
    assert!(offset_of!(VolumeRecordBytes, slot) == 16);
    assert!(offset_of!(VolumeRecordBytes, flags) == 24);
    assert!(offset_of!(VolumeRecordBytes, uuid) == 32);
    assert!(offset_of!(VolumeRecordBytes, size_bytes) == 48);
    assert!(offset_of!(VolumeRecordBytes, name) == 64);
    assert!(offset_of!(VolumeRecordBytes, origin_slot) == 128);
    assert!(offset_of!(VolumeRecordBytes, checksum) == 248);
    assert!(size_of::<LogHeaderBytes>() == 64);
    assert!(offset_of!(LogHeaderBytes, commit) == 24);
    assert!(size_of::<LogEntryBytes>() == 16);
    // A new pool's first chunk: superblock, volume table, log, volume table, superblock, and no
    // overlap.
    let table_bytes = VOLUME_SLOTS as u64 * VOLUME_RECORD_BYTES;
    assert!(SUPERBLOCK_OFFSETS[0] + SUPERBLOCK_BYTES <= VOLUME_TABLE_OFFSETS[0]);
    assert!(VOLUME_TABLE_OFFSETS[0] + table_bytes <= LOG_OFFSET);
    assert!(LOG_OFFSET + LOG_BYTES <= VOLUME_TABLE_OFFSETS[1]);
    assert!(VOLUME_TABLE_OFFSETS[1] + table_bytes <= SUPERBLOCK_OFFSETS[1]);
    assert!(SUPERBLOCK_OFFSETS[1] + SUPERBLOCK_BYTES <= CHUNK_TABLE_OFFSET);
    // An owner word has 16 bits for a slot.
    assert!(VOLUME_SLOTS <= 1 << 16);
};
