//! Rule 9: watermarks of the pool's free space for volumes.

use proptest::prelude::*;

use super::*;
use crate::{BLOCK_BYTES, StorageSpace};

/// Guest with full DRAM and 512 MiB of PM, at a fixed size. Volumes may need 1 GiB. The watermarks
/// are 64 and 128 MiB, and more than that is free.
fn rig() -> Rig {
    let mut rig = Rig::fixed(640);
    rig.tick(0);
    rig.follow();
    rig.host.storage = Some(StorageSpace {
        free_bytes: 256 * MIB,
        needed_bytes: 1024 * MIB,
        low_bytes: 64 * MIB,
        high_bytes: 128 * MIB,
        ..StorageSpace::default()
    });
    assert_eq!(rig.requested_mib(), (128, 512));
    rig
}

fn set_free(rig: &mut Rig, mib: u64) {
    rig.host.storage.as_mut().expect("watermarks").free_bytes = mib * MIB;
}

#[test]
fn rule_9_recalls_pm_below_low_until_high() {
    let mut rig = rig();
    for mib in [256, 127, 64] {
        set_free(&mut rig, mib);
        assert_eq!(rig.tick(6_000).direction, Direction::Hold, "{mib} MiB");
    }
    set_free(&mut rig, 63);
    let plan = rig.tick(100);
    assert_eq!((plan.direction, plan.reason), (Direction::Shrink, Reason::StorageLow));
    // 65 MiB are missing, which are 33 blocks.
    assert_eq!(rig.requested_mib(), (128, 446));
    // Memory that is about to be unplugged counts.
    assert_eq!(rig.tick(100).direction, Direction::Hold);
    // The guest has unplugged a part, but the volumes grow.
    rig.host.zones[PM].plugged_bytes = 480 * MIB;
    set_free(&mut rig, 60);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 412));
    rig.follow();
    set_free(&mut rig, 127);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 410), "up to high");
    rig.follow();
    set_free(&mut rig, 128);
    let plan = rig.tick(100);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Grow, Some(Reason::StorageLow)));
    assert_eq!(rig.requested_mib(), (128, 474), "64 MiB above low");
}

#[test]
fn rule_9_recall_does_not_wait_for_cool_down_and_steps() {
    let mut rig = rig();
    // Only rule 9 shrinks within the cool-down, and by more than `shrink_step`.
    set_free(&mut rig, 0);
    rig.controller.grown_at = Some(rig.now);
    rig.host.storage.as_mut().expect("watermarks").high_bytes = 300 * MIB;
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (128, 212));
}

#[test]
fn rule_9_pm_grows_only_above_low_and_not_during_a_recall() {
    let mut rig = rig();
    rig.want(1152);
    let plan = rig.tick(1_000);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Grow, Some(Reason::StorageLow)));
    assert_eq!(rig.requested_mib(), (128, 704), "192 MiB above low");
    rig.follow();
    set_free(&mut rig, 64);
    assert_eq!(rig.tick(1_000).reason, Reason::StorageLow);
    // Between low and high, a recall continues, and only a recall prevents growth.
    set_free(&mut rig, 10);
    rig.tick(1_000);
    assert_eq!(rig.requested_mib(), (128, 586));
    set_free(&mut rig, 100);
    let plan = rig.tick(100);
    assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::StorageLow));
    rig.follow();
    set_free(&mut rig, 128);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 650), "64 MiB above low");
}

#[test]
fn rule_9_outstanding_grow_is_withdrawn_first() {
    let mut rig = rig();
    rig.want(740);
    rig.tick(1_000);
    assert_eq!(rig.requested_mib(), (128, 612));
    set_free(&mut rig, 60);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 444), "512 MiB are plugged, 68 MiB are missing");
}

#[test]
fn rule_9_outstanding_grow_to_a_floor_is_kept() {
    for (floor_mib, zone_floor_mib, left_mib) in [(700, 0, 572), (0, 530, 530), (0, 0, 444)] {
        let mut rig = rig();
        rig.want(740);
        rig.tick(1_000);
        let rules = Rules { floor_bytes: floor_mib * MIB, ..Rules::default() };
        rig.controller.set_rules(rules).expect("in bounds");
        rig.host.zones[PM].floor_bytes = zone_floor_mib * MIB;
        set_free(&mut rig, 60);
        rig.tick(100);
        assert_eq!(rig.requested_mib(), (128, left_mib), "{floor_mib} {zone_floor_mib}");
    }
}

