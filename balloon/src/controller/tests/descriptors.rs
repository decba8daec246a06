//! Rule 4: as much as the guest's DRAM carries page descriptors for.

use super::*;

#[test]
fn rule_4_a_grow_is_cut_to_what_free_dram_carries() {
    let mut rig = Rig::new(Policy::default());
    // 8 MiB over the high watermark, half of which is two sections' descriptors.
    rig.raw.zones[0].free_pages = 750 + 2048;
    rig.raw.memory.total_bytes = 800 * MIB;
    let plan = rig.report(1000, 1);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Grow, None));
    let mut rig = Rig::new(Policy::default());
    // The same, in a guest that wants 300 MiB for kswapd's sake.
    (rig.raw.zones[0].high_pages, rig.raw.zones[0].free_pages) = (76_800, 76_800 + 2048);
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
fn rule_4_one_section_is_always_allowed_and_movable_memory_carries_nothing() {
    let mut rig = Rig::new(Policy::default());
    rig.raw.zones[0].free_pages = 0;
    let movable =
        Zone { kind: ZoneKind::Movable, free_pages: 60_000, managed_pages: 60_000, ..Zone::default() };
    rig.raw.zones.push(movable);
    rig.raw.memory.total_bytes = 4000 * MIB;
    rig.report(1000, 1);
    assert_eq!(rig.requested_mib(), (128, 0));
}
