//! The rules above every policy, one by one.

use foreshore_proto::{Blocks, Memory, PROTOCOL_VERSION, RawReport, Zone};

use super::*;
use crate::policy::{fixed, psi};
use crate::{MIB, Tier, ZoneSizes};

const DRAM: usize = 0;
const PM: usize = 1;

/// A VM of 384 MiB with 128 MiB of DRAM and 1 GiB of PM to come, and its loop.
struct Rig {
    controller: Controller,
    host: HostView,
    raw: RawReport,
    now: TimeMs,
}

impl Rig {
    fn new(policy: Policy) -> Self {
        let zone = |id, tier, max_mib| ZoneSizes::empty(id, tier, max_mib * MIB);
        Rig {
            controller: Controller::new(policy, Rules::default()).expect("defaults"),
            host: HostView {
                zones: vec![zone(0, Tier::Dram, 128), zone(1, Tier::Pm, 1024)],
                boot_bytes: 384 * MIB,
                pool_free_bytes: 4096 * MIB,
                ..HostView::default()
            },
            raw: RawReport {
                version: PROTOCOL_VERSION,
                monotonic_ms: 10_000,
                memory: Memory { total_bytes: 352 * MIB, available_bytes: 280 * MIB, ..Memory::default() },
                zones: vec![Zone {
                    kind: ZoneKind::Dma32,
                    free_pages: 70_000,
                    high_pages: 750,
                    managed_pages: 90_000,
                    ..Zone::default()
                }],
                blocks: Blocks { online_policy: OnlinePolicy::OnlineMovable, ..Blocks::default() },
                ..RawReport::default()
            },
            now: TimeMs(10_000),
        }
    }

    fn fixed(mib: u64) -> Self {
        Self::new(Policy::Fixed(fixed::Params { size_bytes: mib * MIB }))
    }

    fn want(&mut self, mib: u64) {
        let policy = Policy::Fixed(fixed::Params { size_bytes: mib * MIB });
        self.controller.set_policy(policy).expect("in range");
    }

    /// Time passes, and the controller is called without a report. The plan is carried out.
    fn tick(&mut self, ms: u64) -> Plan {
        self.now = self.now + ms;
        let plan = self.controller.step(Event::Tick, &self.host, self.now);
        self.carry_out(&plan);
        plan
    }

    /// Time passes, and the guest reports. The plan is carried out.
    fn report(&mut self, ms: u64, available_mib: u64) -> Plan {
        self.now = self.now + ms;
        self.raw.seq += 1;
        self.raw.monotonic_ms = self.now.0;
        self.raw.memory.available_bytes = available_mib * MIB;
        let report = Report::try_from(self.raw.clone()).expect("sound");
        let plan = self.controller.step(Event::Report(&report), &self.host, self.now);
        self.carry_out(&plan);
        plan
    }

    fn carry_out(&mut self, plan: &Plan) {
        if !plan.dry_run {
            for (zone, target) in self.host.zones.iter_mut().zip(&plan.targets) {
                assert_eq!(zone.id, target.zone);
                if zone.requested_bytes != target.requested_bytes {
                    zone.requested_bytes = target.requested_bytes;
                    self.host.short.retain(|id| *id != zone.id);
                }
            }
        }
    }

    /// The host has no more than this for a zone, and the device lowers what is requested.
    fn host_has(&mut self, zone: usize, mib: u64) {
        let zone = &mut self.host.zones[zone];
        assert!(zone.requested_bytes > mib * MIB);
        zone.requested_bytes = mib * MIB;
        self.host.short.push(zone.id);
    }

    /// The guest's driver does what it was asked.
    fn follow(&mut self) {
        for zone in &mut self.host.zones {
            zone.plugged_bytes = zone.requested_bytes;
        }
    }

    fn requested_mib(&self) -> (u64, u64) {
        (self.host.zones[DRAM].requested_bytes / MIB, self.host.zones[PM].requested_bytes / MIB)
    }
}

#[test]
fn rule_1_a_grow_goes_to_its_full_target_at_once_dram_first() {
    let mut rig = Rig::fixed(600);
    let plan = rig.tick(0);
    assert_eq!((plan.direction, plan.reason, plan.limited_by), (Direction::Grow, Reason::FixedSize, None));
    assert_eq!(rig.requested_mib(), (128, 472));
    let mut rig = Rig::fixed(100);
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (100, 0));
}

