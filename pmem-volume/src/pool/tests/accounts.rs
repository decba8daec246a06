//! Tests of promised, reserved, allocated and lent bytes.

use zerocopy::IntoBytes;

use super::crash::{new_pool_of, open, open_for};
use super::*;
use crate::pool::format::table::{Owner, Slot, encode_owner};
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::layout::{CHUNK_ENTRY_BYTES, CHUNK_TABLE_OFFSET};

/// Bytes that are promised, reserved, allocated and lent, in MiB.
fn accounts(info: &PoolInfo) -> [u64; 4] {
    [info.promised_bytes, info.reserved_bytes, info.volume_bytes, info.memory_bytes]
        .map(|bytes| bytes / MIB)
}

#[test]
fn accounts_follow_volumes_and_memory() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 16 * MIB);
    assert_eq!(accounts(&pool.info()), [0, 16, 0, 0]);
    pool.create_volume("a", VolumeSize::Bytes(12 * MIB), VolumeFormat::Raw).unwrap();
    assert_eq!(accounts(&pool.info()), [12, 16, 12, 0]);
    pool.create_volume("b", VolumeSize::Bytes(8 * MIB), VolumeFormat::Raw).unwrap();
    assert_eq!(accounts(&pool.info()), [20, 20, 20, 0]);
    pool.alloc_memory(6 * MIB).unwrap();
    assert_eq!(accounts(&pool.info()), [20, 20, 20, 6]);
    pool.delete_volume("a").unwrap();
    assert_eq!(accounts(&pool.info()), [8, 16, 8, 6]);
}

/// Bad media can leave less than the reserve.
#[test]
fn reserved_bytes_are_at_most_the_usable_bytes() {
    let fixture = Fixture::new();
    let info = fixture.create(64 * MIB, 60 * MIB).info();
    assert_eq!(info.reserved_bytes, 60 * MIB);
    let worn = PoolInfo { retired_bytes: 6 * MIB, ..info }.with_reserved_bytes();
    assert_eq!((worn.reserve_bytes, worn.reserved_bytes), (60 * MIB, 54 * MIB));
}

/// A thin volume of 20 chunks in a pool of 12 has chunks only at the indexes 0 and 19.
#[test]
fn holes_of_a_thin_volume_are_promised_but_not_allocated() {
    let (media, pool) = new_pool_of(12, |superblock| {
        superblock.strg_bytes = CHUNK_BYTES;
        superblock.volume_slots = 4;
        superblock.log_bytes = 4096;
    });
    pool.create_volume("full", VolumeSize::Bytes(3 * CHUNK_BYTES), VolumeFormat::Raw).unwrap();
    let slot = Slot(1);
    let record = VolumeRecord {
        sequence: 1,
        slot,
        name: "thin".parse().unwrap(),
        uuid: Uuid::from_u128(2),
        format: VolumeFormat::Raw,
        thin: true,
        part: None,
        chunks: 20,
        created_unix_s: 1,
    };
    for offset in pool.superblock.volume_record_offsets(slot) {
        media.store(offset, record.to_bytes().as_bytes()).unwrap();
    }
    drop(pool);
    for (chunk, index) in [(ChunkId(8), 0), (ChunkId(10), 19)] {
        let offset = CHUNK_TABLE_OFFSET + u64::from(chunk.0) * CHUNK_ENTRY_BYTES;
        let word = encode_owner(chunk, Owner::Volume { slot, index });
        media.store_word(offset, word).unwrap();
    }
    let peek = open_for(&media, OpenMode::Peek).unwrap();
    assert_eq!(accounts(&peek.info()), [46, 10, 10, 0]);
    drop(peek);
    assert_eq!(accounts(&open(&media).unwrap().info()), [46, 10, 10, 0]);
}
