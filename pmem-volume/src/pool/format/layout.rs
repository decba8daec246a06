//! Media format of a pool, version 1. `docs/reference/format.md` contains the byte map, and
//! explains why each commit is safe.
//!
//! All numbers are little-endian. These types are raw, untrusted bytes. [`super::superblock`],
//! [`super::table`], [`super::volume_record`] and [`crate::pool::redo_log`] convert them into
//! verified types.

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
/// Only format version that is written and read.
pub const FORMAT_VERSION: u32 = 1;

/// Compatible feature: the pool is a file on a disk, and its free chunks are holes. A program
/// without this feature zeroes chunks in place, which only uses more blocks.
pub const FEATURE_THIN: u64 = 1;
/// Feature that a writer must support: volumes may be thin, and guaranteed only in part. A program
/// without it would treat a damaged owner word as unused, although its chunk may belong to a thin
/// volume.
pub const FEATURE_THIN_VOLUMES: u64 = 1;
/// Features for writers that this version supports.
pub const FEATURES_READ_ONLY: u64 = FEATURE_THIN_VOLUMES;

/// Offsets of the two superblocks, which are the same in all versions. The superblock contains all
/// other offsets.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, CHUNK_BYTES - SUPERBLOCK_BYTES];
/// Size of a superblock in bytes.
pub const SUPERBLOCK_BYTES: u64 = 4096;

/// Offsets of the two copies of the volume table in a new pool. In an existing pool, the offsets in
/// the superblock are used.
pub const VOLUME_TABLE_OFFSETS: [u64; 2] = [64 << 10, 1 << 20];
/// Size of one copy of a volume record in bytes.
pub const VOLUME_RECORD_BYTES: u64 = 256;
/// Number of slots for volumes in a new pool.
pub const VOLUME_SLOTS: u32 = 1024;
/// Offset of the log area in a new pool.
pub const LOG_OFFSET: u64 = 512 << 10;
/// Size of the log area in a new pool, in bytes.
pub const LOG_BYTES: u64 = 64 << 10;
/// Maximum size of the log. The log is read into memory, and the size in a superblock is untrusted.
pub const MAX_LOG_BYTES: u64 = 2 << 20;
const _: () = assert!(LOG_BYTES <= MAX_LOG_BYTES);
/// Offset of the chunk table in a new pool.
pub const CHUNK_TABLE_OFFSET: u64 = CHUNK_BYTES;
/// Size of a chunk's entry in bytes: an owner word and a wear word.
pub const CHUNK_ENTRY_BYTES: u64 = 16;

/// Number of chunks that an owner word can address. The number limits pools and volumes to 512 TiB.
pub const MAX_CHUNKS: u64 = 1 << 28;
/// Maximum length of a volume name in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 64;

/// Superblock of a pool. Its two copies are at [`SUPERBLOCK_OFFSETS`].
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SuperblockBytes {
    /// [`SUPERBLOCK_MAGIC`].
    pub magic: [u8; 8],
    /// [`FORMAT_VERSION`].
    pub version: U32,
    /// Size of the superblock, 4096. In every version, its last 8 bytes contain the checksum.
    pub superblock_bytes: U32,
    /// Features that a reader may ignore: [`FEATURE_THIN`].
    pub features_compatible: U64,
    /// Features that a writer must support: [`FEATURE_THIN_VOLUMES`].
    pub features_read_only: U64,
    /// Features that a reader must support.
    pub features_incompatible: U64,
    /// Incremented by each change. If both copies are valid, the copy with the higher number is
    /// used.
    pub sequence: U64,
    /// Identity of the pool.
    pub uuid: [u8; 16],
    /// Size of the pool and of its file. A device may be longer.
    pub size_bytes: U64,
    /// Size of a chunk: 2 MiB.
    pub chunk_bytes: U64,
    /// Bytes reserved for volumes and never lent as memory.
    pub strg_bytes: U64,
    /// Offset of the chunk table.
    pub chunk_table_offset: U64,
    /// Number of entries in the chunk table: one for each chunk of the pool, including metadata.
    pub chunk_table_entries: U64,
    /// Offsets of the two copies of the volume table.
    pub volume_table_offsets: [U64; 2],
    /// Number of records in each copy of the volume table.
    pub volume_slots: U32,
    /// Size of a volume record: 256.
    pub volume_record_bytes: U32,
    /// Offset of the log.
    pub log_offset: U64,
    /// Size of the log.
    pub log_bytes: U64,
    /// Creation time in seconds since 1970.
    pub created_unix_s: U64,
    /// Zero, or the file size after a growth that is in progress.
    pub growing_to_bytes: U64,
    /// Reserved, zero.
    pub reserved0: [u8; 280],
    /// Disk signature of an MBR, which contains the first bytes of the UUID. Zero in pools of older
    /// programs.
    pub mbr_id: [u8; 4],
    /// Reserved, zero.
    pub reserved1: [u8; 2],
    /// Partition entries of an MBR, all zero.
    pub mbr_partitions: [u8; 64],
    /// [`MBR_SIGNATURE`], so that `wipefs`, `blkid` and other programs do not treat the device as
    /// empty. Zero in pools of older programs. Readers ignore it.
    pub mbr_signature: [u8; 2],
    /// Reserved, zero.
    pub reserved2: [u8; 3576],
    /// CRC-32 (IEEE 802.3) of all preceding bytes.
    pub checksum: U64,
}

