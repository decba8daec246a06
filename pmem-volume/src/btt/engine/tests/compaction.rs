//! Compaction of a thin volume.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use super::super::release_budget::ReleaseBudget;
use super::release::{Thin, UNIT_BYTES, fill, new_media, thin};
use super::threads::version_of;
use super::*;
use crate::btt::flog::recover;
use crate::btt::layout::MAP_BLOCK;
use crate::media::simulator::Random;
use crate::{CHUNK_BYTES, Pool, VolumeFormat, VolumeOptions, VolumeSize};

/// Sectors of the small arena.
const SECTORS: u64 = 48;

/// Versions of the sectors. Version 0 reads as zeros.
type Versions = [u64; SECTORS as usize];

/// Opens a volume in which all sectors are written, and all but `kept` are discarded in a way that
/// releases nothing.
fn open_sparse<'a>(thin: &'a Thin<'a>, kept: &[u64]) -> (Engine<&'a Thin<'a>>, Versions) {
    let engine = Engine::open(thin).unwrap();
    let mut versions = [0; SECTORS as usize];
    fill(&engine, 0..SECTORS, 1);
    for sector in 0..SECTORS {
        if kept.contains(&sector) {
            versions[sector as usize] = 1;
        } else {
            engine.write_zeroes(sector..sector + 1).unwrap();
        }
    }
    (engine, versions)
}

fn verify(engine: &Engine<&Thin<'_>>, versions: &Versions) {
    for (sector, version) in (0..).zip(versions) {
        let expected = if *version == 0 { vec![0; 4096] } else { content(sector, *version, 4096) };
        assert!(read(engine, sector) == expected, "sector {sector}, version {version}");
    }
    let report = check(*engine.space());
    assert!(report.is_clean(), "{report:?}");
}

/// Compacts until nothing is released any more. Returns the number of released bytes.
fn compact(engine: &Engine<impl Media>) -> u64 {
    let passes = std::iter::from_fn(|| Some(engine.compact(&mut |_| true).unwrap()));
    passes.take_while(|released_bytes| *released_bytes > 0).sum()
}

fn arena<M: Media>(engine: &Engine<M>) -> &Arena {
    engine.arena_slots[0].arena().unwrap()
}

/// Returns the unit of a sector's block.
fn unit_of(engine: &Engine<&Thin<'_>>, sector: u32) -> u64 {
    let entry = arena(engine).map.entry(engine.space(), sector).unwrap();
    arena(engine).info.block_at(entry & MAP_BLOCK) / UNIT_BYTES
}

#[test]
fn live_sectors_of_sparse_units_are_moved_together() {
    let media = new_media(UNIT_BYTES);
    let thin = thin(&media, UNIT_BYTES);
    let kept = [5, 11, 14, 22, 23, 30, 38, 39, 40];
    let (engine, versions) = open_sparse(&thin, &kept);
    let before = thin.allocated();
    // A full pool has no space for a temporary copy.
    thin.set_available_chunks(0);
    let released_bytes = compact(&engine);
    let after = thin.allocated();
    assert!(after.iter().all(|unit| before.contains(unit)));
    // Units that had no live blocks before are released too, and do not count.
    assert!(released_bytes <= (before.len() - after.len()) as u64 * UNIT_BYTES);
    assert!(released_bytes >= 2 * UNIT_BYTES, "{before:?} became {after:?}");
    assert!(2 * engine.compacted_bytes() <= released_bytes);
    verify(&engine, &versions);
    // No lane allocates a released unit again.
    let lanes = recover(&thin, &arena(&engine).info).free;
    for (block, lane) in lanes {
        assert_eq!(thin.holes_in(arena(&engine).info.data_range(block)), 0, "lane {lane}");
    }
    verify(&Engine::open(&thin).unwrap(), &versions);
}

