//! Tests of the rules that apply to every policy, one by one.

mod bounds;
mod changes;
mod descriptors;
mod dry_run;
mod growing;
mod lost_reports;
mod pinned_zones;
mod progress;
mod recall;
mod shrinking;
mod storage;
mod unsupported;

use foreshore_proto::{Blocks, Memory, PROTOCOL_VERSION, RawReport, Zone, ZoneKind};

use super::*;
use crate::policy::{fixed, psi};
use crate::units::{PAGE_BYTES, SECTION_BYTES};
use crate::{MIB, Shortfall, Tier, ZoneSizes};

const DRAM: usize = 0;
const PM: usize = 1;

/// VM of 384 MiB with its controller. 128 MiB of DRAM and 1 GiB of PM can be plugged.
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
                memory: Memory {
                    total_bytes: 352 * MIB,
                    available_bytes: 280 * MIB,
                    ..Memory::default()
                },
                zones: vec![Zone {
                    kind: ZoneKind::Dma32,
                    free_pages: 70_000,
                    high_pages: 750,
                    managed_pages: 90_000,
                    ..Zone::default()
                }],
                blocks: Blocks {
                    online_policy: OnlinePolicy::OnlineMovable,
                    block_bytes: SECTION_BYTES,
                    ..Blocks::default()
                },
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

    /// Advances time by `ms`, calls the controller without a report, and carries out its plan.
    fn tick(&mut self, ms: u64) -> Plan {
        self.now = self.now + ms;
        let plan = self.controller.step(Event::Tick, &self.host, self.now);
        self.carry_out(&plan);
        plan
    }

    /// Advances time by `ms`, passes a report, and carries out the plan.
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
                    zone.shortfall = None;
                }
            }
        }
    }

    /// Sets the free memory above the high watermarks so that the guest has room for the page
    /// descriptors of exactly `sections`.
    fn describe(&mut self, sections: u64) {
        let zone = &mut self.raw.zones[0];
        let floor_pages = zone.managed_pages.div_ceil(64).max(1024);
        // The descriptors of a section take 2 MiB, and half of the free memory is kept free.
        zone.free_pages = zone.high_pages + floor_pages + sections * 1024;
    }

    fn pin(&mut self, zone: ZoneId) {
        self.controller.observe(&self.host, self.now);
        self.controller.pin(zone);
    }

    fn set_goal(&mut self, zone: ZoneId, size_bytes: u64) {
        self.controller.observe(&self.host, self.now);
        self.controller.set_goal(zone, size_bytes);
    }

    /// Requests the next steps towards the goals.
    fn step(&mut self) -> Vec<GoalStep> {
        self.controller.observe(&self.host, self.now);
        let steps = self.controller.next_steps(&self.host, self.now);
        for step in &steps {
            self.host.zones[step.zone.0 as usize].requested_bytes = step.requested_bytes;
        }
        steps
    }

    /// Refuses the guest's driver of a zone and withdraws the request, as the zone's device does.
    fn refuse_driver(&mut self, zone: usize) {
        let zone = &mut self.host.zones[zone];
        (zone.driver, zone.requested_bytes) = (DriverState::Unsupported, zone.plugged_bytes);
    }

    /// Lowers the request of a zone to `mib`. The device does this when the host has no more
    /// memory.
    fn host_has(&mut self, zone: usize, mib: u64) {
        let zone = &mut self.host.zones[zone];
        assert!(zone.requested_bytes > mib * MIB);
        let wanted_bytes = std::mem::replace(&mut zone.requested_bytes, mib * MIB);
        zone.shortfall = Some(Shortfall { reason: "pool-full", wanted_bytes });
    }

    /// Plugs and unplugs memory until all requests are followed, as the guest's driver does.
    fn follow(&mut self) {
        for zone in &mut self.host.zones {
            zone.plugged_bytes = zone.requested_bytes;
        }
    }

    fn requested_mib(&self) -> (u64, u64) {
        (self.host.zones[DRAM].requested_bytes / MIB, self.host.zones[PM].requested_bytes / MIB)
    }
}
