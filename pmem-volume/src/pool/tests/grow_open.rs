//! Growth of a volume that an engine serves.

use super::crash::{Replay, new_pool_of, open, verify_each, verify_space};
use super::*;
use crate::btt::{self, Engine};
use crate::media::simulator::{Random, Simulator};
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::volume::{Space, extents_of};

const CHUNKS: u32 = 26;
const OLD: u32 = 9;
const NEW: u32 = 18;
const SECTOR: usize = btt::SECTOR_BYTES as usize;

/// Sectors of the first arena that are written before the growth.
const WRITTEN: [u64; 3] = [0, 700, 2000];

fn bytes(chunks: u32) -> VolumeSize {
    VolumeSize::Bytes(u64::from(chunks) * CHUNK_BYTES)
}

fn engine<M: Media>(pool: &Arc<Pool<M>>) -> Engine<Volume<M>> {
    Engine::open(pool.open_volume("v").unwrap()).unwrap()
}

/// Creates the volume `v`, and writes its sectors.
fn with_volume(thin: bool) -> (Simulator, Arc<OtherPool>, Engine<OtherVolume>) {
    let (media, pool) = new_pool_of(CHUNKS, |_| {});
    let options =
        VolumeOptions { size: bytes(OLD), format: VolumeFormat::Btt, thin, reserve_bytes: None };
    pool.create_volume_with("v", options).unwrap();
    let engine = engine(&pool);
    WRITTEN.into_iter().for_each(|sector| engine.write(sector, &[1; SECTOR]).unwrap());
    (media, pool, engine)
}

fn first_byte(engine: &Engine<OtherVolume>, sector: u64) -> Result<u8, String> {
    let mut data = [0; SECTOR];
    engine.read(sector, &mut data).map_err(|error| format!("sector {sector}: {error}"))?;
    match data {
        [first, ..] if data == [first; SECTOR] => Ok(first),
        _ => Err(format!("sector {sector} is torn")),
    }
}

/// Checks an image of a crash during a growth from `old_sectors` or after it. Sector 700 may have
/// been written again, and the sector 3 of the new arena for the first time.
fn verify_image(image: &Simulator, old_sectors: u64) -> Result<(), String> {
    let pool = open(image).map_err(|error| error.to_string())?;
    let volume = pool.open_volume("v").map_err(|error| error.to_string())?;
    let has_grown = volume.size_bytes() > u64::from(OLD) * CHUNK_BYTES;
    let engine = Engine::open(volume).map_err(|error| error.to_string())?;
    if has_grown != (engine.sectors() > old_sectors) {
        return Err(format!("{} sectors, and has grown: {has_grown}", engine.sectors()));
    }
    if let Some(arena) = engine.arenas().iter().find(|arena| arena.read_only.is_some()) {
        return Err(format!("{arena:?}"));
    }
    for sector in WRITTEN {
        match first_byte(&engine, sector)? {
            1 => {}
            2 if sector == 700 && has_grown => {}
            other => return Err(format!("sector {sector} has {other}")),
        }
    }
    if has_grown && first_byte(&engine, old_sectors + 3)? > 2 {
        return Err("the new sector has other data".to_owned());
    }
    drop(engine);
    verify_space(image, &pool)
}

#[test]
fn growth_of_a_served_volume_is_atomic_and_keeps_its_sectors() {
    for thin in [false, true] {
        let (media, _pool, mut engine) = with_volume(thin);
        let old_sectors = engine.sectors();
        media.record();
        engine.grow(bytes(NEW)).unwrap();
        assert!(engine.sectors() > 2 * old_sectors, "the disk has grown: {}", engine.sectors());
        for sector in [700, old_sectors + 3] {
            engine.write(sector, &[2; SECTOR]).unwrap();
        }
        let verify = |image: &Simulator| verify_image(image, old_sectors);
        let images = verify_each(&media.take_points(), 64, &mut Random::new(8), &verify).unwrap();
        Replay::from_environment().count(images, 400);
    }
}

