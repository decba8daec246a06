//! Tests of damaged pools. Data with a second copy is read from that copy, and data without one is
//! refused. The damage should never get worse.

use std::mem::offset_of;

use super::*;
use crate::btt;
use crate::pool::format::table::{Owner, Slot, WearWord, encode_owner, encode_wear};
use crate::pool::layout::{
    CHUNK_TABLE_OFFSET, LOG_OFFSET, SUPERBLOCK_OFFSETS, SuperblockBytes, VOLUME_RECORD_BYTES,
    VOLUME_TABLE_OFFSETS, VolumeRecordBytes,
};

/// Creates a pool with a volume of three chunks, which start at 5, 6 and 7 times 2 MiB.
fn with_volume() -> Fixture {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 4 * MIB);
    let place = pool.create_volume("data", VolumeSize::Bytes(6 * MIB), VolumeFormat::Raw).unwrap();
    assert_eq!(place.allocated_bytes, 6 * MIB);
    fixture
}

/// Sample of superblock fields. The test in `fields.rs` flips every bit of all fields.
const SUPERBLOCK_FIELDS: [(&str, usize); 3] = [
    ("magic", offset_of!(SuperblockBytes, magic)),
    ("sequence", offset_of!(SuperblockBytes, sequence)),
    ("checksum", offset_of!(SuperblockBytes, checksum)),
];

#[test]
fn flipped_bit_in_one_superblock_is_repaired_from_the_other() {
    let fixture = with_volume();
    let good = fixture.image();
    for (name, offset) in SUPERBLOCK_FIELDS {
        for (copy, start) in SUPERBLOCK_OFFSETS.into_iter().enumerate() {
            fixture.flip(start + offset as u64, 3);
            let report = fixture.check();
            assert_eq!(report.pool, [Finding::SuperblockCopy { copy }], "{name}");
            assert!(!report.is_clean());
            assert_eq!(fixture.open().volumes().len(), 1, "{name}");
            assert!(good == fixture.image(), "{name}: opening rewrote the damaged copy");
        }
    }
}

#[test]
fn flipped_bit_in_both_superblocks_is_refused() {
    let fixture = with_volume();
    for (name, offset) in SUPERBLOCK_FIELDS {
        let both = SUPERBLOCK_OFFSETS.map(|start| start + offset as u64);
        both.iter().for_each(|at| fixture.flip(*at, 0));
        for mode in [OpenMode::ReadWrite, OpenMode::ReadOnly, OpenMode::Peek] {
            let error = fixture.open_error(mode);
            let expected = match name {
                "magic" => matches!(error, PoolError::SuperblocksLost { .. }),
                _ => matches!(error, PoolError::SuperblocksDamaged { .. }),
            };
            assert!(expected, "{name}: {error}");
        }
        both.iter().for_each(|at| fixture.flip(*at, 0));
    }
    fixture.open();
}

/// Changes both superblocks, and updates their checksums.
pub(super) fn with_superblock(fixture: &Fixture, change: impl Fn(&mut SuperblockBytes)) {
    use zerocopy::{FromBytes, IntoBytes};
    let bytes = fs::read(fixture.path()).unwrap();
    let mut superblock = SuperblockBytes::read_from_bytes(&bytes[..4096]).unwrap();
    change(&mut superblock);
    mirrored::seal(&mut superblock);
    SUPERBLOCK_OFFSETS.iter().for_each(|at| fixture.overwrite(*at, superblock.as_bytes()));
}

#[test]
fn pool_with_unknown_read_only_features_can_be_read() {
    let fixture = with_volume();
    with_superblock(&fixture, |s| s.features_read_only.set(8));
    assert!(matches!(
        fixture.open_error(OpenMode::ReadWrite),
        PoolError::Features { features: 8, .. }
    ));
    assert!(fixture.check().is_clean());
}

