//! Comparison of the engine with a list of sectors, and with checks that do not use the engine.

mod bulk_load;
mod compaction;
mod crash;
mod damage;
mod holes;
mod injected_bugs;
mod lock;
mod loom_model;
mod missing_arenas;
mod model;
mod out_of_space;
mod readers;
mod release;
mod script;
mod sparse_volume;
mod threads;
mod torn_entry;

use uuid::Uuid;
use zerocopy::{FromZeros, IntoBytes};

use super::*;
use crate::btt::arena::read_arena;
use crate::btt::layout::{InfoBytes, START_BYTES, checksum};
use crate::btt::{Layout, Reader, Sector, check, usable_bytes};
use crate::media::{Media, MemoryMedia};

pub(super) const VOLUME_BYTES: u64 = 18 << 20;

pub(super) fn formatted(sector_bytes: u32) -> MemoryMedia {
    let media = MemoryMedia::new(VOLUME_BYTES);
    Layout::new(VOLUME_BYTES, sector_bytes, Uuid::from_u128(42)).unwrap().format(&media).unwrap();
    media
}

/// Creates media with two arenas. The second one is beyond the initial size of the volume.
pub(super) fn format_two_arenas(sector_bytes: u32) -> MemoryMedia {
    grown(&formatted(sector_bytes), 2 * VOLUME_BYTES)
}

/// Returns the BTT with an additional arena, which ends at the new end of the volume.
pub(super) fn grown(media: &MemoryMedia, size_bytes: u64) -> MemoryMedia {
    let extension = crate::btt::extend(media, size_bytes).unwrap();
    let mut bytes = media.to_bytes();
    bytes.resize(size_bytes as usize, 0);
    let media = MemoryMedia::from_bytes(&bytes);
    extension.format(&media).unwrap();
    for (at, word) in extension.link_words() {
        media.store(at, &word.to_le_bytes()).unwrap();
    }
    media
}

/// Formats an arena with few sectors and lanes in place of the one that Linux would create. Blocks
/// are reused soon, and an image opens quickly.
pub(in crate::btt) fn format_small(media: &(impl Media + ?Sized), sectors: u32, lanes: u32) {
    Layout::new(VOLUME_BYTES, 4096, Uuid::from_u128(42)).unwrap().format(&media).unwrap();
    let mut info = InfoBytes::new_zeroed();
    media.read(START_BYTES, info.as_mut_bytes()).unwrap();
    let flog_at = START_BYTES + info.logoff.get();
    let mut flog = vec![0; 256 * 64];
    for (lane, group) in (0..lanes).zip(flog.chunks_exact_mut(64)) {
        let block = sectors + lane;
        group[..16].copy_from_slice([lane, block, block, 1].map(u32::to_le).as_bytes());
    }
    info.external_nlba.set(sectors);
    info.internal_nlba.set(sectors + lanes);
    info.nfree.set(lanes);
    let sum = checksum(&info);
    info.checksum.set(sum);
    let copy_at = START_BYTES + info.info2off.get();
    let places = [(flog_at, &flog[..]), (START_BYTES, info.as_bytes()), (copy_at, info.as_bytes())];
    for (at, bytes) in places {
        media.store(at, bytes).unwrap();
        media.persist(std::slice::from_ref(&(at..at + bytes.len() as u64))).unwrap();
    }
}

