//! Memory that a shrink could take.

use super::*;
use crate::policy::off;

/// Rig with two PM zones, `plugged_mib` of each zone plugged, and a floor.
fn rig(floor_mib: u64, plugged_mib: [u64; 3]) -> Rig {
    let mut rig = Rig::new(Policy::default());
    rig.host.zones.push(ZoneSizes::empty(2, Tier::Pm, 1024 * MIB));
    for (zone, mib) in rig.host.zones.iter_mut().zip(plugged_mib) {
        (zone.requested_bytes, zone.plugged_bytes) = (mib * MIB, mib * MIB);
    }
    let rules = Rules { floor_bytes: floor_mib * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in range");
    rig
}

fn recallable_mib(rig: &Rig) -> Vec<u64> {
    rig.controller.recallable_bytes(&rig.host).into_iter().map(|bytes| bytes / MIB).collect()
}

#[test]
fn plugged_pm_above_the_floor_of_all_zones_is_recallable() {
    assert_eq!(recallable_mib(&rig(0, [128, 0, 0])), [0, 0, 0], "DRAM is not lent");
    assert_eq!(recallable_mib(&rig(0, [128, 200, 100])), [0, 200, 100]);
    assert_eq!(recallable_mib(&rig(100, [128, 200, 100])), [0, 200, 100], "DRAM is the floor");
    assert_eq!(recallable_mib(&rig(200, [128, 200, 100])), [0, 128, 100]);
    assert_eq!(recallable_mib(&rig(350, [128, 200, 100])), [0, 0, 78], "the last zone first");
    assert_eq!(recallable_mib(&rig(428, [128, 200, 100])), [0, 0, 0]);
    assert_eq!(recallable_mib(&rig(500, [128, 200, 100])), [0, 0, 0]);
}

#[test]
fn pinned_zones_and_floors_of_zones_are_not_recallable() {
    let mut rig = rig(0, [0, 200, 100]);
    rig.host.zones[PM].floor_bytes = 30 * MIB;
    assert_eq!(recallable_mib(&rig), [0, 170, 100]);
    rig.pin(ZoneId(2));
    assert_eq!(recallable_mib(&rig), [0, 170, 0]);
    rig.controller.resume(Some(ZoneId(2)));
    assert_eq!(recallable_mib(&rig), [0, 170, 100]);
}

#[test]
fn pm_is_recallable_whatever_the_policy() {
    let mut rig = rig(200, [128, 200, 100]);
    rig.controller.set_policy(Policy::Off).expect("has no parameters");
    rig.controller.set_dry_run(true);
    rig.controller.pause();
    assert_eq!(recallable_mib(&rig), [0, 128, 100]);
}

#[test]
fn zones_are_recalled_in_the_order_of_a_shrink() {
    let mut rig = rig(350, [128, 200, 100]);
    for (node, zone) in (1..).zip(&mut rig.host.zones[PM..]) {
        zone.guest_numa_node = node;
    }
    rig.controller.observe(&rig.host, rig.now);
    for (near, from, expected_mib) in [
        (None, None, [0, 0, 78]),
        (Some(1), None, [0, 0, 78]),
        (Some(2), None, [0, 78, 0]),
        (Some(2), Some(2), [0, 0, 78]),
        (None, Some(1), [0, 78, 0]),
    ] {
        let decision = Decision { near, from, ..off::decide() };
        let last = rig.controller.unreported(decision, rig.now);
        rig.controller.last = Some(last);
        assert_eq!(recallable_mib(&rig), expected_mib, "near {near:?}, from {from:?}");
        let (zones, host) = (&rig.controller.zones, &rig.host);
        let mut allocation = rig.controller.allocation(zones, last, from, host, rig.now);
        assert_eq!(allocation.shrink(78 * MIB), (78 * MIB, None));
        let sizes = host.zones.iter().zip(allocation.into_requests());
        let shrunk_mib: Vec<_> =
            sizes.map(|(zone, bytes)| (zone.requested_bytes - bytes) / MIB).collect();
        assert_eq!(shrunk_mib, expected_mib, "near {near:?}, from {from:?}");
    }
}
