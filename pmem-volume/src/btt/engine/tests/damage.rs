//! Impossible metadata and failing media. Damage should be reported for its own arena, and should
//! not affect the other arena.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::script::{InjectedBug, LANES, Oracle, Recorded, SECTORS, new_media};
use super::*;
use crate::btt::Finding;
use crate::btt::arena::ArenaInfo;
use crate::btt::flog::{Recovery, read_map, recover};
use crate::btt::layout::{FLAG_ERROR, MAP_BLOCK, MAP_ERROR, MAP_ZERO};
use crate::media::simulator::{Random, Simulator};
use crate::media::{Durability, Media, MediaError, Pending};

pub(super) fn info_at(media: &MemoryMedia, start: u64) -> ArenaInfo {
    read_arena(media, start, VOLUME_BYTES - START_BYTES).unwrap().0
}

/// Returns the second of two arenas.
pub(super) fn second_of(media: &MemoryMedia) -> ArenaInfo {
    info_at(media, info_at(media, START_BYTES).next_bytes.unwrap())
}

fn store_u32(media: &MemoryMedia, at: u64, value: u32) {
    media.store(at, &value.to_le_bytes()).unwrap();
}

/// Changes an info block or its copy, and updates its checksum.
pub(super) fn change_info(media: &MemoryMedia, at: u64, change: impl Fn(&mut InfoBytes)) {
    let mut info = InfoBytes::new_zeroed();
    media.read(at, info.as_mut_bytes()).unwrap();
    change(&mut info);
    let sum = checksum(&info);
    info.checksum.set(sum);
    media.store(at, info.as_bytes()).unwrap();
}

pub(super) fn corrupt(media: &MemoryMedia, at: u64) {
    store_u32(media, at + 16, 0xdead_beef);
}

pub(super) fn flags_at(media: &MemoryMedia, at: u64) -> u32 {
    let mut info = InfoBytes::new_zeroed();
    media.read(at, info.as_mut_bytes()).unwrap();
    assert_eq!(info.checksum.get(), checksum(&info), "the info block is whole");
    info.flags.get()
}

