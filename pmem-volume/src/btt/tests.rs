//! Tests with a writer that follows the order of steps in Linux and stops after each step, and
//! tests with all kinds of damage.

use std::sync::atomic::{AtomicU64, Ordering};

use uuid::Uuid;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::arena::read_arena;
use super::check::Finding;
use super::flog::{MapKind, read_map, recover};
use super::layout::*;
use super::*;
use crate::media::simulator::Simulator;
use crate::media::{Durability, Media, MediaError, MemoryMedia};

pub(super) const VOLUME_BYTES: u64 = 18 << 20;

pub(super) fn formatted(sector_bytes: u32) -> MemoryMedia {
    let media = MemoryMedia::new(VOLUME_BYTES);
    Layout::new(VOLUME_BYTES, sector_bytes, Uuid::from_u128(42)).unwrap().format(&media).unwrap();
    media
}

/// Returns the offset of a sector's map entry.
fn entry_at(info: &ArenaInfo, sector: u32) -> u64 {
    info.map_at + u64::from(sector) * MAP_ENTRY_BYTES
}

pub(super) fn map_entry(media: &MemoryMedia, arena: &ArenaInfo, sector: u32) -> u32 {
    let mut bytes = [0; 4];
    media.read(entry_at(arena, sector), &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

pub(super) fn set_map(media: &MemoryMedia, arena: &ArenaInfo, sector: u32, entry: u32) {
    media.store(entry_at(arena, sector), &entry.to_le_bytes()).unwrap();
}

/// Writes sectors like the Linux driver, one lane at a time.
pub(super) struct Writer<'a, M> {
    media: &'a M,
    pub(super) arena: ArenaInfo,
    /// Free block, next sequence number and next slot of each lane.
    pub(super) lanes: Vec<(u32, u32, usize)>,
    /// Second slot in use: 1, or 2 with the old padding.
    second: usize,
}

impl<'a, M: Media> Writer<'a, M> {
    pub(super) fn new(media: &'a M, second: usize) -> Self {
        let (arena, _) = read_arena(media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
        let recovery = recover(media, &arena);
        assert!(recovery.redo.is_empty(), "the volume is recovered before the writer starts");
        let lanes = recovery.free.iter().map(|(block, _)| (*block, 2, 1)).collect();
        Self { media, arena, lanes, second }
    }

    /// Executes the first `steps` of the five steps of a write.
    pub(super) fn write(&mut self, lane: usize, sector: u32, bytes: &[u8], steps: u32) {
        let (free, sequence, slot) = self.lanes[lane];
        let old = read_map(self.media, &self.arena, sector).unwrap().block;
        let slot_number = if slot == 0 { 0 } else { self.second };
        let entry_at =
            self.arena.flog_at + lane as u64 * FLOG_GROUP_BYTES + slot_number as u64 * 16;
        let halves = [[sector, old], [free, sequence]];
        if steps >= 1 {
            self.media.store(self.arena.block_at(free), bytes).unwrap();
        }
        for (at, half) in halves.iter().enumerate().take(steps.saturating_sub(1) as usize) {
            self.media.store(entry_at + at as u64 * 8, half.map(u32::to_le).as_bytes()).unwrap();
        }
        if steps >= 4 {
            // Simulated media stores whole words.
            let at = self.arena.map_at + u64::from(sector / 2 * 2) * MAP_ENTRY_BYTES;
            let shift = sector % 2 * 32;
            let other = self.media.load_word(at).unwrap() & !(u64::from(u32::MAX) << shift);
            let entry = u64::from(free | MAP_ERROR | MAP_ZERO) << shift;
            self.media.store_word(at, other | entry).unwrap();
        }
        if steps >= 3 {
            self.lanes[lane] = (old, sequence % 3 + 1, 1 - slot);
        }
    }
}

pub(super) const ALL_STEPS: u32 = 4;

pub(super) fn content(sector: u32, version: u32, sector_bytes: u32) -> Vec<u8> {
    let mut bytes = vec![version as u8; sector_bytes as usize];
    bytes[..4].copy_from_slice(&sector.to_le_bytes());
    bytes
}

fn read(media: &MemoryMedia, sector: u32) -> (Sector, Vec<u8>) {
    let Ok(reader) = Reader::open(media) else { panic!("not a whole volume") };
    let mut bytes = vec![0xee; reader.sector_bytes() as usize];
    let kind = reader.read(u64::from(sector), &mut bytes).unwrap();
    (kind, bytes)
}

#[test]
fn empty_volume_is_clean_and_reads_as_zeros() {
    for sector_bytes in [512, 4096] {
        let media = formatted(sector_bytes);
        let report = check(&media);
        assert!(report.is_clean(), "{report:?}");
        let last = report.sectors() - 1;
        let (kind, bytes) = read(&media, last as u32);
        assert_eq!(kind, Sector::Data);
        assert!(bytes.iter().all(|b| *b == 0));
    }
}

#[test]
fn interrupted_write_leaves_the_old_or_new_sector() {
    for second in [1, 2] {
        let media = formatted(4096);
        let mut writer = Writer::new(&media, second);
        for version in 1..=7u32 {
            for sector in [0, 3, 900] {
                writer.write(
                    version as usize % 2 * 200,
                    sector,
                    &content(sector, version, 4096),
                    ALL_STEPS,
                );
            }
        }
        assert!(check(&media).is_clean());
        let before = media.to_bytes();
        for steps in 0..=ALL_STEPS {
            let media = MemoryMedia::from_bytes(&before);
            let mut stopped = Writer {
                media: &media,
                arena: writer.arena.clone(),
                lanes: writer.lanes.clone(),
                second,
            };
            stopped.write(200, 3, &content(3, 8, 4096), steps);
            let report = check(&media);
            assert!(report.is_clean(), "stopped after {steps}: {report:?}");
            assert_eq!(report.arenas[0].redo, u32::from(steps == 3));
            // The second half of the flog entry commits the write.
            let version = if steps >= 3 { 8 } else { 7 };
            assert_eq!(
                read(&media, 3),
                (Sector::Data, content(3, version, 4096)),
                "stopped after {steps}"
            );
            assert_eq!(read(&media, 900).1, content(900, 7, 4096));
        }
    }
}

#[test]
fn map_entry_before_its_flog_entry_is_detected() {
    // The check should fail for the wrong order of steps. Otherwise, it would prove nothing.
    let media = formatted(4096);
    let writer = Writer::new(&media, 1);
    let (free, _, _) = writer.lanes[5];
    media.store(writer.arena.map_at, &(free | MAP_ERROR | MAP_ZERO).to_le_bytes()).unwrap();
    let report = check(&media);
    let findings = &report.arenas[0].findings;
    assert!(
        findings.iter().any(|f| matches!(f, Finding::BlockTwice { block, .. } if *block == free)),
        "{findings:?}"
    );
    assert!(findings.contains(&Finding::BlocksLost { count: 1, first: 0 }), "{findings:?}");
}

#[test]
fn trimmed_and_failed_sectors_keep_their_blocks() {
    let media = formatted(4096);
    let writer = Writer::new(&media, 1);
    let set = |sector: u32, flags: u32| {
        media
            .store(writer.arena.map_at + u64::from(sector) * 4, &(sector | flags).to_le_bytes())
            .unwrap();
    };
    set(7, MAP_ZERO);
    set(8, MAP_ERROR);
    assert_eq!(read_map(&media, &writer.arena, 7).unwrap().kind, MapKind::Zeros);
    let report = check(&media);
    assert!(report.is_clean());
    assert_eq!(report.arenas[0].error_sectors, 1);
    assert_eq!(read(&media, 7), (Sector::Zeros, vec![0; 4096]));
    assert_eq!(read(&media, 8).0, Sector::Error);
}

pub(super) fn flip(media: &MemoryMedia, offset: u64, bit: u8) {
    let mut byte = [0];
    media.read(offset, &mut byte).unwrap();
    media.store(offset, &[byte[0] ^ 1 << bit]).unwrap();
}

fn findings(media: &MemoryMedia) -> Vec<Finding> {
    let report = check(media);
    assert!(!report.is_clean());
    report.arenas.into_iter().flat_map(|a| a.findings).collect()
}

#[test]
fn damaged_info_block_is_reported_and_the_other_one_is_used() {
    let media = formatted(4096);
    let first = START_BYTES;
    let second = VOLUME_BYTES - INFO_BYTES;
    for offset in [0, 16, 48, 52, 56, 60, 64, 68, 72, 80, 88, 96, 104, 112, 2000, 4088] {
        flip(&media, first + offset, 2);
        assert_eq!(findings(&media), [Finding::FirstInfo], "offset {offset}");
        assert_eq!(read(&media, 0).0, Sector::Data);
        flip(&media, second + offset, 2);
        assert!(matches!(findings(&media)[..], [Finding::NoInfo(_)]));
        flip(&media, first + offset, 2);
        assert_eq!(findings(&media), [Finding::SecondInfo]);
        flip(&media, second + offset, 2);
    }
    assert!(check(&media).is_clean());
}

/// Changes both info blocks, and updates their checksums.
pub(super) fn with_info(media: &MemoryMedia, change: impl Fn(&mut InfoBytes)) {
    let mut bytes = [0; INFO_BYTES as usize];
    for at in [START_BYTES, VOLUME_BYTES - INFO_BYTES] {
        media.read(at, &mut bytes).unwrap();
        let mut info = InfoBytes::read_from_bytes(&bytes).unwrap();
        change(&mut info);
        let sum = checksum(&info);
        info.checksum.set(sum);
        media.store(at, info.as_bytes()).unwrap();
    }
}

#[test]
fn copy_with_another_offset_does_not_replace_the_first_info_block() {
    let media = formatted(4096);
    with_info(&media, |info| {
        let arena_bytes = VOLUME_BYTES - START_BYTES;
        info.external_nlba.set(100);
        info.internal_nlba.set(400);
        info.mapoff.set(info.dataoff.get() + 400 * 4096);
        info.logoff.set(info.mapoff.get() + 4096);
        info.info2off.set(arena_bytes - 5 * INFO_BYTES);
    });
    flip(&media, START_BYTES, 0);
    assert!(matches!(findings(&media)[..], [Finding::NoInfo(_)]));
    assert!(
        plan_repair(&media, GiveUp::Nothing, &mut |_| {}).unwrap().fixes.is_empty(),
        "the bytes at its offset would be accepted as it"
    );
}

#[test]
fn impossible_info_blocks_are_refused_despite_a_correct_checksum() {
    type Change = fn(&mut InfoBytes);
    let changes: [(&str, Change); 13] = [
        ("external_lbasize", |i| i.external_lbasize.set(0)),
        ("external_lbasize", |i| i.external_lbasize.set(u32::MAX)),
        ("internal_lbasize", |i| i.internal_lbasize.set(64)),
        ("nfree", |i| i.nfree.set(0)),
        ("nfree", |i| i.nfree.set(u32::MAX)),
        ("internal_nlba", |i| i.internal_nlba.set(u32::MAX)),
        ("external_nlba", |i| i.external_nlba.set(u32::MAX)),
        ("external_nlba", |i| i.external_nlba.set(0)),
        ("nextoff", |i| i.nextoff.set(u64::MAX)),
        ("nextoff", |i| i.nextoff.set(4096)),
        ("dataoff", |i| i.dataoff.set(u64::MAX)),
        ("mapoff", |i| i.mapoff.set(0)),
        ("logoff", |i| i.logoff.set(1 << 40)),
    ];
    for (name, change) in changes {
        let media = formatted(4096);
        with_info(&media, change);
        match &findings(&media)[..] {
            [Finding::NoInfo(InfoError::Field { field, .. })] => assert_eq!(*field, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    let media = formatted(4096);
    with_info(&media, |i| i.version_major.set(2));
    assert!(matches!(findings(&media)[..], [Finding::NoInfo(InfoError::Version(2, 1))]));
    let media = formatted(4096);
    with_info(&media, |i| i.flags.set(FLAG_ERROR));
    assert_eq!(findings(&media), [Finding::ErrorFlag]);
    let media = formatted(4096);
    with_info(&media, |i| i.parent_uuid = [7; 16]);
    flip(&media, START_BYTES + 16, 0);
    assert_eq!(findings(&media), [Finding::FirstInfo]);
}

#[test]
fn damage_in_map_and_flog_is_reported() {
    let damaged = |change: fn(&MemoryMedia, &ArenaInfo)| {
        let media = formatted(4096);
        let arena = Writer::new(&media, 1).arena;
        change(&media, &arena);
        findings(&media)
    };
    let found = damaged(|m, a| m.store(a.map_at + 40, &u32::MAX.to_le_bytes()).unwrap());
    assert!(matches!(
        found[..],
        [Finding::MapRange { sector: 10, .. }, Finding::BlocksLost { count: 1, first: 10 }]
    ));
    let found =
        damaged(|m, a| m.store(a.map_at + 40, &(11 | MAP_ERROR | MAP_ZERO).to_le_bytes()).unwrap());
    assert!(matches!(
        found[..],
        [Finding::BlockTwice { block: 11, .. }, Finding::BlocksLost { count: 1, first: 10 }]
    ));
    let found = damaged(|m, a| m.store(a.flog_at + 3 * 64 + 12, &9u32.to_le_bytes()).unwrap());
    assert_eq!(found, [Finding::FlogSequence { lane: 3, sequences: [9, 0] }]);
    for (field, offset) in [("lba", 0), ("old_map", 4), ("new_map", 8)] {
        let media = formatted(4096);
        let arena = Writer::new(&media, 1).arena;
        media.store(arena.flog_at + 3 * 64 + offset, &(MAP_BLOCK - 1).to_le_bytes()).unwrap();
        assert!(
            matches!(findings(&media)[..], [Finding::FlogRange { lane: 3, field: f, .. }] if f == field)
        );
    }
    let found = damaged(|m, a| m.store(a.flog_at + 48, &[1; 16]).unwrap());
    assert_eq!(found[0], Finding::FlogPadding);
    let found = damaged(|m, a| m.store(a.flog_at, &[0; 64]).unwrap());
    assert_eq!(found, [Finding::FlogSequence { lane: 0, sequences: [0, 0] }]);
    assert!(Reader::open(&MemoryMedia::new(VOLUME_BYTES)).is_err());
}

#[test]
fn findings_beyond_the_limit_are_counted_but_not_listed() {
    let media = formatted(4096);
    let arena = Writer::new(&media, 1).arena;
    media.store(arena.map_at, &vec![0xff; 4 * 4000]).unwrap();
    let report = check(&media);
    assert_eq!(report.arenas[0].findings.len(), 100);
    assert_eq!(report.arenas[0].findings_total, 4001);
}

#[test]
fn unused_rest_is_zeroed_before_an_arena_gets_it() {
    // There are 6 MiB of data after the only arena.
    let media = MemoryMedia::new(VOLUME_BYTES + (6 << 20));
    Layout::new(VOLUME_BYTES, 512, Uuid::from_u128(42)).unwrap().format(&media).unwrap();
    media.store(VOLUME_BYTES, &vec![0xab; 6 << 20]).unwrap();
    let refused = extend(&media, VOLUME_BYTES + (14 << 20)).unwrap_err();
    assert!(
        matches!(
            refused,
            BttError::TooLittleGrowth { size_bytes, least_bytes }
                if size_bytes == 32 << 20 && least_bytes == 34 << 20
        ),
        "{refused}"
    );
    let mut bytes = media.to_bytes();
    bytes.resize(40 << 20, 0);
    let grown = MemoryMedia::from_bytes(&bytes);
    let extension = extend(&media, 40 << 20).unwrap();
    extension.format(&grown).unwrap();
    let sectors = check(&grown).sectors();
    assert_eq!(sectors, check(&media).sectors(), "not linked yet");
    for (at, word) in extension.link_words() {
        grown.store(at, &word.to_le_bytes()).unwrap();
    }
    let report = check(&grown);
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((report.arenas.len(), report.arenas[1].start_bytes), (2, VOLUME_BYTES));
    let reader = Reader::open(&grown).unwrap();
    assert_eq!(reader.sector_bytes(), 512);
    let mut sector = [0xee; 512];
    for number in sectors..report.sectors() {
        reader.read(number, &mut sector).unwrap();
        assert_eq!(sector, [0; 512], "sector {number}");
    }
}

#[test]
fn arena_behind_a_small_one_keeps_the_minimum_distance() {
    let media = MemoryMedia::new(40 << 20);
    Layout::new(VOLUME_BYTES, 4096, Uuid::from_u128(42)).unwrap().format(&media).unwrap();
    // Reduces the arena to 1000 sectors, and puts the map, the flog and the second info block at
    // 8 MiB.
    let mut bytes = [0; INFO_BYTES as usize];
    media.read(START_BYTES, &mut bytes).unwrap();
    let mut info = InfoBytes::read_from_bytes(&bytes).unwrap();
    let (sectors, flog) = (1000, info.logoff.get());
    let mut groups = vec![0; 256 * FLOG_GROUP_BYTES as usize];
    media.read(START_BYTES + flog, &mut groups).unwrap();
    for (lane, group) in groups.chunks_mut(FLOG_GROUP_BYTES as usize).enumerate() {
        let block = (sectors + lane as u32).to_le_bytes();
        group[4..8].copy_from_slice(&block);
        group[8..12].copy_from_slice(&block);
    }
    info.external_nlba.set(sectors);
    info.internal_nlba.set(sectors + 256);
    info.mapoff.set(8 << 20);
    info.logoff.set((8 << 20) + 4096);
    info.info2off.set((8 << 20) + 4096 + 16384);
    let sum = checksum(&info);
    info.checksum.set(sum);
    media.store(START_BYTES + info.logoff.get(), &groups).unwrap();
    for at in [START_BYTES, START_BYTES + info.info2off.get()] {
        media.store(at, info.as_bytes()).unwrap();
    }
    assert!(check(&media).is_clean());
    let extension = extend(&media, 40 << 20).unwrap();
    extension.format(&media).unwrap();
    extension
        .link_words()
        .iter()
        .for_each(|(at, word)| media.store(*at, &word.to_le_bytes()).unwrap());
    let report = check(&media);
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.arenas[1].start_bytes, START_BYTES + ARENA_MIN_BYTES);
}

#[test]
fn btt_grows_up_to_the_arena_limit_of_the_engine() {
    const ARENAS: u64 = 1024;
    let places: Vec<_> =
        (0..ARENAS).map(|n| (START_BYTES + n * ARENA_MIN_BYTES, ARENA_MIN_BYTES)).collect();
    let mut common = InfoBytes::new_zeroed();
    common.signature = SIGNATURE;
    common.version_major.set(VERSION.0);
    common.version_minor.set(VERSION.1);
    for (arenas, is_taken) in [(ARENAS - 1, true), (ARENAS, false)] {
        let size_bytes = (arenas + 1) * ARENA_MIN_BYTES;
        let media = Simulator::new(size_bytes);
        let layouts = ArenaLayout::all(&places[..arenas as usize], 4096);
        common.external_lbasize.set(4096);
        write_arenas(&media, &layouts, &common).unwrap();
        let found = super::arenas(&media);
        assert_eq!((found.len() as u64, found.iter().all(Result::is_ok)), (arenas, true));
        match extend(&media, size_bytes + (64 << 20)) {
            Ok(_) => assert!(is_taken),
            Err(error) => {
                let is_full = matches!(error, BttError::NoArenaLeft { limit: 1024 });
                assert!(!is_taken && is_full, "{error}")
            }
        }
    }
}

#[test]
fn too_small_media_has_no_btt() {
    for bytes in [8, 4096, 1 << 20] {
        assert!(!check(&MemoryMedia::new(bytes)).is_clean());
    }
}

#[test]
fn btt_written_by_linux_is_clean_and_readable() {
    let text = include_str!("linux-6.12.golden");
    let media = MemoryMedia::from_bytes(&crate::test_image::from_text(text, VOLUME_BYTES));
    let report = check(&media);
    assert!(report.is_clean(), "{report:?}");
    for sector in 0..=141 {
        let text = format!("L{sector:05} v5");
        let mut expected = vec![0; 4096];
        if sector % 7 == 0 && sector <= 140 {
            expected[..text.len()].copy_from_slice(text.as_bytes());
        }
        assert_eq!(read(&media, sector), (Sector::Data, expected), "sector {sector}");
    }
}

/// Media whose zeroed pages are holes. The media counts the bytes that are read from it.
struct Sparse<'a> {
    media: &'a MemoryMedia,
    read_bytes: AtomicU64,
}

impl Media for Sparse<'_> {
    fn len_bytes(&self) -> u64 {
        self.media.len_bytes()
    }

    fn durability(&self) -> Durability {
        Durability::Volatile
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.read_bytes.fetch_add(into.len() as u64, Ordering::Relaxed);
        self.media.read(offset_bytes, into)
    }

    fn next_data(
        &self,
        range: std::ops::Range<u64>,
    ) -> Result<Option<std::ops::Range<u64>>, MediaError> {
        let mut page = [0; PAGE_BYTES as usize];
        for start in (range.start / PAGE_BYTES * PAGE_BYTES..range.end).step_by(PAGE_BYTES as usize)
        {
            self.media.read(start, &mut page)?;
            if page != [0; PAGE_BYTES as usize] {
                return Ok(Some(start.max(range.start)..(start + PAGE_BYTES).min(range.end)));
            }
        }
        Ok(None)
    }
}

#[test]
fn reader_finds_every_sector_with_data_and_reads_no_hole() {
    for sector_bytes in [512, 4096] {
        let media = formatted(sector_bytes);
        let sparse = Sparse { media: &media, read_bytes: 0.into() };
        let reader = Reader::open(&sparse).unwrap();
        sparse.read_bytes.store(0, Ordering::Relaxed);
        assert_eq!(
            (reader.next_data(0..reader.sectors()), sparse.read_bytes.load(Ordering::Relaxed)),
            (None, 0)
        );
        // Sector 700 is written. The writes of sectors 2000 and 2001 stop after 3 and 2 steps.
        // Sector 1500 was never written, but its block contains data.
        let mut writer = Writer::new(&media, 1);
        for (lane, sector, steps) in [(0, 700, ALL_STEPS), (1, 2000, 3), (2, 2001, 2)] {
            writer.write(lane, sector, &content(sector, 1, sector_bytes), steps);
        }
        media.store(writer.arena.block_at(1500), &content(1500, 1, sector_bytes)).unwrap();
        let reader = Reader::open(&sparse).unwrap();
        let mut bytes = vec![0; sector_bytes as usize];
        let mut has_data = |sector| {
            reader.read(sector, &mut bytes).unwrap();
            bytes.iter().any(|byte| *byte != 0)
        };
        let with_data: Vec<_> = (0..reader.sectors()).filter(|sector| has_data(*sector)).collect();
        assert_eq!(with_data, [700, 1500, 2000]);
        for start in (0..reader.sectors()).step_by(61) {
            let expected = with_data.iter().copied().find(|sector| *sector >= start);
            let found = reader.next_data(start..reader.sectors());
            if sector_bytes == 4096 {
                assert_eq!(found, expected, "from {start} on");
            }
            // A page with data contains several small sectors. A sector may be reported too early,
            // but none may be missed.
            assert!(found.is_some() || expected.is_none(), "no data from {start} on");
            assert!(
                found.is_none_or(|found| found >= start && expected.is_none_or(|at| found <= at)),
                "{found:?}"
            );
        }
    }
}

#[test]
fn reader_skips_discarded_sectors_by_the_map_alone() {
    let media = formatted(4096);
    let engine = crate::btt::Engine::open(&media).unwrap();
    let sectors = engine.sectors();
    for sector in [0, 9, sectors - 1] {
        engine.write(sector, &content(sector as u32, 1, 4096)).unwrap();
    }
    engine.discard(0..sectors - 1).unwrap();
    drop(engine);
    let sparse = Sparse { media: &media, read_bytes: 0.into() };
    let reader = Reader::open(&sparse).unwrap();
    sparse.read_bytes.store(0, Ordering::Relaxed);
    assert_eq!(reader.next_data(0..sectors - 1), None);
    assert_eq!(sparse.read_bytes.load(Ordering::Relaxed), (sectors - 1) * 4);
    assert_eq!(reader.next_data(0..sectors), Some(sectors - 1));
}