#[test]
fn rule_1_sizes_are_rounded_up_to_blocks() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 43);
    assert!(rig.host.zones.iter().all(|zone| zone.requested_bytes % zone.block_bytes == 0));
    assert!(rig.host.requested_bytes() > 0);
}

#[test]
fn rule_2_a_shrink_waits_goes_in_steps_and_takes_pm_first() {
    let mut rig = Rig::fixed(400);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    assert_eq!(rig.tick(4_900).reason, Reason::CoolDown);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let plan = rig.tick(1_000);
        assert_eq!(plan.direction, Direction::Shrink);
        rig.follow();
        seen.push(rig.requested_mib());
        let left = rig.host.requested_bytes() > 0;
        let reason = if left { Reason::CoolDown } else { Reason::Enough };
        assert_eq!(rig.tick(500).reason, reason, "half a second after a step");
    }
    assert_eq!(seen, [(128, 144), (128, 16), (128, 0), (0, 0)], "never both tiers in one step");
}

#[test]
fn rule_2_the_next_step_waits_for_the_last_one() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig.tick(6_000);
    let plan = rig.tick(2_000);
    assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::InProgress));
}

#[test]
fn rule_2_a_large_guest_shrinks_in_larger_steps() {
    let mut rig = Rig::fixed(64 << 10);
    rig.host.zones[PM].max_bytes = 128 << 30;
    rig.host.pool_free_bytes = 128 << 30;
    rig.host.boot_bytes = 64 << 30;
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig.tick(6_000);
    assert_eq!(rig.requested_mib().1, (56 << 10) - 128);
}

#[test]
fn rule_2_a_shrink_that_had_to_be_undone_doubles_the_cool_down() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(256);
    rig.tick(6_000);
    rig.follow();
    rig.want(512);
    rig.tick(1_000);
    rig.follow();
    assert_eq!(rig.controller.status().cool_down_ms, 10_000);
    rig.want(256);
    assert_eq!(rig.tick(9_000).reason, Reason::CoolDown);
    assert_eq!(rig.tick(1_500).direction, Direction::Shrink);
    rig.follow();
    rig.want(512);
    rig.tick(61_000);
    assert_eq!(rig.controller.status().cool_down_ms, 5_000, "forgotten after a minute");
}

/// Seconds at which a balloon is inflated whose guest takes it all back a second later, as its device does on OOM.
fn fought_at(rig: &mut Rig) -> Vec<u64> {
    let mut at = Vec::new();
    for second in 1..=200 {
        let plan = rig.tick(1_000);
        if plan.direction == Direction::Shrink {
            at.push(second);
            rig.follow();
        } else {
            let zone = &mut rig.host.zones[DRAM];
            (zone.requested_bytes, zone.plugged_bytes) = (zone.max_bytes, zone.max_bytes);
        }
    }
    at
}

#[test]
fn rule_2_memory_that_a_guest_takes_out_of_its_balloon_is_fought_for_ever_more_rarely() {
    let ceiling = Rules { ceiling_bytes: 64 * MIB, ..Rules::default() };
    for (size_mib, rules) in [(64, Rules::default()), (128, ceiling)] {
        let mut rig = Rig::fixed(size_mib);
        rig.host.balloon = Some(ZoneId(0));
        rig.host.zones[DRAM].requested_bytes = 128 * MIB;
        rig.follow();
        rig.controller.set_rules(rules).expect("in bounds");
        // A second until it is taken back, one more until that is seen, and the cool-down: 10, 20, 40 and 60 s.
        assert_eq!(fought_at(&mut rig), [1, 13, 35, 77, 139], "fixed at {size_mib} MiB");
        assert_eq!(rig.controller.status().cool_down_ms, 60_000);
    }
}

#[test]
fn rule_2_what_a_hand_adds_is_no_grow_of_the_guests() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    rig.follow();
    rig.tick(60_000);
    rig.controller.pin(ZoneId(0), &rig.host, rig.now);
    rig.host.zones[DRAM].requested_bytes = 128 * MIB;
    rig.follow();
    rig.controller.resume(None);
    assert_eq!(rig.tick(100).direction, Direction::Shrink);
}

