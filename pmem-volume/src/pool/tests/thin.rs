//! Tests of thin volumes.

use zerocopy::{FromZeros, IntoBytes};

use super::campaign::{Replay, verify_each};
use super::crash::{new_pool_of, open, open_for};
use super::*;
use crate::media::simulator::{Random, Simulator};
use crate::pool::format::superblock::allow_thin_volumes;
use crate::pool::format::table::Slot;
use crate::pool::format::volume_record::VolumeRecord;
use crate::pool::layout::{FEATURE_THIN_VOLUMES, SUPERBLOCK_OFFSETS, SuperblockBytes};

/// Returns the features for writers in each copy of the superblock that is whole.
fn features(media: &dyn Media) -> Vec<u64> {
    let mut copies = [SuperblockBytes::new_zeroed(), SuperblockBytes::new_zeroed()];
    for (copy, at) in copies.iter_mut().zip(SUPERBLOCK_OFFSETS) {
        media.read(at, copy.as_mut_bytes()).unwrap();
    }
    let whole = copies.iter().filter(|copy| mirrored::is_whole(*copy));
    whole.map(|copy| copy.features_read_only.get()).collect()
}

fn new_pool() -> (Simulator, Arc<OtherPool>) {
    new_pool_of(12, |superblock| {
        superblock.volume_slots = 4;
        superblock.log_bytes = 4096;
    })
}

#[test]
fn feature_bit_is_set_in_one_step() {
    let (media, pool) = new_pool();
    media.record();
    let superblock = allow_thin_volumes(&media, &pool.superblock).unwrap();
    assert!(superblock.has_thin_volumes);
    assert_eq!(features(&media), [FEATURE_THIN_VOLUMES; 2]);
    let verify = |image: &Simulator| {
        let pool = open(image).map_err(|error| error.to_string())?;
        let is_set = pool.superblock.has_thin_volumes;
        let expected = if is_set { FEATURE_THIN_VOLUMES } else { 0 };
        match features(image) {
            copies if copies == [expected; 2] => Ok(()),
            copies => Err(format!("after the open, the copies have {copies:?}")),
        }
    };
    let images = verify_each(&media.take_points(), 200, &mut Random::new(1), &verify).unwrap();
    Replay::from_environment().count(images, 10);
    // A second call changes nothing.
    let before = media.digest();
    allow_thin_volumes(&media, &superblock).unwrap();
    assert!(before == media.digest());
}

/// The damaged copy is written first, so that one copy is whole at any time.
#[test]
fn feature_bit_is_set_although_a_copy_is_damaged() {
    for damaged in SUPERBLOCK_OFFSETS {
        let (media, pool) = new_pool();
        media.store_word(damaged + 80, 9).unwrap();
        media.persist_range(0..media.len_bytes()).unwrap();
        media.record();
        allow_thin_volumes(&media, &pool.superblock).unwrap();
        let opens = |image: &Simulator| open(image).map(drop).map_err(|error| error.to_string());
        verify_each(&media.take_points(), 200, &mut Random::new(1), &opens).unwrap();
        assert_eq!(features(&media), [FEATURE_THIN_VOLUMES; 2]);
    }
}

#[test]
fn missing_feature_bit_of_a_thin_volume_is_set_by_the_next_open() {
    let (media, pool) = new_pool();
    let record = VolumeRecord {
        sequence: 1,
        slot: Slot(1),
        name: "thin".parse().unwrap(),
        uuid: Uuid::from_u128(2),
        format: VolumeFormat::Raw,
        thin: true,
        part: None,
        chunks: 3,
        created_unix_s: 1,
    };
    let offsets = pool.superblock.volume_record_offsets(record.slot);
    mirrored::write(&media, offsets, &record.to_bytes()).unwrap();
    drop(pool);
    let finding = Finding::ThinFeatureMissing { name: "thin".to_owned() };
    let reader = open_for(&media, OpenMode::ReadOnly).unwrap();
    assert_eq!(reader.check().unwrap().pool, std::slice::from_ref(&finding));
    assert_eq!(features(&media), [0; 2]);
    drop(reader);
    assert_eq!(open(&media).unwrap().findings_at_open(), [finding]);
    assert_eq!(features(&media), [FEATURE_THIN_VOLUMES; 2]);
    let pool = open(&media).unwrap();
    assert_eq!((pool.findings_at_open(), pool.check().unwrap().pool), (vec![], vec![]));
}

/// Programs without the feature see an unknown bit, as this version does with other bits.
#[test]
fn unknown_feature_for_writers_allows_only_reads() {
    let (media, pool) = new_pool();
    let mut bytes = pool.superblock.to_bytes();
    bytes.features_read_only.set(FEATURE_THIN_VOLUMES << 1);
    mirrored::seal(&mut bytes);
    mirrored::write(&media, SUPERBLOCK_OFFSETS, &bytes).unwrap();
    let error = open(&media).unwrap_err();
    assert!(matches!(error, PoolError::Features { features: 2, .. }), "{error}");
    open_for(&media, OpenMode::ReadOnly).unwrap();
}
