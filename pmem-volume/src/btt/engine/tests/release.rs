//! Release of space of a thin volume.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use super::super::live_blocks::LiveBlocks;
use super::super::release_budget::ReleaseBudget;
use super::threads::version_of;
use super::*;
use crate::btt::arena::ArenaInfo;
use crate::btt::free_report::tests::Shared;
use crate::btt::layout::{MAP_BLOCK, PAGE_BYTES};
use crate::btt::{live_bytes, release_reported};
use crate::media::simulator::Random;
use crate::media::thin::ThinMedia;

const SECTORS: u32 = 48;
const LANES: u32 = 4;
/// Unit with 8 blocks. The data begins 2 pages after the start of the volume, so that 5 units
/// contain only blocks.
pub(super) const UNIT_BYTES: u64 = 8 * PAGE_BYTES;
const UNITS: Range<u64> = 1..6;

pub(super) type Thin<'a> = ThinMedia<&'a MemoryMedia>;

pub(super) fn new_media(unit_bytes: u64) -> MemoryMedia {
    let media = MemoryMedia::new(ThinMedia::<MemoryMedia>::wrapped_bytes(VOLUME_BYTES, unit_bytes));
    format_small(&ThinMedia::new(&media, VOLUME_BYTES, unit_bytes), SECTORS, LANES);
    media
}

pub(super) fn thin(media: &MemoryMedia, unit_bytes: u64) -> Thin<'_> {
    ThinMedia::new(media, VOLUME_BYTES, unit_bytes).strict().with_reuse()
}

pub(super) fn fill(engine: &Engine<impl Media>, sectors: Range<u64>, version: u64) {
    let bytes: Vec<u8> = sectors.clone().flat_map(|at| content(at, version, 4096)).collect();
    engine.write(sectors.start, &bytes).unwrap();
}

/// Returns the units of the volume that have space and contain only blocks.
fn present(engine: &Engine<&'static Thin<'static>>) -> Vec<u64> {
    engine.space().allocated().into_iter().filter(|unit| UNITS.contains(unit)).collect()
}