/// Overwrites have mixed the blocks of all sectors and lanes. The free blocks in use by lanes count
/// once, so they do not prevent a pass.
#[test]
fn sparsest_unit_is_emptied_if_the_other_units_have_enough_free_blocks() {
    let mut passes = 0;
    for seed in 1..200 {
        let media = new_media(UNIT_BYTES);
        let thin = thin(&media, UNIT_BYTES);
        let engine = Engine::open(&thin).unwrap();
        let mut random = Random::new(seed);
        for _ in 0..4 * SECTORS {
            fill(&engine, random_sector(&mut random), 1);
        }
        for _ in 0..SECTORS {
            engine.write_zeroes(random_sector(&mut random)).unwrap();
        }
        let live = arena(&engine).live.as_deref().unwrap();
        let units: Vec<u32> = live.used_units().map(|(_, live)| live).collect();
        let Some(sparsest) = units.iter().min() else { continue };
        let free: u32 = units.iter().map(|used| live.unit_blocks() - used).sum();
        let needed = sparsest + arena(&engine).lanes.len() as u32;
        if 2 * sparsest <= live.unit_blocks() && needed <= free - (live.unit_blocks() - sparsest) {
            engine.compact(&mut |_| true).unwrap();
            assert!(engine.compacted_bytes() > 0, "seed {seed}: {units:?}");
            passes += 1;
        }
    }
    assert!(passes > 50, "{passes}");
}

fn random_sector(random: &mut Random) -> Range<u64> {
    let sector = random.below(SECTORS);
    sector..sector + 1
}

#[test]
fn dense_volume_is_not_compacted() {
    let media = new_media(UNIT_BYTES);
    let thin = thin(&media, UNIT_BYTES);
    let kept: Vec<u64> = (0..SECTORS).filter(|sector| sector % 8 != 0).collect();
    let (engine, versions) = open_sparse(&thin, &kept);
    let before = thin.allocated();
    assert_eq!((compact(&engine), engine.compacted_bytes()), (0, 0));
    assert_eq!(thin.allocated(), before);
    verify(&engine, &versions);
}