#[test]
fn compatible_features_survive_the_repair_of_a_copy() {
    let fixture = with_volume();
    with_superblock(&fixture, |s| s.features_compatible.set(16));
    let good = fixture.image();
    fixture.flip(SUPERBLOCK_OFFSETS[1] + 100, 0);
    drop(fixture.open());
    assert!(good == fixture.image());
}

#[test]
fn volume_record_is_read_from_either_copy() {
    let fixture = with_volume();
    let good = fixture.image();
    let offsets = [offset_of!(VolumeRecordBytes, magic), offset_of!(VolumeRecordBytes, checksum)];
    for offset in offsets.map(|o| o as u64) {
        for (copy, table) in VOLUME_TABLE_OFFSETS.into_iter().enumerate() {
            fixture.flip(table + offset, 1);
            assert_eq!(fixture.check().pool, [Finding::VolumeRecordCopy { slot: 0, copy }]);
            assert_eq!(fixture.open().volumes()[0].name, "data");
            assert!(good == fixture.image());
        }
        VOLUME_TABLE_OFFSETS.iter().for_each(|table| fixture.flip(table + offset, 1));
        let error = fixture.open_error(OpenMode::ReadWrite);
        assert!(
            matches!(&error, PoolError::Damaged { first, count: 1, .. } if **first == Finding::VolumeRecordLost { slot: 0 }),
            "the volume's chunks must not count as leftover: {error}"
        );
        assert!(!fixture.check().is_clean());
        VOLUME_TABLE_OFFSETS.iter().for_each(|table| fixture.flip(table + offset, 1));
    }
}

#[test]
fn crash_between_copies_of_a_record_leaves_the_newer_one() {
    let fixture = with_volume();
    // Restores the second copy to its state before the volume was created.
    let empty = volume_record::empty_record(Slot(0), 0);
    fixture.overwrite(VOLUME_TABLE_OFFSETS[1], zerocopy::IntoBytes::as_bytes(&empty));
    let report = fixture.check();
    assert_eq!(report.pool, [Finding::VolumeRecordStale { slot: 0, copy: 1 }]);
    assert!(report.is_clean());
    assert_eq!(fixture.open().volumes().len(), 1);
    assert_eq!(fixture.check().pool, []);
}

fn entry(chunk: u32) -> u64 {
    CHUNK_TABLE_OFFSET + u64::from(chunk) * 16
}

#[test]
fn flipped_bit_in_an_owner_word_prevents_only_writing() {
    let fixture = with_volume();
    for chunk in [0, 2, 20] {
        for byte in 0..8 {
            fixture.flip(entry(chunk) + byte, 5);
            let error = fixture.open_error(OpenMode::ReadWrite);
            assert!(matches!(&error, PoolError::Damaged { first, .. }
                if matches!(**first, Finding::OwnerWord { chunk: found, .. } if found.0 == chunk)));
            let pool = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
            assert!(!pool.check().unwrap().is_clean());
            assert_states_add_up(&pool.info());
            drop(pool);
            fixture.flip(entry(chunk) + byte, 5);
        }
    }
}

#[test]
fn zeroed_table_is_damage_instead_of_an_empty_pool() {
    let fixture = with_volume();
    fixture.overwrite(CHUNK_TABLE_OFFSET, &[0; 4096]);
    assert!(matches!(fixture.open_error(OpenMode::ReadWrite), PoolError::Damaged { .. }));
    let fixture = with_volume();
    VOLUME_TABLE_OFFSETS
        .iter()
        .for_each(|at| fixture.overwrite(*at, &[0; VOLUME_RECORD_BYTES as usize]));
    assert!(matches!(fixture.open_error(OpenMode::ReadWrite), PoolError::Damaged { .. }));
}

