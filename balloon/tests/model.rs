//! The controller under anything that can happen to it: random reports, delays, refusals, losses, hands.

use balloon::controller::{Controller, Event, Rules};
use balloon::plan::{Direction, Plan, Reason};
use balloon::policy::{Policy, fixed};
use balloon::proto::{
    Blocks, Counters, Memory, OnlinePolicy, PROTOCOL_VERSION, RawReport, Report, Stall, Zone, ZoneKind,
};
use balloon::{BLOCK_BYTES, HostView, MIB, Tier, TimeMs, ZoneId, ZoneSizes};
use proptest::prelude::*;

/// What happens to a VM.
#[derive(Clone, Debug)]
enum Happening {
    /// The guest reports: available memory in thousandths of the total, stall and swap since the last report.
    Report { available_permille: u64, stall_ms: u64, swapped_pages: u64, free_mib: u64 },
    /// Nothing is heard.
    Tick,
    /// The guest follows a zone's request, by this share.
    Follow { zone: usize, permille: u64 },
    /// The pool's free space changes.
    Pool { mib: u64 },
    /// Somebody resizes a zone.
    Pin { zone: usize, mib: u64 },
    /// And lets the loop have it again.
    Resume,
    /// The policy is exchanged for `fixed`, or back for `psi`.
    Fix { mib: Option<u64> },
    /// The guest's onlining is right or wrong.
    Online { movable: bool },
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        8 => (0u64..=1000, 0u64..400, prop_oneof![3 => Just(0u64), 1 => 0u64..5000], 0u64..300).prop_map(
            |(available_permille, stall_ms, swapped_pages, free_mib)| Happening::Report {
                available_permille,
                stall_ms: if stall_ms > 300 { stall_ms } else { 0 },
                swapped_pages,
                free_mib,
            }
        ),
        3 => Just(Happening::Tick),
        6 => (0usize..3, prop_oneof![Just(1000u64), 0u64..=1000])
            .prop_map(|(zone, permille)| Happening::Follow { zone, permille }),
        1 => (0u64..2000).prop_map(|mib| Happening::Pool { mib }),
        1 => (0usize..3, 0u64..256).prop_map(|(zone, mib)| Happening::Pin { zone, mib }),
        1 => Just(Happening::Resume),
        1 => prop::option::of(0u64..1200).prop_map(|mib| Happening::Fix { mib }),
        1 => any::<bool>().prop_map(|movable| Happening::Online { movable }),
    ]
}

/// A VM with two DRAM zones, the second with a floor, and one of PM.
struct World {
    host: HostView,
    controller: Controller,
    now: TimeMs,
    seq: u64,
    stall: Stall,
    counters: Counters,
    movable: bool,
    pinned: [bool; 3],
    /// A request that was not followed for this long may be withdrawn.
    last_grow: Option<TimeMs>,
}

impl World {
    fn new() -> Self {
        let zone = |id, tier, floor, max| ZoneSizes {
            id: ZoneId(id),
            tier,
            guest_numa_node: 0,
            block_bytes: BLOCK_BYTES,
            floor_bytes: floor * MIB,
            max_bytes: max * MIB,
            requested_bytes: floor * MIB,
            plugged_bytes: floor * MIB,
        };
        World {
            host: HostView {
                zones: vec![
                    zone(7, Tier::Pm, 16, 1024),
                    zone(3, Tier::Dram, 0, 128),
                    zone(4, Tier::Dram, 32, 256),
                ],
                boot_bytes: 512 * MIB,
                pool_free_bytes: 1024 * MIB,
                ..HostView::default()
            },
            controller: Controller::new(Policy::default(), Rules::default()).expect("defaults"),
            now: TimeMs(1_000),
            seq: 0,
            stall: Stall::default(),
            counters: Counters::default(),
            movable: true,
            pinned: [false; 3],
            last_grow: None,
        }
    }

