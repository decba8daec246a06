//! Tests of all kinds of damage. Each checks the finding of a check, the repair, and that other
//! sectors do not change.

use std::collections::BTreeMap;
use std::ops::Range;

use super::*;
use crate::btt::layout::START_BYTES;
use crate::btt::tests::{
    ALL_STEPS, VOLUME_BYTES, Writer, content, flip, formatted, map_entry, set_map, with_info,
};
use crate::btt::{ReadFailure, Reader, check};
use crate::media::simulator::{CrashPoint, Random, Simulator};
use crate::media::{Media, MemoryMedia};

const SECTOR_BYTES: usize = 4096;
/// Sectors that the tests compare. Some of them have content.
const COMPARED_SECTORS: Range<u64> = 0..60;
/// Lanes that the tests use for writes.
const WRITERS: [usize; 4] = [0, 7, 200, 255];

/// Creates a volume in which sectors 0 to 29 were written. Some were written several times, so that
/// sectors have blocks which other sectors had before.
fn filled(second: usize) -> (MemoryMedia, ArenaInfo) {
    let media = formatted(4096);
    let mut writer = Writer::new(&media, second);
    for version in 1..=5u32 {
        for sector in (0..30).filter(|sector| sector % version == 0) {
            let lane = WRITERS[(sector + version) as usize % WRITERS.len()];
            writer.write(lane, sector, &content(sector, version, 4096), ALL_STEPS);
        }
    }
    let arena = writer.arena;
    assert!(check(&media).is_clean());
    (media, arena)
}

/// Returns the content of all readable sectors.
fn sectors(space: &impl Media) -> BTreeMap<u64, Vec<u8>> {
    let (reader, _) = Reader::open_damaged(space);
    if reader.sectors() == 0 {
        return BTreeMap::new();
    }
    let mut bytes =
        vec![0xee; (COMPARED_SECTORS.end - COMPARED_SECTORS.start) as usize * SECTOR_BYTES];
    let mut lost = vec![];
    reader.read_many(COMPARED_SECTORS.start, &mut bytes, &mut |sector, _| lost.push(sector));
    let read = COMPARED_SECTORS.zip(bytes.chunks(SECTOR_BYTES).map(<[u8]>::to_vec));
    read.filter(|(sector, _)| !lost.contains(sector)).collect()
}

fn plan(space: &impl Media, give_up: GiveUp) -> Repair {
    plan_repair(space, give_up, &mut |_| {}).unwrap()
}

/// Carries out a repair and compares the result with its plan. Sectors whose content is correct
/// should not change.
fn repaired(media: &MemoryMedia, give_up: GiveUp, right: &BTreeMap<u64, Vec<u8>>) -> Repair {
    let before = sectors(media);
    let repair = plan(media, give_up);
    repair.apply(media).unwrap();
    let found = check(media);
    assert_eq!(
        format!("{found:?}"),
        format!("{:?}", repair.report_after),
        "the repair differs from its plan"
    );
    let after = sectors(media);
    for (sector, bytes) in right.iter().filter(|(sector, bytes)| before.get(sector) == Some(bytes))
    {
        if give_up == GiveUp::Nothing {
            assert!(
                after.get(sector) == Some(bytes),
                "the repair damaged sector L{sector}: {repair:?}"
            );
        }
    }
    assert!(plan(media, give_up).fixes.is_empty(), "a second repair changes more");
    repair
}

/// Expects a repair to restore the state before the damage.
fn assert_repaired(media: &MemoryMedia, right: &BTreeMap<u64, Vec<u8>>) -> Repair {
    let repair = repaired(media, GiveUp::Nothing, right);
    assert!(repair.report_after.is_clean(), "{repair:?}");
    assert!(sectors(media) == *right, "sectors changed");
    repair
}

/// Expects a repair to leave the damage unchanged.
fn assert_unrepaired(media: &MemoryMedia) -> Repair {
    let before = media.to_bytes();
    let repair = plan(media, GiveUp::Nothing);
    assert!(repair.fixes.is_empty() && !repair.report_after.is_clean(), "{repair:?}");
    repair.apply(media).unwrap();
    assert!(before == media.to_bytes());
    repair
}

fn set_flog(media: &MemoryMedia, arena: &ArenaInfo, lane: u64, slot: u64, field: u64, value: u32) {
    let at = arena.flog_at + lane * FLOG_GROUP_BYTES + slot * 16 + field * 4;
    media.store(at, &value.to_le_bytes()).unwrap();
}