#[test]
fn rule_3_floors_and_ceilings_hold() {
    let mut rig = Rig::fixed(4096);
    assert_eq!(rig.tick(0).limited_by, Some(Reason::AtCeiling));
    assert_eq!(rig.requested_mib(), (128, 1024));
    rig.follow();
    assert_eq!(rig.tick(1_000).reason, Reason::AtCeiling);

    rig.host.zones[PM].floor_bytes = 1000 * MIB;
    rig.host.zones[DRAM].floor_bytes = 128 * MIB;
    rig.want(0);
    assert_eq!(rig.tick(6_000).limited_by, Some(Reason::AtFloor));
    assert_eq!(rig.requested_mib(), (128, 1000));
    rig.follow();
    assert_eq!(rig.tick(6_000).reason, Reason::AtFloor);
}

/// Memory in two nodes of PM beside DRAM that is full, the last shrink from node 1.
fn shrunk_from_node_1() -> Rig {
    let mut rig = Rig::new(Policy::default());
    rig.host.zones[DRAM].requested_bytes = 128 * MIB;
    rig.host.zones[PM].requested_bytes = 256 * MIB;
    let other = ZoneSizes { id: ZoneId(2), guest_numa_node: 2, ..rig.host.zones[PM] };
    rig.host.zones.push(other);
    rig.follow();
    rig.report(1_000, 280);
    rig.controller.last.as_mut().expect("reported").decision.from = Some(1);
    rig
}

#[test]
fn rule_3_where_memory_was_to_go_from_is_nothing_to_a_floors_grow() {
    for ceiling_mib in [None, Some(576)] {
        let mut rig = shrunk_from_node_1();
        let bounds = match ceiling_mib {
            None => Rules { floor_bytes: 704 * MIB, ..Rules::default() },
            Some(mib) => Rules { ceiling_bytes: mib * MIB, ..Rules::default() },
        };
        rig.controller.set_rules(bounds).expect("in bounds");
        let plan = rig.tick(100);
        let pm = [PM, PM + 1].map(|zone| rig.host.zones[zone].requested_bytes / MIB);
        match ceiling_mib {
            // In the host's order, as for any grow of the VM as a whole.
            None => assert_eq!((plan.reason, pm), (Reason::BelowFloor, [320, 256])),
            Some(_) => assert_eq!((plan.reason, pm), (Reason::AboveCeiling, [192, 256])),
        }
    }
}

#[test]
fn rule_3_an_empty_pool_limits_pm_and_is_said() {
    let mut rig = Rig::fixed(1152);
    rig.host.pool_free_bytes = 101 * MIB;
    assert_eq!(rig.tick(0).limited_by, Some(Reason::PoolEmpty));
    assert_eq!(rig.requested_mib(), (128, 100));
    // What is requested and not plugged will still be taken from the pool.
    assert_eq!(rig.tick(1_000).reason, Reason::PoolEmpty);
    assert_eq!(rig.requested_mib(), (128, 100));
}

#[test]
fn rule_3_memory_that_would_not_come_back_is_lent_sparingly() {
    let mut rig = Rig::new(Policy::default());
    rig.raw.blocks.online_policy = OnlinePolicy::Online;
    rig.raw.memory.total_bytes = 352 * MIB;
    let plan = rig.report(1000, 0);
    assert_eq!(rig.requested_mib(), (32, 28));
    assert_eq!(plan.reason, Reason::LowAvailable);
    rig.follow();
    rig.raw.memory.total_bytes += 60 * MIB;
    rig.raw.memory.available_bytes = 0;
    for _ in 0..9 {
        rig.report(1000, 0);
        rig.follow();
    }
    assert_eq!(rig.requested_mib(), (32, 256), "a quarter of each");
    assert_eq!(rig.report(1000, 0).reason, Reason::OnlinePolicy);
}

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

#[test]
fn rule_5_a_guest_without_a_driver_is_asked_for_less_and_less_and_then_left_alone() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    let mut seen = Vec::new();
    for _ in 0..60 {
        let plan = rig.tick(1_000);
        if plan.reason == Reason::NoProgress {
            seen.push(rig.requested_mib());
        }
    }
    // DRAM is tried with less; what it does not take is asked of PM, with which it is the same.
    assert!(seen.len() > 10, "{seen:?}");
    assert!(seen.iter().any(|(dram, _)| *dram == 32) && seen.iter().any(|(dram, _)| *dram == 0), "{seen:?}");
    assert!(seen.iter().any(|(_, pm)| *pm > 0), "{seen:?}");
    assert!(rig.host.requested_bytes() <= 64 * MIB + 4 * MIB);
}

