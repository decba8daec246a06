//! Rule 4: requests are limited to the memory for which the guest's DRAM can hold page descriptors.

use super::*;

#[test]
fn grow_is_limited_to_describable_memory() {
    let mut rig = Rig::new(Policy::default());
    rig.describe(2);
    rig.raw.memory.total_bytes = 800 * MIB;
    let plan = rig.report(1000, 1);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Grow, None));
    // Because of its high watermarks, this guest needs 300 MiB.
    let mut rig = Rig::new(Policy::default());
    rig.raw.zones[0].high_pages = 76_800;
    rig.describe(2);
    rig.host.zones[DRAM].max_bytes = 0;
    rig.raw.memory.total_bytes = 4000 * MIB;
    let plan = rig.report(1000, 1);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Grow, Some(Reason::Descriptors)));
    assert_eq!(rig.requested_mib(), (0, 256));
    assert_eq!(rig.report(50, 1).reason, Reason::Descriptors, "until they are online");
    rig.follow();
    assert_eq!(rig.report(50, 1).direction, Direction::Grow);
}

#[test]
fn nothing_is_requested_from_guest_without_room() {
    let mut rig = Rig::new(Policy::default());
    rig.describe(0);
    // Page descriptors cannot be placed in movable memory.
    let movable = Zone {
        kind: ZoneKind::Movable,
        free_pages: 60_000,
        managed_pages: 60_000,
        ..Zone::default()
    };
    rig.raw.zones.push(movable);
    rig.raw.memory.total_bytes = 4000 * MIB;
    assert_eq!(rig.report(1000, 1).reason, Reason::Descriptors);
    assert_eq!(rig.requested_mib(), (0, 0));
    // Reclaim can make room for one section at a time.
    rig.raw.memory.swap_total_bytes = 64 * MIB;
    rig.raw.memory.swap_free_bytes = 4 * MIB;
    assert_eq!(rig.report(50, 1).reason, Reason::Descriptors, "no page can be swapped out");
    rig.raw.zones[0].user_pages = Some(8 * MIB / PAGE_BYTES);
    rig.report(50, 1);
    assert_eq!(rig.requested_mib(), (128, 0));
}

/// Guest with free swap. Its kernel uses up its zones, section by section.
#[test]
fn swap_gives_room_only_while_the_kernels_zones_have_user_pages() {
    let mut rig = Rig::fixed(16_384);
    rig.host.zones[PM].max_bytes = 16_384 * MIB;
    rig.host.pool_free_bytes = 16_384 * MIB;
    rig.raw.memory.total_bytes = 16_384 * MIB;
    rig.raw.memory.swap_total_bytes = 2048 * MIB;
    rig.raw.memory.swap_free_bytes = 2048 * MIB;
    rig.describe(0);
    let mut user_bytes = 64 * MIB;
    for _ in 0..60 {
        rig.raw.zones[0].user_pages = Some(user_bytes / PAGE_BYTES);
        let before = rig.requested_mib();
        rig.report(50, 280);
        rig.follow();
        if rig.requested_mib() == before {
            break;
        }
        user_bytes = user_bytes.saturating_sub(2 * MIB);
    }
    // One section is added for each 2 MiB, until less than 4 MiB are left.
    assert_eq!(user_bytes, 2 * MIB);
    assert_eq!(rig.requested_mib().0 + rig.requested_mib().1, 31 * 128);
}

/// The limit does not change between two reports, even after many ticks.
#[test]
fn limit_is_constant_between_two_reports() {
    let mut rig = Rig::fixed(1024);
    rig.describe(1);
    rig.report(0, 280);
    assert_eq!(rig.requested_mib(), (128, 0));
    for _ in 0..60 {
        rig.follow();
        assert_eq!(rig.tick(16).reason, Reason::Descriptors);
    }
    assert_eq!(rig.requested_mib(), (128, 0));
    rig.report(50, 280);
    assert_eq!(rig.requested_mib(), (128, 128));
}

