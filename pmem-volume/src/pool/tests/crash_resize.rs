//! Crashes during a resize. The volume should have its old or new size, a matching BTT, and all of
//! its content.

use super::crash::{
    Replay, Volumes, fill_volume, new_pool_of, open, open_for, report_images, verify, verify_each,
    verify_points, verify_space, volumes_of,
};
use super::*;
use crate::btt;
use crate::media::Media;
use crate::media::simulator::{CrashPoint, Random, Simulator};
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::volume::{Space, extents_of};

const CHUNKS: u32 = 26;
const OLD: u32 = 9;
const NEW: u32 = 18;

fn bytes(chunks: u32) -> VolumeSize {
    VolumeSize::Bytes(u64::from(chunks) * CHUNK_BYTES)
}

fn only(chunks: u32) -> Volumes {
    Volumes::from([("v".to_owned(), chunks)])
}

fn with_volume(format: VolumeFormat, chunks: u32) -> (Simulator, Arc<OtherPool>) {
    let (media, pool) = new_pool_of(CHUNKS, |_| {});
    pool.create_volume("v", bytes(chunks), format).unwrap();
    fill_volume(&media, &pool, "v");
    (media, pool)
}

/// Returns the words at the start of the volume's old chunks, which are the volume's content in
/// these tests.
fn content(pool: &Arc<OtherPool>, chunks: u32) -> Vec<u64> {
    let volume = pool.open_volume("v").unwrap();
    let word = |index: u32| {
        let mut word = [0; 8];
        volume.read(u64::from(index) * CHUNK_BYTES, &mut word).unwrap();
        u64::from_le_bytes(word)
    };
    (0..chunks).map(word).collect()
}

fn sectors(pool: &Arc<Pool<impl Media>>) -> u64 {
    pool.open_volume("v").unwrap().check_btt().unwrap().sectors()
}

/// Verifies images of a BTT volume that has grown. The record and the BTT should change together.
fn verify_growth(
    points: &[CrashPoint],
    sectors_of: [u64; 2],
    old_content: &[u64],
) -> Result<usize, String> {
    let verify_image = |image: &Simulator| {
        // A reader should see the state that the next open for writing produces.
        let opened = open_for(image, OpenMode::ReadOnly).map_err(|error| error.to_string())?;
        let report = opened.check().map_err(|error| error.to_string())?;
        if !report.is_clean() {
            return Err(format!("a check finds {report:?}"));
        }
        let (visible, visible_sectors) = (volumes_of(&opened), sectors(&opened));
        drop(opened);
        verify(image, &[&only(OLD), &only(NEW)])?;
        let pool = open(image).unwrap();
        let (now, now_sectors) = (volumes_of(&pool), sectors(&pool));
        let expected = sectors_of[usize::from(now == only(NEW))];
        if (now_sectors, content(&pool, OLD)) != (expected, old_content.to_vec()) {
            return Err(format!("{now:?} has {now_sectors} sectors, or has lost content"));
        }
        if (visible, visible_sectors) != (now, now_sectors) {
            return Err("a check and the next open differ".to_owned());
        }
        Ok(())
    };
    verify_each(points, 96, &mut Random::new(5), &verify_image)
}

#[test]
fn growth_of_a_btt_volume_is_atomic() {
    let (media, pool) = with_volume(VolumeFormat::Btt, OLD);
    let old_content = content(&pool, OLD);
    let old_sectors = sectors(&pool);
    media.record();
    let info = pool.resize_volume("v", bytes(NEW), Shrink::Refuse).unwrap();
    let points = media.take_points();
    assert_eq!((info.size_bytes, info.extents), (u64::from(NEW) * CHUNK_BYTES, 1));
    let new_sectors = sectors(&pool);
    // The two arenas have about the same size.
    assert!(new_sectors > 2 * old_sectors, "{new_sectors} after {old_sectors}");
    let images = verify_growth(&points, [old_sectors, new_sectors], &old_content).unwrap();
    Replay::from_environment().count(images, 400);
}

