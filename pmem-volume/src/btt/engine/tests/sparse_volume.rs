//! Large volumes that consist almost only of holes.

use super::*;
use crate::CHUNK_BYTES;
use crate::btt::arena::ArenaInfo;
use crate::btt::layout::{FLOG_GROUP_BYTES, INFO_BYTES};
use crate::btt::{GiveUp, arenas, holds_data, plan_repair};
use crate::media::simulator::Simulator;
use crate::media::thin::{Accesses, ThinMedia};

const SIZE: u64 = 1 << 40;

type SparseMedia = ThinMedia<Simulator>;

/// Creates an empty BTT. Reads and persists of its creation are not recorded, and stores into holes
/// panic.
fn empty_volume(size_bytes: u64) -> SparseMedia {
    let media = Simulator::new(SparseMedia::wrapped_bytes(size_bytes, CHUNK_BYTES));
    let thin = ThinMedia::new(media.clone(), size_bytes, CHUNK_BYTES);
    Layout::new(size_bytes, 4096, Uuid::from_u128(42)).unwrap().format(&thin).unwrap();
    ThinMedia::new(media, size_bytes, CHUNK_BYTES).strict()
}

fn infos(media: &SparseMedia) -> Vec<ArenaInfo> {
    arenas(media).into_iter().map(|arena| arena.unwrap().0).collect()
}

/// Checks that only chunks with space were accessed, except that single map entries were read.
/// Returns the number of bytes that were read.
fn only_allocated_chunks_were_accessed(media: &SparseMedia) -> u64 {
    let Accesses { read, persisted } = media.take_accesses();
    for range in read.iter().filter(|range| range.end - range.start > 8).chain(&persisted) {
        assert_eq!(media.holes_in(range.clone()), 0, "{range:#x?}");
    }
    read.iter().map(|range| range.end - range.start).sum()
}

#[test]
fn format_allocates_only_chunks_with_info_blocks_and_flogs() {
    let media = empty_volume(SIZE);
    let chunks = infos(&media).into_iter().flat_map(|info| {
        let flog_bytes = u64::from(info.lanes) * FLOG_GROUP_BYTES;
        let ranges = [
            info.start_bytes..info.start_bytes + INFO_BYTES,
            info.flog_at..info.flog_at + flog_bytes,
            info.copy_at..info.copy_at + INFO_BYTES,
        ];
        ranges
            .into_iter()
            .flat_map(|range| range.start / CHUNK_BYTES..=(range.end - 1) / CHUNK_BYTES)
    });
    let mut expected: Vec<u64> = chunks.collect();
    expected.sort_unstable();
    expected.dedup();
    assert_eq!(media.allocated(), expected);
    assert!(expected.len() <= 6, "{expected:?}");
}

#[test]
fn open_and_quiesce_of_an_empty_volume_access_no_hole() {
    let media = empty_volume(SIZE);
    let before = media.allocated();
    let engine = Engine::open(&media).unwrap();
    // Each arena has two info blocks, a flog, and a map entry for each lane.
    let metadata_bytes = 2 * INFO_BYTES + 256 * (FLOG_GROUP_BYTES + 8);
    let read_bytes = only_allocated_chunks_were_accessed(&media);
    // Live blocks are counted in the parts of the map that share a chunk with other metadata.
    let map_bytes = before.len() as u64 * CHUNK_BYTES;
    let max_bytes = engine.arenas().len() as u64 * metadata_bytes + map_bytes;
    assert!(read_bytes <= max_bytes, "{read_bytes}");
    assert!(read(&engine, engine.sectors() / 2) == [0; 4096]);
    engine.flush().unwrap();
    assert_eq!(media.allocated(), before);
}

#[test]
fn search_for_data_reads_no_hole_of_the_map() {
    let media = empty_volume(SIZE);
    let sector = {
        let engine = Engine::open(&media).unwrap();
        let sector = engine.sectors() / 2 + 7;
        assert!(!holds_data(&media).unwrap());
        engine.write(sector, &content(sector, 1, 4096)).unwrap();
        sector
    };
    media.take_accesses();
    assert!(holds_data(&media).unwrap());
    let reader = Reader::open(&media).unwrap();
    let chunk_sectors = CHUNK_BYTES / 4096;
    // All blocks in a chunk with space may contain data.
    let next = reader.next_data(chunk_sectors..reader.sectors()).unwrap();
    assert!((sector - chunk_sectors..=sector).contains(&next), "{next} is not near {sector}");
    let mut bytes = vec![0; 4096];
    assert_eq!(reader.read(sector, &mut bytes).unwrap(), Sector::Data);
    assert!(bytes == content(sector, 1, 4096));
    let read_bytes = only_allocated_chunks_were_accessed(&media);
    assert!(read_bytes < 4 * CHUNK_BYTES, "{read_bytes}");
}

#[test]
fn check_and_repair_read_no_hole() {
    let media = empty_volume(16 << 30);
    let info = infos(&media).pop().unwrap();
    // A lane with an impossible entry.
    media.store_word(info.flog_at + 8, u64::MAX).unwrap();
    media.take_accesses();
    assert!(!check(&media).is_clean());
    let repair = plan_repair(&media, GiveUp::Nothing, &mut |_| {}).unwrap();
    let before = media.allocated();
    repair.apply(&media).unwrap();
    assert_eq!(media.allocated(), before);
    only_allocated_chunks_were_accessed(&media);
    assert!(check(&media).is_clean());
}

/// `mkfs` programs discard the whole volume.
#[test]
fn discard_of_an_empty_volume_allocates_no_space() {
    for sector_bytes in [512, 4096] {
        let media = Simulator::new(SparseMedia::wrapped_bytes(SIZE, CHUNK_BYTES));
        let media = ThinMedia::new(media, SIZE, CHUNK_BYTES);
        Layout::new(SIZE, sector_bytes, Uuid::from_u128(42)).unwrap().format(&media).unwrap();
        let media = media.strict();
        let before = media.allocated();
        let engine = Engine::open(&media).unwrap();
        media.take_accesses();
        engine.discard(0..engine.sectors()).unwrap();
        assert_eq!(media.allocated(), before);
        let read_bytes = only_allocated_chunks_were_accessed(&media);
        assert!(read_bytes <= before.len() as u64 * CHUNK_BYTES, "{read_bytes}");
    }
}
