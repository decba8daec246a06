//! Tests of repairs. Damage that can be explained should be restored byte for byte, and other
//! damage should not be changed.

use uuid::Uuid;

use super::*;
use crate::pool::format::table::{Owner, Slot};
use crate::pool::layout::{
    CHUNK_TABLE_OFFSET, LOG_OFFSET, SUPERBLOCK_OFFSETS, VOLUME_TABLE_OFFSETS,
};
use crate::pool::maintenance::repair::{correct_one_bit, fix_owners};

pub(super) fn entry(chunk: u32) -> u64 {
    CHUNK_TABLE_OFFSET + u64::from(chunk) * 16
}

/// Creates a pool with a BTT volume in chunks 2 to 10 and a raw volume in chunks 11 to 13.
pub(super) fn with_volumes() -> Fixture {
    let fixture = Fixture::new();
    let pool = fixture.create(44 * MIB, 0);
    pool.create_volume("btt", VolumeSize::Bytes(18 * MIB), VolumeFormat::Btt).unwrap();
    pool.create_volume("raw", VolumeSize::Bytes(6 * MIB), VolumeFormat::Raw).unwrap();
    let place = pool.open_volume("raw").unwrap().extents()[0].run;
    assert_eq!(place, Run { start: ChunkId(11), chunks: 3 });
    place.extents().for_each(|extent| fill(&pool, extent, 0x42));
    fixture
}

fn repair(fixture: &Fixture, dry_run: bool) -> RepairReport {
    Pool::repair(&fixture.path(), dry_run).unwrap()
}

/// Damages and repairs a pool, and expects the original bytes. The report should contain `words`.
fn assert_repaired(case: &str, damage: impl Fn(&Fixture), words: &str) {
    let fixture = with_volumes();
    let good = fs::read(fixture.path()).unwrap();
    damage(&fixture);
    let damaged = fs::read(fixture.path()).unwrap();
    assert!(damaged != good, "{case}");
    let dry = repair(&fixture, true);
    assert!(damaged == fs::read(fixture.path()).unwrap(), "{case}: a dry run changed something");
    let report = repair(&fixture, false);
    assert_eq!(
        (&report.mended, &report.left),
        (&dry.mended, &dry.left),
        "{case}: a dry run reports the same"
    );
    assert_eq!(report.left, [""; 0], "{case}");
    assert!(report.mended.iter().any(|text| text.contains(words)), "{case}: {:?}", report.mended);
    assert!(good == fs::read(fixture.path()).unwrap(), "{case}: not restored");
    assert!(fixture.check().is_clean());
    assert_eq!(repair(&fixture, false).mended, [""; 0], "{case}: the repair is incomplete");
}

/// Damages a pool, and expects a repair not to change it.
fn assert_unrepaired(case: &str, damage: impl Fn(&Fixture), words: &str) {
    let fixture = with_volumes();
    damage(&fixture);
    let damaged = fs::read(fixture.path()).unwrap();
    for dry_run in [true, false] {
        let report = repair(&fixture, dry_run);
        assert!(report.left.iter().any(|text| text.contains(words)), "{case}: {report:?}");
        assert!(
            damaged == fs::read(fixture.path()).unwrap(),
            "{case}: the media was changed: {report:?}"
        );
    }
}

#[test]
fn flipped_bit_in_any_owner_word_is_repaired() {
    for chunk in [1, 2, 12, 20] {
        for bit in [0, 29, 46, 63] {
            let flip = |fixture: &Fixture| fixture.flip(entry(chunk) + bit / 8, (bit % 8) as u8);
            assert_repaired(&format!("chunk {chunk} bit {bit}"), flip, "owner word");
        }
    }
}

#[test]
fn chunk_whose_repaired_word_is_free_is_erased() {
    let fixture = with_volumes();
    fixture.overwrite(ChunkId(20).offset_bytes() + 64, b"unknown owner");
    fixture.flip(entry(20) + 6, 3);
    assert_eq!(repair(&fixture, false).left, [""; 0]);
    assert!(is_zero(&fixture.open(), Extent::chunk(ChunkId(20))));
}