    fn happen(&mut self, happening: &Happening) -> Option<Plan> {
        match *happening {
            Happening::Report { available_permille, stall_ms, swapped_pages, free_mib } => {
                self.stall.some_us += stall_ms * 1000;
                self.counters.pswpout += swapped_pages;
                let report = self.report(available_permille, free_mib);
                return Some(self.controller.step(Event::Report(&report), &self.host, self.now));
            }
            Happening::Tick => return Some(self.controller.step(Event::Tick, &self.host, self.now)),
            Happening::Follow { zone, permille } => {
                let zone = &mut self.host.zones[zone];
                let part = |bytes: u64| bytes * permille / 1000 / BLOCK_BYTES * BLOCK_BYTES;
                let (grow, shrink) =
                    (part(zone.outstanding_grow_bytes()), part(zone.outstanding_shrink_bytes()));
                zone.plugged_bytes = zone.plugged_bytes + grow - shrink;
            }
            Happening::Pool { mib } => self.host.pool_free_bytes = mib * MIB,
            Happening::Pin { zone, mib } => {
                let sizes = &mut self.host.zones[zone];
                let size = (mib * MIB).clamp(sizes.floor_bytes, sizes.max_bytes);
                sizes.requested_bytes = size / BLOCK_BYTES * BLOCK_BYTES;
                self.controller.pin(self.host.zones[zone].id, &self.host, self.now);
                self.pinned[zone] = true;
            }
            Happening::Resume => {
                self.controller.resume(None);
                self.pinned = [false; 3];
            }
            Happening::Fix { mib } => {
                let policy = mib.map_or_else(Policy::default, |mib| {
                    Policy::Fixed(fixed::Params { size_bytes: mib * MIB / BLOCK_BYTES * BLOCK_BYTES })
                });
                self.controller.set_policy(policy).expect("in range");
            }
            Happening::Online { movable } => self.movable = movable,
        }
        None
    }

    fn report(&mut self, available_permille: u64, free_mib: u64) -> Report {
        self.seq += 1;
        let total_bytes = 480 * MIB + self.host.plugged_bytes();
        let online_policy = if self.movable { OnlinePolicy::OnlineMovable } else { OnlinePolicy::Online };
        Report::try_from(RawReport {
            version: PROTOCOL_VERSION,
            seq: self.seq,
            monotonic_ms: self.now.0,
            memory: Memory {
                total_bytes,
                available_bytes: total_bytes / 1000 * available_permille,
                ..Memory::default()
            },
            stall: Stall { some_us: self.stall.some_us.min(self.now.0 * 1000), ..self.stall },
            zones: vec![Zone {
                kind: ZoneKind::Normal,
                free_pages: free_mib * 256,
                high_pages: 1000,
                managed_pages: 120_000,
                ..Zone::default()
            }],
            counters: self.counters,
            blocks: Blocks { online_policy, ..Blocks::default() },
            ..RawReport::default()
        })
        .expect("sound")
    }

    fn check(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let zones = &self.host.zones;
        prop_assert_eq!(plan.targets.len(), zones.len());
        for ((zone, target), pinned) in zones.iter().zip(&plan.targets).zip(self.pinned) {
            let bytes = target.requested_bytes;
            prop_assert_eq!(zone.id, target.zone);
            prop_assert_eq!(bytes % zone.block_bytes, 0, "whole blocks");
            prop_assert!(bytes >= zone.floor_bytes && bytes <= zone.max_bytes, "{:?}: {}", zone, bytes);
            prop_assert!(!pinned || bytes == zone.requested_bytes, "a zone sized by hand is left alone");
        }
        match plan.direction {
            Direction::Grow => self.check_grow(plan),
            Direction::Shrink => self.check_shrink(plan),
            Direction::Hold => self.check_hold(plan),
        }
    }

    fn check_grow(&self, plan: &Plan) -> Result<(), TestCaseError> {
        use Reason::{Filling, FixedSize, LowAvailable, ReportsLost, Stalled, Swapping, Thrashing};
        let reasons = [Filling, FixedSize, LowAvailable, ReportsLost, Stalled, Swapping, Thrashing];
        prop_assert!(reasons.contains(&plan.reason), "{:?}", plan);
        prop_assert!(plan.requested_bytes() > self.host.requested_bytes());
        let mut new_pm = 0;
        for (zone, target) in self.host.zones.iter().zip(&plan.targets) {
            prop_assert!(target.requested_bytes >= zone.requested_bytes, "nothing shrinks in a grow");
            if zone.tier == Tier::Pm {
                new_pm += target.requested_bytes.saturating_sub(zone.plugged_bytes);
            }
        }
        let owed = self.host.zones[0].outstanding_grow_bytes();
        prop_assert!(new_pm <= self.host.pool_free_bytes.max(owed), "more PM than the pool has");
        Ok(())
    }

