//! Tests of volumes with missing chunks. Their chunks must never be reused. Giving up such a volume
//! should make the pool usable again.

use super::campaign::{report_images, verify_each};
use super::crash::{Volumes, fill_volume, new_pool_with, open, verify, volumes_of};
use super::repair::{entry, with_volumes};
use super::*;
use crate::media::simulator::{Random, Simulator};
use crate::pool::format::mirrored::Copies;
use crate::pool::format::table::{Owner, Slot, encode_owner};
use crate::pool::layout::VOLUME_TABLE_OFFSETS;
use crate::pool::maintenance::repair::fix_tables;

/// Changes an owner word and its checksum, as if the disk had lost a store.
fn set_owner(fixture: &Fixture, chunk: u32, owner: Owner) {
    fixture.overwrite(entry(chunk), &encode_owner(ChunkId(chunk), owner).to_le_bytes());
}

fn discard(fixture: &Fixture, name: &str, dry_run: bool) -> Result<RepairReport, PoolError> {
    Pool::repair_with(&fixture.path(), dry_run, Some(name), &mut |_| {})
}

/// Owner words that a lost chunk of the volume `raw` may have.
const LOST: [Owner; 4] = [
    Owner::Free,
    Owner::Scrub,
    Owner::Memory,
    // A leftover past the end of another volume.
    Owner::Volume { slot: Slot(0), index: 9 },
];

#[test]
fn missing_chunk_of_a_volume_is_neither_lent_nor_erased() {
    for lost in LOST {
        let fixture = with_volumes();
        set_owner(&fixture, 12, lost);
        let before = fs::read(fixture.path()).unwrap();
        let error = fixture.open_error(OpenMode::ReadWrite);
        assert!(error.to_string().contains("\"raw\" lacks 1 of its 3 chunks"), "{error}");
        let reader = Pool::open(&fixture.path(), OpenMode::ReadOnly).unwrap();
        assert_eq!(reader.volumes().len(), 2);
        assert!(reader.open_volume("btt").is_ok(), "the other chunks are readable");
        let report = reader.check().unwrap();
        let not_erased = Finding::NotErased { chunk: ChunkId(12) };
        assert_eq!(report.pool.contains(&not_erased), lost == Owner::Free, "{report:?}");
        assert!(!report.is_clean());
        drop(reader);
        for dry_run in [true, false] {
            let report = Pool::repair(&fixture.path(), dry_run).unwrap();
            assert_eq!(report.incomplete_volumes, ["raw"], "{lost:?}: {report:?}");
            let is_named = report.left.iter().any(|text| text.contains("free chunk C12 holds"));
            assert_eq!(is_named, lost == Owner::Free, "{report:?}");
        }
        assert!(before == fs::read(fixture.path()).unwrap(), "{lost:?}");
    }
}

#[test]
fn discard_of_a_damaged_volume_recovers_the_pool() {
    for lost in LOST {
        let fixture = with_volumes();
        set_owner(&fixture, 12, lost);
        let before = fs::read(fixture.path()).unwrap();
        let dry = discard(&fixture, "raw", true).unwrap();
        assert!(before == fs::read(fixture.path()).unwrap(), "a dry run changed something");
        let done = discard(&fixture, "raw", false).unwrap();
        assert!(
            done.mended[0].contains("volume \"raw\", which lacks 1 of its 3 chunks"),
            "{done:?}"
        );
        assert_eq!((&dry.mended, &dry.left), (&done.mended, &done.left));
        assert_eq!(done.left, [""; 0]);
        assert!(fixture.check().is_clean());
        let pool = fixture.open();
        assert_eq!(
            pool.volumes().iter().map(|volume| volume.name.as_str()).collect::<Vec<_>>(),
            ["btt"]
        );
        let lent = pool.alloc_memory(pool.info().lendable_bytes).unwrap();
        assert!(lent.iter().any(|extent| extent.run().ids().any(|chunk| chunk == ChunkId(12))));
        assert!(lent.iter().all(|extent| is_zero(&pool, *extent)), "{lost:?}");
    }
}