/// Opens media that lives as long as the test process.
fn open() -> (&'static Thin<'static>, Engine<&'static Thin<'static>>, ArenaInfo) {
    let media: &'static MemoryMedia = Box::leak(Box::new(new_media(UNIT_BYTES)));
    let thin: &'static Thin<'static> = Box::leak(Box::new(thin(media, UNIT_BYTES)));
    let (info, _) = read_arena(&thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    (thin, Engine::open(thin).unwrap(), info)
}

#[test]
fn discard_releases_units_without_data_and_later_writes_allocate_them_again() {
    let (thin, engine, _) = open();
    for version in 1..4 {
        fill(&engine, 0..48, version);
        assert_eq!(present(&engine), UNITS.collect::<Vec<_>>());
        // Sector 40 keeps the unit of its block.
        engine.discard(0..40).unwrap();
        engine.discard(41..48).unwrap();
        assert_eq!(present(&engine).len(), 1);
        for sector in 0..48 {
            let expected = if sector == 40 { content(40, version, 4096) } else { vec![0; 4096] };
            assert!(read(&engine, sector) == expected, "{sector}");
        }
        assert!(check(thin).is_clean());
    }
    let engine = Engine::open(thin).unwrap();
    assert!(read(&engine, 40) == content(40, 3, 4096));
    engine.discard(40..41).unwrap();
    assert_eq!(present(&engine), [0; 0]);
}

#[test]
fn other_calls_release_nothing_but_the_next_discard_releases_their_units() {
    let (thin, engine, _) = open();
    fill(&engine, 0..48, 1);
    engine.write_zeroes(0..48).unwrap();
    engine.flush().unwrap();
    engine.quiesce().unwrap();
    assert_eq!(present(&engine), UNITS.collect::<Vec<_>>());
    // A process that opens the volume later finds the units too.
    let engine = Engine::open(thin).unwrap();
    assert_eq!(present(&engine), UNITS.collect::<Vec<_>>());
    engine.discard(0..0).unwrap();
    assert_eq!(present(&engine), UNITS.collect::<Vec<_>>());
    engine.discard(3..4).unwrap();
    assert_eq!(present(&engine), [0; 0]);
}

/// A BTT may have been formatted over old data, which unwritten sectors show.
#[test]
fn unit_with_data_of_an_unwritten_sector_keeps_its_space() {
    let (thin, engine, info) = open();
    thin.provision(info.data_range(10)).unwrap();
    thin.store(info.block_at(10), &[7; 4096]).unwrap();
    for sector in [9, 11] {
        fill(&engine, sector..sector + 1, 1);
        engine.discard(sector..sector + 1).unwrap();
    }
    let engine = Engine::open(thin).unwrap();
    engine.discard(9..10).unwrap();
    assert_eq!((read(&engine, 10), thin.holes_in(info.data_range(10))), (vec![7; 4096], 0));
    engine.discard(10..11).unwrap();
    assert_eq!((read(&engine, 10), thin.holes_in(info.data_range(10))), (vec![0; 4096], 1));
}

#[test]
fn unit_keeps_its_space_while_a_block_is_read() {
    let (_, engine, info) = open();
    fill(&engine, 0..48, 1);
    for block in [6, 13] {
        let announcement = engine.common.readers.announce(info.block_at(block));
        engine.discard(0..48).unwrap();
        assert_eq!(present(&engine), [1], "{block}");
        drop(announcement);
    }
    let _elsewhere = engine.common.readers.announce(info.block_at(14));
    engine.discard(0..1).unwrap();
    assert_eq!(present(&engine), [0; 0]);
}

#[test]
fn units_that_exceed_the_budget_are_released_by_later_discards() {
    let (_, engine, _) = open();
    fill(&engine, 0..48, 1);
    let set_budget = |units| *engine.common.locked_budget() = ReleaseBudget::new(units);
    set_budget(0);
    engine.discard(0..48).unwrap();
    assert_eq!(present(&engine), UNITS.collect::<Vec<_>>());
    set_budget(100);
    engine.discard(0..1).unwrap();
    assert_eq!(present(&engine), [0; 0]);
    // Only released units are taken from the budget.
    let taken = engine.common.locked_budget().take(100, std::time::Duration::ZERO);
    assert_eq!(taken, 100 - UNITS.count() as u64);
}

/// Erasing a unit on failed media would fail.
#[test]
fn unit_with_a_failed_block_keeps_its_space() {
    let (_, engine, info) = open();
    fill(&engine, 0..48, 1);
    let arena = engine.arena_slots[0].arena().unwrap();
    engine.write_zeroes(40..41).unwrap();
    // Blocks of a written and of a discarded sector.
    let blocks = [5, 40].map(|sector| {
        let block = arena.map.entry(engine.space(), sector).unwrap() & MAP_BLOCK;
        arena.add_failed(block);
        block
    });
    engine.write_zeroes(0..48).unwrap();
    engine.discard(0..48).unwrap();
    let mut units = blocks.map(|block| info.block_at(block) / UNIT_BYTES).to_vec();
    units.sort_unstable();
    units.dedup();
    units.retain(|unit| UNITS.contains(unit));
    assert_eq!(present(&engine), units);
}

/// The flog records failed blocks of lanes.
#[test]
fn failed_free_block_keeps_its_unit() {
    let (thin, _engine, info) = open();
    let counts = |failed: &[u32]| {
        LiveBlocks::count(thin, &info, failed.iter().copied()).unwrap().unwrap().counts()
    };
    assert_eq!((counts(&[]), counts(&[6, 45])), (vec![0; 5], vec![1, 0, 0, 0, 1]));
}

#[test]
fn arena_with_small_sectors_releases_nothing() {
    const UNIT: u64 = 1 << 21;
    let media = MemoryMedia::new(ThinMedia::<MemoryMedia>::wrapped_bytes(VOLUME_BYTES, UNIT));
    let thin = ThinMedia::new(&media, VOLUME_BYTES, UNIT);
    Layout::new(VOLUME_BYTES, 512, Uuid::from_u128(42)).unwrap().format(&thin).unwrap();
    let engine = Engine::open(&thin).unwrap();
    let bytes: Vec<u8> = (0..9000).flat_map(|sector| content(sector, 1, 512)).collect();
    engine.write(0, &bytes).unwrap();
    let before = thin.allocated();
    engine.discard(0..9000).unwrap();
    assert_eq!(thin.allocated(), before);
}

/// Performs random operations. After each of them, the counts are those of a new count.
fn count_after_operations(seed: u64, unit_bytes: u64) -> usize {
    let media = new_media(unit_bytes);
    let thin = thin(&media, unit_bytes);
    let (info, _) = read_arena(&thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let mut engine = Engine::open(&thin).unwrap();
    let mut random = Random::new(seed);
    let mut released = 0;
    for version in 1..120 {
        let first = random.below(u64::from(SECTORS));
        let sectors = first..u64::from(SECTORS).min(first + 1 + random.below(12));
        let before = thin.allocated().len();
        let result = match random.below(10) {
            0 => {
                engine = Engine::open(&thin).unwrap();
                Ok(())
            }
            1 => engine.write_zeroes(sectors),
            2..4 => engine.discard(sectors),
            4 => {
                let free = if random.below(2) == 0 { u64::MAX } else { random.below(3) };
                thin.set_available_chunks(free);
                Ok(())
            }
            5 => engine.compact(&mut |_| true).map(drop),
            _ => {
                let bytes: Vec<u8> =
                    sectors.flat_map(|sector| content(sector, version, 4096)).collect();
                engine.write(first, &bytes)
            }
        };
        assert!(matches!(result, Ok(()) | Err(BttError::Full(_))), "{result:?}");
        released += before.saturating_sub(thin.allocated().len());
        let live = engine.arena_slots[0].arena().unwrap().live.as_deref().unwrap();
        let counted = LiveBlocks::count(&thin, &info, []).unwrap().unwrap();
        assert_eq!(live.counts(), counted.counts(), "seed {seed}, operation {version}");
        assert_eq!(engine.live_bytes(), live_bytes(&thin), "seed {seed}, operation {version}");
        assert_eq!(engine.live_bytes(), Some(counted.sectors() * 4096));
        for (unit, count) in (0..).zip(live.counts()) {
            let range = live.range_of(unit);
            assert!(count == 0 || thin.holes_in(range.clone()) == 0, "{range:x?} is a hole");
        }
    }
    assert!(check(&thin).is_clean());
    released
}

#[test]
fn counts_of_live_blocks_follow_every_operation() {
    for unit_bytes in [512, PAGE_BYTES, UNIT_BYTES] {
        let released: usize = (1..9).map(|seed| count_after_operations(seed, unit_bytes)).sum();
        assert!(released > 10, "{unit_bytes}: only {released} units were released");
    }
}

/// Another owner stores to each unit as soon as it is released.
#[test]
fn threads_that_read_write_and_discard_never_see_released_space() {
    const WRITERS: u64 = 2;
    const ROUNDS: u64 = 600;
    let media = new_media(UNIT_BYTES);
    let thin = thin(&media, UNIT_BYTES);
    let engine = Engine::open(&thin).unwrap();
    *engine.common.locked_budget() = ReleaseBudget::new(u64::MAX);
    let (version, writing) = (AtomicU64::new(1), AtomicU64::new(WRITERS));
    let start = Barrier::new(WRITERS as usize + 2);
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (engine, start, version, writing) = (&engine, &start, &version, &writing);
            scope.spawn(move || {
                let mut random = Random::new(writer + 1);
                // Each writer has its own sectors, and checks their content.
                let mine = writer * 24..(writer + 1) * 24;
                start.wait();
                for _ in 0..ROUNDS {
                    let first = mine.start + random.below(24);
                    let sectors = first..mine.end.min(first + 1 + random.below(16));
                    let number = version.fetch_add(1, Ordering::SeqCst);
                    fill(engine, sectors.clone(), number);
                    assert!(
                        sectors.clone().all(|at| read(engine, at) == content(at, number, 4096))
                    );
                    engine.discard(sectors.clone()).unwrap();
                    assert!(sectors.clone().all(|at| read(engine, at) == [0; 4096]));
                }
                writing.fetch_sub(1, Ordering::SeqCst);
            });
        }
        for reader in 0..2 {
            let (engine, start, writing) = (&engine, &start, &writing);
            scope.spawn(move || {
                let mut random = Random::new(reader + 100);
                start.wait();
                while writing.load(Ordering::SeqCst) > 0 {
                    let sector = random.below(u64::from(SECTORS));
                    let bytes = read(engine, sector);
                    assert!(version_of(sector, &bytes).is_some(), "{sector}: {:x?}", &bytes[..8]);
                }
            });
        }
    });
    assert!(check(&thin).is_clean());
    engine.discard(0..48).unwrap();
    assert!(thin.allocated().iter().all(|unit| !UNITS.contains(unit)));
}