/// Returns content that identifies a sector and its version.
pub(super) fn content(sector: u64, version: u64, sector_bytes: u32) -> Vec<u8> {
    let seed = sector << 32 | version;
    let words = (0..u64::from(sector_bytes) / 8)
        .map(|at| (seed ^ at << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

pub(super) fn word_at(media: &MemoryMedia, at: u64) -> u64 {
    Media::load_word(media, at).unwrap()
}

pub(super) fn read(engine: &Engine<impl Media>, sector: u64) -> Vec<u8> {
    let mut bytes = vec![0xee; engine.sector_bytes() as usize];
    engine.read(sector, &mut bytes).unwrap();
    bytes
}

#[test]
fn written_sectors_are_read_across_arenas_and_after_a_reopen() {
    for sector_bytes in [512, 4096] {
        let engine = Engine::open(format_two_arenas(sector_bytes)).unwrap();
        assert_eq!(engine.sector_bytes(), sector_bytes);
        let border = engine.arenas()[1].first_sector;
        assert!(border > 100 && engine.sectors() > border + 100);
        // A range in both arenas that is longer than an exchange.
        let sectors = border - 90..border + 90;
        let bytes: Vec<u8> =
            sectors.clone().flat_map(|sector| content(sector, 1, sector_bytes)).collect();
        engine.write(sectors.start, &bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        engine.read(sectors.start, &mut back).unwrap();
        assert!(back == bytes);
        engine.discard(border - 1..border + 1).unwrap();
        engine.flush().unwrap();

        let media = engine.common.space;
        let report = check(&media);
        assert!(report.is_clean(), "{report:?}");
        let engine = Engine::open(media).unwrap();
        for sector in sectors.start - 1..sectors.end + 1 {
            let is_written = sectors.contains(&sector) && sector != border && sector + 1 != border;
            let expected = if is_written {
                content(sector, 1, sector_bytes)
            } else {
                vec![0; sector_bytes as usize]
            };
            assert_eq!(read(&engine, sector), expected, "sector {sector}");
        }
    }
}

#[test]
fn both_paddings_of_the_flog_are_kept() {
    // Linux before 4.15 used slots 0 and 2.
    let media = formatted(4096);
    let engine = Engine::open(&media).unwrap();
    engine.write(5, &content(5, 1, 4096)).unwrap();
    drop(engine);
    let (info, _) = read_arena(&media, START_BYTES, VOLUME_BYTES - START_BYTES).unwrap();
    let group_of = |slot: u64| {
        (0..256u64).find(|lane| word_at(&media, info.flog_at + lane * 64 + slot * 16 + 8) != 0)
    };
    let lane = group_of(1).expect("slot 1 is in use");
    let (from, to) = (info.flog_at + lane * 64 + 16, info.flog_at + lane * 64 + 32);
    for word in [0, 8] {
        let moved = word_at(&media, from + word);
        media.store(to + word, &moved.to_le_bytes()).unwrap();
        media.store(from + word, &[0; 8]).unwrap();
    }
    let engine = Engine::open(&media).unwrap();
    for version in 2..9 {
        let sectors: Vec<u8> = (0..300).flat_map(|sector| content(sector, version, 4096)).collect();
        engine.write(0, &sectors).unwrap();
    }
    assert_eq!(group_of(1), None);
    assert!(group_of(2).is_some());
    let report = check(&media);
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(read(&Engine::open(&media).unwrap(), 299), content(299, 8, 4096));
}

#[test]
fn impossible_requests_are_refused_with_the_reason() {
    let engine = Engine::open(formatted(4096)).unwrap();
    let end = engine.sectors();
    let mut two = vec![0; 8192];
    assert!(matches!(engine.read(end - 1, &mut two), Err(BttError::Outside { .. })));
    assert!(matches!(engine.write(end, &two), Err(BttError::Outside { .. })));
    assert!(matches!(engine.write(u64::MAX, &two), Err(BttError::Outside { .. })));
    assert!(matches!(engine.discard(end - 1..end + 1), Err(BttError::Outside { .. })));
    #[expect(clippy::reversed_empty_ranges, reason = "expected a refusal")]
    let reversed = 5..4;
    assert!(matches!(engine.write_zeroes(reversed), Err(BttError::Outside { .. })));
    assert!(matches!(engine.write(0, &two[..100]), Err(BttError::Length { .. })));
    assert!(matches!(engine.read(0, &mut two[..4097]), Err(BttError::Length { .. })));
    engine.discard(end..end).unwrap();
    engine.write(end, &[]).unwrap();
    engine.read(end - 2, &mut two).unwrap();
}

#[test]
fn reader_sees_written_and_discarded_sectors() {
    // Map entries with the flag for zeros are used only for sectors of a page, because Linux does
    // not read beyond such an entry if sectors are smaller.
    for (sector_bytes, discarded) in [(4096, Sector::Zeros), (512, Sector::Data)] {
        let media = formatted(sector_bytes);
        let engine = Engine::open(&media).unwrap();
        let written: Vec<u8> =
            (3..300).flat_map(|sector| content(sector, 1, sector_bytes)).collect();
        engine.write(3, &written).unwrap();
        engine.discard(4..299).unwrap();
        let reader = Reader::open(&media).unwrap();
        let mut bytes = vec![0xee; sector_bytes as usize];
        for sector in [3, 299] {
            assert_eq!(reader.read(sector, &mut bytes).unwrap(), Sector::Data);
            assert_eq!(bytes, content(sector, 1, sector_bytes));
        }
        for sector in 4..299 {
            assert_eq!(reader.read(sector, &mut bytes).unwrap(), discarded);
            assert!(bytes.iter().all(|byte| *byte == 0), "sector {sector}");
        }
        // Discarded sectors can be written again.
        engine.write(5, &content(5, 2, sector_bytes)).unwrap();
        assert_eq!(read(&engine, 5), content(5, 2, sector_bytes));
        assert!(check(&media).is_clean());
    }
}

#[test]
fn btt_written_by_linux_is_served() {
    let text = include_str!("../../linux-6.12.golden");
    let media = MemoryMedia::from_bytes(&crate::test_image::from_text(text, VOLUME_BYTES));
    let engine = Engine::open(&media).unwrap();
    assert_eq!(engine.arenas()[0].read_only, None);
    for sector in (0..=140).step_by(7) {
        let text = format!("L{sector:05} v5");
        assert!(read(&engine, sector).starts_with(text.as_bytes()), "sector {sector}");
        engine.write(sector, &content(sector, 6, 4096)).unwrap();
    }
    assert!(check(&media).is_clean());
    assert_eq!(read(&engine, 140), content(140, 6, 4096));
}

#[test]
fn volume_of_a_pool_is_served_and_keeps_its_content() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("pool");
    let pool = crate::Pool::create(&path, 64 << 20, 0).unwrap();
    let volume = || pool.open_volume("v").unwrap();
    pool.create_volume("v", crate::VolumeSize::Bytes(VOLUME_BYTES), crate::VolumeFormat::Btt)
        .unwrap();
    let engine = Engine::open(volume()).unwrap();
    let sectors: Vec<u64> = (0..200).map(|number| number * 19 % engine.sectors()).collect();
    for version in 1..4 {
        sectors
            .iter()
            .for_each(|sector| engine.write(*sector, &content(*sector, version, 4096)).unwrap());
    }
    engine.flush().unwrap();
    drop(engine);
    assert!(volume().check_btt().unwrap().is_clean());
    let engine = Engine::open(volume()).unwrap();
    for sector in sectors {
        assert!(read(&engine, sector) == content(sector, 3, 4096), "sector {sector}");
    }
}

#[test]
fn usable_bytes_are_those_of_the_sectors_of_all_arenas() {
    for sector_bytes in [512, 4096] {
        let engine = Engine::open(format_two_arenas(sector_bytes)).unwrap();
        let bytes = engine.sectors() * u64::from(sector_bytes);
        assert_eq!(usable_bytes(engine.space()), Some(bytes));
        assert!(bytes > usable_bytes(&formatted(sector_bytes)).unwrap());
    }
    let media = formatted(4096);
    media.store(START_BYTES, &[0; 4096]).unwrap();
    assert!(usable_bytes(&media).is_some(), "the second info block counts");
    media.store((18 << 20) - 4096, &[0; 4096]).unwrap();
    assert_eq!(usable_bytes(&media), None);
}
