//! Tests of repairs in pools with thin volumes. A chunk with data may belong to a hole.

use super::crash::{Volumes, new_pool_of, open, volumes_of};
use super::hooked::{self, Hooked};
use super::repair::entry;
use super::*;
use crate::media::MediaError;
use crate::pool::format::table::{Owner, Slot, encode_owner};
use crate::pool::maintenance::repair::{first_claims, fix_owners_with, fix_tables};
use crate::pool::scan::scan;

/// Pool with a thin raw volume `thin` of 5 chunks, which has data at the indexes 1 and 3, in chunks
/// 2 and 3, and with a thick volume `full` in chunk 4.
fn with_thin_volume() -> Fixture {
    let fixture = Fixture::new();
    let pool = fixture.create(44 * MIB, 0);
    let options = VolumeOptions {
        size: VolumeSize::Bytes(10 * MIB),
        format: VolumeFormat::Raw,
        thin: true,
        reserve_bytes: None,
    };
    pool.create_volume_with("thin", options).unwrap();
    let volume = pool.open_volume("thin").unwrap();
    [1, 3].iter().for_each(|index| volume.store_word(index * CHUNK_BYTES, 7).unwrap());
    let chunks: Vec<_> = volume.allocated_extents().iter().map(|e| e.run.start.0).collect();
    assert_eq!(chunks, [2, 3]);
    pool.create_volume("full", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
    fixture
}

fn words(volume: &impl Media) -> Vec<u64> {
    (0..5).map(|index| volume.load_word(index * CHUNK_BYTES).unwrap()).collect()
}

/// Repairs the pool, and returns the report, which a dry run should predict.
fn repair(fixture: &Fixture, give_up: Option<&str>) -> RepairReport {
    let run = |dry_run| Pool::repair_with(&fixture.path(), dry_run, give_up, &mut |_| {}).unwrap();
    let before = fixture.image();
    let dry = run(true);
    assert!(before == fixture.image(), "a dry run changed something");
    let report = run(false);
    assert_eq!(dry.mended, report.mended);
    assert_eq!(dry.left.is_empty(), report.left.is_empty(), "{dry:?} {report:?}");
    assert_eq!(dry.incomplete_volumes, report.incomplete_volumes);
    report
}

/// Expects a repair to change nothing, and to report `left` pieces of damage.
fn assert_left(fixture: &Fixture, left: usize) {
    let damaged = fixture.image();
    let report = repair(fixture, None);
    assert_eq!((report.mended.len(), report.left.len()), (0, left), "{report:?}");
    assert!(damaged == fixture.image());
}

fn write_chunk(fixture: &Fixture, chunk: u32) {
    fixture.overwrite(u64::from(chunk) * CHUNK_BYTES + 4096, &[9; 8]);
}

#[test]
fn flipped_bit_in_the_owner_word_of_a_thin_volume_is_repaired() {
    for bit in [0, 29, 46, 63] {
        let fixture = with_thin_volume();
        let good = fixture.image();
        fixture.flip(entry(3) + bit / 8, (bit % 8) as u8);
        let report = repair(&fixture, None);
        assert_eq!((report.mended.len(), report.left.len()), (1, 0), "{report:?}");
        assert!(good == fixture.image());
        let pool = fixture.open();
        assert_eq!(words(&pool.open_volume("thin").unwrap()), [0, 7, 0, 7, 0]);
    }
}

/// Stores both words of an entry.
fn set_entry(fixture: &Fixture, chunk: u32, owner: Owner) {
    let pool = fixture.open();
    pool.table().set_entry(pool.media(), ChunkId(chunk), owner, 1).unwrap();
}

/// Destroys an owner word, but not its copy.
fn zero_owner(fixture: &Fixture, chunk: u32) {
    fixture.overwrite(entry(chunk), &[0; 8]);
}

#[test]
fn lost_owner_words_of_a_thin_volume_are_repaired_from_their_copies() {
    for lost in [0, !0, 0x0123_4567_89ab_cdef_u64] {
        let fixture = with_thin_volume();
        let good = fixture.image();
        [2, 3, 4, 9].iter().for_each(|chunk| fixture.overwrite(entry(*chunk), &lost.to_le_bytes()));
        let report = repair(&fixture, None);
        assert_eq!(report.left, [""; 0], "{report:?}");
        assert_eq!(report.incomplete_volumes, [""; 0]);
        assert!(report.mended[1].contains("a copy of the owner: chunk 3 of volume thin"));
        assert_eq!(words(&fixture.open().open_volume("thin").unwrap()), [0, 7, 0, 7, 0]);
        assert!(good == fixture.image());
    }
}

#[test]
fn unused_chunk_with_data_is_recognized_by_its_copy() {
    for (owner, erased_chunks) in
        [(Owner::Scrub, 1), (Owner::Memory, 1), (Owner::Metadata, 1), (Owner::Retired, 0)]
    {
        let fixture = with_thin_volume();
        set_entry(&fixture, 9, owner);
        write_chunk(&fixture, 9);
        zero_owner(&fixture, 9);
        let report = repair(&fixture, None);
        assert_eq!(report.left, [""; 0], "{owner:?}: {report:?}");
        assert_eq!(fixture.check().pool, []);
        let info = fixture.open().info();
        assert_eq!(info.retired_bytes, (1 - erased_chunks) * CHUNK_BYTES);
        assert_eq!(info.free_bytes, (16 + erased_chunks) * CHUNK_BYTES);
    }
}

/// The flipped bit of chunk 9 names memory, and its copy index 3. Either chunk may have the index.
#[test]
fn contradictory_claim_prevents_another() {
    let fixture = with_thin_volume();
    let third = Owner::Volume { slot: Slot(0), index: 3 };
    set_entry(&fixture, 9, third);
    let word = encode_owner(ChunkId(9), Owner::Memory) ^ 1 << 50;
    fixture.overwrite(entry(9), &word.to_le_bytes());
    write_chunk(&fixture, 9);
    zero_owner(&fixture, 3);
    assert_left(&fixture, 2);
}

#[test]
fn retired_chunk_with_a_flipped_bit_stays_retired() {
    let fixture = Fixture::new();
    drop(fixture.create(44 * MIB, 0));
    // The copy is still *free*, because a repair stored only the owner word.
    let word = encode_owner(ChunkId(9), Owner::Retired) ^ 1 << 50;
    fixture.overwrite(entry(9), &word.to_le_bytes());
    assert_eq!(repair(&fixture, None).left, [""; 0]);
    assert_eq!(fixture.open().info().retired_bytes, CHUNK_BYTES);
}

/// Expects a repair to change nothing, and the broken variant to restore other data than was lost.
fn assert_not_guessed(fixture: &Fixture) {
    let damaged = fixture.image();
    let report = repair(fixture, None);
    assert_eq!(report.mended, [""; 0]);
    assert!(damaged == fixture.image());
    let error = fixture.open_error(OpenMode::ReadWrite);
    assert!(matches!(error, PoolError::Damaged { .. }), "{error}");
    let reader = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
    let (media, superblock) = (reader.media(), reader.superblock());
    let found = scan(media, &superblock).unwrap();
    let fixes = fix_owners_with(media, &superblock, &found, first_claims).unwrap();
    drop(reader);
    assert!(!fixes.is_empty());
    for (at, word) in fixes.iter().flat_map(|fix| &fix.words) {
        fixture.overwrite(*at, &word.to_le_bytes());
    }
    let reader = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
    let guessed = reader.open_damaged_volume("thin").unwrap();
    assert_ne!(guessed.load_word(3 * CHUNK_BYTES).ok(), Some(7), "the guess is right");
}

#[test]
fn index_that_two_chunks_claim_is_not_restored() {
    let fixture = with_thin_volume();
    // The copy of chunk 2 also names index 3. The old data of the chunk must not appear there.
    let third = Owner::Volume { slot: Slot(0), index: 3 };
    set_entry(&fixture, 2, third);
    fixture.overwrite(2 * CHUNK_BYTES, &[8; 8]);
    [2, 3].iter().for_each(|chunk| zero_owner(&fixture, *chunk));
    assert_not_guessed(&fixture);
}

/// Neither of the chunks may appear in another volume once their volume is given up.
#[test]
fn chunks_of_a_volume_that_is_given_up_are_erased() {
    let fixture = with_thin_volume();
    set_entry(&fixture, 2, Owner::Volume { slot: Slot(0), index: 3 });
    [2, 3].iter().for_each(|chunk| zero_owner(&fixture, *chunk));
    let options = VolumeOptions {
        size: VolumeSize::Bytes(1 << 41),
        format: VolumeFormat::Raw,
        thin: true,
        reserve_bytes: Some(0),
    };
    assert_eq!(repair(&fixture, None).left.len(), 2);
    let report = repair(&fixture, Some("thin"));
    assert_eq!(report.left, [""; 0], "{report:?}");
    let pool = fixture.open();
    assert_eq!(pool.info().free_bytes, 19 * CHUNK_BYTES);
    for chunk in [2, 3] {
        assert_eq!(pool.media().load_word(ChunkId(chunk).offset_bytes()).unwrap(), 0);
    }
    pool.create_volume_with("other", options).unwrap();
    assert_eq!(pool.open_volume("other").unwrap().allocated_bytes(), 0);
}

/// The volume in the copy is deleted or has shrunk, or another chunk has the index. As the copy may
/// be wrong, a chunk with data may belong to a hole.
#[test]
fn chunk_that_no_volume_lacks_is_erased_only_if_it_reads_as_zeros() {
    for (slot, index) in [(7, 2), (0, 5), (0, 1)] {
        for has_data in [true, false] {
            let fixture = with_thin_volume();
            set_entry(&fixture, 9, Owner::Volume { slot: Slot(slot), index });
            if has_data {
                write_chunk(&fixture, 9);
            }
            zero_owner(&fixture, 9);
            let report = repair(&fixture, None);
            assert_eq!(report.left.len(), usize::from(has_data), "{report:?}");
            if !has_data {
                assert_eq!(words(&fixture.open().open_volume("thin").unwrap()), [0, 7, 0, 7, 0]);
                assert_eq!(fixture.open().info().free_bytes, 17 * CHUNK_BYTES);
            }
        }
    }
}

#[test]
fn free_chunk_with_data_and_a_lost_word_may_belong_to_a_hole() {
    let fixture = with_thin_volume();
    write_chunk(&fixture, 9);
    zero_owner(&fixture, 9);
    assert_left(&fixture, 1);
}

#[test]
fn word_with_a_flipped_bit_and_its_copy_may_name_different_unused_states() {
    let fixture = with_thin_volume();
    set_entry(&fixture, 9, Owner::Memory);
    write_chunk(&fixture, 9);
    let word = encode_owner(ChunkId(9), Owner::Scrub) ^ 1 << 50;
    fixture.overwrite(entry(9), &word.to_le_bytes());
    let report = repair(&fixture, None);
    assert_eq!(report.left, [""; 0], "{report:?}");
    assert_eq!(fixture.open().info().free_bytes, 17 * CHUNK_BYTES);
}

/// Otherwise, only a second repair would find that no volume has a hole.
#[test]
fn chunk_is_erased_in_the_repair_that_fills_the_last_hole() {
    let fixture = with_thin_volume();
    fixture.open().open_volume("thin").unwrap().provision(0..10 * MIB).unwrap();
    zero_owner(&fixture, 3);
    fixture.lose_owner(15);
    write_chunk(&fixture, 15);
    let report = repair(&fixture, None);
    assert_eq!(report.left, [""; 0], "{report:?}");
    assert!(report.mended[1].contains("no volume lacks a chunk"), "{report:?}");
    assert_eq!(words(&fixture.open().open_volume("thin").unwrap()), [0, 7, 0, 7, 0]);
}

#[test]
fn chunk_of_a_volume_with_a_lost_record_stays() {
    let fixture = with_thin_volume();
    let pool = fixture.open();
    let records = pool.superblock().volume_record_offsets(Slot(0));
    drop(pool);
    records.iter().for_each(|at| fixture.overwrite(*at, &[0xee; 256]));
    zero_owner(&fixture, 3);
    let damaged = fixture.image();
    let report = repair(&fixture, None);
    assert_eq!(report.mended, [""; 0], "{report:?}");
    assert!(damaged == fixture.image());
}

#[test]
fn word_is_not_repaired_if_its_flipped_bit_and_its_copy_name_different_owners() {
    let fixture = with_thin_volume();
    let word = encode_owner(ChunkId(3), Owner::Scrub) ^ 1 << 50;
    fixture.overwrite(entry(3), &word.to_le_bytes());
    assert_left(&fixture, 1);
}

#[test]
fn chunk_with_data_may_belong_to_a_hole_until_the_volume_is_given_up() {
    let fixture = with_thin_volume();
    fixture.lose_owner(3);
    let damaged = fixture.image();
    let report = repair(&fixture, None);
    assert_eq!((report.mended.len(), report.left.len()), (0, 1), "{report:?}");
    assert_eq!(report.incomplete_volumes, ["thin"]);
    assert!(damaged == fixture.image());
    let error = fixture.open_error(OpenMode::ReadWrite);
    assert!(matches!(error, PoolError::Damaged { .. }), "{error}");
    // A reader gets the rest of the volume only if it accepts missing chunks.
    let reader = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
    let error = reader.open_volume("thin").unwrap_err();
    assert!(matches!(error, PoolError::VolumeUnusable { .. }), "{error}");
    // No missing chunk is read as a hole.
    let volume = reader.open_damaged_volume("thin").unwrap();
    assert_eq!(volume.load_word(CHUNK_BYTES).unwrap(), 7);
    for index in [0, 2, 3, 4] {
        let at = index * CHUNK_BYTES;
        assert!(matches!(volume.load_word(at), Err(MediaError::Io { .. })), "{index}");
        assert!(volume.next_data(at..at + 8).unwrap().is_some());
    }
    assert!(reader.open_volume("full").is_ok());
    assert!(!reader.check().unwrap().is_clean());
    drop((reader, volume));
    let report = repair(&fixture, Some("thin"));
    assert_eq!(report.left, [""; 0], "{report:?}");
    let pool = fixture.open();
    assert_eq!(pool.volumes().iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["full"]);
    assert_eq!(pool.info().free_bytes, 38 * MIB);
    assert_eq!(pool.check().unwrap().pool, []);
}

#[test]
fn holes_of_a_thin_volume_in_an_intact_pool_are_zeros_for_a_rescue() {
    let fixture = with_thin_volume();
    let reader = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
    let volume = reader.open_damaged_volume("thin").unwrap();
    assert_eq!(words(&volume), [0, 7, 0, 7, 0]);
    let data = volume.next_data(0..10 * MIB).unwrap().unwrap();
    assert_eq!(data.start / CHUNK_BYTES, 1);
}

/// The damaged word may be that of a thin chunk, while the word of the missing chunk was lost to a
/// valid one.
#[test]
fn only_gap_is_not_filled_while_a_thin_volume_has_a_hole() {
    let fixture = with_thin_volume();
    let lost = encode_owner(ChunkId(4), Owner::Free);
    fixture.overwrite(entry(4), &lost.to_le_bytes());
    fixture.lose_owner(3);
    let damaged = fixture.image();
    let report = repair(&fixture, None);
    assert_eq!((report.mended.len(), report.left.len()), (0, 2), "{report:?}");
    assert_eq!(report.incomplete_volumes, ["full", "thin"]);
    assert!(damaged == fixture.image());
}

#[test]
fn chunk_of_zeros_with_a_damaged_owner_word_is_erased() {
    let fixture = with_thin_volume();
    fixture.lose_owner(9);
    let report = repair(&fixture, None);
    assert_eq!(report.left, [""; 0], "{report:?}");
    assert_eq!(words(&fixture.open().open_volume("thin").unwrap()), [0, 7, 0, 7, 0]);
}

#[test]
fn flipped_bit_in_the_owner_word_of_an_unused_chunk_with_data_is_repaired() {
    let fixture = with_thin_volume();
    let word = encode_owner(ChunkId(9), Owner::Scrub) ^ 1 << 50;
    fixture.overwrite(entry(9), &word.to_le_bytes());
    fixture.remove_copy(9);
    write_chunk(&fixture, 9);
    let report = repair(&fixture, None);
    assert_eq!(report.left, [""; 0], "{report:?}");
    assert_eq!(fixture.open().check().unwrap().pool, []);
}

/// Opening accepts the hole that the lost owner word has left, and would hand out the chunk.
#[test]
fn free_chunk_with_data_is_never_used_again_while_a_volume_has_a_hole() {
    let fixture = with_thin_volume();
    let lost = encode_owner(ChunkId(3), Owner::Free);
    fixture.overwrite(entry(3), &lost.to_le_bytes());
    assert_eq!(fixture.check().pool, [Finding::NotErased { chunk: ChunkId(3) }]);
    let report = repair(&fixture, None);
    assert_eq!((report.mended.len(), report.left.len()), (1, 0), "{report:?}");
    assert!(report.mended[0].contains("thin volume may have lost"), "{report:?}");
    assert_eq!(fixture.check().pool, []);
    let pool = fixture.open();
    let info = pool.info();
    assert_eq!(info.retired_bytes, CHUNK_BYTES);
    assert_states_add_up(&info);
    let volume = pool.open_volume("thin").unwrap();
    assert_eq!(words(&volume), [0, 7, 0, 0, 0]);
    volume.provision(0..10 * MIB).unwrap();
    let memory = pool.alloc_memory(pool.info().lendable_bytes).unwrap();
    let runs =
        memory.iter().map(|e| e.run()).chain(volume.allocated_extents().into_iter().map(|e| e.run));
    assert!(runs.flat_map(|run| run.ids()).all(|chunk| chunk != ChunkId(3)));
    assert_eq!(pool.media().load_word(ChunkId(3).offset_bytes()).unwrap(), 7, "the data is lost");
}

#[test]
fn free_chunk_with_data_is_erased_if_the_thin_volume_is_given_up() {
    let fixture = with_thin_volume();
    write_chunk(&fixture, 9);
    let report = repair(&fixture, Some("thin"));
    assert_eq!(report.left, [""; 0], "{report:?}");
    assert_eq!(fixture.check().pool, []);
    assert_eq!(fixture.open().info().retired_bytes, 0);
}

#[test]
fn thin_volume_of_an_intact_pool_is_not_given_up() {
    let fixture = with_thin_volume();
    for name in ["thin", "full"] {
        let error = Pool::repair_with(&fixture.path(), false, Some(name), &mut |_| {}).unwrap_err();
        assert!(matches!(error, PoolError::VolumeComplete { .. }), "{error}");
    }
    assert_eq!(words(&fixture.open().open_volume("thin").unwrap()), [0, 7, 0, 7, 0]);
}

/// Pool with a raw volume `v` of 3 chunks, all with data, on media with unreadable ranges. Returns
/// the volume's chunks.
fn with_unreadable_media(thin: bool) -> (Hooked, Superblock, Vec<ChunkId>) {
    let media = Hooked::new(16 * CHUNK_BYTES, || Ok(()));
    let pool = hooked::open(media.clone());
    let options = VolumeOptions {
        size: VolumeSize::Bytes(6 * MIB),
        format: VolumeFormat::Raw,
        thin,
        reserve_bytes: None,
    };
    pool.create_volume_with("v", options).unwrap();
    let volume = pool.open_volume("v").unwrap();
    let stored = if thin { 0..2 } else { 0..3 };
    stored.for_each(|index| volume.store_word(index * CHUNK_BYTES, 7).unwrap());
    let chunks = volume.allocated_extents().iter().flat_map(|e| e.run.ids()).collect();
    (media, pool.superblock(), chunks)
}

#[test]
fn unreadable_chunk_does_not_prevent_other_repairs() {
    let (media, superblock, chunks) = with_unreadable_media(true);
    media.store(entry(chunks[1].0), &[0; 16]).unwrap();
    media.store_word(entry(1), 0).unwrap();
    media.set_bad(Some(chunks[1].offset_bytes()..chunks[1].offset_bytes() + CHUNK_BYTES));
    let mut mended = vec![];
    fix_tables(&media, &superblock, None, false, &mut mended).unwrap();
    assert_eq!(mended.len(), 1, "{mended:?}");
    assert!(mended[0].contains("according to the superblock"), "{mended:?}");
    assert_eq!(media.load_word(entry(chunks[1].0)).unwrap(), 0, "the chunk may have data");
    // The chunk is a reason to give up the volume.
    fix_tables(&media, &superblock, Some("v"), false, &mut mended).unwrap();
    assert!(mended[1].contains("volume \"v\", which may lack its 3 chunks"), "{mended:?}");
}

#[test]
fn unreadable_free_chunk_is_a_reason_to_give_up_a_thin_volume() {
    for thin in [false, true] {
        let (media, superblock, chunks) = with_unreadable_media(thin);
        let lost = encode_owner(chunks[1], Owner::Free);
        media.store_word(entry(chunks[1].0), lost).unwrap();
        media.set_bad(Some(chunks[1].offset_bytes()..chunks[1].offset_bytes() + CHUNK_BYTES));
        let mut mended = vec![];
        fix_tables(&media, &superblock, Some("v"), false, &mut mended).unwrap();
        assert!(mended[0].contains("volume \"v\", which"), "{mended:?}");
    }
}

/// The first chunk of a part was just allocated for its BTT and reads as zeros, so a damaged owner
/// word becomes *scrub*. No chunk is unknown then, but the part can never be finished.
#[test]
fn part_without_a_chunk_for_its_metadata_can_be_given_up() {
    let (media, pool) = new_pool_of(28, |_| {});
    let size = VolumeSize::Bytes(18 * CHUNK_BYTES);
    let options =
        VolumeOptions { size, format: VolumeFormat::Btt, thin: true, reserve_bytes: None };
    pool.create_volume_with("v", options).unwrap();
    let volume = pool.open_volume("v").unwrap();
    volume.provision(8 * CHUNK_BYTES..10 * CHUNK_BYTES).unwrap();
    let extents = volume.allocated_extents();
    let extent = extents.iter().find(|e| (e.index..e.index + e.run.chunks).contains(&9)).unwrap();
    let chunk = extent.run.start.plus(9 - extent.index);
    drop(volume);
    let parts =
        [("v", 9), ("w", 9)].map(|(n, c)| (n.to_owned(), VolumeSize::Bytes(c * CHUNK_BYTES)));
    let records = pool.plan_parts(&pool.lock_state(), Slot(0), &parts, &[9, 9]).unwrap();
    let words = pool.split_words(&records).unwrap();
    redo_log::commit(&media, &pool.superblock(), &words).unwrap();
    let superblock = pool.superblock();
    drop(pool);
    media.store(entry(chunk.0), &[0; 16]).unwrap();
    let fix = |give_up| fix_tables(&media, &superblock, give_up, false, &mut vec![]).map(drop);
    fix(None).unwrap();
    let error = open(&media).unwrap_err();
    assert!(error.to_string().contains("\"w\" lacks 1 of its 9 chunks"), "{error}");
    let error = fix(Some("v")).unwrap_err();
    assert!(matches!(error, PoolError::VolumeComplete { .. }), "{error}");
    fix(Some("w")).unwrap();
    assert_eq!(volumes_of(&open(&media).unwrap()), Volumes::from([("v".to_owned(), 9)]));
}