#[test]
fn every_bit_of_an_info_block_is_restored_from_its_copy() {
    let media = formatted(4096);
    let good = media.to_bytes();
    let places =
        [(START_BYTES, Finding::FirstInfo), (VOLUME_BYTES - INFO_BYTES, Finding::SecondInfo)];
    for (block, finding) in places {
        for byte in (0..120).chain(4088..4096) {
            for bit in 0..8 {
                flip(&media, block + byte, bit);
                let report = check(&media);
                assert_eq!(
                    report.arenas[0].findings,
                    std::slice::from_ref(&finding),
                    "byte {byte}, bit {bit}"
                );
                let repair = plan(&media, GiveUp::Nothing);
                assert!(repair.report_after.is_clean() && repair.fixes.len() == 1);
                repair.apply(&media).unwrap();
                let mut back = [0xee; 4096];
                media.read(block, &mut back).unwrap();
                assert!(back == good[block as usize..][..4096], "byte {byte}, bit {bit}");
            }
        }
    }
    assert!(good == media.to_bytes());
}

#[test]
fn volume_without_info_blocks_is_unchanged() {
    let (media, _) = filled(1);
    for offset in [0, 56, 2000, 4090] {
        let places = [START_BYTES + offset, VOLUME_BYTES - INFO_BYTES + offset];
        places.iter().for_each(|at| flip(&media, *at, 1));
        let repair = assert_unrepaired(&media);
        assert!(matches!(repair.report_after.arenas[0].findings[..], [Finding::NoInfo(_)]));
        assert!(sectors(&media).is_empty());
        places.iter().for_each(|at| flip(&media, *at, 1));
    }
    // The truncated volume is smaller than its info block states.
    for bytes in [START_BYTES, 8 << 20, VOLUME_BYTES - 4096, VOLUME_BYTES - 8] {
        let cut = MemoryMedia::from_bytes(&media.to_bytes()[..bytes as usize]);
        let repair = assert_unrepaired(&cut);
        assert!(
            matches!(repair.report_after.arenas[0].findings[..], [Finding::NoInfo(_)]),
            "{repair:?}"
        );
    }
}

#[test]
fn impossible_lanes_get_blocks_without_an_owner() {
    for second in [1, 2] {
        let (media, arena) = filled(second);
        let (good, right) = (media.to_bytes(), sectors(&media));
        let blocks = |media: &MemoryMedia| -> Vec<u32> {
            let lanes = survey(media, &arena).unwrap().unwrap().lanes;
            lanes.iter().map(|lane| lane.free.unwrap()).collect()
        };
        let before = blocks(&media);
        // A lane that has written once, one that has written several times, and one that has never
        // written.
        for lane in [0, 7, 100] {
            for (field, value) in
                [(0, MAP_BLOCK), (1, MAP_BLOCK - 1), (2, u32::MAX), (3, 9), (3, 0), (3, 4)]
            {
                let media = MemoryMedia::from_bytes(&good);
                (0..4).for_each(|slot| set_flog(&media, &arena, lane, slot, field, value));
                let repair = assert_repaired(&media, &right);
                assert!(
                    repair.fixes[0].description.contains(&format!("lane {lane}")),
                    "{repair:?}"
                );
                assert_eq!(before, blocks(&media), "lane {lane}, field {field}");
            }
        }
        // Two equally new entries in each of several lanes.
        let media = MemoryMedia::from_bytes(&good);
        for lane in [0, 7, 100, 255] {
            [0, second as u64].iter().for_each(|slot| set_flog(&media, &arena, lane, *slot, 3, 2));
        }
        let repair = assert_repaired(&media, &right);
        assert!(repair.fixes[0].description.contains("4 lane(s)"), "{repair:?}");
        assert_eq!(before.len(), blocks(&media).len());
    }
}

#[test]
fn lost_flog_is_derived_from_the_map() {
    for byte in [0, 0xff, 0x5a] {
        let (media, arena) = filled(1);
        let right = sectors(&media);
        media.store(arena.flog_at, &vec![byte; 256 * FLOG_GROUP_BYTES as usize]).unwrap();
        let repair = assert_repaired(&media, &right);
        assert!(repair.fixes[0].description.contains("256 lane(s) of the flog"), "{repair:?}");
    }
}

