//! Tests of splits: refusals, content of the parts, and crashes.

use std::collections::BTreeMap;

use super::crash::{
    Replay, Volumes, fill_blocks, new_pool_of, open, open_for, places, verify_each, verify_fresh,
    verify_space, volumes_of,
};
use super::repair::entry;
use super::*;
use crate::btt::{self, Engine};
use crate::media::Media;
use crate::media::simulator::{Random, Simulator};
use crate::pool::SplitContent;
use crate::pool::format::table::Slot;
use crate::pool::maintenance::repair::fix_metadata;
use crate::pool::volume::split::{
    batches, finish, finish_records, format_parts, store_part_owners, unformatted_runs,
};
use crate::progress::{Progress, Task};

const CHUNKS: u32 = 30;
/// Sectors of the BTT volume that have content. Each part has some, and some are at the start of
/// chunks.
const WRITTEN: [u64; 9] = [0, 1, 500, 509, 510, 1022, 1534, 4607, 8700];

fn part(name: &str, chunks: u64) -> (String, VolumeSize) {
    (name.to_owned(), VolumeSize::Bytes(chunks * CHUNK_BYTES))
}

fn rest(name: &str) -> (String, VolumeSize) {
    (name.to_owned(), VolumeSize::Remaining)
}

/// Returns the content at the start of a chunk in a raw volume.
fn mark(index: u64) -> u64 {
    0x1234_0000 + index
}

/// Creates a pool with a fragmented raw volume `v` of six chunks, and another volume.
fn with_raw_volume() -> (Simulator, Arc<OtherPool>) {
    let (media, pool) = new_pool_of(CHUNKS, |superblock| superblock.volume_slots = 5);
    for (name, chunks) in [("x", 1), ("v", 2), ("w", 1)] {
        pool.create_volume(name, VolumeSize::Bytes(chunks * CHUNK_BYTES), VolumeFormat::Raw)
            .unwrap();
    }
    pool.resize_volume("v", VolumeSize::Bytes(6 * CHUNK_BYTES), Shrink::Refuse).unwrap();
    let volume = pool.open_volume("v").unwrap();
    assert!(volume.extents().len() > 1);
    for index in 0..6 {
        volume.store(index * CHUNK_BYTES, &mark(index).to_le_bytes()).unwrap();
    }
    volume.persist(std::slice::from_ref(&(0..volume.size_bytes()))).unwrap();
    drop(volume);
    (media, pool)
}

/// Returns the requested parts.
fn raw_parts() -> [(String, VolumeSize); 3] {
    [part("v", 1), part("b", 3), rest("c")]
}

fn after_raw() -> Volumes {
    [("x", 1), ("w", 1), ("v", 1), ("b", 3), ("c", 2)]
        .map(|(name, chunks)| (name.to_owned(), chunks))
        .into()
}