#[test]
fn unexplained_words_are_unused_after_the_volume_is_discarded() {
    let fixture = with_volumes();
    [11, 12, 20].iter().for_each(|chunk| fixture.lose_owner(*chunk));
    assert_eq!(Pool::repair(&fixture.path(), false).unwrap().mended, [""; 0]);
    let dry = discard(&fixture, "raw", true).unwrap();
    let done = discard(&fixture, "raw", false).unwrap();
    assert_eq!((dry.mended.len(), &dry.mended), (done.mended.len(), &done.mended));
    assert_eq!(done.left, [""; 0]);
    assert!(fixture.check().is_clean());
    assert_eq!(fixture.open().volumes().len(), 1);
}

#[test]
fn only_a_volume_with_missing_chunks_can_be_discarded() {
    let fixture = with_volumes();
    set_owner(&fixture, 12, Owner::Free);
    let before = fs::read(fixture.path()).unwrap();
    for dry_run in [true, false] {
        let error = discard(&fixture, "btt", dry_run).unwrap_err();
        assert!(matches!(&error, PoolError::VolumeComplete { name } if name == "btt"), "{error}");
        let error = discard(&fixture, "other", dry_run).unwrap_err();
        assert!(
            matches!(&error, PoolError::NoSuchVolume { existing, .. } if existing.len() == 2),
            "{error}"
        );
    }
    // The log may contain a store to the volume's record.
    fixture.flip(layout::LOG_OFFSET + 24, 3);
    fixture.flip(layout::LOG_OFFSET + 25, 3);
    for dry_run in [true, false] {
        let report = discard(&fixture, "raw", dry_run).unwrap();
        assert!(
            report.mended.is_empty() && report.left[0].contains("log is damaged"),
            "{report:?}"
        );
    }
    fixture.flip(layout::LOG_OFFSET + 24, 3);
    fixture.flip(layout::LOG_OFFSET + 25, 3);
    assert!(before == fs::read(fixture.path()).unwrap());
}

/// Gives up volume `v`, whose chunk 3 is marked *free*, and repeats this after each crash. If
/// `damaged` is set, that copy of the volume's record is damaged.
fn crash_while_discarding(damaged: Option<usize>) -> usize {
    let (media, pool) = new_pool_with(|_| {});
    for (name, chunks) in [("v", 3), ("w", 2)] {
        pool.create_volume(name, VolumeSize::Bytes(chunks * CHUNK_BYTES), VolumeFormat::Raw)
            .unwrap();
        fill_volume(&media, &pool, name);
    }
    let superblock = pool.superblock();
    drop(pool);
    media.store_word(entry(3), encode_owner(ChunkId(3), Owner::Free)).unwrap();
    if let Some(copy) = damaged {
        media.store_word(VOLUME_TABLE_OFFSETS[copy] + 64, 0).unwrap();
    }
    media.persist_range(0..media.len_bytes()).unwrap();
    let kept = Volumes::from([("w".to_owned(), 2)]);
    let discard_raw =
        |image: &Simulator| fix_tables(image, &superblock, Some("v"), false, &mut vec![]).map(drop);
    media.record();
    discard_raw(&media).unwrap();
    let verify_image = |image: &Simulator| {
        let copies = mirrored::read::<layout::VolumeRecordBytes>(image, VOLUME_TABLE_OFFSETS);
        assert!(!matches!(copies.unwrap(), Copies::Lost), "a crash has destroyed the record");
        match open(image) {
            Err(PoolError::Damaged { .. }) => discard_raw(image).unwrap(),
            result => assert_eq!(volumes_of(&result.unwrap()), kept),
        }
        verify(image, &[&kept])
    };
    verify_each(&media.take_points(), 256, &mut Random::new(5), &verify_image).unwrap()
}

#[test]
fn discard_of_a_damaged_volume_is_atomic() {
    for damaged in [None, Some(0), Some(1)] {
        let images = crash_while_discarding(damaged);
        report_images(images);
        assert!(images > 500, "only {images} images");
    }
}