#[test]
fn content_of_an_unused_slot_affects_only_its_lane() {
    for (second, wrong) in [(1, 2), (1, 3), (2, 1), (2, 3)] {
        let (media, arena) = filled(second);
        let right = sectors(&media);
        set_flog(&media, &arena, 7, wrong, 1, 3);
        assert!(check(&media).arenas[0].findings.contains(&Finding::FlogPadding));
        let repair = assert_repaired(&media, &right);
        assert!(repair.fixes[0].description.contains("1 lane(s) of the flog"), "{repair:?}");
    }
}

#[test]
fn only_sector_without_a_block_gets_the_only_block_without_an_owner() {
    let (media, arena) = filled(1);
    let (good, right) = (media.to_bytes(), sectors(&media));
    for sector in [0, 12, 29] {
        set_map(&media, &arena, sector, MAP_BLOCK | MAP_ERROR | MAP_ZERO);
        assert_eq!(sectors(&media).get(&u64::from(sector)), None);
        let repair = assert_repaired(&media, &right);
        assert!(
            repair.fixes[0].description.starts_with(&format!("sector L{sector} ")),
            "{repair:?}"
        );
        assert!(good == media.to_bytes());
    }
    // A discarded sector remains discarded.
    set_map(&media, &arena, 40, 40 | MAP_ZERO);
    let good = media.to_bytes();
    set_map(&media, &arena, 40, (arena.blocks + 40) | MAP_ZERO);
    assert_repaired(&media, &right);
    assert!(good == media.to_bytes());
}

#[test]
fn sectors_with_unknown_blocks_are_marked_as_lost() {
    let (media, arena) = filled(1);
    let right = sectors(&media);
    for sector in [3, 4, 5, 20] {
        set_map(&media, &arena, sector, (arena.blocks + sector) | MAP_ERROR | MAP_ZERO);
    }
    let damaged = media.to_bytes();
    let repair = repaired(&media, GiveUp::Nothing, &right);
    assert!(repair.report_after.is_clean());
    assert_eq!(repair.report_after.arenas[0].error_sectors, 4);
    assert!(repair.fixes[0].description.contains("4 sector(s) are marked as lost"), "{repair:?}");
    assert!(repair.fixes[0].description.contains("L3 to 5, L20."), "{repair:?}");
    let (reader, _) = Reader::open_damaged(&media);
    let mut lost = vec![];
    reader.read_many(0, &mut [0; 30 * SECTOR_BYTES], &mut |sector, reason| {
        lost.push((sector, matches!(reason, ReadFailure::Marked)));
    });
    assert_eq!(lost, [(3, true), (4, true), (5, true), (20, true)]);

    // A crash may lose any one of the words. The sector that then has no block should not receive
    // the only block without an owner, because it may not be its own.
    let stores = &repair.fixes[0].phases[0];
    for missing in 0..stores.len() {
        let media = MemoryMedia::from_bytes(&damaged);
        for (at, bytes) in stores
            .iter()
            .enumerate()
            .filter(|(number, _)| *number != missing)
            .map(|(_, store)| store)
        {
            media.store(*at, bytes).unwrap();
        }
        let rest = repaired(&media, GiveUp::Nothing, &right);
        assert!(rest.report_after.is_clean());
        assert_eq!(rest.report_after.arenas[0].error_sectors, 4, "a sector was guessed");
    }
}

#[test]
fn no_sector_is_guessed_with_a_lane_without_a_block() {
    let (media, arena) = filled(1);
    let right = sectors(&media);
    set_map(&media, &arena, 12, MAP_BLOCK | MAP_ERROR | MAP_ZERO);
    set_flog(&media, &arena, 7, 0, 3, 9);
    let repair = repaired(&media, GiveUp::Nothing, &right);
    assert!(repair.report_after.is_clean());
    assert_eq!((repair.fixes.len(), repair.report_after.arenas[0].error_sectors), (2, 1));
    assert!(repair.fixes[0].description.contains("L12"), "sectors come first: {repair:?}");
}