fn words_of(pool: &Arc<OtherPool>, name: &str) -> Result<Vec<u64>, String> {
    let volume = pool.open_volume(name).map_err(|error| error.to_string())?;
    let word = |at: u64| {
        let mut bytes = [0; 8];
        volume.read(at * CHUNK_BYTES, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    };
    Ok((0..volume.size_bytes() / CHUNK_BYTES).map(word).collect())
}

/// Checks that either the volume or all parts exist, and that every byte is in the right place.
fn verify_raw_split(image: &Simulator, before: &Volumes) -> Result<(), String> {
    // A reader sees the same volumes, even before a writer completes the split.
    let opened = open_for(image, OpenMode::ReadOnly).map_err(|error| error.to_string())?;
    let visible = volumes_of(&opened);
    drop(opened);
    let pool = open(image).map_err(|error| error.to_string())?;
    let volumes = volumes_of(&pool);
    if visible != volumes {
        return Err(format!("{visible:?} are visible, but the volumes are {volumes:?}"));
    }
    let parts: &[(&str, std::ops::Range<u64>)] = match volumes {
        volumes if volumes == *before => &[("v", 0..6)],
        volumes if volumes == after_raw() => &[("v", 0..1), ("b", 1..4), ("c", 4..6)],
        volumes => return Err(format!("has volumes {volumes:?}")),
    };
    for (name, indexes) in parts {
        let words = words_of(&pool, name)?;
        if words != indexes.clone().map(mark).collect::<Vec<_>>() {
            return Err(format!("{name} holds {words:x?}"));
        }
    }
    verify_space(image, &pool)
}

#[test]
fn split_of_a_raw_volume_is_atomic() {
    let (media, pool) = with_raw_volume();
    let before = volumes_of(&pool);
    media.record();
    let parts = pool.split_volume("v", &raw_parts(), SplitContent::Refuse).unwrap();
    let points = media.take_points();
    assert_eq!(parts.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["v", "b", "c"]);
    assert_eq!(volumes_of(&pool), after_raw());
    assert_states_add_up(&pool.info());
    let images =
        verify_each(&points, 300, &mut Random::new(5), &|image| verify_raw_split(image, &before))
            .unwrap();
    Replay::from_environment().count(images, 730);
    // The parts are ordinary volumes from here on.
    pool.delete_volume("b").unwrap();
    pool.resize_volume("c", VolumeSize::Bytes(4 * CHUNK_BYTES), Shrink::Refuse).unwrap();
    pool.scrub_all().unwrap();
    assert_eq!(words_of(&pool, "c").unwrap()[..2], [mark(4), mark(5)]);
    verify_space(&media, &pool).unwrap();
}

fn plan(
    pool: &OtherPool,
    slot: Slot,
    parts: &[(String, VolumeSize)],
) -> Vec<volume_record::VolumeRecord> {
    let chunks: Vec<u32> = parts
        .iter()
        .map(|(_, size)| match size {
            VolumeSize::Bytes(bytes) => (bytes / CHUNK_BYTES) as u32,
            VolumeSize::Remaining => 2,
        })
        .collect();
    pool.plan_parts(&pool.lock_state(), slot, parts, &chunks).unwrap()
}

/// Returns the parts of the volume according to their records.
fn entries(
    pool: &OtherPool,
    slot: Slot,
    records: &[volume_record::VolumeRecord],
) -> (Parts, Vec<Slot>) {
    let mut chunks = pool.lock_state().volumes[&slot].chunk_ids().collect::<Vec<_>>().into_iter();
    let parts = records.iter().map(|record| {
        let chunks = (0..).zip(chunks.by_ref().take(record.chunks as usize)).collect();
        (record.slot, scan::VolumeEntry { record: record.clone(), chunks })
    });
    (parts.collect(), records.iter().map(|record| record.slot).collect())
}

type Parts = BTreeMap<Slot, scan::VolumeEntry>;

#[test]
fn owner_words_before_the_records_are_detected() {
    let (media, pool) = with_raw_volume();
    let before = volumes_of(&pool);
    let slot = pool.lock_state().require_closed_volume("v").unwrap();
    let records = plan(&pool, slot, &raw_parts());
    media.record();
    let (parts, slots) = entries(&pool, slot, &records);
    store_part_owners(&media, &pool.superblock(), &parts, &slots).unwrap();
    // The records are written too late: they must precede the owner words.
    redo_log::commit(&media, &pool.superblock(), &pool.split_words(&records).unwrap()).unwrap();
    let points = media.take_points();
    verify_each(&points, 100, &mut Random::new(5), &|image| verify_raw_split(image, &before))
        .expect_err("the wrong order was not detected");
}

#[test]
fn records_without_a_transaction_are_detected() {
    let (media, pool) = with_raw_volume();
    let before = volumes_of(&pool);
    let slot = pool.lock_state().require_closed_volume("v").unwrap();
    let records = plan(&pool, slot, &raw_parts());
    media.record();
    for record in &records {
        let offsets = pool.superblock().volume_record_offsets(record.slot);
        mirrored::write(&media, offsets, &record.to_bytes()).unwrap();
    }
    let points = media.take_points();
    verify_each(&points, 100, &mut Random::new(5), &|image| verify_raw_split(image, &before))
        .expect_err("the wrong order was not detected");
}

/// Creates a pool with a BTT volume `v` of 18 chunks, which has content and has grown once.
fn with_btt_volume() -> (Simulator, Arc<OtherPool>) {
    let (media, pool) = new_pool_of(CHUNKS, |superblock| superblock.volume_slots = 4);
    pool.create_volume("v", VolumeSize::Bytes(9 * CHUNK_BYTES), VolumeFormat::Btt).unwrap();
    pool.resize_volume("v", VolumeSize::Bytes(18 * CHUNK_BYTES), Shrink::Refuse).unwrap();
    let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
    for sector in WRITTEN {
        engine.write(sector % engine.sectors(), &old_sector(sector)).unwrap();
    }
    drop(engine);
    (media, pool)
}

fn old_sector(sector: u64) -> [u8; 4096] {
    let mut bytes = [0xcd; 4096];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// Checks that either the volume exists with its content, or both parts exist and are empty.
fn verify_btt_split(image: &Simulator, before: &Volumes, every: usize) -> Result<(), String> {
    let pool = open(image).map_err(|error| error.to_string())?;
    let volumes = volumes_of(&pool);
    let after: Volumes = [("a".to_owned(), 9), ("b".to_owned(), 9)].into();
    if volumes != *before && volumes != after {
        return Err(format!("has volumes {volumes:?}"));
    }
    for name in volumes.keys() {
        let volume = pool.open_volume(name).map_err(|error| error.to_string())?;
        let report = volume.check_btt().expect("it has a BTT");
        if !report.is_clean() {
            return Err(format!("BTT of {name}: {report:?}"));
        }
        let reader = btt::Reader::open(&volume).unwrap();
        let mut bytes = [0xee; 4096];
        if volumes == *before {
            for sector in WRITTEN {
                reader.read(sector % reader.sectors(), &mut bytes).unwrap();
                if bytes != old_sector(sector) {
                    return Err(format!("{name} has lost sector {sector}"));
                }
            }
        } else {
            verify_fresh(image, &volume)?;
            for sector in (0..reader.sectors()).step_by(every) {
                reader.read(sector, &mut bytes).unwrap();
                if bytes != [0; 4096] {
                    return Err(format!("sector {sector} of {name} has old content"));
                }
            }
        }
    }
    verify_space(image, &pool)
}

#[test]
fn split_of_a_btt_volume_is_atomic_and_parts_are_empty() {
    let (media, pool) = with_btt_volume();
    let before = volumes_of(&pool);
    let parts = [part("a", 9), rest("b")];
    let refused = pool.split_volume("v", &parts, SplitContent::Refuse).unwrap_err();
    assert!(matches!(refused, PoolError::SplitHoldsData { .. }), "{refused}");
    assert_eq!(volumes_of(&pool), before);
    media.record();
    pool.split_volume("v", &parts, SplitContent::Discard).unwrap();
    let points = media.take_points();
    verify_btt_split(&media, &before, 1).unwrap();
    let verify_image = |image: &Simulator| verify_btt_split(image, &before, 97);
    let images = verify_each(&points, 60, &mut Random::new(5), &verify_image).unwrap();
    Replay::from_environment().count(images, 500);
    // Empty parts can be split without permission to discard content.
    pool.resize_volume("a", VolumeSize::Bytes(18 * CHUNK_BYTES), Shrink::Refuse).unwrap();
    pool.split_volume("a", &[part("c", 9), part("d", 9)], SplitContent::Refuse).unwrap();
    assert_eq!(pool.check().unwrap().pool, []);
}

/// Splits the BTT volume with wrong steps, and returns the error that reveals it.
fn split_wrongly(
    steps: impl Fn(&Simulator, &OtherPool, &[volume_record::VolumeRecord], &mut Parts, &[Slot]),
) -> String {
    let (media, pool) = with_btt_volume();
    fill_blocks(&media, &pool, "v");
    let before = volumes_of(&pool);
    let records = plan(&pool, Slot(0), &[part("a", 9), part("b", 9)]);
    let (mut parts, slots) = entries(&pool, Slot(0), &records);
    media.record();
    steps(&media, &pool, &records, &mut parts, &slots);
    let points = media.take_points();
    let verify_image = |image: &Simulator| verify_btt_split(image, &before, 97);
    let crashes = verify_each(&points, 20, &mut Random::new(5), &verify_image);
    crashes.and_then(|_| verify_image(&media)).expect_err("the wrong order was not detected")
}

fn commit(media: &Simulator, pool: &OtherPool, records: &[volume_record::VolumeRecord]) {
    redo_log::commit(media, &pool.superblock(), &pool.split_words(records).unwrap()).unwrap();
}

fn erase(media: &Simulator, parts: &Parts, slots: &[Slot]) {
    batches(&unformatted_runs(parts, slots)).iter().for_each(|batch| media.erase(batch).unwrap());
}

#[test]
fn btts_before_the_records_are_detected() {
    split_wrongly(|media, pool, records, parts, slots| {
        format_parts(media, parts, slots).unwrap();
        commit(media, pool, records);
        finish(media, &pool.superblock(), parts).unwrap();
    });
}

#[test]
fn erasing_before_the_records_is_detected() {
    split_wrongly(|media, pool, records, parts, slots| {
        erase(media, parts, slots);
        commit(media, pool, records);
        finish(media, &pool.superblock(), parts).unwrap();
    });
}

#[test]
fn missing_erasure_of_parts_is_detected() {
    split_wrongly(|media, pool, records, parts, slots| {
        commit(media, pool, records);
        store_part_owners(media, &pool.superblock(), parts, slots).unwrap();
        format_parts(media, parts, slots).unwrap();
        finish_records(media, &pool.superblock(), parts, slots).unwrap();
    });
}

/// The chunk contains only blocks that no map entry names.
#[test]
fn missing_erasure_of_a_single_chunk_is_detected() {
    let found = split_wrongly(|media, pool, records, parts, slots| {
        let forgotten = parts[&slots[1]].chunks[4].1.offset_bytes();
        commit(media, pool, records);
        store_part_owners(media, &pool.superblock(), parts, slots).unwrap();
        let old = Media::load_word(media, forgotten + CHUNK_BYTES / 2).unwrap();
        erase(media, parts, slots);
        media.store_word(forgotten + CHUNK_BYTES / 2, old).unwrap();
        media.persist_range(forgotten..forgotten + CHUNK_BYTES).unwrap();
        format_parts(media, parts, slots).unwrap();
        finish_records(media, &pool.superblock(), parts, slots).unwrap();
    });
    assert!(found.contains("old content"), "{found}");
}

#[test]
fn btts_before_the_erasure_are_detected() {
    split_wrongly(|media, pool, records, parts, slots| {
        commit(media, pool, records);
        store_part_owners(media, &pool.superblock(), parts, slots).unwrap();
        format_parts(media, parts, slots).unwrap();
        erase(media, parts, slots);
        finish_records(media, &pool.superblock(), parts, slots).unwrap();
    });
}

#[test]
fn final_records_before_the_last_step_are_detected() {
    split_wrongly(|media, pool, records, parts, slots| {
        commit(media, pool, records);
        store_part_owners(media, &pool.superblock(), parts, slots).unwrap();
        let runs = unformatted_runs(parts, slots);
        let unformatted: Vec<_> = parts.values().map(|part| part.record.part).collect();
        finish_records(media, &pool.superblock(), parts, slots).unwrap();
        batches(&runs).iter().for_each(|batch| media.erase(batch).unwrap());
        parts.values_mut().zip(unformatted).for_each(|(part, was)| part.record.part = was);
        format_parts(media, parts, slots).unwrap();
    });
}

/// Discarded sectors are treated as empty and cannot be read, but a guest that maps a part could
/// read their bytes.
#[test]
fn discarded_sectors_are_erased_from_parts() {
    let (media, pool) = with_btt_volume();
    let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
    engine.discard(0..engine.sectors()).unwrap();
    drop(engine);
    pool.split_volume("v", &[part("a", 9), rest("b")], SplitContent::Refuse).unwrap();
    for name in ["a", "b"] {
        verify_fresh(&media, &pool.open_volume(name).unwrap()).unwrap();
    }
    assert_eq!(pool.check().unwrap().pool, []);
}

/// Erasing the parts may take minutes. In the meantime, other threads use the pool.
#[test]
fn pool_is_usable_while_parts_are_erased() {
    let fixture = Fixture::new();
    let pool = fixture.create(640 * MIB, 0);
    pool.create_volume("v", VolumeSize::Bytes(600 * MIB), VolumeFormat::Btt).unwrap();
    let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
    (0..engine.sectors())
        .step_by(1000)
        .for_each(|sector| engine.write(sector, &old_sector(sector)).unwrap());
    drop(engine);
    let mut reported = Vec::new();
    let mut progress = |now: Progress| {
        assert_eq!((now.task, now.total_bytes), (Task::Erase, 600 * MIB));
        reported.push(now.done_bytes);
        let extents = pool.alloc_memory(2 * CHUNK_BYTES).unwrap();
        pool.free_memory(&extents).unwrap();
        assert!(matches!(pool.open_volume("b"), Err(PoolError::VolumeUnfinished { .. })));
        assert!(matches!(pool.delete_volume("v"), Err(PoolError::VolumeInUse { .. })));
    };
    let parts = [("v".to_owned(), VolumeSize::Bytes(100 * MIB)), rest("b")];
    pool.split_volume_with("v", &parts, SplitContent::Discard, &mut progress).unwrap();
    assert_eq!(reported, [0, 256, 512, 600].map(|mib| mib * MIB));
    for name in ["v", "b"] {
        let volume = pool.open_volume(name).unwrap();
        let mut bytes = vec![0; volume.size_bytes() as usize];
        volume.read(0, &mut bytes).unwrap();
        assert!(
            !bytes.chunks(4096).any(|page| page.ends_with(&[0xcd; 64])),
            "{name} has old content"
        );
    }
    drop(pool);
    assert!(fixture.check().is_clean());
}

/// After a crash, only the records exist. Opening for reading reports them.
#[test]
fn unfinished_split_is_a_note_instead_of_damage() {
    let (media, pool) = with_btt_volume();
    let records = plan(&pool, Slot(0), &[part("a", 9), part("b", 9)]);
    redo_log::commit(&media, &pool.superblock(), &pool.split_words(&records).unwrap()).unwrap();
    drop(pool);
    let opened = open_for(&media, OpenMode::ReadOnly).unwrap();
    let report = opened.check().unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.pool.len(), 2, "{report:?}");
    assert!(report.pool.iter().all(|finding| matches!(finding, Finding::SplitUnfinished { .. })));
    assert!(matches!(opened.open_volume("b"), Err(PoolError::VolumeUnfinished { .. })));
    // The part cannot be copied either, because it still contains data of the split volume.
    assert!(matches!(opened.open_damaged_volume("b"), Err(PoolError::VolumeUnfinished { .. })));
    drop(opened);
    let pool = open(&media).unwrap();
    assert!(pool.check().unwrap().is_clean());
    let engine = Engine::open(pool.open_volume("b").unwrap()).unwrap();
    engine.write(5, &[7; 4096]).unwrap();
}

/// The copy still names the split volume, which no longer has the index.
#[test]
fn lost_owner_word_of_an_unfinished_split_is_repaired() {
    for thin in [true, false] {
        let (media, pool) = new_pool_of(CHUNKS, |superblock| superblock.volume_slots = 5);
        let size = VolumeSize::Bytes(6 * CHUNK_BYTES);
        let (format, reserve_bytes) = (VolumeFormat::Raw, None);
        pool.create_volume_with("v", VolumeOptions { size, format, thin, reserve_bytes }).unwrap();
        let volume = pool.open_volume("v").unwrap();
        [0, 4].iter().for_each(|index| {
            volume.store_word(index * CHUNK_BYTES, mark(*index)).unwrap();
        });
        volume.persist_range(0..6 * CHUNK_BYTES).unwrap();
        let marked = places(&volume).into_iter().filter(|(index, _)| [0, 4].contains(index));
        let words: Vec<_> = marked.map(|(_, chunk)| entry(chunk.0)).collect();
        drop(volume);
        let records = plan(&pool, Slot(0), &raw_parts());
        commit(&media, &pool, &records);
        let superblock = pool.superblock();
        drop(pool);
        words.iter().for_each(|at| media.store_word(*at, 0).unwrap());
        assert!(matches!(open(&media), Err(PoolError::Damaged { .. })));
        assert_eq!(fix_metadata(&media, &superblock, false).unwrap().len(), 2);
        let pool = open(&media).unwrap();
        assert_eq!(words_of(&pool, "v").unwrap(), [mark(0)]);
        assert_eq!(words_of(&pool, "c").unwrap(), [mark(4), 0]);
    }
}

#[test]
fn impossible_parts_are_refused_without_changes() {
    let fixture = Fixture::new();
    let pool = fixture.create(96 * MIB, 0);
    pool.create_volume("btt", VolumeSize::Bytes(40 * MIB), VolumeFormat::Btt).unwrap();
    pool.create_volume("raw", VolumeSize::Bytes(8 * MIB), VolumeFormat::Raw).unwrap();
    let before = fixture.image();
    let bytes = |name: &str, mib: u64| (name.to_owned(), VolumeSize::Bytes(mib * MIB));
    let refused = |name: &str, parts: &[(String, VolumeSize)], words: &[&str]| {
        let text = pool.split_volume(name, parts, SplitContent::Refuse).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text:?} lacks one of {words:?}");
    };
    refused("nothing", &[bytes("a", 4), rest("b")], &["no such volume: \"nothing\""]);
    refused("raw", &[], &["\"raw\"", "at least 2 parts, not 0"]);
    refused("raw", &[rest("a")], &["not 1"]);
    refused(
        "raw",
        &[bytes("a", 4), bytes("b", 2)],
        &["6291456 bytes (6 MiB)", "8388608 (8 MiB)", "the rest"],
    );
    refused("raw", &[bytes("a", 4), bytes("b", 6)], &["10485760", "8388608"]);
    refused("raw", &[bytes("a", 8), rest("b")], &["nothing is left for \"b\"", "8 MiB"]);
    refused("raw", &[rest("a"), rest("b")], &["\"a\" and \"b\""]);
    refused("raw", &[bytes("a", 4), bytes("a", 4)], &["two parts", "\"a\""]);
    refused("raw", &[bytes("a", 1), rest("b")], &["\"a\"", "1048576", "2 MiB"]);
    refused("raw", &[bytes("a", 4), rest("btt")], &["\"btt\" already exists"]);
    refused("raw", &[bytes("a b", 4), rest("c")], &["a b", "' '"]);
    refused("btt", &[bytes("a", 24), rest("b")], &["\"b\"", "16777216", "18 MiB"]);
    let many: Vec<_> = (0..80).map(|number| bytes(&format!("p{number}"), 2)).collect();
    refused("raw", &many, &["167772160"]);
    let volume = pool.open_volume("raw").unwrap();
    refused("raw", &[bytes("a", 4), rest("b")], &["in use"]);
    drop(volume);
    assert!(before == fixture.image());
    let volumes =
        pool.split_volume("btt", &[bytes("btt", 18), rest("b")], SplitContent::Refuse).unwrap();
    assert_eq!(volumes.iter().map(|v| v.size_bytes / MIB).collect::<Vec<_>>(), [18, 22]);
    drop(pool);
    assert!(fixture.check().is_clean());
}