#[test]
fn rule_5_a_driver_that_comes_late_is_asked_at_once() {
    let mut rig = Rig::fixed(64);
    rig.host.zones.truncate(1);
    let mut alone_s = 0;
    // Until it is asked no more than once in a while.
    for _ in 0..300 {
        rig.tick(1_000);
        alone_s = if rig.host.requested_bytes() == 0 { alone_s + 1 } else { 0 };
        if alone_s == 12 {
            break;
        }
    }
    assert_eq!(alone_s, 12, "it is never left alone");
    rig.tick(10);
    assert_eq!(rig.host.requested_bytes(), 0, "and is still");
    let now = rig.now;
    rig.controller.driver_came(ZoneId(0), now);
    assert_eq!(rig.tick(10).direction, Direction::Grow);
    assert_eq!(rig.host.requested_bytes(), 64 * MIB);
    // It has as long to follow as any.
    assert_ne!(rig.tick(4_900).reason, Reason::NoProgress);
    assert_eq!(rig.tick(100).reason, Reason::NoProgress);
}

#[test]
fn rule_5_progress_makes_whole_again() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib().0, 32);
    rig.host.zones[DRAM].plugged_bytes = 32 * MIB;
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (64, 0));
}

/// A loop whose zones together have a floor of 64 MiB, asked for it and not followed.
fn floor_that_nobody_follows(zones: usize, pool_mib: u64) -> Rig {
    let mut rig = Rig::new(Policy::default());
    rig.host.zones.truncate(zones);
    rig.host.pool_free_bytes = pool_mib * MIB;
    let rules = Rules { floor_bytes: 64 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in range");
    assert_eq!(rig.tick(0).reason, Reason::BelowFloor);
    assert_eq!(rig.tick(4_900).reason, Reason::NoReport);
    rig
}

#[test]
fn rule_5_what_the_floor_asks_for_stays_where_nobody_else_has_any() {
    let mut rig = floor_that_nobody_follows(1, 0);
    let said = (0..600).filter(|_| rig.tick(100).reason == Reason::NoProgress).count();
    assert_eq!(rig.host.requested_bytes(), 64 * MIB);
    assert_eq!(said, 1, "once for as long as nothing happens");
    // A guest that is short does not wait for it.
    let mut rig = floor_that_nobody_follows(2, 0);
    assert_eq!(rig.tick(100).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (64, 0));
    rig.host.pool_free_bytes = 4096 * MIB;
    let plan = rig.report(1_000, 10);
    assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::LowAvailable));
    assert!(rig.requested_mib().1 > 0);
}

#[test]
fn rule_5_what_the_floor_asks_for_is_asked_of_another_zone() {
    let mut rig = floor_that_nobody_follows(2, 4096);
    let mut seen = Vec::new();
    for _ in 0..40 {
        if rig.tick(1_000).reason == Reason::NoProgress {
            seen.push(rig.requested_mib());
        }
        rig.host.zones[PM].plugged_bytes = rig.host.zones[PM].requested_bytes;
    }
    assert_eq!(seen, [(32, 32), (16, 48), (8, 56), (4, 60), (2, 62), (0, 64)]);
}

#[test]
fn rule_5_slow_progress_is_progress() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    for step in 1..=32 {
        rig.host.zones[DRAM].plugged_bytes = step * 2 * MIB;
        assert_ne!(rig.tick(4_900).reason, Reason::NoProgress);
    }
}

#[test]
fn rule_5_a_shrink_that_the_guest_refuses_is_withdrawn_and_dram_is_not_taken_instead() {
    let mut rig = Rig::fixed(400);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig.tick(6_000);
    assert_eq!(rig.requested_mib(), (128, 144));
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (128, 272), "withdrawn");
    assert_eq!(rig.tick(2_000).reason, Reason::NoProgress, "left alone for a while");
    let plan = rig.tick(3_500);
    assert_eq!(plan.direction, Direction::Shrink);
    assert_eq!(rig.requested_mib(), (128, 208), "half as much");
}