/// Creates a pool with a thin volume `v`, in a file system with holes.
fn pool_with_thin_volume(folder: &Path) -> Arc<crate::Pool> {
    let pool = crate::Pool::create(&folder.join("pool"), 64 << 20, 0).unwrap();
    let thick = crate::VolumeOptions::thick(VOLUME_BYTES, crate::VolumeFormat::Btt);
    pool.create_volume_with("v", crate::VolumeOptions { thin: true, ..thick }).unwrap();
    pool
}

/// A kill between the allocation of a chunk and the first store leaves it without data. The file of
/// the pool then has a hole there.
#[test]
fn chunks_that_a_killed_process_left_without_data_are_released() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let pool = pool_with_thin_volume(folder.path());
    let volume = pool.open_volume("v").unwrap();
    let before = volume.allocated_bytes();
    let (info, _) = read_arena(&volume, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let unused = [2, 3].map(|index| volume.provision_chunk(index).unwrap());
    assert_eq!(volume.allocated_bytes(), before + 2 * crate::CHUNK_BYTES, "{unused:?}");
    drop(volume);

    // A driver in the guest reports the blocks of one of them as free.
    let volume = pool.open_volume("v").unwrap();
    let block_bytes = u64::from(info.block_bytes);
    let first = (2 * crate::CHUNK_BYTES - info.data_at) / block_bytes;
    let end = (3 * crate::CHUNK_BYTES - info.data_at).div_ceil(block_bytes);
    let free = first * PAGE_BYTES..end * PAGE_BYTES;
    let released = release_reported(&volume, &[free], &mut Shared(|| {})).unwrap();
    assert_eq!(released, crate::CHUNK_BYTES);
    drop(volume);

    let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
    engine.discard(0..1).unwrap();
    assert_eq!(engine.space().allocated_bytes(), before);
}

#[test]
fn discard_in_a_thin_volume_of_a_pool_releases_chunks() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let pool = pool_with_thin_volume(folder.path());
    let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
    let before = engine.space().allocated_bytes();
    fill(&engine, 0..2500, 1);
    let full = engine.space().allocated_bytes();
    assert!(full >= before + (8 << 20), "{full}");
    engine.discard(0..2000).unwrap();
    let after = engine.space().allocated_bytes();
    assert!(after <= full - (4 << 20), "{after}");
    assert_eq!(engine.space().released_bytes(), full - after);
    for sector in [0, 1999, 2000, 2499] {
        let expected = if sector < 2000 { vec![0; 4096] } else { content(sector, 1, 4096) };
        assert!(read(&engine, sector) == expected, "{sector}");
    }
    assert_eq!(engine.live_bytes(), Some(500 * 4096));
    drop(engine);
    assert_eq!(pool.check().unwrap().pool, []);
    let volume = pool.open_volume("v").unwrap();
    assert_eq!(volume.live_bytes(), Some(500 * 4096));
    assert!(volume.check_btt().unwrap().is_clean());
    assert_eq!(volume.allocated_bytes(), after);
}