/// Last two bytes of an MBR, which has 512 bytes.
pub const MBR_SIGNATURE: [u8; 2] = [0x55, 0xaa];

/// Volume record. Each of the two volume tables contains a copy.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct VolumeRecordBytes {
    /// [`VOLUME_MAGIC`], even in an empty slot.
    pub magic: [u8; 8],
    /// Incremented by each change. If both copies are valid, the copy with the higher number is
    /// used.
    pub sequence: U64,
    /// Position of this record in the table. Owner words of chunks contain it.
    pub slot: U32,
    /// 0 if the slot is empty, 1 if the volume exists.
    pub state: u8,
    /// 1 for a BTT, 2 for a raw volume, 0 in an empty slot.
    pub format: u8,
    /// Length of the name in bytes.
    pub name_bytes: u8,
    /// Reserved, zero.
    pub reserved0: u8,
    /// Bit 0: thin, so the volume may have no chunk at an index. Bit 1: part of a split volume. Bit
    /// 2, used only with bit 1: the BTT of the part is not written yet. Other bits are zero, and a
    /// reader refuses unknown bits.
    pub flags: U64,
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// Size of the volume in bytes, a multiple of the chunk size.
    pub size_bytes: U64,
    /// Creation time in seconds since 1970.
    pub created_unix_s: U64,
    /// Name in UTF-8, padded with zeros.
    pub name: [u8; MAX_NAME_BYTES],
    /// With flag bit 1, the slot of the split volume; otherwise zero.
    pub origin_slot: U32,
    /// With flag bit 1, the index of the part's first chunk in the split volume; otherwise zero.
    pub origin_index: U32,
    /// Part of the size that is not guaranteed, a multiple of the chunk size. 0, as in volumes that
    /// are not thin, guarantees all of it.
    pub unreserved_bytes: U64,
    /// Reserved, zero.
    pub reserved1: [u8; 104],
    /// CRC-32 (IEEE 802.3) of all preceding bytes.
    pub checksum: U64,
}

/// State in a volume record: the slot is empty.
pub const VOLUME_EMPTY: u8 = 0;
/// State in a volume record: the volume exists.
pub const VOLUME_LIVE: u8 = 1;
/// Format in a volume record: the volume has a BTT.
pub const VOLUME_FORMAT_BTT: u8 = 1;
/// Format in a volume record: the volume is raw.
pub const VOLUME_FORMAT_RAW: u8 = 2;
/// Flag in a volume record: the volume may have no chunk at an index.
pub const VOLUME_FLAG_THIN: u64 = 1;
/// Flag in a volume record: the volume is a part of a split volume. Owner words of its chunks may
/// still contain the slot of the split volume.
pub const VOLUME_FLAG_PART: u64 = 2;
/// Flag in a volume record: the volume is a part whose BTT is not written yet.
pub const VOLUME_FLAG_UNFORMATTED: u64 = 4;