/// Checks that only the second arena is read-only, in the engine and on the media, and that the
/// first one still works. Returns the reason.
fn only_the_second_is_read_only(media: &MemoryMedia, engine: &Engine<&MemoryMedia>) -> String {
    let arenas = engine.arenas();
    let border = arenas[1].first_sector;
    assert_eq!(arenas[0].read_only, None);
    engine.write(border - 1, &content(border - 1, 7, 4096)).unwrap();
    assert_eq!(read(engine, border - 1), content(border - 1, 7, 4096));
    let reason = arenas[1].read_only.clone().expect("the second arena is damaged");
    let refused =
        [engine.write(border, &content(border, 7, 4096)), engine.discard(border..border + 1)];
    for result in refused {
        let Err(BttError::ReadOnly { arena: 1, reason: fault }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(fault.to_string(), reason);
    }
    // A write across the boundary still writes the sectors of the first arena.
    assert!(matches!(
        engine.write(border - 1, &vec![1; 8192]),
        Err(BttError::ReadOnly { arena: 1, .. })
    ));
    engine.flush().unwrap();
    let info = second_of(media);
    for at in [info.start_bytes, info.copy_at] {
        assert_eq!(flags_at(media, at), FLAG_ERROR);
    }
    let first = info_at(media, START_BYTES);
    assert_eq!(flags_at(media, first.start_bytes) | flags_at(media, first.copy_at), 0);
    // The next open finds the flag.
    assert!(Engine::open(media).unwrap().arenas()[1].read_only.is_some());
    reason
}

#[test]
fn impossible_flog_makes_its_arena_read_only() {
    type Change = fn(&MemoryMedia, &ArenaInfo, &Recovery);
    let changes: [(&str, Change); 8] = [
        ("sequence numbers: 9 and 0", |m, a, _| store_u32(m, a.flog_at + 3 * 64 + 12, 9)),
        ("sequence numbers: 0 and 0", |m, a, _| m.store(a.flog_at + 3 * 64, &[0; 64]).unwrap()),
        ("an unknown way", |m, a, _| store_u32(m, a.flog_at + 48, 1)),
        ("lba", |m, a, _| store_u32(m, a.flog_at + 3 * 64, MAP_BLOCK)),
        ("old_map", |m, a, _| store_u32(m, a.flog_at + 3 * 64 + 4, MAP_BLOCK)),
        ("new_map", |m, a, _| store_u32(m, a.flog_at + 3 * 64 + 8, MAP_BLOCK)),
        ("referenced twice, the second time by lane 4", |m, a, r| {
            store_u32(m, a.flog_at + 4 * 64 + 4, r.free[3].0);
        }),
        ("referenced twice, the second time by sector L3", |m, a, r| {
            store_u32(m, a.map_at + 4 * 3, r.free[4].0 | MAP_ERROR | MAP_ZERO);
        }),
    ];
    for (case, change) in changes {
        let media = format_two_arenas(4096);
        let engine = Engine::open(&media).unwrap();
        let border = engine.arenas()[1].first_sector;
        engine.write(border + 5, &content(border + 5, 1, 4096)).unwrap();
        drop(engine);
        // A new thread does not use lane 3 and its neighbors first.
        let info = second_of(&media);
        change(&media, &info, &recover(&media, &info));
        let engine = Engine::open(&media).unwrap();
        let reason = only_the_second_is_read_only(&media, &engine);
        assert!(reason.contains(case), "{case}: {reason}");
        // Sectors that are readable can still be read.
        assert_eq!(read(&engine, border + 5), content(border + 5, 1, 4096), "{case}");
    }
}

#[test]
fn map_entry_out_of_range_is_detected_on_use() {
    for by_write in [false, true] {
        let media = format_two_arenas(4096);
        let info = second_of(&media);
        store_u32(&media, info.map_at + 4 * 9, MAP_ERROR | MAP_ZERO | info.blocks);
        let engine = Engine::open(&media).unwrap();
        let border = engine.arenas()[1].first_sector;
        engine.write(border, &content(border, 1, 4096)).unwrap();
        let error = match by_write {
            true => engine.write(border + 8, &vec![1; 8192]).unwrap_err(),
            false => engine.read(border + 9, &mut vec![0; 4096]).unwrap_err(),
        };
        match error {
            BttError::ReadOnly { arena: 1, reason } if by_write => {
                assert!(matches!(reason, Fault::Damaged(Finding::MapRange { sector: 9, .. })));
            }
            BttError::Sector { sector } if !by_write => assert_eq!(sector, border + 9),
            other => panic!("{other}"),
        }
        let reason = only_the_second_is_read_only(&media, &engine);
        assert!(reason.contains("sector L9 is mapped to"), "{reason}");
        assert_eq!(read(&engine, border), content(border, 1, 4096));
    }
}

#[test]
fn arena_with_error_flag_is_unchanged_and_recovered_in_memory() {
    let media = format_two_arenas(4096);
    let info = second_of(&media);
    // Simulates a write of sector 3 that is missing in the map: data in the lane's block, and a
    // committed entry.
    let recovery = recover(&media, &info);
    let (block, _) = recovery.free[0];
    let border = Engine::open(&media).unwrap().arenas()[1].first_sector;
    media.store(info.block_at(block), &content(border + 3, 5, 4096)).unwrap();
    media.store(info.flog_at + 16, [3u32, 3, block, 2].map(u32::to_le).as_bytes()).unwrap();
    for at in [info.start_bytes, info.copy_at] {
        change_info(&media, at, |info| info.flags.set(FLAG_ERROR));
    }
    let before = media.to_bytes();
    let engine = Engine::open(&media).unwrap();
    assert_eq!(read(&engine, border + 3), content(border + 3, 5, 4096));
    assert!(media.to_bytes() == before, "nothing is stored");
    let reason = only_the_second_is_read_only(&media, &engine);
    assert_eq!(reason, "its error flag is set");
}

#[test]
fn sector_in_error_is_unreadable_but_writable() {
    let media = formatted(4096);
    let info = info_at(&media, START_BYTES);
    for sector in [6, 7] {
        store_u32(&media, info.map_at + 4 * sector, sector as u32 | MAP_ERROR);
    }
    let engine = Engine::open(&media).unwrap();
    let error = engine.read(5, &mut vec![0; 3 * 4096]).unwrap_err();
    assert!(matches!(error, BttError::Sector { sector: 6 }), "{error}");
    engine.write(6, &content(6, 1, 4096)).unwrap();
    assert_eq!(read(&engine, 6), content(6, 1, 4096));
    engine.discard(7..8).unwrap();
    assert_eq!(read(&engine, 7), vec![0; 4096]);
    assert!(check(&media).is_clean());
    // As in Linux, the flog records that the block which the lane received has failed.
    let entries = (0..256).map(|lane| word_at(&media, info.flog_at + lane * 64 + 16));
    assert!(entries.into_iter().any(|half| half == u64::from(6 | MAP_ERROR) << 32 | 6));
}

#[test]
fn damaged_info_block_is_replaced_by_its_copy_or_the_arena_is_missing() {
    let media = format_two_arenas(4096);
    let info = second_of(&media);
    let border = Engine::open(&media).unwrap().arenas()[1].first_sector;
    for at in [info.start_bytes, info.copy_at] {
        let media = MemoryMedia::from_bytes(&media.to_bytes());
        corrupt(&media, at);
        let engine = Engine::open(&media).unwrap();
        engine.write(border, &content(border, 1, 4096)).unwrap();
        assert_eq!(read(&engine, border), content(border, 1, 4096));
    }
    let sectors = Engine::open(&media).unwrap().sectors();
    [info.start_bytes, info.copy_at].iter().for_each(|at| corrupt(&media, *at));
    let engine = Engine::open(&media).unwrap();
    let status = &engine.arenas()[1];
    assert_eq!((status.uuid, status.sectors, engine.sectors()), (None, sectors - border, sectors));
    assert_eq!(
        status.read_only.as_deref(),
        Some("neither info block is intact (the checksum is wrong)")
    );
    engine.write(border - 1, &content(border - 1, 1, 4096)).unwrap();
    let results = [
        engine.read(border - 1, &mut vec![0; 8192]),
        engine.write(border, &vec![0; 4096]),
        engine.discard(border..sectors),
    ];
    for result in results {
        assert!(matches!(result, Err(BttError::Missing { arena: 1, .. })), "{result:?}");
    }
    corrupt(&media, START_BYTES);
    corrupt(&media, info_at_copy(&media));
    let error = Engine::open(&media).unwrap_err();
    assert!(
        error.to_string().starts_with("arena 0, at 0x1000: neither info block is intact"),
        "{error}"
    );
}

/// Returns the offset of the first arena's second info block.
fn info_at_copy(media: &MemoryMedia) -> u64 {
    info_at(media, START_BYTES).copy_at
}

#[test]
fn unsupported_sector_sizes_are_refused() {
    for sector_bytes in [520, 4224] {
        let media = formatted(4096);
        let info = info_at(&media, START_BYTES);
        for at in [info.start_bytes, info.copy_at] {
            change_info(&media, at, |info| {
                info.external_lbasize.set(sector_bytes);
                info.internal_lbasize.set(sector_bytes.next_multiple_of(64));
                info.external_nlba.set(1000);
                info.internal_nlba.set(1256);
            });
        }
        let error = Engine::open(&media).unwrap_err();
        assert!(matches!(error, BttError::SectorSize { sector_bytes: s } if s == sector_bytes));
    }
}

/// Opens an arena with impossible metadata, and crashes while the error flag is being set.
fn crash_at_the_error_flag(bug: InjectedBug) -> Result<usize, String> {
    let media = new_media();
    let info = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap().0;
    assert_eq!((info.sectors, info.lanes), (SECTORS, LANES));
    media.store(info.flog_at + 8, &[0xff; 8]).unwrap();
    Media::persist(&media, std::slice::from_ref(&(info.flog_at..info.flog_at + 16))).unwrap();
    let recorded = Recorded::new(media, bug, Oracle::default());
    recorded.record();
    assert!(Engine::open(&recorded).unwrap().arenas()[0].read_only.is_some());
    let verify = |image: &Simulator| {
        let engine = Engine::open(image).map_err(|error| error.to_string())?;
        engine.arenas()[0].read_only.clone().ok_or("served despite the damage")?;
        Oracle::default().read(&engine).map(drop)
    };
    let points: Vec<_> = recorded.take_points().into_iter().map(|(point, _)| point).collect();
    crate::pool::tests::campaign::verify_each(&points, 64, &mut Random::new(1), &verify)
}

#[test]
fn crash_while_the_error_flag_is_set_leaves_a_whole_info_block() {
    let images = crash_at_the_error_flag(InjectedBug::Nothing).unwrap();
    crate::pool::tests::campaign::report_images(images);
    assert!(images > 6, "only {images} images");
}

#[test]
fn error_flag_set_in_both_blocks_at_once_is_detected() {
    let error = crash_at_the_error_flag(InjectedBug::ErrorFlag).unwrap_err();
    assert!(error.contains("neither info block is intact"), "{error}");
}

/// Media on which changes fail after the first `left` have succeeded. The media also has ranges
/// that can neither be read nor written, like lost pages.
pub(super) struct Failing {
    pub(super) media: MemoryMedia,
    pub(super) left: AtomicU64,
    bad: Mutex<Vec<Range<u64>>>,
    /// Number of reads that succeed before one fails.
    pub(super) read_fails_after: AtomicU64,
    /// Ranges of all calls of [`Media::persist`], in order.
    pub(super) persisted: Mutex<Vec<Range<u64>>>,
    /// Makes the next [`Media::persist`] fail.
    pub(super) persist_fails: AtomicBool,
}

impl Failing {
    pub(super) fn new(media: MemoryMedia) -> Self {
        Self {
            media,
            left: u64::MAX.into(),
            bad: Mutex::default(),
            read_fails_after: u64::MAX.into(),
            persisted: Mutex::default(),
            persist_fails: AtomicBool::default(),
        }
    }

    fn failure() -> MediaError {
        let source = std::io::Error::from_raw_os_error(libc::EIO);
        MediaError::Io { operation: "test", offset_bytes: 0, length_bytes: 8, source }
    }

    fn count_store(&self) -> Result<(), MediaError> {
        let passed =
            self.left.try_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        passed.map(drop).map_err(|_| Self::failure())
    }

    fn check_access(&self, at: u64, length: usize) -> Result<(), MediaError> {
        let end = at + length as u64;
        match self.bad.lock().unwrap().iter().any(|bad| at < bad.end && bad.start < end) {
            true => Err(Self::failure()),
            false => Ok(()),
        }
    }

    pub(super) fn set_bad(&self, bad: &[Range<u64>]) {
        *self.bad.lock().unwrap() = bad.to_vec();
    }
}

impl Media for Failing {
    fn len_bytes(&self) -> u64 {
        Media::len_bytes(&self.media)
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.check_access(offset_bytes, into.len())?;
        // The counter wraps around at the failure, so that later reads succeed.
        if self.read_fails_after.fetch_sub(1, Ordering::SeqCst) == 0 {
            return Err(Self::failure());
        }
        self.media.read(offset_bytes, into)
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.count_store()?;
        self.check_access(offset_bytes, bytes.len())?;
        self.media.store(offset_bytes, bytes)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.count_store()?;
        if self.persist_fails.swap(false, Ordering::SeqCst) {
            return Err(Self::failure());
        }
        self.persisted.lock().unwrap().extend_from_slice(ranges);
        Ok(())
    }

    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        self.check_access(offset_bytes, 8)?;
        Media::load_word(&self.media, offset_bytes)
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.count_store()?;
        self.check_access(offset_bytes, 8)?;
        Media::store_word(&self.media, offset_bytes, word)
    }

    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        self.count_store()?;
        pending.add(range);
        Ok(())
    }
}