    fn check_shrink(&self, plan: &Plan) -> Result<(), TestCaseError> {
        prop_assert!(matches!(plan.reason, Reason::Surplus | Reason::FixedSize), "{:?}", plan);
        let taken = self.host.requested_bytes() - plan.requested_bytes();
        prop_assert!(taken <= (128 * MIB).max(self.host.plugged_bytes() / 8), "a step of {}", taken);
        prop_assert!(self.host.outstanding_shrink_bytes() == 0, "the last step has not been followed");
        let cooled = self.last_grow.is_none_or(|at| self.now.since(at) >= Rules::default().cool_down_ms);
        prop_assert!(
            cooled,
            "taken back {} ms after a grow",
            self.now.since(self.last_grow.expect("not cooled"))
        );
        let (pm, pm_target) = (&self.host.zones[0], plan.targets[0].requested_bytes);
        let dram_taken = (1..3).any(|i| plan.targets[i].requested_bytes < self.host.zones[i].requested_bytes);
        prop_assert!(!dram_taken || self.pinned[0] || pm_target == pm.floor_bytes, "DRAM before PM");
        Ok(())
    }

    /// A hold asks for nothing new: at most it comes nearer to what the guest has.
    fn check_hold(&self, plan: &Plan) -> Result<(), TestCaseError> {
        for (zone, target) in self.host.zones.iter().zip(&plan.targets) {
            let (now, then) = (zone.requested_bytes, target.requested_bytes);
            if then != now {
                prop_assert_eq!(plan.reason, Reason::NoProgress);
                prop_assert!(then.abs_diff(zone.plugged_bytes) < now.abs_diff(zone.plugged_bytes));
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, plan: &Plan) {
        if plan.direction == Direction::Grow {
            self.last_grow = Some(self.now);
        }
        for (zone, target) in self.host.zones.iter_mut().zip(&plan.targets) {
            zone.requested_bytes = target.requested_bytes;
        }
    }
}

/// Whether every DRAM zone has all it may have.
fn dram_is_full(host: &HostView, plan: &Plan) -> bool {
    (1..3).all(|i| plan.targets[i].requested_bytes == host.zones[i].max_bytes)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_rules_hold(
        steps in prop::collection::vec((happening(), prop_oneof![3 => 1u64..200, 2 => 200u64..7000]), 1..120),
    ) {
        let mut world = World::new();
        for (happening, ms) in &steps {
            world.now = world.now + *ms;
            if let Some(plan) = world.happen(happening) {
                world.check(&plan)?;
                world.carry_out(&plan);
            }
        }
    }

    #[test]
    fn in_a_guest_that_follows_dram_is_full_before_pm_grows(
        steps in prop::collection::vec((0u64..=1000, 0u64..300, 50u64..3000), 1..120),
    ) {
        let mut world = World::new();
        for (available_permille, free_mib, ms) in steps {
            world.now = world.now + ms;
            let report = Happening::Report { available_permille, stall_ms: 0, swapped_pages: 0, free_mib };
            let plan = world.happen(&report).expect("a plan");
            world.check(&plan)?;
            let pm_grows = plan.targets[0].requested_bytes > world.host.zones[0].requested_bytes;
            prop_assert!(!pm_grows || dram_is_full(&world.host, &plan), "{:?}", plan);
            world.carry_out(&plan);
            for zone in 0..3 {
                world.happen(&Happening::Follow { zone, permille: 1000 });
            }
        }
    }

    #[test]
    fn the_same_happenings_give_the_same_plans(
        steps in prop::collection::vec((happening(), 1u64..3000), 1..60),
    ) {
        let run = || {
            let mut world = World::new();
            let mut plans = Vec::new();
            for (happening, ms) in &steps {
                world.now = world.now + *ms;
                if let Some(plan) = world.happen(happening) {
                    world.carry_out(&plan);
                    plans.push(plan);
                }
            }
            plans
        };
        prop_assert_eq!(run(), run());
    }
}