/// Header of the log. The entries ([`LogEntryBytes`]) follow it.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogHeaderBytes {
    /// [`LOG_MAGIC`].
    pub magic: [u8; 8],
    /// Number of entries in the transaction.
    pub entries: U64,
    /// CRC-32 (IEEE 802.3) of the magic, the number of entries, and all entries.
    pub checksum: U64,
    /// 0 without a transaction, or [`LOG_COMMITTED`] plus the checksum of a committed transaction,
    /// which the next open redoes.
    pub commit: U64,
    /// Reserved, zero.
    pub reserved: [u8; 32],
}

/// Upper half of the log's commit word. The checksum is the lower half.
pub const LOG_COMMITTED: u64 = 0x434f_4d4d << 32;

/// Entry of a transaction, which stores one word.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogEntryBytes {
    /// Offset of the word, a multiple of 8. The offset must be in the chunk table, a volume table,
    /// or a chunk of a volume.
    pub offset: U64,
    /// Value of the word.
    pub word: U64,
}

const _: () = {
    assert!(size_of::<SuperblockBytes>() as u64 == SUPERBLOCK_BYTES);
    assert!(offset_of!(SuperblockBytes, features_compatible) == 16);
    assert!(offset_of!(SuperblockBytes, features_read_only) == 24);
    assert!(offset_of!(SuperblockBytes, features_incompatible) == 32);
    assert!(offset_of!(SuperblockBytes, sequence) == 40);
    assert!(offset_of!(SuperblockBytes, uuid) == 48);
    assert!(offset_of!(SuperblockBytes, size_bytes) == 64);
    assert!(offset_of!(SuperblockBytes, strg_bytes) == 80);
    assert!(offset_of!(SuperblockBytes, chunk_table_offset) == 88);
    assert!(offset_of!(SuperblockBytes, volume_table_offsets) == 104);
    assert!(offset_of!(SuperblockBytes, volume_slots) == 120);
    assert!(offset_of!(SuperblockBytes, log_offset) == 128);
    assert!(offset_of!(SuperblockBytes, growing_to_bytes) == 152);
    assert!(offset_of!(SuperblockBytes, reserved0) == 160);
    assert!(offset_of!(SuperblockBytes, mbr_id) == 440);
    assert!(offset_of!(SuperblockBytes, mbr_partitions) == 446);
    assert!(offset_of!(SuperblockBytes, mbr_signature) == 510);
    assert!(offset_of!(SuperblockBytes, checksum) == 4088);
    assert!(size_of::<VolumeRecordBytes>() as u64 == VOLUME_RECORD_BYTES);
    assert!(offset_of!(VolumeRecordBytes, slot) == 16);
    assert!(offset_of!(VolumeRecordBytes, flags) == 24);
    assert!(offset_of!(VolumeRecordBytes, uuid) == 32);
    assert!(offset_of!(VolumeRecordBytes, size_bytes) == 48);
    assert!(offset_of!(VolumeRecordBytes, name) == 64);
    assert!(offset_of!(VolumeRecordBytes, origin_slot) == 128);
    assert!(offset_of!(VolumeRecordBytes, unreserved_bytes) == 136);
    assert!(offset_of!(VolumeRecordBytes, checksum) == 248);
    assert!(size_of::<LogHeaderBytes>() == 64);
    assert!(offset_of!(LogHeaderBytes, commit) == 24);
    assert!(size_of::<LogEntryBytes>() == 16);
    // The regions in the first chunk of a new pool do not overlap: superblock, volume table, log,
    // volume table, superblock.
    let table_bytes = VOLUME_SLOTS as u64 * VOLUME_RECORD_BYTES;
    assert!(SUPERBLOCK_OFFSETS[0] + SUPERBLOCK_BYTES <= VOLUME_TABLE_OFFSETS[0]);
    assert!(VOLUME_TABLE_OFFSETS[0] + table_bytes <= LOG_OFFSET);
    assert!(LOG_OFFSET + LOG_BYTES <= VOLUME_TABLE_OFFSETS[1]);
    assert!(VOLUME_TABLE_OFFSETS[1] + table_bytes <= SUPERBLOCK_OFFSETS[1]);
    assert!(SUPERBLOCK_OFFSETS[1] + SUPERBLOCK_BYTES <= CHUNK_TABLE_OFFSET);
    // The slot in an owner word has 16 bits.
    assert!(VOLUME_SLOTS <= 1 << 16);
};