#[test]
fn rule_5_a_shrink_that_one_pm_zone_refuses_is_asked_of_the_other() {
    let mut rig = Rig::fixed(128 + 1024 + 64);
    rig.host.zones.push(ZoneSizes { id: ZoneId(2), max_bytes: 64 * MIB, ..rig.host.zones[PM] });
    for _ in 0..4 {
        rig.tick(1_000);
        rig.follow();
    }
    assert_eq!(rig.host.zones[2].plugged_bytes, 64 * MIB);
    // The zone that goes first does not let go of anything.
    rig.want(1024);
    let first = rig.tick(10_000);
    assert_eq!(first.targets[2].requested_bytes, 0);
    let refused = 64 * MIB;
    rig.host.zones[PM].plugged_bytes = rig.host.zones[PM].requested_bytes;
    let plugged = rig.host.zones[PM].plugged_bytes;
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.host.zones[2].requested_bytes, refused, "withdrawn");
    let second = rig.tick(1_000);
    assert_eq!(second.direction, Direction::Shrink);
    assert_eq!(second.targets[2].requested_bytes, refused, "left alone");
    assert!(second.targets[PM].requested_bytes < plugged, "the other is asked");
    assert_eq!(second.targets[DRAM].requested_bytes, 128 * MIB);
}

/// A balloon's guest inflates and deflates by pages, and stops anywhere.
#[test]
fn rule_5_what_is_withdrawn_is_whole_blocks_whatever_the_guest_has() {
    let mut rig = Rig::fixed(128);
    rig.host.balloon = Some(ZoneId(0));
    rig.tick(0);
    rig.follow();
    rig.want(64);
    assert_eq!(rig.tick(6_000).direction, Direction::Shrink);
    rig.host.zones[DRAM].plugged_bytes = 101 * MIB + 4096;
    rig.tick(1_000);
    assert_eq!(rig.tick(5_000).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib(), (102, 0), "what it has stays, and the rest of the block");
    // What is missing of the block is no request that has to be withdrawn.
    rig.want(102);
    assert_eq!(rig.tick(60_000).reason, Reason::Enough);

    rig.want(128);
    assert_eq!(rig.tick(1_000).direction, Direction::Grow);
    let mut seen = Vec::new();
    for _ in 0..5 {
        let plan = rig.tick(5_000);
        assert!(plan.targets.iter().all(|target| target.requested_bytes % (2 * MIB) == 0), "{plan:?}");
        seen.push((plan.reason, rig.requested_mib().0));
    }
    let less = Reason::NoProgress;
    assert_eq!(seen[..2], [(less, 112), (less, 104)], "down for a grow: {seen:?}");
}

#[test]
fn rule_5_what_the_host_cannot_provide_is_asked_of_another_zone_at_once() {
    let mut rig = Rig::fixed(100);
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (100, 0));
    rig.host_has(DRAM, 24);
    let plan = rig.tick(10);
    assert_eq!((plan.direction, plan.reason, plan.limited_by), (Direction::Grow, Reason::HostShort, None));
    assert_eq!(rig.requested_mib(), (24, 76));
    // What it got comes, and says nothing about what it did not get.
    rig.follow();
    rig.want(110);
    assert_eq!(rig.tick(4_990).reason, Reason::FixedSize);
    assert_eq!(rig.requested_mib(), (24, 86));
    rig.follow();
    rig.want(120);
    rig.tick(10);
    assert_eq!(rig.requested_mib(), (34, 86), "asked again");
    // It comes: the host has memory again.
    rig.follow();
    rig.want(128);
    rig.tick(10);
    assert_eq!(rig.requested_mib(), (42, 86));
}

#[test]
fn rule_5_a_host_that_has_nothing_is_asked_ever_more_rarely() {
    let mut rig = Rig::fixed(64);
    rig.host.zones.truncate(1);
    let mut asked_s = Vec::new();
    for second in 0..200 {
        let plan = rig.tick(1_000);
        match rig.host.requested_bytes() {
            0 => assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::HostShort), "{second}"),
            _ => {
                asked_s.push(second);
                rig.host_has(DRAM, 0);
            }
        }
    }
    assert_eq!(asked_s, [0, 6, 17, 38, 79, 140]);
}

/// A report may come before the devices' news: it has its say as well.
#[test]
fn rule_5_what_is_wanted_meanwhile_is_asked_with_what_the_host_could_not_provide() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 20);
    let (asked, _) = rig.requested_mib();
    assert!((1..128).contains(&asked), "{asked}");
    rig.host_has(DRAM, 0);
    let plan = rig.report(50, 10);
    assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::HostShort));
    assert!(rig.requested_mib().1 >= asked, "{:?}", rig.requested_mib());
}