#[test]
fn removal_of_arenas_without_data_is_atomic() {
    let (media, pool) = with_volume(VolumeFormat::Btt, OLD);
    let old_content = content(&pool, OLD);
    let old_sectors = sectors(&pool);
    pool.resize_volume("v", bytes(NEW), Shrink::Refuse).unwrap();
    let new_sectors = sectors(&pool);
    media.record();
    let info = pool.resize_volume("v", bytes(OLD), Shrink::Allow).unwrap();
    pool.scrub_all().unwrap();
    assert_eq!((info.size_bytes, sectors(&pool)), (u64::from(OLD) * CHUNK_BYTES, old_sectors));
    let points = media.take_points();
    let images = verify_growth(&points, [old_sectors, new_sectors], &old_content).unwrap();
    Replay::from_environment().count(images, 50);
    // The volume can have the arena again.
    pool.resize_volume("v", bytes(NEW), Shrink::Refuse).unwrap();
    assert_eq!(sectors(&pool), new_sectors);
    assert!(pool.check().unwrap().is_clean());
}

#[test]
fn smaller_record_before_arenas_are_unlinked_is_detected() {
    let (media, pool) = with_volume(VolumeFormat::Btt, OLD);
    let old_content = content(&pool, OLD);
    let old_sectors = sectors(&pool);
    pool.resize_volume("v", bytes(NEW), Shrink::Refuse).unwrap();
    let new_sectors = sectors(&pool);
    let slot = table::Slot(0);
    let record = pool.lock_state().volumes[&slot].record.clone();
    let record = record.resized(record.sequence + 1, OLD);
    let extents = pool.lock_state().volumes[&slot].extents();
    let space = Space::new(&media, &extents);
    let unlink = btt::reduce(&space, record.size_bytes()).unwrap();
    media.record();
    let offsets = pool.superblock().volume_record_offsets(slot);
    mirrored::write(&media, offsets, &record.to_bytes()).unwrap();
    let words = pool.resize_words(&space, &unlink, &record).unwrap();
    redo_log::commit(&media, &pool.superblock(), &words).unwrap();
    verify_growth(&media.take_points(), [old_sectors, new_sectors], &old_content)
        .expect_err("the wrong order was not detected");
}

/// A thin volume returns the chunks of a removed arena to the pool.
#[test]
fn thin_volume_shrinks_down_to_its_data() {
    let fixture = Fixture::new();
    let pool = fixture.create(128 * MIB, 0);
    let size = VolumeSize::Bytes(20 * MIB);
    let options =
        VolumeOptions { size, format: VolumeFormat::Btt, thin: true, reserve_bytes: None };
    pool.create_volume_with("v", options).unwrap();
    let before = pool.info();
    for mib in [40, 60] {
        pool.resize_volume("v", VolumeSize::Bytes(mib * MIB), Shrink::Refuse).unwrap();
    }
    let engine = |pool: &Arc<Pool>| btt::Engine::open(pool.open_volume("v").unwrap()).unwrap();
    let first = engine(&pool);
    // The second arena.
    let sector = first.sectors() / 2;
    first.write(sector, &[7; 4096]).unwrap();
    drop(first);
    let shrink = |mib| pool.resize_volume("v", VolumeSize::Bytes(mib * MIB), Shrink::Allow);
    let error = shrink(20).unwrap_err().to_string();
    assert!(error.contains("the minimum size is 41943040 (40 MiB)"), "{error}");
    assert_eq!(shrink(40).unwrap().size_bytes, 40 * MIB);
    let second = engine(&pool);
    let mut data = [0; 4096];
    second.read(sector, &mut data).unwrap();
    assert_eq!(data, [7; 4096]);
    second.discard(0..second.sectors()).unwrap();
    drop(second);
    shrink(20).unwrap();
    pool.scrub_all().unwrap();
    assert_eq!(pool.info().promised_bytes, before.promised_bytes);
    assert!(pool.info().volume_bytes <= before.volume_bytes + 2 * CHUNK_BYTES);
    assert!(pool.check().unwrap().is_clean());
    assert_states_add_up(&pool.info());
}