/// The media of a single sector fails. No other sector is lost. The failed block is never written,
/// even after another open and many writes of other sectors.
#[test]
fn unreadable_sector_does_not_affect_other_sectors() {
    for is_discarded in [false, true] {
        let media = MemoryMedia::new(VOLUME_BYTES);
        format_small(&media, 16, 4);
        let info = info_at(&media, START_BYTES);
        let engine = Engine::open(Failing::new(media)).unwrap();
        for sector in 0..16 {
            engine.write(sector, &content(sector, 1, 4096)).unwrap();
        }
        let bad = [3, 4].map(|sector| {
            let start = info.block_at(read_map(engine.space(), &info, sector).unwrap().block);
            start + 64..start + 128
        });
        engine.space().set_bad(&bad);
        let unreadable = |sector: u64| {
            let result = engine.read(sector, &mut vec![0; 4096]);
            matches!(result, Err(BttError::Unreadable { sector: s, .. }) if s == sector)
        };
        assert!(unreadable(3) && unreadable(4));
        assert_eq!(engine.arenas()[0].read_only, None);
        engine.flush().unwrap();
        assert_eq!(read(&engine, 5), content(5, 1, 4096));
        match is_discarded {
            true => engine.discard(2..5).unwrap(),
            false => engine.write(3, &[content(3, 2, 4096), content(4, 2, 4096)].concat()).unwrap(),
        }
        let rewrite = |engine: &Engine<Failing>| {
            for version in 3..40 {
                for sector in (0..16).filter(|sector| !(2..5).contains(sector)) {
                    engine.write(sector, &content(sector, version, 4096)).unwrap();
                }
            }
            for sector in 3..5 {
                let expected = if is_discarded { vec![0; 4096] } else { content(sector, 2, 4096) };
                assert_eq!(read(engine, sector), expected);
            }
        };
        rewrite(&engine);
        let engine = Engine::open(engine.common.space).unwrap();
        rewrite(&engine);
        assert!(check(&engine.common.space.media).is_clean());
    }
}