/// Links the new arena without the log.
#[test]
fn growth_of_a_served_volume_without_the_log_is_detected() {
    let (media, pool, engine) = with_volume(false);
    let run = engine.space().extents()[0].run;
    let slot = table::Slot(0);
    let record = pool.lock_state().volumes[&slot].record.clone();
    let record = VolumeRecord { sequence: record.sequence + 1, chunks: NEW, ..record };
    let extension = btt::extend(engine.space(), record.size_bytes()).unwrap();
    let extents = extents_of((0..).zip(Run { start: run.start, chunks: NEW }.ids()));
    let space = Space::new(&media, &extents);
    media.record();
    let added = Run { start: run.end(), chunks: NEW - OLD };
    pool.mark(&[added], |place| table::Owner::Volume { slot, index: OLD + place }).unwrap();
    extension.format(&space).unwrap();
    for (at, word) in pool.resize_words(&space, &extension.link_words(), &record).unwrap() {
        media.store_word(at, word).unwrap();
        media.persist_range(at..at + 8).unwrap();
    }
    let verify = |image: &Simulator| verify_image(image, engine.sectors());
    let error = verify_each(&media.take_points(), 64, &mut Random::new(8), &verify)
        .expect_err("the missing log was not detected");
    assert!(error.contains("has grown") || error.contains("BTT"), "{error}");
}

#[test]
fn grown_thin_volume_allocates_and_releases_in_its_new_arena() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    let options = VolumeOptions {
        size: bytes(OLD),
        format: VolumeFormat::Btt,
        thin: true,
        reserve_bytes: None,
    };
    pool.create_volume_with("v", options).unwrap();
    let mut engine = engine(&pool);
    let old_sectors = engine.sectors();
    engine.grow(bytes(NEW)).unwrap();
    assert_eq!(pool.info().promised_bytes, u64::from(NEW) * CHUNK_BYTES);
    let metadata_bytes = engine.space().allocated_bytes();
    let part = old_sectors + 512..old_sectors + 512 + 4 * 512;
    for sector in part.clone() {
        engine.write(sector, &[3; SECTOR]).unwrap();
    }
    let written_bytes = engine.space().allocated_bytes();
    assert!(written_bytes >= metadata_bytes + 4 * CHUNK_BYTES, "{written_bytes}");
    engine.discard(part).unwrap();
    let released_bytes = engine.space().released_bytes();
    assert!(released_bytes >= 3 * CHUNK_BYTES, "{released_bytes} of {written_bytes}");
    assert_states_add_up(&pool.info());
    drop(engine);
    assert!(pool.check().unwrap().is_clean());
}

#[test]
fn refused_growth_of_a_served_volume_changes_nothing() {
    let fixture = Fixture::new();
    let pool = fixture.create(64 * MIB, 0);
    pool.create_volume("v", VolumeSize::Bytes(20 * MIB), VolumeFormat::Btt).unwrap();
    let mut engine = engine(&pool);
    engine.write(9, &[4; SECTOR]).unwrap();
    let (before, sectors) = (fixture.image(), engine.sectors());
    for (size_bytes, word) in [
        (18 * MIB, "cannot shrink"),
        (21 * MIB, "multiple of 2 MiB"),
        (34 * MIB, "16 MiB"),
        (80 * MIB, "full"),
    ] {
        let text = engine.grow(VolumeSize::Bytes(size_bytes)).unwrap_err().to_string();
        assert!(text.contains(word), "{text:?} lacks {word:?}");
    }
    engine.grow(VolumeSize::Bytes(20 * MIB)).unwrap();
    assert!(before == fixture.image());
    assert_eq!(engine.sectors(), sectors);
    engine.grow(VolumeSize::Bytes(40 * MIB)).unwrap();
    assert_eq!(engine.space().size_bytes(), 40 * MIB);
    let last = engine.sectors() - 1;
    engine.write(last, &[5; SECTOR]).unwrap();
    drop(engine);
    let engine = self::engine(&pool);
    let mut data = [0; SECTOR];
    for (sector, byte) in [(9, 4), (last, 5)] {
        engine.read(sector, &mut data).unwrap();
        assert_eq!(data, [byte; SECTOR]);
    }
}