/// Performs all steps of a growth correctly except the last one, for which it calls `finish`.
fn grow_wrongly(
    finish: impl Fn(&Simulator, &OtherPool, &Space<'_>, &btt::Extension, &VolumeRecord),
) -> String {
    let (media, pool) = with_volume(VolumeFormat::Btt, OLD);
    let old_content = content(&pool, OLD);
    let old_sectors = sectors(&pool);
    let old = pool.open_volume("v").unwrap().extents()[0].run;
    let all = Run { start: old.start, chunks: NEW };
    let added = Run { start: old.end(), chunks: NEW - OLD };
    let slot = table::Slot(0);
    let record = pool.lock_state().volumes[&slot].record.clone();
    let record = record.resized(record.sequence + 1, NEW);
    let extents = extents_of((0..).zip(all.ids()));
    let space = Space::new(&media, &extents);
    let before = extents_of((0..).zip(old.ids()));
    let extension = btt::extend(&Space::new(&media, &before), record.size_bytes()).unwrap();
    media.record();
    pool.mark(&[added], |place| table::Owner::Volume { slot, index: OLD + place }).unwrap();
    extension.format(&space).unwrap();
    finish(&media, &pool, &space, &extension, &record);
    let new_sectors = 2 * old_sectors + 1;
    verify_growth(&media.take_points(), [old_sectors, new_sectors], &old_content)
        .expect_err("the wrong order was not detected, so the other test proves nothing")
}

fn store_words(media: &Simulator, words: &[(u64, u64)]) {
    words.iter().for_each(|(at, word)| media.store_word(*at, *word).unwrap());
    media.persist(&words.iter().map(|(at, _)| *at..at + 8).collect::<Vec<_>>()).unwrap();
}

#[test]
fn linking_arenas_without_the_log_is_detected() {
    let error = grow_wrongly(|media, pool, space, extension, record| {
        let words = pool.resize_words(space, &extension.link_words(), record).unwrap();
        store_words(media, &words);
    });
    assert!(error.contains("a check finds"), "{error}");
}

#[test]
fn record_before_the_links_of_arenas_is_detected() {
    let error = grow_wrongly(|media, pool, space, extension, record| {
        mirrored::write(
            media,
            pool.superblock().volume_record_offsets(record.slot),
            &record.to_bytes(),
        )
        .unwrap();
        let words = pool.resize_words(space, &extension.link_words(), record).unwrap();
        redo_log::commit(media, &pool.superblock(), &words).unwrap();
    });
    assert!(error.contains("sectors"), "{error}");
}

#[test]
fn commit_word_before_its_entries_is_detected() {
    let error = grow_wrongly(|media, pool, space, extension, record| {
        let words = pool.resize_words(space, &extension.link_words(), record).unwrap();
        redo_log::write_for_test(media, &pool.superblock(), &words);
        let log = pool.superblock().log_offset;
        media.persist_range(log..log + 4096).unwrap();
        store_words(media, &words);
    });
    assert!(error.contains("LogDamaged"), "{error}");
}

#[test]
fn clearing_the_log_before_its_words_are_durable_is_detected() {
    let error = grow_wrongly(|media, pool, space, extension, record| {
        let words = pool.resize_words(space, &extension.link_words(), record).unwrap();
        let log = pool.superblock().log_offset;
        redo_log::write_for_test(media, &pool.superblock(), &words);
        let (_, commit) = redo_log::magic_and_commit(&pool.superblock());
        let committed = media.load_word(commit).unwrap();
        media.store_word(commit, 0).unwrap();
        media.persist_range(log..log + 4096).unwrap();
        store_words(media, &[(commit, committed)]);
        // All steps so far are correct. The wrong order follows: the log is cleared before the
        // words are stored.
        store_words(media, &[(commit, 0)]);
        store_words(media, &words);
    });
    assert!(error.contains("a check finds"), "{error}");
}

#[test]
fn reuse_of_an_index_before_the_scrub_mark_is_detected() {
    let (media, pool) = with_volume(VolumeFormat::Raw, 4);
    media.record();
    let slot = table::Slot(0);
    let shrunk = pool.lock_state().volumes[&slot].record.clone();
    let shrunk = shrunk.resized(shrunk.sequence + 1, 3);
    let grown = shrunk.resized(shrunk.sequence + 1, 4);
    let write = |record: &VolumeRecord| {
        mirrored::write(&media, pool.superblock().volume_record_offsets(slot), &record.to_bytes())
            .unwrap();
    };
    write(&shrunk);
    // Omitted: changing the owner word of the removed chunk to *scrub*, and persisting it.
    let again = Run { start: ChunkId(20), chunks: 1 };
    pool.mark(&[again], |_| table::Owner::Volume { slot, index: 3 }).unwrap();
    write(&grown);
    let error = verify_points(&media.take_points(), 64, &[&only(3), &only(4)], &mut Random::new(7))
        .expect_err("the wrong order was not detected");
    assert!(error.contains("are both chunk 3"), "{error}");
}

#[test]
fn shrinking_a_raw_volume_is_atomic_and_removed_chunks_are_erased() {
    let (media, pool) = with_volume(VolumeFormat::Raw, 6);
    media.record();
    pool.resize_volume("v", bytes(2), Shrink::Allow).unwrap();
    pool.scrub_all().unwrap();
    // The volume grows back into two of the removed chunks.
    let again = pool.resize_volume("v", bytes(4), Shrink::Refuse).unwrap();
    assert_eq!(again.extents, 1);
    let points = media.take_points();
    assert_eq!(content(&pool, 4)[2..], [0, 0]);
    let verify_image = |image: &Simulator| {
        let pool = open(image).map_err(|error| error.to_string())?;
        let volumes = volumes_of(&pool);
        if volumes != only(4) {
            drop(pool);
            return verify(image, &[&only(6), &only(2)]);
        }
        // The added chunks have no marks yet.
        match content(&pool, 4)[2..] {
            [0, 0] => verify_space(image, &pool),
            _ => Err("the lost content is back".to_owned()),
        }
    };
    let images = verify_each(&points, 200, &mut Random::new(6), &verify_image).unwrap();
    Replay::from_environment().count(images, 220);
}

#[test]
fn removed_index_never_has_two_chunks_later() {
    let (media, pool) = new_pool_of(CHUNKS, |_| {});
    for (name, chunks) in [("x", 1), ("v", 2), ("y", 1)] {
        pool.create_volume(name, bytes(chunks), VolumeFormat::Raw).unwrap();
    }
    // The volume continues after y. Later, it shrinks, and then grows by the former chunk of x.
    pool.resize_volume("v", bytes(6), Shrink::Refuse).unwrap();
    pool.delete_volume("x").unwrap();
    pool.scrub_all().unwrap();
    ["v", "y"].iter().for_each(|name| fill_volume(&media, &pool, name));
    media.record();
    pool.resize_volume("v", bytes(2), Shrink::Allow).unwrap();
    pool.resize_volume("v", bytes(3), Shrink::Refuse).unwrap();
    let points = media.take_points();
    let place = pool.open_volume("v").unwrap().extents()[1].run;
    assert_eq!(place, Run { start: ChunkId(2), chunks: 1 });
    let verify_image = |image: &Simulator| {
        let pool = open(image).map_err(|error| error.to_string())?;
        verify_space(image, &pool)
    };
    let images = verify_each(&points, 64, &mut Random::new(11), &verify_image).unwrap();
    report_images(images);
}

#[test]
fn erasing_before_a_volume_has_shrunk_is_detected() {
    let (media, pool) = with_volume(VolumeFormat::Raw, 6);
    media.record();
    let run = pool.open_volume("v").unwrap().extents()[0].run;
    let removed = Run { start: run.start.plus(2), chunks: 4 };
    media.erase(&[removed.byte_range()]).unwrap();
    pool.resize_volume("v", bytes(2), Shrink::Allow).unwrap();
    let error = verify_points(&media.take_points(), 64, &[&only(6), &only(2)], &mut Random::new(7))
        .expect_err("the wrong order was not detected");
    assert!(error.contains("has lost chunk"), "{error}");
}

/// Returns the offset of a sector that was never written. The map assigns its own block to it.
fn sector_place(volume: &Volume, sector: u64) -> u64 {
    // The first arena starts at 4 KiB. Its blocks start one page later.
    let offset = 8192 + sector * 4096;
    let extents = volume.extents();
    let space = Space::new(volume.pool().media(), extents);
    space.file_offset(offset)
}

#[test]
fn btt_volume_in_a_file_grows_twice_and_keeps_its_sectors() {
    let fixture = Fixture::new();
    let pool = fixture.create(256 * MIB, 0);
    pool.create_volume("v", VolumeSize::Bytes(20 * MIB), VolumeFormat::Btt).unwrap();
    // Makes the volume fragmented when it grows.
    pool.create_volume("w", VolumeSize::Bytes(2 * MIB), VolumeFormat::Raw).unwrap();
    let volume = pool.open_volume("v").unwrap();
    for sector in [0, 77, 2000] {
        pool.file().write_all_at(&[sector as u8 + 1; 4096], sector_place(&volume, sector)).unwrap();
    }
    drop(volume);
    let mut sectors_before = sectors(&pool);
    for (size, arenas) in [(60 * MIB, 2), (76 * MIB, 3)] {
        let info = pool.resize_volume("v", VolumeSize::Bytes(size), Shrink::Refuse).unwrap();
        assert_eq!((info.size_bytes, info.allocated_bytes, info.extents), (size, size, 2));
        let volume = pool.open_volume("v").unwrap();
        let report = volume.check_btt().unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.arenas.len(), arenas);
        assert!(report.sectors() > sectors_before);
        let reader = btt::Reader::open(&volume).unwrap();
        let mut sector = [0xee; 4096];
        for number in [0, 77, 2000] {
            assert_eq!(reader.read(number, &mut sector).unwrap(), btt::Sector::Data);
            assert_eq!(sector, [number as u8 + 1; 4096]);
        }
        for number in sectors_before..report.sectors() {
            reader.read(number, &mut sector).unwrap();
            assert_eq!(sector, [0; 4096], "sector {number} is new");
        }
        sectors_before = report.sectors();
    }
    drop(pool);
    assert!(fixture.check().is_clean());
    let pool = fixture.open();
    assert_eq!(pool.findings_at_open(), []);
    let info = pool.resize_volume("v", VolumeSize::Remaining, Shrink::Refuse).unwrap();
    assert_eq!((info.size_bytes, pool.info().free_bytes), (250 * MIB, 0));
    assert_states_add_up(&pool.info());
}