/// An unreadable map entry does not affect durability either.
#[test]
fn unreadable_map_entry_does_not_latch_the_arena() {
    let media = MemoryMedia::new(VOLUME_BYTES);
    format_small(&media, 16, 4);
    let info = info_at(&media, START_BYTES);
    let engine = Engine::open(Failing::new(media)).unwrap();
    engine.write(0, &content(0, 1, 4096)).unwrap();
    engine.space().set_bad(std::slice::from_ref(&(info.map_at + 8..info.map_at + 16)));
    let results = [
        engine.read(2, &mut vec![0; 4096]),
        engine.write(1, &vec![1; 8192]),
        engine.write(3, &vec![1; 4096]),
        engine.discard(2..3),
    ];
    for result in results {
        assert!(matches!(result, Err(BttError::Media(_))), "{result:?}");
    }
    assert_eq!(engine.arenas()[0].read_only, None);
    engine.write(0, &content(0, 2, 4096)).unwrap();
    engine.quiesce().unwrap();
    engine.space().set_bad(&[]);
    assert_eq!(read(&engine, 0), content(0, 2, 4096));
    assert_eq!(read(&engine, 2), vec![0; 4096]);
    assert!(check(&engine.common.space.media).is_clean());
}

#[test]
fn first_failure_makes_the_arena_read_only_until_it_is_reopened() {
    let sectors = |version| [2, 3].map(|sector| content(sector, version, 4096)).concat();
    for failure in 0.. {
        let media = MemoryMedia::new(VOLUME_BYTES);
        format_small(&media, 16, 4);
        let engine = Engine::open(Failing::new(media)).unwrap();
        engine.write(2, &sectors(1)).unwrap();
        engine.space().left.store(failure, Ordering::SeqCst);
        let result = engine.write(2, &sectors(2)).and_then(|()| engine.discard(3..4));
        engine.space().left.store(u64::MAX, Ordering::SeqCst);
        if result.is_ok() {
            assert!(failure > 8, "a write and a discard do more");
            break;
        }
        assert!(matches!(result, Err(BttError::Media(_))), "{failure}: {result:?}");
        // Only reads succeed from here on.
        let now: Vec<_> = [2, 3].iter().map(|sector| read(&engine, *sector)).collect();
        let is_latched = |result| {
            matches!(result, Err(BttError::ReadOnly { arena: 0, reason: Fault::Media(_) }))
        };
        assert!(is_latched(engine.write(9, &content(9, 1, 4096))));
        assert!(is_latched(engine.discard(9..10)));
        assert!(is_latched(engine.flush()), "a failure is not forgotten");
        let reason = engine.arenas()[0].read_only.clone().unwrap();
        assert!(reason.contains("test of 0x8 bytes") && reason.contains("os error 5"), "{reason}");

        let media = engine.common.space.media;
        assert!(check(&media).is_clean());
        let engine = Engine::open(media).unwrap();
        for (sector, now) in (2..4).zip(now) {
            let then = read(&engine, sector);
            let versions = [content(sector, 1, 4096), content(sector, 2, 4096), vec![0; 4096]];
            assert!(
                versions.contains(&now) && versions.contains(&then),
                "{failure}: sector {sector}"
            );
        }
        engine.write(9, &content(9, 1, 4096)).unwrap();
    }
}