#[test]
fn sectors_that_share_a_block_stay_unless_they_are_given_up() {
    let (media, arena) = filled(1);
    let right = sectors(&media);
    set_map(&media, &arena, 12, map_entry(&media, &arena, 20));
    let repair = assert_unrepaired(&media);
    let findings = &repair.report_after.arenas[0].findings;
    assert!(
        matches!(&findings[..], [Finding::BlockTwice { by, .. }, Finding::BlocksLost { count: 1, .. }] if by.contains("L20")),
        "{findings:?}"
    );
    let repair = repaired(&media, GiveUp::Sectors, &right);
    assert!(repair.report_after.is_clean());
    let read = sectors(&media);
    assert_eq!((read.get(&12), read.get(&20)), (None, None));
    let others = |sectors: &BTreeMap<u64, Vec<u8>>| -> Vec<_> {
        sectors.clone().into_iter().filter(|(sector, _)| ![12, 20].contains(sector)).collect()
    };
    assert!(others(&read) == others(&right));
}

#[test]
fn block_of_a_sector_and_a_lane_stays_unless_the_sector_is_given_up() {
    let (media, arena) = filled(1);
    let right = sectors(&media);
    let lane = survey(&media, &arena).unwrap().unwrap().lanes[7].free.unwrap();
    set_map(&media, &arena, 12, lane | MAP_ERROR | MAP_ZERO);
    assert_unrepaired(&media);
    let repair = repaired(&media, GiveUp::Sectors, &right);
    assert!(repair.report_after.is_clean(), "{repair:?}");
    assert_eq!(sectors(&media).get(&12), None);
    // The sector keeps the block regardless of its content. Otherwise, the lane would write to the
    // block.
    assert_eq!(map_entry(&media, &arena, 12), lane | MAP_ERROR);
}

#[test]
fn lanes_that_share_a_block_are_repaired_without_losing_a_sector() {
    let (media, arena) = filled(1);
    let right = sectors(&media);
    let lanes = survey(&media, &arena).unwrap().unwrap().lanes;
    let (first, second) = (lanes[100].free.unwrap(), lanes[101].free.unwrap());
    set_flog(&media, &arena, 101, 0, 1, first);
    let repair = assert_repaired(&media, &right);
    assert!(repair.fixes[0].description.contains("lane 101"), "{repair:?}");
    assert_eq!(survey(&media, &arena).unwrap().unwrap().lanes[101].free, Some(second));
}

#[test]
fn pending_map_entry_is_stored_before_its_lane_is_replaced() {
    let (media, arena) = filled(1);
    let mut writer = Writer::new(&media, 1);
    // The flog entry is complete, but the map entry has not been written.
    writer.write(50, 12, &content(12, 9, 4096), 3);
    let right = sectors(&media);
    assert_eq!(right[&12], content(12, 9, 4096));
    let old = survey(&media, &arena).unwrap().unwrap().lanes[50].free.unwrap();
    // The block also belongs to an earlier lane, so the later lane receives another block.
    set_flog(&media, &arena, 3, 0, 1, old);
    let repair = assert_repaired(&media, &right);
    assert!(repair.fixes[0].description.contains("lane 50"), "{repair:?}");
    assert_eq!(check(&media).arenas[0].redo, 0);
}

#[test]
fn error_flag_is_cleared_if_nothing_else_is_damaged() {
    let (media, arena) = filled(1);
    let (good, right) = (media.to_bytes(), sectors(&media));
    let set = |info: &mut InfoBytes| info.flags.set(FLAG_ERROR);
    with_info(&media, set);
    let repair = assert_repaired(&media, &right);
    assert!(repair.fixes[0].description.contains("error flag"), "{repair:?}");
    assert!(good == media.to_bytes());
    // The flag is cleared together with the repair of the defect that caused it.
    with_info(&media, set);
    set_flog(&media, &arena, 7, 0, 3, 9);
    flip(&media, START_BYTES + 20, 1);
    assert_eq!(assert_repaired(&media, &right).fixes.len(), 3);
    // The flag is not cleared while another defect remains.
    with_info(&media, set);
    set_map(&media, &arena, 12, map_entry(&media, &arena, 20));
    assert!(
        assert_unrepaired(&media).report_after.arenas[0].findings.contains(&Finding::ErrorFlag)
    );
}

#[test]
fn lost_map_stays_and_uses_little_memory() {
    let (media, arena) = filled(1);
    let map_bytes = arena.sectors as usize * MAP_ENTRY_BYTES as usize;
    media.store(arena.map_at, &vec![0; map_bytes]).unwrap();
    assert_unrepaired(&media);
    media.store(arena.map_at, &vec![0xff; map_bytes]).unwrap();
    // All sectors are mapped out of range and could have any block. Their number is less than the
    // limit of a repair.
    let repair = plan(&media, GiveUp::Nothing);
    assert!(repair.report_after.is_clean());
    assert_eq!(repair.report_after.arenas[0].error_sectors, arena.sectors);
}