#[test]
fn rule_9_watermarks_count_up_to_the_need_of_the_volumes() {
    let mut rig = rig();
    set_free(&mut rig, 10);
    rig.host.storage.as_mut().expect("watermarks").needed_bytes = 10 * MIB;
    assert_eq!(rig.tick(6_000).direction, Direction::Hold);
    rig.host.storage.as_mut().expect("watermarks").needed_bytes = 30 * MIB;
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 492), "30 MiB and not `high`");
}

#[test]
fn rule_9_respects_floor_and_pins() {
    let mut rig = rig();
    let rules = Rules { floor_bytes: 600 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in bounds");
    set_free(&mut rig, 0);
    let plan = rig.tick(100);
    assert_eq!(plan.limited_by, Some(Reason::AtFloor));
    assert_eq!(rig.requested_mib(), (128, 472), "DRAM is not unplugged");
    let mut rig = self::rig();
    rig.pin(ZoneId(1));
    set_free(&mut rig, 0);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 512));
}

#[test]
fn rule_9_unfollowed_recall_is_repeated_with_half_after_a_pause() {
    let mut rig = rig();
    set_free(&mut rig, 0);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 384));
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (128, 512));
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 512), "a pause");
    rig.tick(5_000);
    assert_eq!(rig.requested_mib(), (128, 448), "half");
}

#[test]
fn rule_9_paused_controller_recalls_nothing_and_dry_run_reports_once() {
    let mut rig = rig();
    rig.controller.pause();
    set_free(&mut rig, 0);
    assert_eq!(rig.tick(100).reason, Reason::Paused);
    rig.controller.unpause();
    rig.controller.set_dry_run(true);
    let plan = rig.tick(100);
    assert_eq!((plan.reason, plan.dry_run), (Reason::StorageLow, true));
    assert_eq!(rig.tick(100).direction, Direction::Hold);
    assert_eq!(rig.requested_mib(), (128, 512));
}

/// State of the host at one step.
#[derive(Clone, Debug)]
struct Step {
    free_mib: u64,
    needed_mib: u64,
    available_mib: u64,
    /// Part of the outstanding requests that the guest has followed.
    followed_permille: u64,
}

fn step() -> impl Strategy<Value = Step> {
    (0..400u64, 0..400u64, 0..300u64, 0..=1000u64).prop_map(
        |(free_mib, needed_mib, available_mib, followed_permille)| Step {
            free_mib,
            needed_mib,
            available_mib,
            followed_permille,
        },
    )
}

proptest! {
    /// Blocks that are still plugged need no space of the pool.
    #[test]
    fn rule_9_pm_never_grows_into_the_space_of_volumes(
        steps in prop::collection::vec(step(), 1..40)
    ) {
        let mut rig = rig();
        rig.controller.set_policy(Policy::default()).expect("in range");
        for Step { free_mib, needed_mib, available_mib, followed_permille } in steps {
            let storage = rig.host.storage.as_mut().expect("watermarks");
            (storage.free_bytes, storage.needed_bytes) = (free_mib * MIB, needed_mib * MIB);
            let storage = *storage;
            for zone in &mut rig.host.zones {
                let part = |bytes: u64| bytes / BLOCK_BYTES * followed_permille / 1000 * BLOCK_BYTES;
                let (grow, shrink) = (zone.outstanding_grow_bytes(), zone.outstanding_shrink_bytes());
                zone.plugged_bytes = zone.plugged_bytes + part(grow) - part(shrink);
            }
            let before = rig.host.zones[PM];
            rig.report(300, available_mib);
            let requested_bytes = rig.host.zones[PM].requested_bytes;
            let had_bytes = before.requested_bytes.max(before.plugged_bytes);
            let new_bytes = requested_bytes.saturating_sub(had_bytes);
            prop_assert!(new_bytes <= storage.above_low_bytes(), "{} of {:?}", new_bytes, storage);
            prop_assert!(new_bytes == 0 || !rig.controller.is_recalling, "{:?}", storage);
            prop_assert!(!storage.is_low() || requested_bytes <= before.plugged_bytes, "{:?}", storage);
        }
    }
}