/// A BTT may have been formatted over old data, which unwritten sectors show.
#[test]
fn old_data_of_unwritten_sectors_stays_visible() {
    let media = new_media(UNIT_BYTES);
    let thin = thin(&media, UNIT_BYTES);
    let (info, _) = read_arena(&thin, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let old: Vec<u32> = (0..40).filter(|sector| sector % 8 == 3).collect();
    for sector in &old {
        thin.provision(info.data_range(*sector)).unwrap();
        thin.store(info.block_at(*sector), &[7; 4096]).unwrap();
    }
    let engine = Engine::open(&thin).unwrap();
    for sector in (0..40).filter(|sector| sector % 8 == 5) {
        engine.write(sector, &content(sector, 1, 4096)).unwrap();
    }
    compact(&engine);
    for sector in 0..40 {
        let expected = match sector % 8 {
            3 => vec![7; 4096],
            5 => content(sector, 1, 4096),
            _ => vec![0; 4096],
        };
        assert!(read(&engine, sector) == expected, "{sector}");
    }
    assert_eq!(engine.compacted_bytes(), 0, "no unit can be released");
    assert!(check(&thin).is_clean());
}

#[test]
fn unit_with_an_unreadable_sector_stays() {
    let media = new_media(UNIT_BYTES);
    let thin = thin(&media, UNIT_BYTES);
    let (engine, _) = open_sparse(&thin, &[5, 14, 22, 23, 30, 31, 38, 39, 40]);
    let sparsest = arena(&engine).live.as_deref().unwrap().used_units().min_by_key(|unit| unit.1);
    let (_, live) = sparsest.unwrap();
    assert_eq!(live, 1);
    for sector in [5, 14] {
        let entry = arena(&engine).map.entry(engine.space(), sector).unwrap();
        arena(&engine).add_failed(entry & MAP_BLOCK);
    }
    let units = [5, 14].map(|sector| unit_of(&engine, sector));
    compact(&engine);
    assert_eq!([5, 14].map(|sector| unit_of(&engine, sector)), units);
    assert!(units.iter().all(|unit| thin.allocated().contains(unit)));
    for sector in [22, 23, 30, 31, 38, 39, 40] {
        assert!(read(&engine, sector) == content(sector, 1, 4096), "{sector}");
    }
}

#[test]
fn block_being_read_is_not_zeroed() {
    let media = new_media(UNIT_BYTES);
    let thin = thin(&media, UNIT_BYTES);
    let kept = [5, 11, 14, 22, 23, 30, 38, 39, 40];
    let (engine, versions) = open_sparse(&thin, &kept);
    let blocks = kept.map(|sector| {
        let entry = arena(&engine).map.entry(engine.space(), sector as u32).unwrap();
        arena(&engine).info.block_at(entry & MAP_BLOCK)
    });
    let reads = blocks.map(|block_at| engine.common.readers.announce(block_at));
    compact(&engine);
    assert!(engine.compacted_bytes() > 0);
    for (sector, block_at) in kept.into_iter().zip(blocks) {
        let mut bytes = vec![0; 4096];
        thin.read(block_at, &mut bytes).unwrap();
        assert!(bytes == content(sector, 1, 4096), "{sector}");
    }
    drop(reads);
    verify(&engine, &versions);
}

#[test]
fn compaction_ends_when_the_caller_ends_it() {
    let media = new_media(UNIT_BYTES);
    let thin = thin(&media, UNIT_BYTES);
    let (engine, versions) = open_sparse(&thin, &[5, 11, 14, 22, 23, 30, 38, 39, 40]);
    engine.compact(&mut |_| false).unwrap();
    assert_eq!(engine.compacted_bytes(), 0);
    engine.compact(&mut |moved_bytes| moved_bytes == 0).unwrap();
    assert_eq!(engine.compacted_bytes(), 4096);
    verify(&engine, &versions);
}

/// The caller writes and discards sectors between the survey and the moves, and between the moves.
#[test]
fn sectors_that_change_during_a_compaction_keep_their_new_content() {
    let (mut moved, mut released) = (0, 0);
    for seed in 1..60 {
        let media = new_media(UNIT_BYTES);
        let thin = thin(&media, UNIT_BYTES);
        let (engine, mut versions) = open_sparse(&thin, &[]);
        let mut random = Random::new(seed);
        let mut change = |engine: &Engine<&Thin<'_>>, discards: u64| {
            let sector = random.below(SECTORS);
            let version = if random.below(8) < discards { 0 } else { 2 + random.below(1 << 20) };
            versions[sector as usize] = version;
            match version {
                0 => engine.discard(sector..sector + 1).unwrap(),
                _ => engine.write(sector, &content(sector, version, 4096)).unwrap(),
            }
        };
        (0..30).for_each(|_| change(&engine, 5));
        for _ in 0..6 {
            released += engine
                .compact(&mut |_| {
                    change(&engine, 6);
                    true
                })
                .unwrap();
        }
        verify(&engine, &versions);
        verify(&Engine::open(&thin).unwrap(), &versions);
        moved += engine.compacted_bytes();
    }
    assert!(moved > 100 * 4096 && released > 0, "{moved} bytes for {released}");
}

/// Another owner stores to each unit as soon as it is released.
#[test]
fn threads_never_see_a_sector_in_motion() {
    const WRITERS: u64 = 2;
    /// Rounds of a writer. It continues while few sectors were moved, up to the maximum.
    const MIN_ROUNDS: u64 = 600;
    const MAX_ROUNDS: u64 = 1 << 20;
    const MOVED_BYTES: u64 = 100 * 4096;
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
                let mut versions = [0; SECTORS as usize / WRITERS as usize];
                let first = writer * versions.len() as u64;
                start.wait();
                for round in 0..MAX_ROUNDS {
                    if round >= MIN_ROUNDS && engine.compacted_bytes() >= MOVED_BYTES {
                        break;
                    }
                    let index = random.below(versions.len() as u64);
                    let sector = first + index;
                    let new = match random.below(8) {
                        0..6 => 0,
                        _ => version.fetch_add(1, Ordering::SeqCst),
                    };
                    match new {
                        0 => engine.write_zeroes(sector..sector + 1).unwrap(),
                        _ => engine.write(sector, &content(sector, new, 4096)).unwrap(),
                    }
                    versions[index as usize] = new;
                    let sector = random.below(versions.len() as u64);
                    let (version, sector) = (versions[sector as usize], first + sector);
                    let expected =
                        if version == 0 { vec![0; 4096] } else { content(sector, version, 4096) };
                    assert!(read(engine, sector) == expected, "{sector}");
                }
                writing.fetch_sub(1, Ordering::SeqCst);
            });
        }
        let (engine, start, writing) = (&engine, &start, &writing);
        scope.spawn(move || {
            let mut random = Random::new(100);
            start.wait();
            while writing.load(Ordering::SeqCst) > 0 {
                let sector = random.below(SECTORS);
                let bytes = read(engine, sector);
                assert!(version_of(sector, &bytes).is_some(), "{sector}: {:x?}", &bytes[..8]);
            }
        });
        start.wait();
        while writing.load(Ordering::SeqCst) > 0 {
            engine.compact(&mut |_| true).unwrap();
        }
    });
    assert!(engine.compacted_bytes() >= MOVED_BYTES);
    assert!(check(&thin).is_clean());
}