#[test]
fn second_arena_is_repaired_independently() {
    let media = MemoryMedia::new(2 * VOLUME_BYTES);
    crate::btt::Layout::new(VOLUME_BYTES, 4096, uuid::Uuid::from_u128(4))
        .unwrap()
        .format(&media)
        .unwrap();
    let extension = crate::btt::extend(&media, 2 * VOLUME_BYTES).unwrap();
    extension.format(&media).unwrap();
    extension
        .link_words()
        .into_iter()
        .for_each(|(at, word)| media.store(at, &word.to_le_bytes()).unwrap());
    let second = arenas(&media)[1].clone().unwrap().0;
    set_flog(&media, &second, 9, 0, 3, 7);
    let damaged = media.to_bytes();
    // Damage that remains in the first arena does not prevent the repair of the second.
    let first = arenas(&media)[0].clone().unwrap().0;
    set_map(&media, &first, 12, 20 | MAP_ERROR | MAP_ZERO);
    let repair = plan(&media, GiveUp::Nothing);
    assert_eq!(repair.fixes.iter().map(|fix| fix.arena).collect::<Vec<_>>(), [1]);
    let clean: Vec<_> =
        repair.report_after.arenas.iter().map(|arena| arena.findings_total == 0).collect();
    assert_eq!(clean, [false, true]);
    repair.apply(&media).unwrap();
    set_map(&media, &first, 12, 0);
    assert!(check(&media).is_clean() && damaged != media.to_bytes());
}

/// Creates a volume with all kinds of repairable damage: both info blocks, sectors, lanes, and the
/// error flag.
fn damaged_simulation() -> (Simulator, BTreeMap<u64, Vec<u8>>) {
    let (media, arena) = filled(1);
    let right = sectors(&media);
    let mut writer = Writer::new(&media, 1);
    writer.write(50, 12, &content(12, 9, 4096), 3);
    let right = BTreeMap::from_iter(right.into_iter().chain([(12, content(12, 9, 4096))]));
    let shared = survey(&media, &arena).unwrap().unwrap().lanes[50].free.unwrap();
    with_info(&media, |info| info.flags.set(FLAG_ERROR));
    set_flog(&media, &arena, 3, 0, 1, shared);
    // Both entries are equally new. The older one contains the lane's block.
    [0, 1].iter().for_each(|slot| set_flog(&media, &arena, 200, *slot, 3, 1));
    set_map(&media, &arena, 20, MAP_BLOCK | MAP_ERROR | MAP_ZERO);
    flip(&media, START_BYTES + 60, 3);
    let simulator = Simulator::new(VOLUME_BYTES);
    simulator.store(0, &media.to_bytes()).unwrap();
    simulator.persist_range(0..VOLUME_BYTES).unwrap();
    (simulator, right)
}

/// Verifies every image of every point. A second repair should complete the first one, and only the
/// sector without a block may be lost.
fn verify_points(points: &[CrashPoint], right: &BTreeMap<u64, Vec<u8>>) -> Result<usize, String> {
    let (mut images, mut random) = (0, Random::new(5));
    for (index, point) in points.iter().enumerate() {
        for (number, image) in point.images(40, &mut random).into_iter().enumerate() {
            images += 1;
            let failed = |text: String| format!("point {index}, image {number}: {text}");
            plan(&image, GiveUp::Nothing).apply(&image).unwrap();
            let report = check(&image);
            if !report.is_clean() {
                return Err(failed(format!("{report:?}")));
            }
            let read = sectors(&image);
            let wrong = right
                .iter()
                .find(|(sector, bytes)| **sector != 20 && read.get(sector) != Some(bytes));
            if let Some((sector, _)) = wrong {
                return Err(failed(format!("sector L{sector} has changed")));
            }
            // The sector may be restored, but only with its own content.
            if read.get(&20).is_some_and(|bytes| *bytes != right[&20]) {
                return Err(failed("sector L20 was guessed".to_owned()));
            }
        }
    }
    Ok(images)
}

