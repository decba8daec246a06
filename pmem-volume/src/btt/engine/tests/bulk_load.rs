//! Bulk filling of an empty BTT: its result, and the state after a crash.

use std::sync::atomic::Ordering;

use super::crash::verify;
use super::damage::second_of;
use super::injected_bugs::must_be_detected;
use super::script::{InjectedBug, Oracle, Recorded, SECTORS, new_media, sparse_content};
use super::*;
use crate::btt::holds_data;
use crate::btt::layout::{MAP_BLOCK, MAP_ZERO};
use crate::media::simulator::{Random, Simulator};
use crate::media::thin::ThinMedia;
use crate::pool::tests::campaign::{Replay, seeds};

/// Maximum number of images per crash point.
const BOUND: usize = 48;
const WINDOW: u32 = 16;

/// Fills a BTT with a random sequence, and crashes at every persist. Some sectors were exchanged
/// and discarded before, so that they have other blocks than their own.
fn crash_while_loading(seed: u64, bug: InjectedBug) -> Result<usize, String> {
    let recorded = Recorded::new(new_media(), bug, Oracle::default());
    let mut random = Random::new(seed);
    let engine = Engine::open(&recorded).unwrap();
    for _ in 0..random.below(20) {
        let sector = random.below(u64::from(SECTORS));
        engine.write(sector, &[0x77; 4096]).unwrap();
        engine.discard(sector..sector + 1).unwrap();
    }
    engine.quiesce().unwrap();
    let mut load = engine.into_bulk_load().unwrap().with_window_sectors(WINDOW);
    recorded.is_open.store(true, Ordering::Relaxed);
    recorded.record();
    let mut at = 0;
    while at < SECTORS {
        let sectors = at..SECTORS.min(at + 1 + random.below(12) as u32);
        let bytes: Vec<u8> = sectors.clone().flat_map(|sector| sparse_content(sector, 1)).collect();
        recorded.oracle.lock().unwrap().expect_write(sectors.clone(), 1);
        load.write(u64::from(sectors.start), &bytes).unwrap();
        at = sectors.end + random.below(6) as u32;
    }
    load.finish().unwrap();
    recorded.oracle.lock().unwrap().end_writes();
    verify(&recorded.take_points(), BOUND, seed, 0)
}

#[test]
fn sectors_are_zeros_or_new_after_a_crash_at_every_persist() {
    let images: usize =
        seeds(24).map(|seed| crash_while_loading(seed, InjectedBug::Nothing).unwrap()).sum();
    Replay::from_environment().count(images, 2000);
}

#[test]
fn data_before_its_map_entry_is_durably_zero_is_detected() {
    let error = must_be_detected(crash_while_loading, InjectedBug::LoadZeros);
    assert!(error.contains("is none of"), "{error}");
}

#[test]
fn map_entry_before_its_data_is_durable_is_detected() {
    let error = must_be_detected(crash_while_loading, InjectedBug::Data);
    assert!(error.contains("is none of"), "{error}");
}

#[test]
fn load_that_ends_before_its_map_is_durable_is_detected() {
    must_be_detected(crash_while_loading, InjectedBug::Discard);
}

#[test]
fn loaded_btt_contains_the_data_and_is_served() {
    let engine = Engine::open(format_two_arenas(4096)).unwrap();
    let border = engine.arenas()[1].first_sector;
    let sectors = border - 90..border + 90;
    let bytes: Vec<u8> = sectors.clone().flat_map(|sector| content(sector, 1, 4096)).collect();
    let mut load = engine.into_bulk_load().unwrap().with_window_sectors(64);
    // Writes sectors of a window out of order, and one of them twice.
    load.write(9, &content(9, 1, 4096)).unwrap();
    load.write(3, &content(3, 1, 4096)).unwrap();
    load.write(3, &content(3, 2, 4096)).unwrap();
    load.write(sectors.start, &bytes).unwrap();
    assert!(matches!(load.write(u64::MAX, &bytes), Err(BttError::Outside { .. })));
    let engine = load.finish().unwrap();
    let mut back = vec![0; bytes.len()];
    engine.read(sectors.start, &mut back).unwrap();
    assert!(back == bytes);
    assert_eq!(read(&engine, 3), content(3, 2, 4096));
    assert_eq!(read(&engine, 4), [0; 4096]);
    engine.write(3, &content(3, 3, 4096)).unwrap();
    engine.quiesce().unwrap();
    let media = engine.common.space;
    assert!(check(&media).is_clean());
    let engine = Engine::open(media).unwrap();
    assert_eq!(read(&engine, 3), content(3, 3, 4096));
    assert_eq!(read(&engine, border), content(border, 1, 4096));
}

