//! Tests of torn map entries, whose first bytes are new and whose last bytes are old after a crash
//! (`btt::torn_entry`).

use std::sync::atomic::Ordering;

use super::damage::Failing;
use super::*;
use crate::btt::arena::ArenaInfo;
use crate::btt::layout::MAP_BLOCK;
use crate::btt::tests::{map_entry, set_map};
use crate::btt::{Finding, GiveUp, flog, plan_repair};

const SECTOR: u64 = 6;

/// Creates a BTT whose last write was the third one of [`SECTOR`]. Returns it with the sector's map
/// entries before and after this write.
fn written() -> (MemoryMedia, ArenaInfo, u32, u32) {
    let media = formatted(4096);
    let (info, _) = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let engine = Engine::open(&media).unwrap();
    let mut entries = [0; 3];
    for (version, after) in (1..).zip(&mut entries) {
        engine.write(SECTOR, &content(SECTOR, version, 4096)).unwrap();
        *after = map_entry(&media, &info, SECTOR as u32);
    }
    (media, info, entries[1], entries[2])
}

/// Returns the entry after a store that was interrupted when `stored` bytes were written.
fn torn(before: u32, after: u32, stored: usize) -> u32 {
    let mut bytes = before.to_le_bytes();
    bytes[..stored].copy_from_slice(&after.to_le_bytes()[..stored]);
    u32::from_le_bytes(bytes)
}

#[test]
fn torn_entry_is_redone_by_check_reader_and_engine() {
    let mut tried = 0;
    for stored in 1..4 {
        let (media, info, before, after) = written();
        let torn = torn(before, after, stored);
        set_map(&media, &info, SECTOR as u32, torn);
        tried += u32::from(![before, after].contains(&torn));

        let report = check(&media);
        assert!(report.is_clean(), "{stored} bytes: {report:?}");
        assert_eq!(report.arenas[0].redo, u32::from(torn != after));
        let mut bytes = vec![0; 4096];
        let reader = Reader::open(&media).unwrap();
        assert_eq!(reader.read(SECTOR, &mut bytes).unwrap(), Sector::Data);
        assert_eq!(bytes, content(SECTOR, 3, 4096), "{stored} bytes");

        // The entry is also corrected on the media, because the driver of a guest would not correct
        // it.
        let engine = Engine::open(&media).unwrap();
        assert_eq!(map_entry(&media, &info, SECTOR as u32), after);
        assert_eq!(read(&engine, SECTOR), content(SECTOR, 3, 4096));
        assert_eq!(check(&media).arenas[0].redo, 0);
    }
    assert!(tried > 0, "each torn entry equals the old or the new entry");
}

#[test]
fn read_of_suspect_fails_if_its_other_owner_is_unreadable() {
    let (media, info, before, after) = written();
    let torn = torn(before, after, 1);
    set_map(&media, &info, SECTOR as u32, torn);
    let owner_at = info.map_at + 4 * u64::from(torn & MAP_BLOCK);
    let failing = Failing::new(media);
    failing.set_bad(std::slice::from_ref(&(owner_at..owner_at + 4)));

    let engine = Engine::open(&failing).unwrap();
    let result = engine.read(SECTOR, &mut vec![0; 4096]);
    assert!(matches!(result, Err(BttError::SectorNotRecovered { sector: SECTOR })), "{result:?}");
    assert_eq!(read(&engine, 0), vec![0; 4096]);
    let (reader, damage) = Reader::open_damaged(&failing);
    assert!(matches!(damage[..], [(0, Finding::MapUnreadable(_))]), "{damage:?}");
    assert_eq!(reader.read(SECTOR, &mut vec![0; 4096]).unwrap(), Sector::Error);

    failing.set_bad(&[]);
    let engine = Engine::open(&failing).unwrap();
    assert_eq!(read(&engine, SECTOR), content(SECTOR, 3, 4096));
}

/// If the torn entry were not redone, its sector would seem to share a block with another sector.
#[test]
fn repair_after_failed_read_gives_up_no_sector_with_torn_entry() {
    let (media, info, before, after) = written();
    set_map(&media, &info, SECTOR as u32, torn(before, after, 1));
    // Damages a lane.
    media.store(info.flog_at + 3 * 64 + 12, &9u32.to_le_bytes()).unwrap();
    let failing = Failing::new(media);
    let plan = || {
        let repair = plan_repair(&failing, GiveUp::Sectors, &mut |_| {}).ok()?;
        // An unreadable info block is rewritten even if there is other damage.
        let of_flog = repair.fixes.iter().filter(|fix| !fix.description.contains("info block"));
        Some(of_flog.map(|fix| format!("{fix:?}")).collect::<Vec<_>>())
    };
    let mended = plan().unwrap();
    assert!(!mended.is_empty());
    for fails_after in 0.. {
        failing.read_fails_after.store(fails_after, Ordering::SeqCst);
        let planned = plan().unwrap_or_default();
        if failing.read_fails_after.swap(u64::MAX, Ordering::SeqCst) < u64::MAX / 2 {
            assert!(fails_after > 8, "a plan reads more");
            break;
        }
        assert!(planned.is_empty() || planned == mended, "{fails_after}: {planned:?}");
    }
}

#[test]
fn entry_that_only_looks_torn_stays() {
    let (media, info, before, after) = written();
    let torn = torn(before, after, 1);
    let owner = torn & MAP_BLOCK;
    assert!(
        owner < info.sectors && map_entry(&media, &info, owner) == 0,
        "the block has the sector's number"
    );
    // Simulates later writes of both sectors by other lanes. Each block has only one owner.
    set_map(&media, &info, SECTOR as u32, torn);
    set_map(&media, &info, owner, after);
    assert!(flog::recover(&media, &info).redo.is_empty());
    let report = check(&media);
    assert!(report.is_clean() && report.arenas[0].redo == 0, "{report:?}");
    drop(Engine::open(&media).unwrap());
    assert_eq!(map_entry(&media, &info, SECTOR as u32), torn);
}

#[test]
fn pending_entry_of_another_lane_precedes_one_that_looks_torn() {
    let (media, info, before, after) = written();
    let torn = torn(before, after, 1);
    let owner = torn & MAP_BLOCK;
    set_map(&media, &info, SECTOR as u32, torn);
    set_map(&media, &info, owner, after);
    // The sector's last write used a lane that had never written before, and a crash prevented the
    // store to the map.
    let lanes = flog::recover(&media, &info).lanes;
    let lane = lanes
        .iter()
        .find(|lane| u64::from(lane.sector) != SECTOR && lane.block >= info.sectors)
        .unwrap();
    let words = [SECTOR as u32, owner, lane.block, 2];
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    media.store(lane.group_at(&info) + 16, &bytes).unwrap();
    let redo = flog::recover(&media, &info).redo;
    assert_eq!(Vec::from_iter(redo), [(SECTOR as u32, lane.block)]);
    let report = check(&media);
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn impossible_torn_entry_is_damage() {
    let (media, info, before, _) = written();
    // Only the last byte differs. It refers to a block that exists only in larger arenas.
    let far = before | 0x3f << 24;
    assert!(far & MAP_BLOCK >= info.blocks);
    set_map(&media, &info, SECTOR as u32, far);
    assert!(flog::recover(&media, &info).redo.is_empty());
    assert!(!check(&media).is_clean());
}