#[test]
fn lost_owner_word_is_repaired_by_elimination_or_stays() {
    let zero = Fixture::lose_owner;
    assert_repaired("of a volume", |f| zero(f, 12), "the only gap");
    assert_repaired("of a free chunk", |f| zero(f, 20), "no volume lacks a chunk");
    assert_repaired(
        "of two free chunks",
        |f| [20, 21].iter().for_each(|c| zero(f, *c)),
        "no volume lacks a chunk",
    );
    assert_repaired("of the pool's own", |f| zero(f, 1), "according to the superblock");
    // An owner word is *free* although the chunk contains metadata.
    let freed = table::encode_owner(ChunkId(1), Owner::Free).to_le_bytes();
    assert_repaired(
        "of the pool's own, free",
        |f| f.overwrite(entry(1), &freed),
        "according to the superblock",
    );
    // Two damaged owner words of the same volume cannot be distinguished. A damaged word of a
    // volume cannot be distinguished from that of a free chunk.
    assert_unrepaired(
        "two of one volume",
        |f| [11, 12].iter().for_each(|c| zero(f, *c)),
        "owner word of chunk C11",
    );
    assert_unrepaired(
        "one and a free one",
        |f| [12, 20].iter().for_each(|c| zero(f, *c)),
        "owner word of chunk C20",
    );
    // Owner word with one wrong bit. Without it, the word names an index that another chunk has.
    let twice =
        table::encode_owner(ChunkId(20), Owner::Volume { slot: Slot(1), index: 0 }) ^ 1 << 5;
    assert_repaired(
        "a second claim",
        |f| {
            f.overwrite(entry(20), &twice.to_le_bytes());
            f.remove_copy(20);
        },
        "no volume lacks a chunk",
    );
}

/// Creates a pool on sparse media that has space for a distant chunk.
fn with_chunk_at(far: ChunkId) -> Fixture {
    let fixture = Fixture::new();
    let size_bytes = u64::from(far.0 + 1) * CHUNK_BYTES;
    let superblock = create::plan(size_bytes, 0, Uuid::from_u128(1), 1).unwrap();
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).open(fixture.path()).unwrap();
    file.set_len(size_bytes).unwrap();
    create::write_empty_pool(&FileMedia::new(file, size_bytes, true).unwrap(), &superblock)
        .unwrap();
    fixture
        .open()
        .create_volume("v", VolumeSize::Bytes(2 * CHUNK_BYTES), VolumeFormat::Raw)
        .unwrap();
    let put = |chunk: ChunkId, owner| {
        fixture.overwrite(entry(chunk.0), &table::encode_owner(chunk, owner).to_le_bytes());
    };
    put(ChunkId(3), Owner::Free);
    put(far, Owner::Volume { slot: Slot(0), index: 1 });
    let pool = fixture.open();
    let places: Vec<_> =
        pool.open_volume("v").unwrap().extents().iter().map(|e| e.run.start).collect();
    assert_eq!(places, [ChunkId(2), far]);
    fill(&pool, Extent::chunk(far), 0x42);
    drop(pool);
    fixture
}

#[test]
fn zeroed_word_one_bit_away_from_a_valid_one_is_not_repaired() {
    let near = [
        (Owner::Free, [8476, 79167, 133_466, 204_153]),
        (Owner::Memory, [54342, 114_789, 195_584, 256_035]),
        (Owner::Metadata, [29226, 91657, 154_220, 216_655]),
    ];
    for (owner, chunks) in near {
        for chunk in chunks.map(ChunkId) {
            assert_eq!(table::encode_owner(chunk, owner).count_ones(), 1, "{chunk}");
            assert_eq!(correct_one_bit(chunk, 0), None, "{chunk}");
        }
    }
    let far = ChunkId(8476);
    let fixture = with_chunk_at(far);
    let content_is_there = || {
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        let file = fs::File::open(fixture.path()).unwrap();
        file.read_exact_at(&mut bytes, far.offset_bytes()).unwrap();
        bytes.iter().all(|byte| *byte == 0x42)
    };
    let good = fixture.image();
    fixture.lose_owner(far.0);
    let report = repair(&fixture, false);
    assert!(report.mended.iter().any(|text| text.contains("the only gap")), "{report:?}");
    assert!(good == fixture.image() && content_is_there(), "{report:?}");
    [2, far.0].iter().for_each(|chunk| fixture.lose_owner(*chunk));
    let damaged = fixture.image();
    for dry_run in [true, false] {
        let report = repair(&fixture, dry_run);
        assert!(
            report.left.iter().any(|text| text.contains("owner word of chunk C8476")),
            "{report:?}"
        );
        assert_eq!(report.mended, [""; 0]);
        assert!(damaged == fixture.image() && content_is_there(), "{report:?}");
    }
    assert!(matches!(fixture.open_error(OpenMode::ReadWrite), PoolError::Damaged { .. }));
}

