//! Crashes during operations on thin volumes.

use super::campaign::{Replay, verify_each};
use super::crash::{
    Volumes, must_be_detected, new_pool_of, open, verify_marked, verify_space, volumes_of,
};
use super::crash_each::{Operation, Start, bytes, split_a_btt_volume, verify_operations};
use super::*;
use crate::media::simulator::{CrashPoint, Random, Simulator};
use crate::pool::format::superblock::allow_thin_volumes;
use crate::pool::format::table::{Owner, Slot};
use crate::pool::format::volume_record::VolumeRecord;

type Case = (&'static str, fn() -> Start, Operation, usize);

/// Operations, each with its minimum number of distinct images.
const OPERATIONS: [Case; 19] = [
    ("make the first thin raw volume", Start::new, |s| make(s, 3, VolumeFormat::Raw), 3050),
    ("make a thin BTT volume", Start::new, |s| make(s, 9, VolumeFormat::Btt), 6610),
    ("make another thin BTT volume", Start::thin, |s| make(s, 9, VolumeFormat::Btt), 3980),
    ("delete a thin volume", Start::thin, |s| s.pool.delete_volume("v").unwrap(), 1780),
    ("fill holes", Start::thin, |s| fill_holes(s, "v"), 280),
    ("fill holes of a BTT volume", Start::thin, |s| fill_holes(s, "b"), 870),
    ("fill holes with waiting chunks", Start::thin, fill_holes_with_waiting_chunks, 5710),
    ("release chunks", Start::thin, |s| release(s, "v", [1, 3]), 100),
    ("release chunks of a BTT volume", Start::thin, |s| release(s, "b", [3, 4]), 100),
    ("make a raw volume thick", Start::thin, |s| convert(s, "v", false), 520),
    ("make a BTT volume thick", Start::thin, |s| convert(s, "b", false), 1110),
    ("make a raw volume thin", Start::thin, |s| convert(s, "w", true), 280),
    ("make a BTT volume thin", Start::new, |s| convert(s, "b", true), 3540),
    ("grow a thin raw volume", Start::thin, |s| resize(s, "v", 7), 260),
    ("shrink a thin raw volume", Start::thin, |s| resize(s, "v", 1), 360),
    ("guarantee less of a thin volume", Start::thin, |s| reserve(s, "v", 2), 1),
    ("grow a thin BTT volume", Start::thin, |s| resize(s, "b", 18), 4280),
    (
        "split a thin raw volume",
        Start::thin,
        |s| s.split("v", [("v", bytes(1)), ("y", VolumeSize::Remaining)]),
        3060,
    ),
    ("split a thin BTT volume", Start::thin, split_a_btt_volume, 13010),
];

fn make(start: &Start, chunks: u64, format: VolumeFormat) {
    let options = VolumeOptions { size: bytes(chunks), format, thin: true, reserve_bytes: None };
    assert!(start.pool.create_volume_with("x", options).unwrap().thin);
}

fn fill_holes(start: &Start, name: &str) {
    let volume = start.pool.open_volume(name).unwrap();
    volume.provision(0..volume.size_bytes()).unwrap();
}

/// Releases chunks without data, erases one of them, and lends all memory.
fn release(start: &Start, name: &str, indexes: [u64; 2]) {
    let volume = start.pool.open_volume(name).unwrap();
    let units = indexes.map(|index| index * CHUNK_BYTES..(index + 1) * CHUNK_BYTES);
    units.iter().for_each(|unit| volume.provision(unit.clone()).unwrap());
    // The preparation is not part of the crash.
    start.media.take_points();
    start.media.record();
    assert_eq!(volume.release(&units, &|_| false).unwrap(), []);
    start.pool.scrub_some(CHUNK_BYTES).unwrap();
    let lendable_bytes = start.pool.info().lendable_bytes;
    crash::fill_memory(&start.media, &start.pool.alloc_memory(lendable_bytes).unwrap());
    volume.provision(units[0].clone()).unwrap();
}

/// All chunks that are left were used as memory before.
fn fill_holes_with_waiting_chunks(start: &Start) {
    use_all_clean_chunks(&start.media, &start.pool);
    fill_holes(start, "b");
}

/// Lends all memory, returns it and lends as much again, so that only waiting chunks are left for
/// volumes.
fn use_all_clean_chunks(media: &Simulator, pool: &OtherPool) {
    for is_returned in [true, false] {
        let memory = pool.alloc_memory(pool.info().lendable_bytes).unwrap();
        crash::fill_memory(media, &memory);
        if is_returned {
            pool.free_memory(&memory).unwrap();
        }
    }
    assert_eq!(pool.info().free_bytes, 0);
}

fn convert(start: &Start, name: &str, thin: bool) {
    assert_eq!(start.pool.convert_volume(name, thin).unwrap().thin, thin);
}

fn reserve(start: &Start, name: &str, chunks: u64) {
    start.pool.set_volume_reserve(name, chunks * CHUNK_BYTES).unwrap();
}

fn resize(start: &Start, name: &str, chunks: u64) {
    start.pool.resize_volume(name, bytes(chunks), Shrink::Allow).unwrap();
}

#[test]
fn every_operation_on_thin_volumes_survives_a_crash_at_every_persist() {
    verify_operations(OPERATIONS);
}

const VALUE: u64 = 0x5eed;

/// Pool with a thin volume `v` of 4 chunks. Only the first is allocated, and contains a word.
fn with_thin_volume() -> (Simulator, Arc<OtherPool>) {
    let (media, pool) = new_pool_of(12, |superblock| superblock.volume_slots = 2);
    let options = VolumeOptions {
        size: bytes(4),
        format: VolumeFormat::Raw,
        thin: true,
        reserve_bytes: None,
    };
    pool.create_volume_with("v", options).unwrap();
    let volume = pool.open_volume("v").unwrap();
    volume.store_word(8, VALUE).unwrap();
    volume.persist_range(8..16).unwrap();
    (media, pool)
}

/// Checks that the word in the first chunk is present, and that the word at `at` is too if
/// `is_durable`.
fn verify_store(image: &Simulator, at: u64, is_durable: bool) -> Result<(), String> {
    let pool = open(image).map_err(|error| format!("does not open: {error}"))?;
    let volume = pool.open_volume("v").map_err(|error| error.to_string())?;
    let word = volume.load_word(at).unwrap();
    if volume.load_word(8).unwrap() != VALUE || (word != VALUE && (is_durable || word != 0)) {
        return Err(format!("the word at {at:#x} is {word:#x}"));
    }
    let words: usize = crash::places(&volume)
        .iter()
        .map(|(_, id)| image.dirty_words(Extent::chunk(*id).run().byte_range()))
        .sum();
    if words != 1 + usize::from(at != 8 && word == VALUE) {
        return Err(format!("the volume contains {words} words"));
    }
    drop(volume);
    verify_space(image, &pool)
}

fn verify_stores(points: &[CrashPoint], at: u64, is_durable: bool) -> Result<usize, String> {
    verify_each(points, 300, &mut Random::new(3), &|image| verify_store(image, at, is_durable))
}

#[test]
fn store_into_a_hole_survives_a_crash_once_it_is_durable() {
    const AT: u64 = 2 * CHUNK_BYTES + 64;
    let (media, pool) = with_thin_volume();
    // The next chunk was used as memory before.
    use_all_clean_chunks(&media, &pool);
    let volume = pool.open_volume("v").unwrap();
    volume.provision(0..2 * CHUNK_BYTES).unwrap();
    media.record();
    volume.store_word(AT, VALUE).unwrap();
    volume.persist_range(AT..AT + 8).unwrap();
    let mut images = verify_stores(&media.take_points(), AT, false).unwrap();
    media.record();
    volume.provision(3 * CHUNK_BYTES..4 * CHUNK_BYTES).unwrap();
    images += verify_stores(&media.take_points(), AT, true).unwrap();
    Replay::from_environment().count(images, 8);
}

#[test]
fn store_before_a_durable_owner_word_is_detected() {
    const AT: u64 = CHUNK_BYTES + 64;
    let (media, pool) = with_thin_volume();
    media.record();
    let chunk = ChunkId(9);
    pool.table().set_owner(&media, chunk, Owner::Volume { slot: Slot(0), index: 1 }).unwrap();
    // Omitted: the persist of the owner word, before the chunk is used.
    media.store_word(chunk.offset_bytes() + 64, VALUE).unwrap();
    media.persist_range(chunk.offset_bytes() + 64..chunk.offset_bytes() + 72).unwrap();
    let error = verify_stores(&media.take_points(), AT, false).expect_err("not detected");
    assert!(error.contains("free chunk C9 has old content"), "{error}");
}

/// Runs `wrong` on a pool with the thin volume `v`. Expects the verification of a crash to fail.
fn must_be_detected_on_thin(wrong: impl Fn(&Simulator, &Arc<OtherPool>)) -> String {
    let (media, pool) = with_thin_volume();
    media.record();
    wrong(&media, &pool);
    verify_stores(&media.take_points(), 8, true).expect_err("the wrong order was not detected")
}

fn write_record(media: &Simulator, pool: &OtherPool, thin: bool) {
    let old = pool.lock_state().volumes[&Slot(0)].record.clone();
    let record = VolumeRecord { sequence: old.sequence + 1, thin, ..old };
    let offsets = pool.superblock().volume_record_offsets(record.slot);
    mirrored::write(media, offsets, &record.to_bytes()).unwrap();
}

#[test]
fn thick_record_before_its_chunks_is_detected() {
    let error = must_be_detected_on_thin(|media, pool| {
        write_record(media, pool, false);
        let run = Run { start: ChunkId(8), chunks: 3 };
        pool.mark(&[run], |position| Owner::Volume { slot: Slot(0), index: position + 1 }).unwrap();
    });
    assert!(error.contains("lacks 3 of its 4 chunks"), "{error}");
}

#[test]
fn release_of_a_chunk_that_was_not_read_is_detected() {
    let error = must_be_detected_on_thin(|media, pool| {
        let volume = pool.open_volume("v").unwrap();
        let run = crash::places(&volume)[0].1;
        pool.table().set_owner(media, run, Owner::Scrub).unwrap();
        pool.persist_entries(&[Run { start: run, chunks: 1 }]).unwrap();
    });
    assert!(error.contains("the word at 0x8 is 0x0"), "{error}");
}

#[test]
fn other_owner_before_the_release_is_durable_is_detected() {
    let error = must_be_detected_on_thin(|media, pool| {
        let volume = pool.open_volume("v").unwrap();
        volume.provision(CHUNK_BYTES..2 * CHUNK_BYTES).unwrap();
        let chunk = crash::places(&volume)[1].1;
        pool.table().set_owner(media, chunk, Owner::Scrub).unwrap();
        // Omitted: the persist of the owner word, before another owner stores to the chunk.
        let at = chunk.offset_bytes() + 64;
        media.store_word(at, VALUE).unwrap();
        media.persist_range(at..at + 8).unwrap();
    });
    assert!(error.contains("the volume contains 2 words"), "{error}");
}

#[test]
fn record_of_a_thin_volume_before_the_feature_bit_is_detected() {
    let error = must_be_detected(|media, pool| {
        write_record(media, pool, true);
        allow_thin_volumes(media, &pool.superblock()).unwrap();
    });
    assert!(error.contains("has a thin volume, but the superblocks have features"), "{error}");
}

/// The BTT of a part needs a chunk at its end, which is a hole of the split volume.
#[test]
fn split_that_does_not_fill_holes_first_is_detected() {
    let (media, pool) = new_pool_of(28, |_| {});
    let options = VolumeOptions {
        size: bytes(18),
        format: VolumeFormat::Btt,
        thin: true,
        reserve_bytes: None,
    };
    pool.create_volume_with("v", options).unwrap();
    let parts = [("v".to_owned(), bytes(9)), ("w".to_owned(), VolumeSize::Remaining)];
    let before = volumes_of(&pool);
    media.record();
    let records = pool.plan_parts(&pool.lock_state(), Slot(0), &parts, &[9, 9]).unwrap();
    let words = pool.split_words(&records).unwrap();
    redo_log::commit(&media, &pool.superblock(), &words).unwrap();
    let after = Volumes::from([("v".to_owned(), 9), ("w".to_owned(), 9)]);
    let verify = |image: &Simulator| verify_marked(image, &[&before, &after], &Default::default());
    let error = verify_each(&media.take_points(), 64, &mut Random::new(3), &verify)
        .expect_err("the wrong order was not detected");
    assert!(error.contains("lacks"), "{error}");
}