#[test]
fn duplicate_and_missing_indexes_are_detected() {
    let fixture = with_volume();
    let owner = |chunk, owner| {
        fixture.overwrite(entry(chunk), &encode_owner(ChunkId(chunk), owner).to_le_bytes())
    };
    let of_volume = |index| Owner::Volume { slot: Slot(0), index };
    let pool = fixture.open();
    let first = pool.open_volume("data").unwrap().extents()[0].run.start;
    drop(pool);

    owner(20, of_volume(1));
    let report = fixture.check();
    assert!(matches!(report.pool[..], [Finding::IndexTwice { index: 1, .. }]), "{:?}", report.pool);
    assert!(matches!(fixture.open_error(OpenMode::ReadWrite), PoolError::Damaged { .. }));
    owner(20, Owner::Free);

    owner(first.0 + 1, Owner::Free);
    let report = fixture.check();
    assert!(matches!(report.pool[..], [Finding::IndexMissing { missing: 1, first_index: 1, .. }]));
    let error = fixture.open_error(OpenMode::ReadWrite);
    assert!(
        matches!(&error, PoolError::Damaged { first, .. } if matches!(**first, Finding::IndexMissing { .. }))
    );
    let pool = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
    assert!(matches!(pool.open_volume("data"), Err(PoolError::VolumeUnusable { .. })));
    drop(pool);

    owner(0, Owner::Free);
    assert!(
        fixture
            .check()
            .pool
            .iter()
            .any(|f| matches!(f, Finding::MetadataTaken { chunk: ChunkId(0), .. }))
    );
    assert!(matches!(fixture.open_error(OpenMode::ReadWrite), PoolError::Damaged { .. }));
}

#[test]
fn leftovers_of_unfinished_operations_are_erased_and_freed() {
    let fixture = with_volume();
    let owner = |chunk, owner| {
        fixture.overwrite(entry(chunk), &encode_owner(ChunkId(chunk), owner).to_le_bytes())
    };
    // Leftovers of creating and growing a volume, and of a moved table, and an unscrubbed chunk.
    let leftovers = [
        Owner::Volume { slot: Slot(5), index: 0 },
        Owner::Volume { slot: Slot(0), index: 3 },
        Owner::Metadata,
        Owner::Scrub,
    ];
    for (chunk, left) in (20..).zip(leftovers) {
        owner(chunk, left);
        fixture.overwrite(ChunkId(chunk).offset_bytes() + 100, b"old content");
    }
    let report = fixture.check();
    assert_eq!(report.pool, [Finding::Unscrubbed { chunks: 1 }, Finding::Leftover { chunks: 3 }]);
    assert!(report.is_clean());
    let pool = fixture.open();
    assert_eq!((pool.info().free_bytes, pool.info().scrubbing_bytes), (46 * MIB, 8 * MIB));
    pool.scrub_all().unwrap();
    assert_eq!(pool.info().free_bytes, 54 * MIB);
    assert!((20..24).all(|chunk| is_zero(&pool, Extent::chunk(ChunkId(chunk)))));
    drop(pool);
    assert_eq!(fixture.check().pool, []);
}

#[test]
fn transaction_is_redone_inside_volumes_and_refused_elsewhere() {
    let fixture = with_volume();
    let pool = fixture.open();
    let last = pool.open_volume("data").unwrap().extents()[0].run.start.0 + 2;
    let superblock = pool.superblock();
    drop(pool);
    // The last chunk of the volume moves to chunk 25. Two words must change together.
    let moved = encode_owner(ChunkId(25), Owner::Volume { slot: Slot(0), index: 2 });
    let words = [(entry(last), encode_owner(ChunkId(last), Owner::Scrub)), (entry(25), moved)];
    let media = crate::media::MemoryMedia::from_bytes(&fs::read(fixture.path()).unwrap());
    redo_log::write_for_test(&media, &superblock, &words);
    fs::write(fixture.path(), media.to_bytes()).unwrap();

    let report = fixture.check();
    assert_eq!(
        report.pool,
        [Finding::LogPending { entries: 2 }, Finding::Unscrubbed { chunks: 1 }]
    );
    assert!(report.is_clean());
    let opened = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
    assert_eq!(
        opened.open_volume("data").unwrap().extents()[1].run.start,
        ChunkId(25),
        "readers see it redone"
    );
    drop(opened);
    let pool = fixture.open();
    let volume = pool.open_volume("data").unwrap();
    assert_eq!(volume.extents()[1].run, Run { start: ChunkId(25), chunks: 1 });
    pool.scrub_all().unwrap();
    assert_eq!(pool.info().free_bytes, 54 * MIB);
    drop((volume, pool));
    assert_eq!(fixture.check().pool, []);

    // Each transaction would store to an invalid place: a free chunk, a superblock, the log itself,
    // or past the end.
    for at in [32 * MIB, 40, LOG_OFFSET, 64 * MIB, u64::MAX - 7] {
        redo_log::write_for_test(&media, &superblock, &[(at, 1)]);
        fs::write(fixture.path(), media.to_bytes()).unwrap();
        assert!(
            matches!(fixture.open_error(OpenMode::ReadWrite), PoolError::Damaged { .. }),
            "{at:#x}"
        );
    }
}