#[test]
fn only_words_that_fill_gaps_are_trusted_while_a_gap_is_left() {
    let one_bit_off = |f: &Fixture, chunk: u32, owner| {
        let word = table::encode_owner(ChunkId(chunk), owner) ^ 1 << 5;
        f.overwrite(entry(chunk), &word.to_le_bytes());
        f.remove_copy(chunk);
    };
    let zero = Fixture::lose_owner;
    for owner in [Owner::Free, Owner::Scrub, Owner::Memory, Owner::Metadata, Owner::Retired] {
        let words = "owner word of chunk C12";
        assert_unrepaired(
            &format!("a volume's as {owner:?}"),
            |f| one_bit_off(f, 12, owner),
            words,
        );
        let damage_with_gap = |f: &Fixture| {
            zero(f, 12);
            one_bit_off(f, 20, owner);
        };
        assert_unrepaired(
            &format!("{owner:?} beside a gap"),
            damage_with_gap,
            "owner word of chunk C20",
        );
    }
    let second = Owner::Volume { slot: Slot(1), index: 1 };
    let claims = |f: &Fixture| [12, 20].iter().for_each(|chunk| one_bit_off(f, *chunk, second));
    assert_unrepaired("two claims to one gap", claims, "owner word of chunk C20");
    let lost_record = |f: &Fixture| {
        VOLUME_TABLE_OFFSETS.iter().for_each(|table| f.flip(table + 256 + 50, 1));
        one_bit_off(f, 20, Owner::Free);
    };
    assert_unrepaired("unknown volume", lost_record, "owner word of chunk C20");
    let filled = |f: &Fixture| {
        [12, 20].iter().for_each(|chunk| f.flip(entry(*chunk), 3));
        zero(f, 21);
    };
    assert_repaired("a gap that is filled", filled, "no volume lacks a chunk");
}

#[test]
fn halves_of_a_record_are_merged_and_a_lost_word_stays() {
    let [first, second] = VOLUME_TABLE_OFFSETS.map(|table| table + 256);
    let both = |f: &Fixture| {
        f.flip(first + 50, 1);
        f.flip(first + 70, 1);
        f.flip(second + 10, 6);
    };
    assert_repaired("the record", both, "volume record 1");
    // Without the record, the owner of the chunk cannot be determined.
    let more = |f: &Fixture| {
        both(f);
        f.lose_owner(12);
    };
    assert_repaired("the record and a chunk", more, "the only gap");
    assert_unrepaired(
        "one word in both",
        |f| [first, second].iter().for_each(|at| f.flip(at + 50, 1)),
        "volume record 1",
    );
    let [first, second] = SUPERBLOCK_OFFSETS;
    let superblocks = |f: &Fixture| {
        f.flip(first + 66, 1);
        f.flip(second + 90, 4);
    };
    assert_repaired("superblocks", superblocks, "both superblocks");
    let fixture = with_volumes();
    SUPERBLOCK_OFFSETS.iter().for_each(|at| fixture.flip(at + 66, 1));
    let before = fixture.image();
    assert!(matches!(
        Pool::repair(&fixture.path(), false),
        Err(PoolError::SuperblocksDamaged { .. })
    ));
    assert!(before == fixture.image());
}

#[test]
fn chunk_is_not_unused_while_a_record_is_lost() {
    let [first, second] = VOLUME_TABLE_OFFSETS.map(|table| table + 256 + 50);
    let damage = |f: &Fixture| {
        [first, second].iter().for_each(|at| f.flip(*at, 1));
        f.overwrite(entry(12), &[0; 8]);
    };
    assert_unrepaired("a chunk of the lost volume", damage, "owner word of chunk C12");
    // The lost record prevents the repair. If the loss were not found, the volume's chunk would be
    // erased.
    let fixture = with_volumes();
    damage(&fixture);
    let pool = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
    let mut seen = scan::scan(pool.media(), &pool.superblock()).unwrap();
    seen.findings.clear();
    let wrong = fix_owners(pool.media(), &pool.superblock(), &seen).unwrap();
    assert!(wrong[0].description.contains("to be erased"), "{wrong:?}");
}