/// File of a simulated file system.
struct File {
    sectors: Range<u64>,
    version: u64,
}

/// Overwrites files at random and deletes a part of them with discards. The remaining space should
/// be little more than the remaining data.
#[test]
fn space_after_random_overwrites_and_deletions_is_close_to_the_data() {
    const MIB: u64 = 1 << 20;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let pool = Pool::create(&folder.path().join("pool"), 128 * MIB, 0).unwrap();
    let (size, format) = (VolumeSize::Bytes(112 * MIB), VolumeFormat::Btt);
    pool.create_volume_with("v", VolumeOptions { size, format, thin: true, reserve_bytes: None })
        .unwrap();
    let engine = Engine::open(pool.open_volume("v").unwrap()).unwrap();
    let empty_bytes = engine.space().allocated_bytes();
    let mut random = Random::new(7);
    let (mut files, mut next) = (Vec::new(), 0);
    while next < engine.sectors() - 256 {
        let end = next + 16 + random.below(240);
        files.push(File { sectors: next..end, version: 1 });
        fill(&engine, next..end, 1);
        next = end;
    }
    // Scatters the blocks of each file over all chunks.
    for version in 2..10_000 {
        let index = random.below(files.len() as u64) as usize;
        let File { sectors, .. } = &files[index];
        let sector = sectors.start + random.below(sectors.end - sectors.start);
        engine.write(sector, &content(sector, version, 4096)).unwrap();
    }
    // The last version of each file is written as a whole, in random order.
    for (version, index) in (10_000..).zip(0..files.len()) {
        let other = index as u64 + random.below((files.len() - index) as u64);
        files.swap(index, other as usize);
        files[index].version = version;
        for sector in files[index].sectors.clone() {
            engine.write(sector, &content(sector, version, 4096)).unwrap();
        }
    }
    let (deleted, kept): (Vec<_>, Vec<_>) = files.into_iter().partition(|_| random.below(100) < 60);
    deleted.iter().for_each(|file| engine.discard(file.sectors.clone()).unwrap());

    let live_bytes: u64 =
        kept.iter().map(|file| (file.sectors.end - file.sectors.start) * 4096).sum();
    let before_bytes = engine.space().allocated_bytes();
    let released_bytes = compact(&engine);
    let after_bytes = engine.space().allocated_bytes();
    let per_live = |bytes: u64| bytes as f64 / live_bytes as f64;
    let figures = format!(
        "{} MiB of data: {:.2} times as much allocated before and {:.2} times after (empty: {} \
         chunks); {:.3} bytes moved per released byte",
        live_bytes / MIB,
        per_live(before_bytes),
        per_live(after_bytes),
        empty_bytes / CHUNK_BYTES,
        engine.compacted_bytes() as f64 / released_bytes as f64,
    );
    println!("{figures}");
    assert_eq!(released_bytes, before_bytes - after_bytes, "{figures}");
    assert!(per_live(before_bytes) > 2.0, "{figures}");
    assert!(per_live(after_bytes) <= 1.3, "{figures}");
    assert!(2 * engine.compacted_bytes() <= released_bytes, "{figures}");
    for file in kept {
        for sector in file.sectors.clone() {
            assert!(read(&engine, sector) == content(sector, file.version, 4096), "{sector}");
        }
    }
    for sector in deleted.iter().flat_map(|file| file.sectors.clone()) {
        assert!(read(&engine, sector) == [0; 4096], "{sector}");
    }
    drop(engine);
    assert_eq!(pool.check().unwrap().pool, []);
    assert!(pool.open_volume("v").unwrap().check_btt().unwrap().is_clean());
}
