//! Engine on media with holes, whose space can run out.

use super::*;
use crate::btt::flog::recover;
use crate::media::MediaError;
use crate::media::simulator::Random;
use crate::media::thin::ThinMedia;

const SECTORS: u32 = 48;
const LANES: u32 = 4;

/// Creates the media for [`thin`], with a small BTT.
fn new_media(chunk_bytes: u64) -> MemoryMedia {
    let media =
        MemoryMedia::new(ThinMedia::<MemoryMedia>::wrapped_bytes(VOLUME_BYTES, chunk_bytes));
    format_small(&ThinMedia::new(&media, VOLUME_BYTES, chunk_bytes), SECTORS, LANES);
    media
}

/// Opens media that panics at a store into a hole.
fn thin(media: &MemoryMedia, chunk_bytes: u64) -> ThinMedia<&MemoryMedia> {
    ThinMedia::new(media, VOLUME_BYTES, chunk_bytes).strict()
}

/// Returns all bytes of the data blocks, the map and the flog.
fn arena_bytes(thin: &ThinMedia<&MemoryMedia>) -> Vec<u8> {
    let (info, _) = read_arena(thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let ranges = [info.data_at..info.data_range(info.blocks - 1).end, info.map_at..info.copy_at];
    let read = |range: Range<u64>| {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        thin.read(range.start, &mut bytes).unwrap();
        bytes
    };
    ranges.map(read).concat()
}

fn contents(sectors: Range<u64>, version: u64) -> Vec<u8> {
    sectors.flat_map(|sector| content(sector, version, 4096)).collect()
}

#[test]
fn every_store_of_a_write_has_space() {
    // With the smallest chunks, a block consists of several chunks, and the map too.
    for chunk_bytes in [64, 4096, 2 << 20] {
        let media = new_media(chunk_bytes);
        let thin = thin(&media, chunk_bytes);
        let engine = Engine::open(&thin).unwrap();
        let mut random = Random::new(chunk_bytes);
        let mut versions = [0; SECTORS as usize];
        for version in 1..200 {
            let first = random.below(u64::from(SECTORS));
            let sectors = first..u64::from(SECTORS).min(first + 1 + random.below(8));
            engine.write(first, &contents(sectors.clone(), version)).unwrap();
            sectors.for_each(|sector| versions[sector as usize] = version);
        }
        for (sector, version) in (0..).zip(versions) {
            assert!(version > 0 && read(&engine, sector) == content(sector, version, 4096));
        }
        assert!(check(&thin).is_clean());
    }
}

#[test]
fn reads_allocate_no_space() {
    let media = new_media(4096);
    let thin = thin(&media, 4096);
    let engine = Engine::open(&thin).unwrap();
    let before = thin.allocated();
    assert!((0..u64::from(SECTORS)).all(|sector| read(&engine, sector) == [0; 4096]));
    assert_eq!(thin.allocated(), before);
}

/// Returns true if a lane can write without further space.
fn has_lane_with_space(thin: &ThinMedia<&MemoryMedia>) -> bool {
    let (info, _) = read_arena(thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let mut lanes = recover(thin, &info).free.into_iter();
    lanes.any(|(block, _)| thin.holes_in(info.data_range(block)) == 0)
}

/// Lets the space run out at each allocation of a write. If `lanes_have_space`, the write needs no
/// space for its data. If chunks are small, it always needs space for a part of its map entries.
/// Returns the number of chunks that the write needs.
fn write_with_little_space(chunk_bytes: u64, lanes_have_space: bool) -> u64 {
    const SECTORS: Range<u64> = 14..18;
    for available in 0.. {
        let media = new_media(chunk_bytes);
        let thin = thin(&media, chunk_bytes);
        let engine = Engine::open(&thin).unwrap();
        // The lanes have received the blocks of these sectors.
        (1..3).for_each(|version| engine.write(0, &contents(0..4, version)).unwrap());
        if !lanes_have_space {
            engine.write(4, &contents(4..8, 1)).unwrap();
        }
        let before = arena_bytes(&thin);
        thin.set_available_chunks(available);
        let result = engine.write(SECTORS.start, &contents(SECTORS, 3));
        assert_eq!(engine.arenas()[0].read_only, None);
        // Waits for all lanes.
        engine.quiesce().unwrap();
        match &result {
            Ok(()) => assert!(read(&engine, 16) == content(16, 3, 4096)),
            Err(BttError::Full(MediaError::Full { .. })) => {
                // Some of the sectors may have been written one by one.
                let written = SECTORS.map(|sector| read(&engine, sector) != [0; 4096]);
                let written = written.filter(|is_written| *is_written).count();
                assert!(written > 0 || arena_bytes(&thin) == before, "{available}");
                let result = engine.write(0, &content(0, 4, 4096));
                assert_eq!(result.is_ok(), has_lane_with_space(&thin), "{available}: {result:?}");
            }
            Err(error) => panic!("{available}: {error}"),
        }
        thin.set_available_chunks(u64::MAX);
        for sectors in [0..4, SECTORS] {
            engine.write(sectors.start, &contents(sectors.clone(), 5)).unwrap();
            assert!(sectors.into_iter().all(|at| read(&engine, at) == content(at, 5, 4096)));
        }
        assert!(check(&thin).is_clean());
        if result.is_ok() {
            return available;
        }
    }
    unreachable!("a write with enough space succeeds")
}

#[test]
fn write_into_a_full_pool_changes_nothing_and_the_engine_stays_writable() {
    assert_eq!(write_with_little_space(4096, true), 0);
    assert_eq!(write_with_little_space(4096, false), 4);
    assert_eq!(write_with_little_space(64, true), 1);
    assert_eq!(write_with_little_space(1024, false), 4 * 4);
}

/// If the block of a lane is in a hole, a write uses another lane.
#[test]
fn write_to_full_pool_uses_lanes_with_allocated_blocks() {
    let media = new_media(4096);
    let thin = thin(&media, 4096);
    let engine = Engine::open(&thin).unwrap();
    for sector in 0..2 {
        engine.write(sector, &content(sector, 1, 4096)).unwrap();
    }
    let (info, _) = read_arena(&thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let lanes = recover(&thin, &info).free;
    assert!(!has_lane_with_space(&thin));
    // A single lane gets space for its block.
    thin.provision(info.data_range(lanes[2].0)).unwrap();
    thin.set_available_chunks(0);
    for version in 2..20 {
        engine.write(version % 2, &content(version % 2, version, 4096)).unwrap();
    }
    assert_eq!(read(&engine, 1), content(1, 19, 4096));
    engine.write(0, &contents(0..2, 20)).unwrap();
    engine.write(2, &content(2, 1, 4096)).unwrap();
    // The lane has received the block of sector 2, so all lanes now have blocks without space.
    assert!(matches!(engine.write(2, &content(2, 2, 4096)), Err(BttError::Full(_))));
    assert_eq!(
        [0, 1, 2].map(|sector| read(&engine, sector)),
        [content(0, 20, 4096), content(1, 20, 4096), content(2, 1, 4096),]
    );
    assert!(check(&thin).is_clean());
}

/// Returns the map entry of a sector.
fn entry(thin: &ThinMedia<&MemoryMedia>, sector: u64) -> u32 {
    let (info, _) = read_arena(thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let mut bytes = [0; 4];
    thin.read(info.map_at + sector * 4, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

#[test]
fn discard_leaves_unwritten_sectors_in_holes_unchanged() {
    let media = new_media(4096);
    let thin = thin(&media, 4096);
    let engine = Engine::open(&thin).unwrap();
    for sector in [3, 4, 9] {
        engine.write(sector, &content(sector, 1, 4096)).unwrap();
    }
    let before = thin.allocated();
    engine.write_zeroes(0..9).unwrap();
    engine.write_zeroes(20..30).unwrap();
    assert_eq!(thin.allocated(), before);
    engine.discard(20..30).unwrap();
    assert!(thin.allocated().iter().all(|chunk| before.contains(chunk)));
    for sector in (0..9).chain(20..30) {
        assert_eq!(entry(&thin, sector) != 0, [3, 4].contains(&sector), "{sector}");
        assert_eq!(read(&engine, sector), [0; 4096]);
    }
    assert_eq!(read(&engine, 9), content(9, 1, 4096));
    assert!(check(&thin).is_clean());
    let engine = Engine::open(&thin).unwrap();
    assert!((0..9).all(|sector| read(&engine, sector) == [0; 4096]));
}

/// A BTT may have been formatted over old data, which is visible in sectors until they are written.
#[test]
fn discard_hides_old_data_in_blocks_of_unwritten_sectors() {
    let media = new_media(4096);
    let thin = thin(&media, 4096);
    let (info, _) = read_arena(&thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    for sector in [5, 6, 7] {
        thin.provision(info.data_range(sector)).unwrap();
    }
    media.store(info.block_at(6), &[7; 4096]).unwrap();
    let engine = Engine::open(&thin).unwrap();
    assert_eq!(read(&engine, 6), [7; 4096]);
    thin.set_available_chunks(0);
    assert!(matches!(engine.discard(0..48), Err(BttError::Full(_))));
    assert_eq!((read(&engine, 6), engine.arenas()[0].read_only.clone()), (vec![7; 4096], None));
    thin.set_available_chunks(1);
    engine.discard(0..48).unwrap();
    assert_eq!(read(&engine, 6), [0; 4096]);
    // The map was a hole, and no space was allocated for the entry of a block with zeros.
    assert_eq!([5, 6, 7].map(|sector| entry(&thin, sector) == 0), [true, false, true]);
    // From here on, blocks are not read, because a change of the map needs no space.
    for sector in [5, 7] {
        thin.provision(info.data_range(sector)).unwrap();
    }
    engine.discard(0..48).unwrap();
    assert_eq!([4, 5, 6, 7].map(|sector| entry(&thin, sector) == 0), [true, false, false, false]);
    assert_eq!([5, 6, 7].map(|sector| thin.holes_in(info.data_range(sector))), [1, 1, 1]);
    assert!(check(&thin).is_clean());
}

#[test]
fn bulk_load_in_a_full_pool_stores_whole_windows() {
    for available in 0.. {
        let media = new_media(4096);
        let thin = thin(&media, 4096);
        let load = Engine::open(&thin).unwrap().into_bulk_load().unwrap();
        let mut load = load.with_window_sectors(16);
        thin.set_available_chunks(available);
        let result = load.write(12, &contents(12..20, 1));
        if let Err(error) = &result {
            assert!(matches!(error, BttError::Full(_)), "{error}");
        }
        thin.set_available_chunks(1);
        let engine = load.finish().unwrap();
        let read: Vec<_> = (12..20).map(|sector| read(&engine, sector)).collect();
        let written = (12..20).zip(read).take_while(|(at, read)| *read == content(*at, 1, 4096));
        // The part of a write in each window is stored completely or not at all.
        let expected = if result.is_ok() {
            8
        } else if available >= 5 {
            4
        } else {
            0
        };
        assert_eq!(written.count(), expected, "{available}");
        assert!(check(&thin).is_clean());
        if result.is_ok() {
            // Sectors that were not loaded have no space.
            assert_eq!((available, entry(&thin, 40)), (9, 0));
            break;
        }
    }
}
