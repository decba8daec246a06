//! Wrong orders of commit protocols that are not tested elsewhere. Their detection proves that the
//! tests of the right orders are effective.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::crash::{
    Volumes, fill_memory, must_be_detected, new_pool_of, open, verify_each, verify_marked,
    verify_points, volumes_of,
};
use super::*;
use crate::btt;
use crate::media::simulator::{Random, Simulator};
use crate::pool::format::table::{Owner, Slot};
use crate::pool::format::volume_record::{VolumeRecord, empty_record};
use crate::pool::volume::{Space, extents_of};

fn record_of(slot: Slot, name: &str, format: VolumeFormat, chunks: u32) -> VolumeRecord {
    VolumeRecord {
        sequence: 10,
        slot,
        name: name.parse().unwrap(),
        uuid: Uuid::from_u128(5),
        format,
        thin: false,
        part: None,
        chunks,
        reserve_chunks: chunks,
        created_unix_s: 1,
    }
}

fn write_record(media: &Simulator, pool: &OtherPool, record: &VolumeRecord) {
    mirrored::write(
        media,
        pool.superblock().volume_record_offsets(record.slot),
        &record.to_bytes(),
    )
    .unwrap();
}

#[test]
fn reuse_of_a_slot_before_the_scrub_marks_is_detected() {
    let error = must_be_detected(|media, pool| {
        let slot = Slot(0);
        mirrored::write(
            media,
            pool.superblock().volume_record_offsets(slot),
            &empty_record(slot, 9),
        )
        .unwrap();
        // Omitted: changing the volume's owner words to *scrub*, and persisting them.
        let run = Run { start: ChunkId(8), chunks: 2 };
        pool.mark(&[run], |index| Owner::Volume { slot, index }).unwrap();
        write_record(media, pool, &record_of(slot, "v", VolumeFormat::Raw, 2));
    });
    assert!(error.contains("are both chunk"), "{error}");
}

#[test]
fn record_of_a_btt_volume_before_its_format_is_detected() {
    const PLACE: u32 = 9;
    let (media, pool) = new_pool_of(14, |_| {});
    media.record();
    let (slot, run) = (Slot(0), Run { start: ChunkId(3), chunks: PLACE });
    pool.mark(&[run], |index| Owner::Volume { slot, index }).unwrap();
    let record = record_of(slot, "b", VolumeFormat::Btt, PLACE);
    write_record(&media, &pool, &record);
    let layout = btt::Layout::new(record.size_bytes(), btt::SECTOR_BYTES, record.uuid).unwrap();
    layout.format(&Space::new(&media, &extents_of((0..).zip(run.ids())))).unwrap();
    let allowed = [&Volumes::new(), &Volumes::from([("b".to_owned(), PLACE)])];
    let error = verify_points(&media.take_points(), 64, &allowed, &mut Random::new(4))
        .expect_err("the wrong order was not detected");
    assert!(error.contains("BTT of b"), "{error}");
}

/// Frees chunks that a crash left lent before it erases them.
#[test]
fn freeing_before_erasing_is_detected() {
    let (media, pool) = new_pool_of(14, |_| {});
    let lent = pool.alloc_memory(2 * CHUNK_BYTES).unwrap();
    fill_memory(&media, &lent);
    media.persist_range(0..media.len_bytes()).unwrap();
    let runs: Vec<Run> = lent.iter().map(|extent| extent.run()).collect();
    media.record();
    for chunk in runs.iter().flat_map(|run| run.ids()) {
        pool.table().set_owner(&media, chunk, Owner::Free).unwrap();
    }
    pool.persist_entries(&runs).unwrap();
    media.erase(&runs.iter().map(|run| run.byte_range()).collect::<Vec<_>>()).unwrap();
    let error = verify_points(&media.take_points(), 64, &[&Volumes::new()], &mut Random::new(4))
        .expect_err("the wrong order was not detected");
    assert!(error.contains("old content"), "{error}");
}

/// A crash left a chunk of an unfinished volume. Opening does not mark it, and the slot is reused
/// in the meantime.
#[test]
fn open_that_does_not_mark_leftovers_is_detected() {
    let error = must_be_detected(|media, pool| {
        let slot = Slot(1);
        let make = |at| {
            pool.mark(&[Run { start: ChunkId(at), chunks: 1 }], |index| Owner::Volume {
                slot,
                index,
            })
        };
        make(8).unwrap();
        // Omitted: changing the chunk's owner word to *scrub*, and persisting it before all other
        // changes.
        make(10).unwrap();
        write_record(media, pool, &record_of(slot, "w", VolumeFormat::Raw, 1));
    });
    assert!(error.contains("are both chunk"), "{error}");
}

/// An owner word is *free* while the chunk is still being erased. The chunk is lent again, and the
/// erasure may destroy stores of its new owner.
#[test]
fn chunk_that_is_free_during_its_erasure_is_detected() {
    let (media, pool) = new_pool_of(14, |_| {});
    let lent = pool.alloc_memory(2 * CHUNK_BYTES).unwrap();
    fill_memory(&media, &lent);
    pool.free_memory(&lent).unwrap();
    let batch = pool.lock_state().scrub.take(1);
    for chunk in batch.iter().flat_map(|run| run.ids()) {
        pool.table().set_owner(&media, chunk, Owner::Free).unwrap();
    }
    batch.iter().for_each(|run| pool.lock_state().buddy.free_run(*run));
    // The chunk becomes part of a volume, from which the old content of memory can be read.
    let all = VolumeSize::Bytes(pool.info().free_bytes);
    media.record();
    pool.create_volume("v", all, VolumeFormat::Raw).unwrap();
    let after = volumes_of(&pool);
    let verify_image =
        |image: &Simulator| verify_marked(image, &[&Volumes::new(), &after], &BTreeMap::new());
    let error = verify_each(&media.take_points(), 64, &mut Random::new(4), &verify_image)
        .expect_err("the wrong order was not detected");
    assert!(error.contains("the old content of chunk") || error.contains("old content"), "{error}");
}

/// Opening rewrites a damaged superblock in a wrong way, by writing both copies at the same time.
#[test]
fn open_that_also_writes_the_good_superblock_is_detected() {
    let (media, pool) = new_pool_of(14, |_| {});
    media.record();
    let newer = Superblock { sequence: pool.superblock().sequence + 1, ..pool.superblock() };
    for at in layout::SUPERBLOCK_OFFSETS {
        media.store(at, zerocopy::IntoBytes::as_bytes(&newer.to_bytes())).unwrap();
        // Omitted: the persist of the first copy before the second one is written.
    }
    let opens = |image: &Simulator| open(image).map(drop).map_err(|error| error.to_string());
    let error = verify_each(&media.take_points(), 64, &mut Random::new(4), &opens)
        .expect_err("the wrong order was not detected");
    assert!(error.contains("both superblocks are damaged"), "{error}");
}
