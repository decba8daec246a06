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

/// Bad media and damage can leave less than the reserve.
#[test]
fn retired_and_damaged_chunks_are_not_reserved() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 60 * MIB);
    pool.create_volume("v", VolumeSize::Bytes(8 * MIB), VolumeFormat::Raw).unwrap();
    assert_eq!(accounts(&pool.info()), [8, 60, 8, 0]);
    drop(pool);
    let offset = |chunk: u32| CHUNK_TABLE_OFFSET + u64::from(chunk) * CHUNK_ENTRY_BYTES;
    let retired = encode_owner(ChunkId(30), Owner::Retired);
    fixture.overwrite(offset(30), &retired.to_le_bytes());
    fixture.flip(offset(31), 5);
    let info = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap().info();
    assert_eq!((info.retired_bytes, info.damaged_bytes), (2 * MIB, 2 * MIB));
    assert_eq!(accounts(&info), [8, 56, 8, 0]);
    assert_eq!(info.usable_bytes(), 58 * MIB);
    assert_accounts_add_up(&info);
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
        reserve_chunks: 20,
        created_unix_s: 1,
    };
    for offset in pool.superblock().volume_record_offsets(slot) {
        media.store(offset, record.to_bytes().as_bytes()).unwrap();
    }
    drop(pool);
    for (chunk, index) in [(ChunkId(8), 0), (ChunkId(10), 19)] {
        let offset = CHUNK_TABLE_OFFSET + u64::from(chunk.0) * CHUNK_ENTRY_BYTES;
        let word = encode_owner(chunk, Owner::Volume { slot, index });
        media.store_word(offset, word).unwrap();
    }
    let peek = open_for(&media, OpenMode::Peek).unwrap();
    // All 10 usable chunks are withheld for the volumes, although the thin one needs more.
    assert_eq!(accounts(&peek.info()), [46, 20, 10, 0]);
    drop(peek);
    let pool = open(&media).unwrap();
    let info = pool.info();
    assert_eq!(accounts(&info), [46, 20, 10, 0]);
    assert_eq!((info.lendable_bytes, info.available_bytes()), (0, 0));
    assert_accounts_add_up(&info);
    for size in [VolumeSize::Bytes(CHUNK_BYTES), VolumeSize::Remaining] {
        let error = pool.create_volume("new", size, VolumeFormat::Raw).unwrap_err();
        assert!(matches!(error, PoolError::PoolFull { .. }), "{error}");
    }
    let size = VolumeSize::Bytes(4 * CHUNK_BYTES);
    for error in [
        pool.resize_volume("full", size, Shrink::Refuse).unwrap_err(),
        pool.convert_volume("thin", false).unwrap_err(),
        pool.alloc_memory(CHUNK_BYTES).unwrap_err(),
    ] {
        assert!(matches!(error, PoolError::PoolFull { .. }), "{error}");
    }
}

#[test]
fn promised_chunks_are_lent_down_to_the_minimum() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let options = VolumeOptions { thin: true, ..VolumeOptions::thick(40 * MIB, VolumeFormat::Raw) };
    pool.create_volume_with("thin", options).unwrap();
    assert_eq!(accounts(&pool.info()), [40, 40, 0, 0]);
    pool.lend_promised(Some(7 * MIB));
    pool.set_borrowable_bytes(u64::MAX);
    let info = pool.info();
    assert_eq!((info.lendable_bytes, pool.offered_bytes()), (52 * MIB, 52 * MIB), "whole chunks");
    assert_eq!((info.needed_bytes(), info.available_bytes()), (40 * MIB, 20 * MIB));
    let memory = pool.alloc_memory(52 * MIB).unwrap();
    let error = pool.alloc_memory(2 * MIB).unwrap_err();
    assert!(
        matches!(error, PoolError::PoolFull { withheld_bytes, .. } if withheld_bytes == 8 * MIB)
    );
    // Volumes can use the minimum, but then memory must be returned first.
    let volume = pool.open_volume("thin").unwrap();
    volume.provision(0..8 * MIB).unwrap();
    let error = volume.provision(8 * MIB..10 * MIB).unwrap_err();
    assert!(matches!(error, MediaError::Full { .. }), "{error}");
    pool.free_memory(&memory).unwrap();
    volume.provision(8 * MIB..36 * MIB).unwrap();
    // Only 4 MiB are still needed, so no more are withheld.
    assert_eq!(pool.info().lendable_bytes, 20 * MIB);
    assert_accounts_add_up(&pool.info());
    // The setting ends. Lent chunks stay lent.
    pool.alloc_memory(20 * MIB).unwrap();
    pool.lend_promised(None);
    assert_eq!(accounts(&pool.info()), [40, 40, 36, 20]);
    assert_eq!(pool.info().lendable_bytes, 0);
}
