//! Map entries of which a crash has left the first bytes new and the others old (`btt::torn`).

use super::*;
use crate::btt::arena::ArenaInfo;
use crate::btt::layout::MAP_BLOCK;
use crate::btt::{ReadAt, flog};

const SECTOR: u64 = 6;

fn entry_at(info: &ArenaInfo, sector: u32) -> u64 {
    info.map_at + u64::from(sector) * 4
}

fn entry(media: &MemoryMedia, info: &ArenaInfo, sector: u32) -> u32 {
    let mut bytes = [0; 4];
    media.read_at(entry_at(info, sector), &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

fn set_entry(media: &MemoryMedia, info: &ArenaInfo, sector: u32, entry: u32) {
    media.write_at(entry_at(info, sector), &entry.to_le_bytes()).unwrap();
}

/// A BTT in which the last write of all was the third of [`SECTOR`], the sector's entry before it, and after it.
fn written() -> (MemoryMedia, ArenaInfo, u32, u32) {
    let media = formatted(4096);
    let (info, _) = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let engine = Engine::open(&media).unwrap();
    let mut entries = [0; 3];
    for (version, after) in (1..).zip(&mut entries) {
        engine.write(SECTOR, &content(SECTOR, version, 4096)).unwrap();
        *after = entry(&media, &info, SECTOR as u32);
    }
    (media, info, entries[1], entries[2])
}

/// What is there when so many bytes of an entry have been stored.
fn torn(before: u32, after: u32, stored: usize) -> u32 {
    let mut bytes = before.to_le_bytes();
    bytes[..stored].copy_from_slice(&after.to_le_bytes()[..stored]);
    u32::from_le_bytes(bytes)
}

#[test]
fn a_torn_entry_is_redone_by_all_that_read_it() {
    let mut tried = 0;
    for stored in 1..4 {
        let (media, info, before, after) = written();
        let torn = torn(before, after, stored);
        set_entry(&media, &info, SECTOR as u32, torn);
        tried += u32::from(![before, after].contains(&torn));

        let report = check(&media).unwrap();
        assert!(report.is_clean(), "{stored} bytes: {report:?}");
        assert_eq!(report.arenas[0].redo, u32::from(torn != after));
        let mut bytes = vec![0; 4096];
        let reader = Reader::open(&media).unwrap().unwrap();
        assert_eq!(reader.read(SECTOR, &mut bytes).unwrap(), Sector::Data);
        assert_eq!(bytes, content(SECTOR, 3, 4096), "{stored} bytes");

        // On the media, too: a guest's driver would leave it as it is.
        let engine = Engine::open(&media).unwrap();
        assert_eq!(entry(&media, &info, SECTOR as u32), after);
        assert_eq!(read(&engine, SECTOR), content(SECTOR, 3, 4096));
        assert_eq!(check(&media).unwrap().arenas[0].redo, 0);
    }
    assert!(tried > 0, "no entry was neither the old nor the new one");
}

#[test]
fn an_entry_that_only_looks_torn_stays() {
    let (media, info, before, after) = written();
    let torn = torn(before, after, 1);
    let owner = torn & MAP_BLOCK;
    assert!(
        owner < info.sectors && entry(&media, &info, owner) == 0,
        "the block is that of a sector's own number"
    );
    // As if the two had been written since by other lanes, which have had other things to do: each block has one owner.
    set_entry(&media, &info, SECTOR as u32, torn);
    set_entry(&media, &info, owner, after);
    assert!(flog::recover(&media, &info).unwrap().redo.is_empty());
    let report = check(&media).unwrap();
    assert!(report.is_clean() && report.arenas[0].redo == 0, "{report:?}");
    drop(Engine::open(&media).unwrap());
    assert_eq!(entry(&media, &info, SECTOR as u32), torn);
}

#[test]
fn what_no_store_can_have_left_is_damage() {
    let (media, info, before, _) = written();
    // The last byte alone is another one, and names a block that only larger arenas have.
    let far = before | 0x3f << 24;
    assert!(far & MAP_BLOCK >= info.blocks);
    set_entry(&media, &info, SECTOR as u32, far);
    assert!(flog::recover(&media, &info).unwrap().redo.is_empty());
    assert!(!check(&media).unwrap().is_clean());
}
