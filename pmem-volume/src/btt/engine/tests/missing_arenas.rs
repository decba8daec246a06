//! Missing and unreadable arenas. The arenas after a missing one are available only if the numbers
//! of their sectors are known.

use std::sync::atomic::Ordering;

use super::damage::{Failing, change_info, corrupt, flags_at, info_at, second_of};
use super::*;
use crate::btt::layout::{INFO_BYTES, SIGNATURE};
use crate::btt::{Finding, GiveUp, InfoSource, ReadFailure, plan_repair};
use crate::media::Media;

/// Creates three arenas and writes the first sector of each.
fn with_three_arenas() -> (MemoryMedia, Vec<ArenaStatus>) {
    let media = grown(&format_two_arenas(4096), 3 * VOLUME_BYTES);
    let engine = Engine::open(&media).unwrap();
    let arenas = engine.arenas();
    for sector in arenas.iter().map(|arena| arena.first_sector) {
        engine.write(sector, &content(sector, 1, 4096)).unwrap();
    }
    drop(engine);
    (media, arenas)
}

fn destroy_second_arena(media: &MemoryMedia) {
    let second = second_of(media);
    [second.start_bytes, second.copy_at].iter().for_each(|at| corrupt(media, *at));
}

#[test]
fn arenas_behind_a_missing_one_keep_their_sectors() {
    let (media, arenas) = with_three_arenas();
    destroy_second_arena(&media);
    let [_, second, third] = arenas.iter().map(|arena| arena.first_sector).collect::<Vec<_>>()[..]
    else {
        panic!("three arenas")
    };
    let engine = Engine::open(&media).unwrap();
    let now = engine.arenas();
    let places = |arenas: &[ArenaStatus]| {
        arenas.iter().map(|a| (a.start_bytes, a.first_sector, a.sectors)).collect::<Vec<_>>()
    };
    assert_eq!(places(&now), places(&arenas));
    assert!(now[0].read_only.is_none() && now[1].uuid.is_none() && now[2].read_only.is_none());
    assert_eq!(read(&engine, third), content(third, 1, 4096));
    engine.write(third, &content(third, 2, 4096)).unwrap();
    let result = engine.write(third - 1, &vec![1; 4096]);
    assert!(matches!(result, Err(BttError::Missing { arena: 1, .. })), "{result:?}");
    let sectors = engine.sectors();
    drop(engine);
    // The reader and the check find the same arenas as the engine.
    let report = check(&media);
    let totals: Vec<_> = report.arenas.iter().map(|arena| arena.findings_total).collect();
    assert_eq!(totals, [0, 1, 0]);
    let (reader, damage) = Reader::open_damaged(&media);
    assert_eq!((reader.sectors(), damage.len(), damage[0].0), (sectors, 1, 1));
    let mut bytes = vec![7; 3 * 4096];
    let mut lost = Vec::new();
    reader.read_many(third - 2, &mut bytes, &mut |sector, reason| {
        lost.push((sector, reason.to_string()))
    });
    let missing = "in arena 1, which is lost".to_owned();
    assert_eq!(lost, [(third - 2, missing.clone()), (third - 1, missing)]);
    assert_eq!(bytes, [vec![0; 8192], content(third, 2, 4096)].concat());
    assert_eq!(reader.read(second, &mut bytes[..4096]).unwrap(), Sector::Error);
}

/// Checks that opening does not guess unknown arenas, and stores nothing.
fn assert_refused(media: &MemoryMedia) {
    let before = media.to_bytes();
    let error = Engine::open(media).unwrap_err();
    assert!(matches!(error, BttError::Ambiguous { arena: 1, .. }), "{error}");
    assert!(media.to_bytes() == before);
    let repair = plan_repair(media, GiveUp::Sectors, &mut |_| {}).unwrap();
    assert!(repair.fixes.is_empty(), "{:?}", repair.fixes);
    assert!(matches!(repair.report_after.arenas[1].findings[..], [Finding::NoInfo(_)]));
    let (reader, damage) = Reader::open_damaged(media);
    assert_eq!(
        (reader.sectors(), damage.len()),
        (u64::from(info_at(media, START_BYTES).sectors), 1)
    );
    let mut sector = vec![0; 4096];
    assert_eq!(reader.read(0, &mut sector).unwrap(), Sector::Data);
    assert_eq!(sector, content(0, 1, 4096));
}

#[test]
fn several_missing_arenas_are_ambiguous() {
    let (media, arenas) = with_three_arenas();
    let third = info_at(&media, arenas[2].start_bytes);
    destroy_second_arena(&media);
    // The first info block of the third arena is whole, but a guest may have written it.
    corrupt(&media, third.copy_at);
    assert_refused(&media);
    corrupt(&media, third.start_bytes);
    assert_refused(&media);
}