#[test]
fn rule_5_what_the_host_could_not_provide_to_a_hand_is_the_hands_affair() {
    let mut rig = Rig::fixed(24);
    rig.tick(0);
    rig.follow();
    let (host, now) = (rig.host.clone(), rig.now);
    rig.controller.pin(ZoneId(0), &host, now);
    rig.host.zones[DRAM].requested_bytes = 100 * MIB;
    rig.tick(10);
    rig.host_has(DRAM, 24);
    assert_eq!(rig.tick(10).reason, Reason::Enough);
    assert_eq!(rig.requested_mib(), (24, 0));
}

#[test]
fn rule_6_lost_reports_of_a_guest_that_was_well_hold() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 280);
    assert_eq!(rig.tick(2_000).reason, Reason::Quiet);
    for _ in 0..20 {
        let plan = rig.tick(1_000);
        assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::ReportsLost));
    }
}

#[test]
fn rule_6_lost_reports_of_a_guest_that_was_short_grow_a_few_times_and_then_hold() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 30);
    rig.follow();
    let mut grown = Vec::new();
    for _ in 0..60 {
        let before = rig.host.requested_bytes();
        let plan = rig.tick(1_000);
        rig.follow();
        assert!(matches!(plan.reason, Reason::Quiet | Reason::ReportsLost));
        if plan.direction == Direction::Grow {
            grown.push((rig.host.requested_bytes() - before) / MIB);
        }
    }
    assert_eq!(grown, [64, 128, 256, 512]);
    assert_eq!(rig.report(100, 280).direction, Direction::Hold, "a report ends it");
}

#[test]
fn rule_6_a_guest_that_never_reported_is_left_alone() {
    let mut rig = Rig::new(Policy::default());
    for _ in 0..20 {
        assert_eq!(rig.tick(1_000).reason, Reason::NoReport);
    }
}

#[test]
fn rule_7_a_zone_sized_by_hand_is_left_alone_until_resumed() {
    let mut rig = Rig::fixed(600);
    rig.host.zones[PM].requested_bytes = 30 * MIB;
    rig.controller.pin(ZoneId(1), &rig.host, rig.now);
    assert_eq!(rig.tick(0).limited_by, Some(Reason::AtCeiling));
    assert_eq!(rig.requested_mib(), (128, 30));
    rig.controller.pin(ZoneId(0), &rig.host, rig.now);
    assert_eq!(rig.tick(0).reason, Reason::Pinned);
    assert_eq!(rig.controller.status().pinned, [ZoneId(0), ZoneId(1)]);
    rig.controller.resume(Some(ZoneId(1)));
    rig.tick(0);
    assert_eq!(rig.requested_mib(), (128, 472));
}

#[test]
fn rule_7_a_hand_that_the_guest_does_not_follow_stops_no_shrink() {
    for by_hand_mib in [100, 0] {
        let mut rig = Rig::fixed(400);
        rig.tick(0);
        rig.follow();
        rig.controller.pin(ZoneId(0), &rig.host, rig.now);
        rig.host.zones[DRAM].requested_bytes = by_hand_mib * MIB;
        rig.want(by_hand_mib);
        assert_eq!(rig.tick(6_000).direction, Direction::Shrink);
        assert_eq!(rig.requested_mib(), (by_hand_mib, 144));
        assert_eq!(rig.tick(1_000).reason, Reason::InProgress, "its own step is waited for");
        rig.host.zones[PM].plugged_bytes = 144 * MIB;
        assert_eq!(rig.tick(1_000).direction, Direction::Shrink);
    }
}

#[test]
fn rule_7_memory_that_does_not_come_to_a_zone_sized_by_hand_is_not_waited_for() {
    let mut rig = Rig::new(Policy::default());
    rig.controller.pin(ZoneId(0), &rig.host, rig.now);
    rig.host.zones[DRAM].requested_bytes = 128 * MIB;
    assert_eq!(rig.report(1000, 10).direction, Direction::Hold, "what is on its way is enough");
    for _ in 0..4 {
        rig.report(1000, 10);
    }
    let plan = rig.report(1000, 10);
    assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::LowAvailable));
    assert_eq!(rig.requested_mib().0, 128, "the hand's request stays");
    assert!(
        (16..128).contains(&rig.requested_mib().1),
        "what the guest lacks, no more: {:?}",
        rig.requested_mib()
    );
}

