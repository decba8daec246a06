//! Rule 7: zones that a client has resized.

use super::*;

#[test]
fn rule_7_pinned_zone_is_left_alone_until_resumed() {
    let mut rig = Rig::fixed(600);
    rig.host.zones[PM].requested_bytes = 30 * MIB;
    rig.pin(ZoneId(1));
    assert_eq!(rig.tick(0).limited_by, Some(Reason::AtCeiling));
    assert_eq!(rig.requested_mib(), (128, 30));
    rig.pin(ZoneId(0));
    assert_eq!(rig.tick(0).reason, Reason::Pinned);
    assert_eq!(rig.controller.status().pinned, [ZoneId(0), ZoneId(1)]);
    rig.controller.resume(Some(ZoneId(1)));
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (128, 472));
}

#[test]
fn rule_7_shrink_that_only_pinned_zones_prevent_holds_with_reason_pinned() {
    let result = |pinned: &[usize]| {
        let mut rig = Rig::fixed(400);
        rig.tick(0);
        rig.follow();
        for zone in pinned {
            rig.pin(rig.host.zones[*zone].id);
        }
        rig.want(0);
        for _ in 0..10 {
            rig.tick(6_000);
            rig.follow();
        }
        (rig.tick(6_000).reason, rig.requested_mib())
    };
    assert_eq!(result(&[]), (Reason::Enough, (0, 0)));
    assert_eq!(result(&[PM]), (Reason::Pinned, (0, 272)), "DRAM is at its floor, and PM is not");
    assert_eq!(result(&[DRAM]), (Reason::Pinned, (128, 0)));
    assert_eq!(result(&[DRAM, PM]), (Reason::Pinned, (128, 272)));
}

#[test]
fn rule_7_pending_request_of_a_client_does_not_delay_shrinks() {
    for client_mib in [100, 0] {
        let mut rig = Rig::fixed(400);
        rig.tick(0);
        rig.follow();
        rig.pin(ZoneId(0));
        rig.host.zones[DRAM].requested_bytes = client_mib * MIB;
        rig.want(client_mib);
        assert_eq!(rig.tick(6_000).direction, Direction::Shrink);
        assert_eq!(rig.requested_mib(), (client_mib, 144));
        assert_eq!(rig.tick(1_000).reason, Reason::InProgress, "it waits for its own step");
        rig.host.zones[PM].plugged_bytes = 144 * MIB;
        assert_eq!(rig.tick(1_000).direction, Direction::Shrink);
    }
}

#[test]
fn rule_7_client_request_without_progress_does_not_delay_grow() {
    let mut rig = Rig::new(Policy::default());
    rig.pin(ZoneId(0));
    rig.host.zones[DRAM].requested_bytes = 128 * MIB;
    assert_eq!(rig.report(1000, 10).direction, Direction::Hold, "the pending memory is enough");
    for _ in 0..4 {
        rig.report(1000, 10);
    }
    let plan = rig.report(1000, 10);
    assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::LowAvailable));
    assert_eq!(rig.requested_mib().0, 128, "the manual request stays");
    assert!(
        (16..128).contains(&rig.requested_mib().1),
        "only the guest's shortage: {:?}",
        rig.requested_mib()
    );
}

/// A client requests memory from zone `client_zone`, the memory does not arrive, and the guest is
/// short of memory. Checks that the other zones do not change for 5 s, with `reason`, and then
/// grow.
fn stuck_client_request(mut rig: Rig, client_zone: usize, reason: Reason) {
    rig.pin(rig.host.zones[client_zone].id);
    rig.host.zones[client_zone].requested_bytes = 128 * MIB;
    rig.want(256);
    for ms in [0, 1_000, 2_000, 1_999] {
        let plan = rig.tick(ms);
        assert_eq!((plan.direction, plan.reason), (Direction::Hold, reason));
    }
    let plan = rig.tick(1);
    assert_eq!(
        (plan.direction, plan.requested_bytes()),
        (Direction::Grow, 256 * MIB),
        "{:?}",
        plan.reason
    );
    assert_eq!(plan.targets[client_zone].requested_bytes, 128 * MIB, "the manual request stays");
}

#[test]
fn rule_7_stuck_client_request_reserves_no_descriptors() {
    let mut rig = Rig::new(Policy::Off);
    rig.describe(1);
    rig.report(0, 280);
    stuck_client_request(rig, DRAM, Reason::Descriptors);
}

#[test]
fn rule_7_stuck_client_request_reserves_no_pool_memory() {
    let mut rig = Rig::new(Policy::Off);
    rig.host.zones[DRAM].tier = Tier::Pm;
    rig.host.pool_free_bytes = 128 * MIB;
    stuck_client_request(rig, DRAM, Reason::PoolEmpty);
}