#[test]
fn arena_in_the_data_of_a_guest_is_ignored() {
    let media = grown(&formatted(4096), 3 * VOLUME_BYTES);
    let engine = Engine::open(&media).unwrap();
    engine.write(0, &content(0, 1, 4096)).unwrap();
    drop(engine);
    let real = second_of(&media);
    // Places a complete third arena into the data of the second one, as a guest could do that
    // writes to all blocks.
    let (three, arenas) = with_three_arenas();
    let start = arenas[2].start_bytes;
    let fake = info_at(&three, start);
    let end = real.data_at + u64::from(real.blocks) * u64::from(real.block_bytes);
    let shift = 64 * 4096;
    let copy_at = fake.copy_at - shift;
    assert!(copy_at + INFO_BYTES <= end);
    let mut block = [0; INFO_BYTES as usize];
    three.read(start, &mut block).unwrap();
    for at in [start, copy_at] {
        media.store(at, &block).unwrap();
        change_info(&media, at, |info| {
            info.external_nlba.set(fake.sectors - 100);
            info.internal_nlba.set(fake.blocks - 100);
            for offset in [&mut info.mapoff, &mut info.logoff, &mut info.info2off] {
                offset.set(offset.get() - shift);
            }
        });
    }
    let (planted, source) = read_arena(&media, start, VOLUME_BYTES).unwrap();
    assert_eq!((planted.copy_at, source), (copy_at, InfoSource::Both));
    assert_eq!(fake.uuid, real.uuid);
    destroy_second_arena(&media);
    assert_refused(&media);
    // A trace of an info block is sufficient, even if all blocks of the arena are lost.
    media.store(start, &[0; INFO_BYTES as usize]).unwrap();
    media.store(start - INFO_BYTES, &SIGNATURE).unwrap();
    assert_refused(&media);
    media.store(start - INFO_BYTES, &[0; SIGNATURE.len()]).unwrap();
    let engine = Engine::open(&media).unwrap();
    assert_eq!(engine.arenas()[1].sectors, u64::from(real.sectors));
}

#[test]
fn arena_with_another_sector_size_is_missing_and_others_are_served() {
    let (media, arenas) = with_three_arenas();
    let second = second_of(&media);
    for at in [second.start_bytes, second.copy_at] {
        change_info(&media, at, |info| {
            info.external_lbasize.set(512);
            info.internal_lbasize.set(512);
        });
    }
    let engine = Engine::open(&media).unwrap();
    let now = engine.arenas();
    assert!(
        now[1].read_only.as_ref().is_some_and(|reason| reason.contains("sectors of one size")),
        "{now:?}"
    );
    let third = arenas[2].first_sector;
    assert_eq!(now[2].first_sector, third);
    assert_eq!(read(&engine, third), content(third, 1, 4096));
}