#[test]
fn unreported_guest_is_limited_to_multiple_of_boot_memory() {
    let mut rig = Rig::fixed(16_384);
    rig.host.zones[PM].max_bytes = 16_384 * MIB;
    rig.host.pool_free_bytes = 16_384 * MIB;
    for _ in 0..60 {
        rig.tick(1_000);
        rig.follow();
    }
    assert_eq!(rig.requested_mib(), (128, 8 * 384 - 128));
    let rules = Rules { unreported_multiple: 16, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in bounds");
    rig.tick(1_000);
    assert_eq!(rig.requested_mib(), (128, 16 * 384 - 128));
    // Reports of an agent replace this limit until reports are lost.
    rig.describe(10);
    rig.follow();
    rig.report(50, 280);
    assert_eq!(rig.requested_mib(), (128, 16 * 384 - 128 + 1280));
    rig.follow();
    for _ in 0..60 {
        assert_eq!(rig.tick(1_000).reason, Reason::Descriptors);
    }
}

/// The host's boot memory does not include the largest balloon. The part of the balloon that the
/// guest keeps is also boot memory.
#[test]
fn unreported_limit_counts_boot_memory_outside_the_balloon() {
    for (in_balloon_mib, boot_mib) in [(0, 384), (100, 284), (288, 96)] {
        let mut rig = Rig::new(Policy::Off);
        let balloon = ZoneSizes {
            requested_bytes: (288 - in_balloon_mib) * MIB,
            plugged_bytes: (288 - in_balloon_mib) * MIB,
            ..ZoneSizes::empty(2, Tier::Dram, 288 * MIB)
        };
        rig.host.boot_bytes = 96 * MIB;
        rig.host.zones.push(balloon);
        rig.host.balloon = Some(balloon.id);
        let room_bytes =
            DescriptorLimit::default().room_bytes(&Rules::default(), &rig.host, rig.now);
        assert_eq!(room_bytes, 8 * boot_mib * MIB, "{in_balloon_mib} MiB in the balloon");
    }
}

/// Balloon statistics do not separate the kernel's memory from other memory.
#[test]
fn balloon_statistics_do_not_raise_unreported_limit() {
    let mut rig = Rig::fixed(16_384);
    rig.host.zones[PM].max_bytes = 16_384 * MIB;
    rig.host.pool_free_bytes = 16_384 * MIB;
    rig.raw.blocks.block_bytes = 0;
    rig.raw.memory.total_bytes = 8_192 * MIB;
    rig.raw.zones[0].managed_pages = 8_192 * MIB / PAGE_BYTES;
    rig.describe(1_000);
    rig.report(50, 280);
    assert_eq!(rig.requested_mib(), (128, 8 * 384 - 128));
}

#[test]
fn size_requested_by_client_is_reached_in_steps() {
    let mut rig = Rig::new(Policy::Off);
    rig.describe(2);
    rig.report(0, 280);
    rig.pin(ZoneId(1));
    rig.set_goal(ZoneId(1), 600 * MIB);
    let step = |requested_mib: u64| GoalStep {
        zone: ZoneId(1),
        requested_bytes: requested_mib * MIB,
        goal_bytes: 600 * MIB,
    };
    assert_eq!(rig.step(), [step(256)]);
    assert_eq!(rig.step(), [], "the guest has not reported since");
    rig.follow();
    assert_eq!(rig.step(), []);
    rig.report(50, 280);
    assert_eq!(rig.step(), [step(512)]);
    rig.follow();
    rig.describe(0);
    rig.report(50, 280);
    assert_eq!(rig.step(), [], "the guest has no room");
    rig.describe(2);
    rig.report(50, 280);
    assert_eq!(rig.step(), [step(600)]);
    rig.describe(100);
    rig.report(50, 280);
    assert_eq!(rig.step(), []);
}

#[test]
fn new_goal_yields_step_even_if_nothing_can_be_requested() {
    let mut rig = Rig::new(Policy::Off);
    rig.describe(0);
    rig.report(0, 280);
    rig.set_goal(ZoneId(1), 600 * MIB);
    assert_eq!(
        rig.step(),
        [GoalStep { zone: ZoneId(1), requested_bytes: 0, goal_bytes: 600 * MIB }]
    );
    assert_eq!(rig.step(), []);
    // A smaller size is requested immediately. Blocks that are still plugged already have their
    // descriptors.
    rig.host.zones[PM].plugged_bytes = 512 * MIB;
    rig.host.zones[PM].requested_bytes = 256 * MIB;
    rig.set_goal(ZoneId(1), 600 * MIB);
    assert_eq!(rig.step()[0].requested_bytes, 512 * MIB);
    rig.set_goal(ZoneId(1), 64 * MIB);
    assert_eq!(rig.step()[0].requested_bytes, 64 * MIB);
    assert_eq!(rig.step(), []);
}

#[test]
fn goal_ends_when_host_or_policy_requests_another_size() {
    let mut rig = Rig::new(Policy::Off);
    rig.describe(2);
    rig.report(0, 280);
    rig.set_goal(ZoneId(1), 600 * MIB);
    rig.step();
    rig.host_has(PM, 100);
    assert_eq!(rig.step(), []);
    rig.describe(100);
    rig.report(50, 280);
    assert_eq!(rig.step(), [], "the pool is empty, so the client must repeat its request");
    rig.host.zones[PM].shortfall = None;
    rig.describe(2);
    rig.report(50, 280);
    rig.set_goal(ZoneId(1), 600 * MIB);
    rig.step();
    rig.follow();
    rig.want(0);
    rig.tick(0);
    rig.tick(6_000);
    assert!(rig.requested_mib().1 < 356, "{:?}", rig.requested_mib());
    rig.describe(100);
    rig.want(rig.requested_mib().1);
    rig.report(50, 280);
    assert_eq!(rig.step(), []);
}

/// Like a zone's memory, a DIMM takes up room until a report shows how much room is left.
#[test]
fn dimms_count_towards_the_limit() {
    let mut rig = Rig::new(Policy::default());
    let boot_mib = rig.host.boot_bytes / MIB;
    let room_mib = |rig: &Rig| rig.controller.describable_bytes(&rig.host, rig.now) / MIB;
    assert_eq!(room_mib(&rig), boot_mib * 8, "without a report");
    rig.controller.add_dimm(256 * MIB, rig.now);
    assert_eq!(room_mib(&rig), boot_mib * 8 - 256);
    rig.describe(3);
    rig.report(1000, 280);
    assert_eq!(room_mib(&rig), 384 - 256, "the guest may not have allocated the descriptors yet");
    rig.report(10_000, 280);
    assert_eq!(room_mib(&rig), 384);
    rig.controller.add_dimm(128 * MIB, rig.now);
    assert_eq!(room_mib(&rig), 384 - 128);
    rig.controller.add_dimm(256 * MIB, rig.now);
    rig.report(1000, 280);
    assert_eq!(room_mib(&rig), 0, "two DIMMs without page descriptors");
}