#[test]
fn second_info_block_is_found_at_an_earlier_end_of_the_volume() {
    let fixture = Fixture::new();
    let pool = fixture.create(256 * MIB, 0);
    pool.create_volume("v", VolumeSize::Bytes(20 * MIB), VolumeFormat::Btt).unwrap();
    for size in [40 * MIB, 60 * MIB] {
        pool.resize_volume("v", VolumeSize::Bytes(size), Shrink::Refuse).unwrap();
    }
    let volume = pool.open_volume("v").unwrap();
    for (arena, start) in [(0, 4096), (1, 20 * MIB), (2, 40 * MIB)] {
        let at = Space::new(pool.media(), volume.extents()).file_offset(start + 100);
        fixture.flip(at, 3);
        let report = volume.check_btt().unwrap();
        assert_eq!(report.arenas.len(), 3);
        let findings: Vec<_> = report.arenas.iter().map(|arena| arena.findings.clone()).collect();
        let mut expected = vec![vec![]; 3];
        expected[arena] = vec![btt::Finding::FirstInfo];
        assert_eq!(findings, expected);
        fixture.flip(at, 3);
    }
    assert!(volume.check_btt().unwrap().is_clean());
}

#[test]
fn impossible_sizes_are_refused_without_changes() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    pool.create_volume("btt", VolumeSize::Bytes(20 * MIB), VolumeFormat::Btt).unwrap();
    pool.create_volume("raw", VolumeSize::Bytes(6 * MIB), VolumeFormat::Raw).unwrap();
    let before = fixture.image();
    let refused = |name: &str, bytes| {
        pool.resize_volume(name, VolumeSize::Bytes(bytes), Shrink::Refuse).unwrap_err()
    };
    let assert_text = |error: PoolError, words: &[&str]| {
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text:?} lacks one of {words:?}");
    };
    assert_text(refused("btt", 0), &["volume size 0", "multiple of 2 MiB"]);
    assert_text(refused("btt", 21 * MIB), &["22020096", "multiple of 2 MiB"]);
    assert_text(refused("btt", 20 * MIB), &["20971520", "already"]);
    assert_text(refused("btt", 18 * MIB), &["18874368", "20 MiB", "BTT cannot shrink"]);
    assert_text(refused("btt", 34 * MIB), &["35651584", "16 MiB", "37748736"]);
    assert_text(refused("raw", 4 * MIB), &["4194304", "6 MiB", "erases"]);
    assert!(
        matches!(refused("btt", 60 * MIB), PoolError::PoolFull { free_bytes, .. } if free_bytes == 34 * MIB)
    );
    assert!(matches!(refused("raw", u64::MAX - CHUNK_BYTES + 1), PoolError::PoolFull { .. }));
    assert!(matches!(refused("nothing", 4 * MIB), PoolError::NoSuchVolume { .. }));
    let shrunk = pool.resize_volume("btt", VolumeSize::Bytes(18 * MIB), Shrink::Allow).unwrap_err();
    assert_text(shrunk, &["18874368", "20971520", "arenas without data"]);
    let volume = pool.open_volume("raw").unwrap();
    assert!(matches!(refused("raw", 8 * MIB), PoolError::VolumeInUse { .. }));
    drop(volume);
    assert!(before == fixture.image());

    // A resize does not change a damaged BTT.
    let place = pool.open_volume("btt").unwrap().extents()[0].offset_bytes();
    fixture.flip(place + 4096 + 60, 1);
    let before = fixture.image();
    assert_text(refused("btt", 36 * MIB), &["btt", "arena 0", "damaged"]);
    assert!(before == fixture.image());
}