/// If metadata is unreadable during open, check, export or repair, only its arena is affected.
#[test]
fn unreadable_metadata_affects_only_its_arena() {
    let info = second_of(&format_two_arenas(4096));
    let of = |at: u64, length: u64| at..at + length;
    let places = [
        ("first", of(info.start_bytes, INFO_BYTES)),
        ("second", of(info.copy_at, INFO_BYTES)),
        ("flog", of(info.flog_at + 64, 64)),
        ("map", of(info.map_at, 4096)),
        ("map behind", of(info.map_at + 8192, 64)),
    ];
    for (case, bad) in places {
        let media = format_two_arenas(4096);
        let border = Engine::open(&media).unwrap().arenas()[1].first_sector;
        Engine::open(&media).unwrap().write(border, &content(border, 1, 4096)).unwrap();
        let failing = Failing::new(media);
        failing.set_bad(std::slice::from_ref(&bad));

        let engine = Engine::open(&failing).unwrap();
        engine.write(border - 1, &content(border - 1, 1, 4096)).unwrap();
        engine.flush().unwrap();
        let reason = engine.arenas()[1].read_only.clone();
        let is_served = ["first", "second", "map behind"].contains(&case);
        assert_eq!(reason.is_none(), is_served, "{case}: {reason:?}");
        match reason {
            None => assert_eq!(read(&engine, border), content(border, 1, 4096)),
            Some(reason) => {
                assert!(reason.contains("os error 5"), "{reason}");
                let result = engine.write(border, &content(border, 2, 4096));
                assert!(matches!(result, Err(BttError::ReadOnly { arena: 1, .. })), "{result:?}");
                let result = engine.read(border, &mut vec![0; 4096]);
                let is_refused = match case {
                    "flog" => matches!(result, Err(BttError::NotRecovered { arena: 1, .. })),
                    _ => {
                        assert_eq!(read(&engine, border + 2000), vec![0; 4096]);
                        matches!(result, Err(BttError::SectorNotRecovered { sector }) if sector == border)
                    }
                };
                assert!(is_refused, "{case}: {result:?}");
                assert_eq!(read(&engine, border - 1), content(border - 1, 1, 4096));
                assert!(engine.quiesce().is_err(), "the remaining recovery is unknown");
            }
        }
        drop(engine);

        let report = check(&failing);
        assert_eq!(report.arenas[0].findings, []);
        let found = &report.arenas[1].findings;
        match case {
            "first" => assert_eq!(found[..], [Finding::FirstInfo]),
            "second" => assert_eq!(found[..], [Finding::SecondInfo]),
            "flog" => assert!(matches!(found[..], [Finding::FlogUnreadable(_)]), "{found:?}"),
            "map" => assert!(
                matches!(
                    found[..],
                    [Finding::EntryUnreadable { sector: 0, .. }, Finding::MapUnreadable(_)]
                ),
                "{found:?}"
            ),
            _ => assert!(matches!(found[..], [Finding::MapUnreadable(_)]), "{case}: {found:?}"),
        }
        let (reader, damage) = Reader::open_damaged(&failing);
        let of_recovery = ["flog", "map"].contains(&case);
        assert_eq!(
            damage,
            found[..usize::from(of_recovery)].iter().map(|f| (1, f.clone())).collect::<Vec<_>>()
        );
        let mut sector = vec![0; 4096];
        for number in [border - 1, border] {
            let is_unresolved = case == "map" && number == border;
            let expected = if is_unresolved { Sector::Error } else { Sector::Data };
            assert_eq!(reader.read(number, &mut sector).unwrap(), expected, "{case}");
            assert!(is_unresolved || sector == content(number, 1, 4096), "{case}");
        }

        let repair = plan_repair(&failing, GiveUp::Nothing, &mut |_| {}).unwrap();
        failing.set_bad(&[]);
        if ["first", "second"].contains(&case) {
            assert_eq!((repair.fixes.len(), repair.report_after.is_clean()), (1, true), "{case}");
            corrupt(&failing.media, bad.start);
            repair.apply(&failing.media).unwrap();
        }
        assert!(check(&failing.media).is_clean(), "{case}");
        // Unreadable media does not cause the arena's error flag to be set.
        assert_eq!(flags_at(&failing.media, info.start_bytes), 0);
        assert!(
            Engine::open(&failing).unwrap().arenas().iter().all(|arena| arena.read_only.is_none())
        );
    }
}

/// Writes two sectors whose map entries are in different lines. A single call writes both, so it
/// uses two lanes. Then restores their old map entries, as a power failure may do. Returns the
/// first sector and the words of the map.
fn leave_redo_of_two_lanes(media: &MemoryMedia) -> (u64, [u64; 2]) {
    let info = second_of(media);
    let engine = Engine::open(media).unwrap();
    let first = engine.arenas()[1].first_sector + 15;
    let both = |version| [first, first + 1].map(|n| content(n, version, 4096)).concat();
    let words = [14, 16].map(|sector| info.map_at + 4 * sector);
    engine.write(first, &both(1)).unwrap();
    let old = words.map(|at| word_at(media, at));
    engine.write(first, &both(2)).unwrap();
    words.iter().zip(old).for_each(|(at, word)| media.store_word(*at, word).unwrap());
    (first, words)
}