#[test]
#[should_panic(expected = "ascending order")]
fn window_that_was_left_is_not_entered_again() {
    let engine = Engine::open(format_two_arenas(4096)).unwrap();
    let mut load = engine.into_bulk_load().unwrap().with_window_sectors(64);
    for sector in [0, 64, 1] {
        load.write(sector, &content(sector, 1, 4096)).unwrap();
    }
}

/// The map words of a window that was left become durable although the next window has no space.
#[test]
fn load_that_ran_out_of_space_is_durable_and_continues() {
    // Each window has its map words in a chunk of its own.
    const CHUNK_BYTES: u64 = 4 * WINDOW as u64;
    for later_chunks in [0, u64::MAX] {
        let media =
            Simulator::new(ThinMedia::<Simulator>::wrapped_bytes(VOLUME_BYTES, CHUNK_BYTES));
        let thin = || ThinMedia::new(&media, VOLUME_BYTES, CHUNK_BYTES);
        format_small(&thin(), SECTORS, 4);
        let thin_media = thin();
        let mut load = Engine::open(&thin_media)
            .unwrap()
            .into_bulk_load()
            .unwrap()
            .with_window_sectors(WINDOW);
        let (first, second) = (0, u64::from(WINDOW));
        load.write(first, &content(first, 1, 4096)).unwrap();
        thin_media.set_available_chunks(0);
        for _ in 0..2 {
            let error = load.write(second, &content(second, 1, 4096)).unwrap_err();
            assert!(matches!(error, BttError::Full(_)), "{error}");
        }
        thin_media.set_available_chunks(later_chunks);
        let is_written = load.write(second, &content(second, 1, 4096)).is_ok();
        assert_eq!(is_written, later_chunks > 0);
        load.finish().unwrap();
        media.record();
        // The image contains only durable words.
        let image = media.take_points()[0].images(1, &mut Random::new(1)).pop().unwrap();
        let engine = Engine::open(ThinMedia::new(&image, VOLUME_BYTES, CHUNK_BYTES)).unwrap();
        assert!(read(&engine, first) == content(first, 1, 4096));
        let expected = if is_written { content(second, 1, 4096) } else { vec![0; 4096] };
        assert!(read(&engine, second) == expected);
    }
}

#[test]
fn btt_whose_empty_entries_name_wrong_blocks_is_not_loaded() {
    // A block that does not exist, and the block of another sector.
    for block in [MAP_BLOCK, 6] {
        let media = format_two_arenas(4096);
        let entry_at = second_of(&media).map_at + 4 * 5;
        media.store(entry_at, &(MAP_ZERO | block).to_le_bytes()).unwrap();
        let engine = Engine::open(media).unwrap();
        assert!(!holds_data(engine.space()).unwrap());
        assert!(engine.into_bulk_load().is_err(), "{block}");
    }
}

#[test]
fn btt_with_data_or_small_sectors_is_not_loaded() {
    let engine = Engine::open(formatted(4096)).unwrap();
    engine.write(7, &content(7, 1, 4096)).unwrap();
    let engine = engine.into_bulk_load().err().unwrap();
    assert_eq!(read(&engine, 7), content(7, 1, 4096));
    assert!(Engine::open(formatted(512)).unwrap().into_bulk_load().is_err());
}