#[test]
fn wear_leveling_continues_after_an_open() {
    let fixture = Fixture::new();
    let mut pool = fixture.create(64 * MIB, 0);
    for cycle in 1..=10_000 {
        let lent = pool.alloc_memory(2 * MIB).unwrap();
        pool.free_memory(&lent).unwrap();
        pool.scrub_all().unwrap();
        if cycle % 2500 == 0 {
            drop(pool);
            pool = fixture.open();
        }
    }
    let table = ChunkTable::new(&pool.superblock());
    let wear: Vec<_> =
        (2..32).map(|chunk| table.uses(pool.media(), ChunkId(chunk)).unwrap()).collect();
    assert_eq!(wear.iter().sum::<u32>(), 10_000);
    let (least, most) = (wear.iter().min().unwrap(), wear.iter().max().unwrap());
    // The average is 333. Without wear leveling, a single chunk would have all uses.
    assert!(*least >= 290 && *most <= 380, "{wear:?}");
    assert_eq!(pool.info().free_bytes, 60 * MIB);
}

#[test]
fn wear_count_increases_with_every_use() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    for _ in 0..3 {
        let all = pool.alloc_memory(60 * MIB).unwrap();
        pool.free_memory(&all).unwrap();
    }
    pool.create_volume("a", VolumeSize::Remaining, VolumeFormat::Raw).unwrap();
    drop(pool);
    let bytes = fs::read(fixture.path()).unwrap();
    let wear = |chunk: u32| {
        let at = entry(chunk) as usize + 8;
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    };
    let used = |chunk: u32, uses, owner| {
        encode_wear(ChunkId(chunk), WearWord { uses, owner: Some(owner) })
    };
    assert_eq!(wear(1), used(1, 0, Owner::Metadata));
    let owner = |chunk| Owner::Volume { slot: Slot(0), index: chunk - 2 };
    assert!((2..32).all(|chunk| wear(chunk) == used(chunk, 4, owner(chunk))));
}

#[test]
fn volume_in_use_is_checked_while_it_is_written() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    pool.create_volume("v", VolumeSize::Bytes(20 * MIB), VolumeFormat::Btt).unwrap();
    let volume = pool.open_volume("v").unwrap();
    let place = volume.extents()[0].offset_bytes();
    let engine = btt::Engine::open(volume).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                engine.write(number * 7 % engine.sectors(), &[number as u8; 4096]).unwrap();
                if is_over.load(std::sync::atomic::Ordering::SeqCst) {
                    break;
                }
            }
        });
        for _ in 0..20 {
            let report = pool.check().unwrap();
            assert!(report.is_clean(), "{report:?}");
            assert!(report.volumes[0].btt.is_some() && report.volumes[0].unusable.is_none());
        }
        is_over.store(true, std::sync::atomic::Ordering::SeqCst);
    });
    fixture.flip(place + 4096 + 100, 1);
    let report = pool.check().unwrap();
    let arena = &report.volumes[0].btt.as_ref().unwrap().arenas[0];
    assert_eq!(arena.findings, [btt::Finding::FirstInfo]);
}
