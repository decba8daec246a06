//! A kill of the process that is followed by a power failure. The next process sees all stores, and
//! must not rely on them before they are durable.

use std::collections::BTreeMap;

use super::campaign::{VerifiedImages, report_images, verify_each};
use super::crash::{Volumes, fill_volume, new_pool_with, open, verify, verify_marked, volumes_of};
use super::crash_each::{OPERATIONS, Operation, Start, bytes, intermediate_state};
use super::repair::entry;
use super::*;
use crate::media::simulator::{Random, Simulator};
use crate::pool::maintenance::repair::fix_metadata;
use crate::pool::scan::make_durable;

/// Maximum number of images per crash point of the power failure.
const BOUND: usize = 24;

/// Kills an operation at each of its persists. The next process opens the visible state, and may
/// reuse a slot that a deletion has freed. The power fails at each persist of this process.
fn survive_kills(case: &str, operation: Operation, makes_another: bool) -> usize {
    let start = Start::new();
    let before = volumes_of(&start.pool);
    start.media.record();
    operation(&start);
    let kills = start.media.take_points();
    let after = volumes_of(&open(&start.media).unwrap());
    let intermediate_state = intermediate_state(case, &before).unwrap_or_else(|| before.clone());
    let mut images = 0;
    // Verified images, grouped by the volumes that they should contain.
    let mut verified: BTreeMap<Volumes, VerifiedImages> = BTreeMap::new();
    for (number, kill) in kills.iter().enumerate() {
        let media = kill.killed();
        media.record();
        let pool =
            open(&media).unwrap_or_else(|error| panic!("{case}, killed at {number}: {error}"));
        let opened = volumes_of(&pool);
        assert!(
            [&before, &after, &intermediate_state].contains(&&opened),
            "{case}, killed at {number}: {opened:?}"
        );
        if makes_another {
            // Fails if all slots are in use.
            let made = pool.create_volume("another", bytes(3), VolumeFormat::Raw);
            assert!(
                matches!(made, Ok(_) | Err(PoolError::NoVolumeSlot { .. })),
                "{case}: {made:?}"
            );
        }
        let made = volumes_of(&pool);
        let allowed = [&before, &after, &intermediate_state, &made];
        let verify_image =
            |image: &Simulator| verify_marked(image, &allowed, &start.marks.borrow());
        images += verified
            .entry(made.clone())
            .or_default()
            .verify_each(
                &media.take_points(),
                BOUND,
                &mut Random::new(number as u64),
                &verify_image,
            )
            .unwrap_or_else(|error| panic!("{case}, killed at {number}: {error}"));
    }
    images
}

#[test]
fn every_operation_survives_a_kill_and_then_a_loss_of_power() {
    for makes_another in [false, true] {
        let mut images = 0;
        for (case, operation, _) in OPERATIONS {
            images += survive_kills(case, operation, makes_another);
        }
        report_images(images);
        assert!(images > 5000, "only {images} images");
    }
}

/// A deletion is killed, and an owner word of the volume is damaged. The repair treats the chunk as
/// unused only because of a record that may not be durable.
#[test]
fn repair_survives_an_earlier_kill_and_then_a_loss_of_power() {
    let (media, pool) = new_pool_with(|_| {});
    pool.create_volume("v", bytes(3), VolumeFormat::Raw).unwrap();
    fill_volume(&media, &pool, "v");
    let superblock = pool.superblock();
    let (with, without) = (volumes_of(&pool), BTreeMap::new());
    media.record();
    pool.delete_volume("v").unwrap();
    let mut images = 0;
    for (number, kill) in media.take_points().iter().enumerate() {
        let media = kill.killed();
        media.store_word(entry(3), media.load_word(entry(3)).unwrap() ^ 1 << 17).unwrap();
        media.persist_range(entry(3)..entry(3) + 8).unwrap();
        media.record();
        repair(&media, &superblock);
        let verify_image = |image: &Simulator| {
            repair(image, &superblock);
            verify(image, &[&with, &without])
        };
        images += verify_each(
            &media.take_points(),
            BOUND,
            &mut Random::new(number as u64),
            &verify_image,
        )
        .unwrap_or_else(|error| panic!("killed at {number}: {error}"));
    }
    report_images(images);
    assert!(images > 100, "only {images} images");
}

/// Performs the steps of [`Pool::repair`].
fn repair(media: &Simulator, superblock: &Superblock) {
    make_durable(media, superblock).unwrap();
    fix_metadata(media, superblock, false).unwrap();
    drop(open(media).unwrap());
}