#[test]
fn flipped_bit_of_an_empty_log_is_repaired_and_a_transaction_stays() {
    for bit in [7u64, 40] {
        assert_repaired("magic", |f| f.flip(LOG_OFFSET + bit / 8, (bit % 8) as u8), "log");
        assert_repaired("commit", |f| f.flip(LOG_OFFSET + 24 + bit / 8, (bit % 8) as u8), "log");
    }
    let two = |f: &Fixture| [0, 1].iter().for_each(|bit| f.flip(LOG_OFFSET + 24, *bit));
    assert_unrepaired("two bits", two, "log is damaged");
    // A committed transaction is redone before the damage is repaired.
    let fixture = with_volumes();
    let good = fs::read(fixture.path()).unwrap();
    let media = crate::media::MemoryMedia::from_bytes(&good);
    let superblock = Pool::open(&fixture.path(), OpenMode::Peek).unwrap().superblock();
    redo_log::write_for_test(&media, &superblock, &[(entry(0), 0)]);
    fs::write(fixture.path(), media.to_bytes()).unwrap();
    assert_eq!(repair(&fixture, false).left, [""; 0]);
    assert_eq!(fixture.check().pool, []);
    let transaction = |f: &Fixture| {
        let media = crate::media::MemoryMedia::from_bytes(&fs::read(f.path()).unwrap());
        let superblock = Pool::open(&f.path(), OpenMode::Peek).unwrap().superblock();
        redo_log::write_for_test(
            &media,
            &superblock,
            &[(entry(20), table::encode_owner(ChunkId(20), Owner::Scrub))],
        );
        media.store_word(LOG_OFFSET + 72, 7).unwrap();
        fs::write(f.path(), media.to_bytes()).unwrap();
    };
    assert_unrepaired("a damaged transaction", transaction, "log is damaged");
    // The stores of the transaction might explain the words differently.
    let more = |f: &Fixture| {
        transaction(f);
        f.flip(entry(12), 0);
        f.overwrite(entry(1), &[0; 8]);
        f.overwrite(entry(20), &[0; 8]);
    };
    assert_unrepaired("a damaged transaction and owner words", more, "log is damaged");
}

#[test]
fn explained_damage_of_a_btt_is_repaired() {
    let start = 2 * CHUNK_BYTES;
    let (first, second) = (start + 4096, start + 18 * MIB - 4096);
    assert_repaired(
        "first",
        |f| f.flip(first + 100, 2),
        "volume btt: arena 0: the first info block",
    );
    assert_repaired(
        "second",
        |f| f.flip(second + 60, 2),
        "volume btt: arena 0: the second info block",
    );
    assert_unrepaired(
        "both",
        |f| [first, second].iter().for_each(|at| f.flip(at + 60, 2)),
        "neither info block",
    );
    // Damages the last page of the map, where two sectors then share a block.
    let map_at = second - 16384 - 4096;
    let entry = |block: u32| (block | 3 << 30).to_le_bytes();
    assert_unrepaired(
        "map",
        |f| f.overwrite(map_at, &entry(20)),
        "volume btt: arena 0: block B20 is referenced twice",
    );
}

#[test]
fn repair_reports_the_corrections_of_open() {
    let fixture = with_volumes();
    let pool = fixture.open();
    pool.alloc_memory(4 * MIB).unwrap();
    drop(pool);
    fixture.flip(SUPERBLOCK_OFFSETS[1] + 70, 1);
    fixture.flip(VOLUME_TABLE_OFFSETS[0] + 70, 1);
    fixture.flip(entry(20) + 9, 1);
    let dry = repair(&fixture, true);
    assert_eq!(dry.mended.len(), 4, "{dry:?}");
    assert_eq!(dry.left, [""; 0]);
    assert_eq!(repair(&fixture, false).mended, dry.mended);
    assert_eq!(fixture.check().pool, []);
}

#[test]
fn non_pool_or_pool_in_use_is_not_repaired() {
    let fixture = with_volumes();
    let pool = fixture.open();
    for dry_run in [true, false] {
        assert!(matches!(Pool::repair(&fixture.path(), dry_run), Err(PoolError::InUse { .. })));
    }
    drop(pool);
    let before = fixture.image();
    assert_eq!(repair(&fixture, false).mended, [""; 0]);
    assert!(before == fixture.image());
    fs::write(fixture.path(), [0x17; 8192]).unwrap();
    for dry_run in [true, false] {
        assert!(matches!(Pool::repair(&fixture.path(), dry_run), Err(PoolError::NotAPool { .. })));
    }
    assert_eq!(fs::read(fixture.path()).unwrap(), [0x17; 8192]);
}