/// A guest that is short, in which a hand asks for a zone that does not come: until when it keeps `reason` from another.
fn hand_that_keeps_others_waiting(mut rig: Rig, by_hand: usize, reason: Reason) {
    rig.controller.pin(rig.host.zones[by_hand].id, &rig.host, rig.now);
    rig.host.zones[by_hand].requested_bytes = 128 * MIB;
    rig.want(256);
    for ms in [0, 1_000, 2_000, 1_999] {
        let plan = rig.tick(ms);
        assert_eq!((plan.direction, plan.reason), (Direction::Hold, reason));
    }
    let plan = rig.tick(1);
    assert_eq!((plan.direction, plan.requested_bytes()), (Direction::Grow, 256 * MIB), "{:?}", plan.reason);
    assert_eq!(plan.targets[by_hand].requested_bytes, 128 * MIB, "the hand's request stays");
}

#[test]
fn rule_7_a_hand_that_the_guest_does_not_follow_keeps_no_descriptors_from_others() {
    let mut rig = Rig::new(Policy::Off);
    // Room for the descriptors of one section.
    rig.raw.zones[0].free_pages = 0;
    rig.report(0, 280);
    hand_that_keeps_others_waiting(rig, DRAM, Reason::Descriptors);
}

#[test]
fn rule_7_a_hand_that_the_guest_does_not_follow_keeps_no_space_in_the_pool_from_others() {
    let mut rig = Rig::new(Policy::Off);
    rig.host.zones[DRAM].tier = Tier::Pm;
    rig.host.pool_free_bytes = 128 * MIB;
    hand_that_keeps_others_waiting(rig, DRAM, Reason::PoolEmpty);
}

#[test]
fn rule_8_a_dry_run_decides_and_starts_no_cool_down() {
    let mut rig = Rig::fixed(600);
    rig.controller.set_dry_run(true);
    for _ in 0..3 {
        let plan = rig.tick(100);
        assert!(plan.dry_run);
        assert_eq!((plan.direction, plan.requested_bytes()), (Direction::Grow, 600 * MIB));
    }
    assert_eq!(rig.requested_mib(), (0, 0));
    rig.controller.set_dry_run(false);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 472));
}

#[test]
fn rule_8_a_dry_run_leaves_no_trace_of_what_it_did_not_do() {
    let mut rig = Rig::fixed(64);
    rig.tick(0);
    rig.controller.set_dry_run(true);
    for _ in 0..60 {
        rig.tick(1_000);
    }
    assert_eq!(rig.tick(0).reason, Reason::NoProgress, "what it would do");
    rig.controller.set_dry_run(false);
    assert_eq!(rig.tick(0).reason, Reason::NoProgress);
    assert_eq!(rig.requested_mib().0, 32, "as if it were the first time");

    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 30);
    rig.follow();
    rig.controller.set_dry_run(true);
    for _ in 0..60 {
        rig.tick(1_000);
    }
    rig.controller.set_dry_run(false);
    let before = rig.host.requested_bytes();
    assert_eq!(rig.tick(0).direction, Direction::Grow);
    assert_eq!(rig.host.requested_bytes() - before, 64 * MIB, "the first of the steps");
}

#[test]
fn other_rules_do_not_make_the_loop_forget() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(256);
    rig.tick(6_000);
    rig.follow();
    rig.want(512);
    rig.tick(1_000);
    let mut cool_down_with = |rules| {
        rig.controller.set_rules(rules).expect("in bounds");
        rig.controller.status().cool_down_ms
    };
    assert_eq!(cool_down_with(Rules { shrink_interval_ms: 2_000, ..Rules::default() }), 10_000);
    assert_eq!(cool_down_with(Rules { max_cool_down_ms: 8_000, ..Rules::default() }), 8_000);
    assert_eq!(cool_down_with(Rules { cool_down_ms: 20_000, ..Rules::default() }), 20_000);
    assert_eq!(
        cool_down_with(Rules { cool_down_ms: 1_000, ..Rules::default() }),
        1_000,
        "nothing is learned"
    );
}

#[test]
fn a_paused_loop_holds_and_goes_on() {
    let mut rig = Rig::fixed(600);
    rig.controller.pause();
    assert_eq!(rig.tick(0).reason, Reason::Paused);
    rig.controller.resume(None);
    assert_eq!(rig.tick(0).direction, Direction::Grow);
}