#[test]
fn raw_volume_in_a_file_shrinks_with_permission_and_grows_in_place() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    pool.create_volume("raw", VolumeSize::Bytes(8 * MIB), VolumeFormat::Raw).unwrap();
    let place = pool.open_volume("raw").unwrap().extents()[0];
    place.run.extents().for_each(|extent| fill(&pool, extent, 0x3c));
    let info = pool.resize_volume("raw", VolumeSize::Bytes(2 * MIB), Shrink::Allow).unwrap();
    assert_eq!((pool.info().scrubbing_bytes, pool.info().lendable_bytes), (6 * MIB, 58 * MIB));
    pool.scrub_all().unwrap();
    assert_eq!((info.size_bytes, pool.info().free_bytes), (2 * MIB, 58 * MIB));
    assert!(!is_zero(&pool, Extent::chunk(place.run.start)));
    assert!((1..4).all(|n| is_zero(&pool, Extent::chunk(place.run.start.plus(n)))));
    let info = pool.resize_volume("raw", VolumeSize::Bytes(10 * MIB), Shrink::Refuse).unwrap();
    assert_eq!((info.size_bytes, info.extents), (10 * MIB, 1));
    assert_states_add_up(&pool.info());
    drop(pool);
    assert_eq!(fixture.check().pool, []);
    assert_eq!(fixture.open().volumes(), [info]);
}