#[test]
fn sector_with_an_unreadable_map_entry_is_refused_and_other_lanes_are_recovered() {
    let media = format_two_arenas(4096);
    let (first, [_, unreadable]) = leave_redo_of_two_lanes(&media);
    let before = media.to_bytes();
    let failing = Failing::new(media);
    failing.set_bad(std::slice::from_ref(&(unreadable..unreadable + 8)));
    let engine = Engine::open(&failing).unwrap();
    let (reader, damage) = Reader::open_damaged(&failing);

    let reason = engine.arenas()[1].read_only.clone().unwrap();
    assert!(reason.starts_with("the map entry of sector L16 cannot be read: "), "{reason}");
    assert_eq!(
        damage.iter().map(|(n, found)| (*n, found.to_string())).collect::<Vec<_>>(),
        [(1, reason)]
    );
    // The sector's map entry is old. The sector cannot be read even when its entry becomes
    // readable.
    for bad in [unreadable..unreadable + 8, 0..0] {
        failing.set_bad(std::slice::from_ref(&bad));
        assert_eq!(read(&engine, first), content(first, 2, 4096));
        let result = engine.read(first + 1, &mut vec![0; 4096]);
        assert!(
            matches!(result, Err(BttError::SectorNotRecovered { sector }) if sector == first + 1),
            "{result:?}"
        );
        let result = engine.write(first, &content(first, 3, 4096));
        assert!(matches!(result, Err(BttError::ReadOnly { arena: 1, .. })), "{result:?}");

        let mut sectors = vec![7; 2 * 4096];
        let mut lost = Vec::new();
        reader.read_many(first, &mut sectors, &mut |sector, reason| lost.push((sector, reason)));
        assert!(
            matches!(lost[..], [(sector, ReadFailure::NotRecovered)] if sector == first + 1),
            "{lost:?}"
        );
        assert_eq!(sectors, [content(first, 2, 4096), vec![0; 4096]].concat());
        let mut sector = vec![0; 4096];
        assert_eq!(reader.read(first + 1, &mut sector).unwrap(), Sector::Error);
    }
    engine.flush().unwrap();
    let result = engine.quiesce();
    assert!(matches!(result, Err(BttError::NotRecovered { arena: 1, .. })), "{result:?}");
    assert!(failing.media.to_bytes() == before, "the media changed");

    let engine = Engine::open(&failing).unwrap();
    assert_eq!(read(&engine, first + 1), content(first + 1, 2, 4096));
    engine.write(first, &content(first, 3, 4096)).unwrap();
}

#[test]
fn quiesce_refuses_a_damaged_arena_with_an_unreadable_entry() {
    let media = format_two_arenas(4096);
    let (_, [_, unreadable]) = leave_redo_of_two_lanes(&media);
    // Stores the sequence numbers 9 and 0 in a lane that the writes have not used.
    media.store(second_of(&media).flog_at + 3 * 64 + 12, &9u32.to_le_bytes()).unwrap();
    let failing = Failing::new(media);
    failing.set_bad(std::slice::from_ref(&(unreadable..unreadable + 8)));
    let engine = Engine::open(&failing).unwrap();

    let reason = engine.arenas()[1].read_only.clone().unwrap();
    assert!(reason.contains("sequence numbers: 9 and 0"), "{reason}");
    let result = engine.quiesce();
    assert!(matches!(result, Err(BttError::NotRecovered { arena: 1, .. })), "{result:?}");
}

#[test]
fn quiesce_persists_maps_of_all_arenas_before_it_reports_an_unreadable_one() {
    let media = format_two_arenas(4096);
    let [first, second] = [info_at(&media, START_BYTES), second_of(&media)];
    let failing = Failing::new(media);
    failing.set_bad(std::slice::from_ref(&(first.flog_at..first.flog_at + 64)));
    let engine = Engine::open(&failing).unwrap();
    let border = engine.arenas()[1].first_sector;
    engine.write(border + 3, &content(border + 3, 1, 4096)).unwrap();
    failing.persisted.lock().unwrap().clear();

    let result = engine.quiesce();

    assert!(matches!(result, Err(BttError::NotRecovered { arena: 0, .. })), "{result:?}");
    let entry_at = second.map_at + 4 * 3;
    let persisted = failing.persisted.lock().unwrap();
    assert!(persisted.iter().any(|range| range.contains(&entry_at)), "{persisted:?}");
}

#[test]
fn quiesce_persists_the_map_of_an_arena_although_an_earlier_one_fails() {
    let media = format_two_arenas(4096);
    let second = second_of(&media);
    let failing = Failing::new(media);
    let engine = Engine::open(&failing).unwrap();
    let border = engine.arenas()[1].first_sector;
    for sector in [3, border + 3] {
        engine.write(sector, &content(sector, 1, 4096)).unwrap();
    }
    failing.persisted.lock().unwrap().clear();
    failing.persist_fails.store(true, Ordering::SeqCst);

    let result = engine.quiesce();

    assert!(matches!(result, Err(BttError::Media(_))), "{result:?}");
    let entry_at = second.map_at + 4 * 3;
    let persisted = failing.persisted.lock().unwrap();
    assert!(persisted.iter().any(|range| range.contains(&entry_at)), "{persisted:?}");
}

#[test]
fn failed_store_of_the_error_flag_is_an_error() {
    let media = formatted(4096);
    let info = info_at(&media, START_BYTES);
    media.store(info.flog_at + 12, &9u32.to_le_bytes()).unwrap();
    let failing = Failing::new(media);
    for left in 0..4 {
        failing.left.store(left, Ordering::SeqCst);
        let error = Engine::open(&failing).unwrap_err();
        assert!(matches!(error, BttError::Media(_)), "{left}: {error}");
    }
    failing.left.store(4, Ordering::SeqCst);
    assert!(Engine::open(&failing).unwrap().arenas()[0].read_only.is_some());
}