#[test]
fn off_changes_nothing_whatever_is_reported() {
    let mut rig = Rig::new(Policy::Off);
    let plan = rig.report(1000, 0);
    assert_eq!((plan.direction, plan.reason), (Direction::Hold, Reason::Off));
    assert_eq!(plan.changes(&rig.host).count(), 0);
}

#[test]
fn pressure_takes_back_a_shrink_that_the_guest_has_not_followed() {
    let mut rig = Rig::fixed(512);
    rig.tick(0);
    rig.follow();
    rig.want(0);
    rig.tick(6_000);
    assert_eq!(rig.requested_mib(), (128, 256));
    // What is still plugged is there at once, before more DRAM could be.
    rig.host.zones[DRAM].max_bytes = 256 * MIB;
    rig.want(500);
    rig.tick(100);
    assert_eq!(rig.requested_mib(), (128, 372));
}

#[test]
fn parameters_out_of_range_leave_the_old_ones() {
    let mut rig = Rig::new(Policy::default());
    let wrong = Rules { cool_down_ms: 0, ..Rules::default() };
    let error = rig.controller.set_rules(wrong).expect_err("too short");
    assert_eq!(error.to_string(), "cool_down is 0ms, must be 100ms to 24h");
    assert_eq!(rig.controller.rules(), &Rules::default());
    let wrong = Policy::Psi(psi::Params { headroom_permille: 0, ..psi::Params::default() });
    assert!(rig.controller.set_policy(wrong).is_err());
    assert_eq!(rig.controller.policy(), &Policy::default());
}

#[test]
fn rule_3_all_zones_together_have_a_floor_and_a_ceiling() {
    let mut rig = Rig::new(Policy::default());
    let rules = Rules { floor_bytes: 200 * MIB, ceiling_bytes: 300 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in bounds");
    // The floor needs neither report nor pressure.
    let plan = rig.tick(0);
    assert_eq!((plan.direction, plan.reason), (Direction::Grow, Reason::BelowFloor));
    assert_eq!(rig.requested_mib(), (128, 72));
    rig.follow();
    rig.want(1000);
    let plan = rig.tick(1_000);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Grow, Some(Reason::AtCeiling)));
    assert_eq!(rig.requested_mib(), (128, 172));
    rig.follow();
    assert_eq!(rig.tick(1_000).reason, Reason::AtCeiling);
    rig.want(0);
    let plan = rig.tick(6_000);
    assert_eq!((plan.direction, plan.limited_by), (Direction::Shrink, Some(Reason::AtFloor)));
    assert_eq!(rig.requested_mib(), (128, 72));
    rig.follow();
    assert_eq!(rig.tick(6_000).reason, Reason::AtFloor);
}

#[test]
fn rule_3_a_ceiling_that_is_lowered_is_come_down_to_in_steps() {
    let mut rig = Rig::fixed(800);
    rig.tick(0);
    rig.follow();
    let rules = Rules { ceiling_bytes: 500 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in bounds");
    assert_eq!(rig.tick(1_000).reason, Reason::CoolDown);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let plan = rig.tick(6_000);
        seen.push((plan.reason, rig.host.requested_bytes() / MIB));
        rig.follow();
    }
    let above = Reason::AboveCeiling;
    assert_eq!(seen, [(above, 672), (above, 544), (above, 500), (Reason::AtCeiling, 500)]);
}

#[test]
fn rule_3_lost_reports_do_not_lead_above_the_ceiling() {
    let mut rig = Rig::new(Policy::default());
    let rules = Rules { ceiling_bytes: 100 * MIB, ..Rules::default() };
    rig.controller.set_rules(rules).expect("in bounds");
    rig.report(1000, 0);
    for _ in 0..60 {
        rig.follow();
        rig.tick(1_000);
    }
    assert_eq!(rig.requested_mib(), (100, 0));
}

#[test]
fn other_parameters_do_not_make_a_policy_forget() {
    let mut rig = Rig::new(Policy::default());
    rig.report(1000, 280);
    rig.report(1000, 280);
    let state = rig.controller.state.clone();
    assert_ne!(state, rig.controller.policy.initial_state());
    let other = rig.controller.policy().with([("idle", &"9s".into())]).expect("in bounds");
    rig.controller.set_policy(other).expect("in bounds");
    assert_eq!(rig.controller.state, state);
    rig.want(0);
    assert_ne!(rig.controller.state, state, "another policy begins anew");
}