#[test]
fn repair_can_be_interrupted_anywhere() {
    let (space, right) = damaged_simulation();
    let repair = plan(&space, GiveUp::Nothing);
    assert!(repair.report_after.is_clean() && repair.fixes.len() == 4, "{repair:?}");
    space.record();
    repair.apply(&space).unwrap();
    let points = space.take_points();
    let images = verify_points(&points, &right).unwrap();
    assert!(images >= 60, "only {images} images");
}

#[test]
fn repair_of_a_lane_in_one_phase_is_detected() {
    let (space, right) = damaged_simulation();
    let mut repair = plan(&space, GiveUp::Nothing);
    // Omits a step: the impossible sequence number that protects a lane until the rest of it is
    // durable.
    for fix in repair.fixes.iter_mut().filter(|fix| fix.description.contains("lane(s)")) {
        fix.phases = vec![fix.phases.drain(..).flatten().collect()];
    }
    space.record();
    repair.apply(&space).unwrap();
    verify_points(&space.take_points(), &right).expect_err("the wrong order was not detected");
}

/// Writes a sector twice, kills the process at each persist, and damages the lanes of these writes.
fn killed_and_damaged() -> Vec<(Simulator, BTreeMap<u64, Vec<u8>>)> {
    let (media, arena) = filled(1);
    let right = sectors(&media);
    let space = Simulator::new(VOLUME_BYTES);
    space.store(0, &media.to_bytes()).unwrap();
    space.persist_range(0..VOLUME_BYTES).unwrap();
    let flog = |space: &Simulator| {
        let mut bytes = vec![0; 256 * FLOG_GROUP_BYTES as usize];
        space.read(arena.flog_at, &mut bytes).unwrap();
        bytes
    };
    let before = flog(&space);
    let engine = crate::btt::Engine::open(&space).unwrap();
    space.record();
    (9..11).for_each(|version| engine.write(12, &content(12, version, 4096)).unwrap());
    let points = space.take_points();
    let mut found = Vec::new();
    for killed in points.iter().map(CrashPoint::killed) {
        let now = flog(&killed);
        let group_bytes = FLOG_GROUP_BYTES as usize;
        let lanes = before.chunks(group_bytes).zip(now.chunks(group_bytes)).enumerate();
        let wrote: Vec<_> =
            lanes.filter(|(_, (before, now))| before != now).map(|(lane, _)| lane).collect();
        for at in
            wrote.iter().flat_map(|lane| [8, 24].map(|at| *lane as u64 * FLOG_GROUP_BYTES + at))
        {
            Media::store_word(&killed, arena.flog_at + at, u64::MAX).unwrap();
            killed.persist_range(arena.flog_at + at..arena.flog_at + at + 8).unwrap();
        }
        if !wrote.is_empty() {
            found.push((killed, right.clone()));
        }
    }
    found
}

/// Repairs the state after a kill, and then simulates a power failure. A sector and a lane should
/// never own the same block.
fn survive_kills(apply: impl Fn(&Repair, &Simulator)) -> Result<usize, String> {
    let mut images = 0;
    for (number, (killed, right)) in killed_and_damaged().iter().enumerate() {
        killed.record();
        let repair = plan(killed, GiveUp::Nothing);
        assert!(repair.report_after.is_clean() && !repair.fixes.is_empty(), "{repair:?}");
        apply(&repair, killed);
        for image in
            killed.take_points().iter().flat_map(|point| point.images(40, &mut Random::new(7)))
        {
            images += 1;
            plan(&image, GiveUp::Nothing).apply(&image).unwrap();
            let report = check(&image);
            if !report.is_clean() {
                return Err(format!("killed at {number}: {report:?}"));
            }
            // The last write of a damaged lane may be lost, because only the lane recorded that its
            // map word was not durable.
            let wrong = sectors(&image)
                .into_iter()
                .find(|(sector, bytes)| *sector != 12 && *bytes != right[sector]);
            if let Some((sector, _)) = wrong {
                return Err(format!("killed at {number}: sector L{sector} has changed"));
            }
        }
    }
    Ok(images)
}

#[test]
fn repair_survives_an_earlier_kill_and_then_a_loss_of_power() {
    let images = survive_kills(|repair, space| repair.apply(space).unwrap()).unwrap();
    assert!(images >= 40, "only {images} images");
}

#[test]
fn repair_based_on_volatile_metadata_is_detected() {
    let found = survive_kills(|repair, space| {
        repair.fixes.iter().try_for_each(|fix| fix.apply(space)).unwrap();
    });
    found.expect_err("it was not detected");
}
