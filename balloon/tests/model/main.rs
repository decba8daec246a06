//! Property tests of the controller under every policy with random events. Examples are reports of
//! several nodes, late and lost reports, refusals, clients that resize zones, and changes of policy
//! and bounds. For each invariant, a faulty controller should fail the same checks.

mod checks;
mod detection;
mod event;
mod expected_need;
mod fault;
#[path = "../rig/properties.rs"]
mod properties;
mod regressions;
mod rules;

use std::collections::VecDeque;

use balloon::controller::{Controller, Event, Rules};
use balloon::plan::{Direction, Plan, Reason};
use balloon::plug_filter::CONFIRM_MS;
use balloon::policy::{Policy, fixed, psi};
use balloon::proto::{
    Blocks, Counters, Memory, NodeIdle, OnlinePolicy, PROTOCOL_VERSION, RawReport, Report, Stall,
    Zone, ZoneKind,
};
use balloon::{BLOCK_BYTES, HostView, MIB, Shortfall, Tier, TimeMs, ZoneId, ZoneSizes};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use self::event::{Counted, Idle, VmEvent, event_sequence, report};
use self::fault::Fault;
use self::properties::{POLICIES, fails, policy};

const PAGES_PER_MIB: u64 = 256;
/// Boot memory that each of the guest's two DRAM nodes manages.
const BOOT_MIB: [u64; 2] = [300, 180];
/// Number of zones. In the order of the host, they are PM near node 1, PM near node 0, DRAM of node
/// 0, and DRAM of node 1.
const ZONES: usize = 4;
/// The zone with the DRAM of node 0 is a balloon. Its size can be any number of pages.
const BALLOON: usize = 2;
const BALLOON_ID: u32 = 3;
/// Time for which `psi` takes earlier reports into account.
const HISTORY_MS: u64 = 2_500;

/// Request to a zone, and the zone's plugged size.
#[derive(Clone, Copy, Debug, Default)]
struct Wait {
    requested_bytes: u64,
    plugged_bytes: u64,
    /// Time of the last change of the request.
    requested_at: TimeMs,
    /// Time of the last change of either size. Memory that was plugged and immediately unplugged
    /// again does not count.
    since: TimeMs,
    /// `since`, or the later time at which the controller withdrew the request.
    restarted_at: TimeMs,
    /// True if memory was plugged and immediately unplugged again since then.
    has_flapped: bool,
}

/// A VM with two nodes of DRAM and two nodes of PM, and its controller.
struct World {
    host: HostView,
    controller: Controller,
    now: TimeMs,
    seq: u64,
    stall: Stall,
    counters: Counters,
    swap_used_mib: u64,
    idle: Idle,
    movable: bool,
    paused: bool,
    dry_run: bool,
    pinned: [bool; ZONES],
    /// True if a client has resized the zone since the last step, or if the controller has not
    /// observed this yet.
    resized_by_client: [bool; ZONES],
    /// Late reports that are newer than all reports that have arrived.
    late: VecDeque<Report>,
    /// True if a late report has arrived and a policy may still use it. The policy's conclusions
    /// are then not checked.
    is_misled: bool,
    /// Time since which no late report has arrived.
    in_time_since: Option<TimeMs>,
    /// Report of the last step, and the time at which it arrived.
    arrived: Option<(TimeMs, Report)>,
    /// Time of the last report, and whether it showed a shortage.
    last_report: Option<(TimeMs, bool)>,
    /// True if the controller has tried to grow the guest since the last report, or if another plan
    /// took precedence.
    has_tried_without_report: bool,
    /// Times on the guest's clock at which the guest counted swapping, refaults and stalls.
    counted_ms: [Vec<u64>; 3],
    /// Cool-down that the controller should currently apply after a grow.
    cool_down_ms: u64,
    last_grow: Option<TimeMs>,
    last_shrink: Option<TimeMs>,
    /// Expected available memory after the last shrink, computed from the report that led to it.
    left_bytes: Option<u64>,
    /// Maximum of the expected available memory since the last shrink.
    max_available_bytes: Option<u64>,
    /// True if the host could not provide memory, and other zones have not been requested to
    /// replace it yet.
    has_host_shortfall: bool,
    /// Zone in which memory is plugged temporarily: its index, its previous size, and the end time.
    flapped: Option<(usize, u64, TimeMs)>,
    /// Outstanding request of each zone.
    waits: [Wait; ZONES],
    /// Number of times that a dry run has shown plans of rules 3 and 5 for the present sizes.
    shown_plans: usize,
    /// True if memory of the zone was plugged temporarily. Its effect on progress depends on the
    /// times at which the controller observed it. They also determine when the controller withdraws
    /// the request, and how much a dry run counts as withdrawn.
    has_uncertain_progress: [bool; ZONES],
    fault: Option<Fault>,
}

impl World {
    fn new(policy: Policy, fault: Option<Fault>) -> Self {
        Self::under(Rules::default(), policy, fault)
    }

    fn under(rules: Rules, policy: Policy, fault: Option<Fault>) -> Self {
        let zone = |id, tier, node, floor, max| ZoneSizes {
            guest_numa_node: node,
            floor_bytes: floor * MIB,
            requested_bytes: floor * MIB,
            plugged_bytes: floor * MIB,
            ..ZoneSizes::empty(id, tier, max * MIB)
        };
        let mut host = HostView {
            zones: vec![
                zone(7, Tier::Pm, 3, 16, 512),
                zone(9, Tier::Pm, 2, 0, 640),
                zone(BALLOON_ID, Tier::Dram, 0, 0, 128),
                zone(4, Tier::Dram, 1, 32, 256),
            ],
            boot_bytes: 512 * MIB,
            pool_free_bytes: 1024 * MIB,
            balloon: Some(ZoneId(BALLOON_ID)),
            ..HostView::default()
        };
        for (from, to) in [(0, 2), (1, 3)] {
            host.distances.set(from, to, 17);
            host.distances.set(1 - from, to, 28);
        }
        World {
            host,
            cool_down_ms: rules.cool_down_ms,
            controller: Controller::new(policy, rules).expect("in range"),
            now: TimeMs(1_000),
            seq: 0,
            stall: Stall::default(),
            counters: Counters::default(),
            swap_used_mib: 0,
            idle: None,
            movable: true,
            paused: false,
            dry_run: false,
            pinned: [false; ZONES],
            resized_by_client: [true; ZONES],
            late: VecDeque::new(),
            is_misled: false,
            in_time_since: None,
            arrived: None,
            last_report: None,
            has_tried_without_report: false,
            counted_ms: Default::default(),
            last_grow: None,
            last_shrink: None,
            left_bytes: None,
            max_available_bytes: None,
            has_host_shortfall: false,
            flapped: None,
            waits: [Wait::default(); ZONES],
            shown_plans: 0,
            has_uncertain_progress: [false; ZONES],
            fault,
        }
    }

    fn step(&mut self, event: Event<'_>) -> Plan {
        match self.fault {
            Some(Fault::ActsInPause) => self.controller.unpause(),
            Some(Fault::ActsInDryRun) => self.controller.set_dry_run(false),
            Some(Fault::NeverDoubles) => self.forget_cool_down(),
            _ => {}
        }
        self.end_flap();
        self.track_growth();
        self.track_sizes();
        self.arrived = match event {
            Event::Report(report) => Some((self.now, report.clone())),
            Event::Tick => None,
        };
        if let Event::Report(report) = event {
            self.track_lateness(report);
        }
        self.max_available_bytes = self
            .max_available_bytes
            .map(|max_available_bytes| max_available_bytes.max(self.current_available_bytes()));
        let mut plan = self.controller.step(event, &self.host, self.now);
        if self.arrived.is_some() {
            (self.last_report, self.has_tried_without_report) =
                (Some((self.now, self.found_shortage())), false);
        }
        self.resized_by_client = [false; ZONES];
        if let Some(fault) = self.fault {
            fault.distort(&mut plan, self);
        }
        plan
    }

    fn apply(&mut self, event: &VmEvent) -> Option<Plan> {
        match *event {
            VmEvent::Report {
                free_permille,
                cached_permille,
                stall_ms,
                counted,
                swap_used_mib,
                idle,
                late,
            } => {
                self.count(stall_ms, counted);
                (self.swap_used_mib, self.idle) = (swap_used_mib, idle);
                let pages = self.managed_pages();
                let free_pages =
                    std::array::from_fn(|zone| pages[zone] * free_permille[zone] / 1000);
                let report = self.report(free_pages, cached_permille);
                if late {
                    self.late.push_back(report);
                    return None;
                }
                // Reports that were sent before this one and arrive later are refused.
                self.late.clear();
                return Some(self.step(Event::Report(&report)));
            }
            VmEvent::Arrival => {
                let report = self.late.pop_front()?;
                return Some(self.step(Event::Report(&report)));
            }
            VmEvent::Tick => return Some(self.step(Event::Tick)),
            VmEvent::Follow { zone, permille } => self.follow(zone, permille),
            VmEvent::Flap { zone, ms } => {
                let before = self.host.zones[zone].plugged_bytes;
                if self.host.zones[zone].outstanding_grow_bytes() == 0 || self.flapped.is_some() {
                    return None;
                }
                self.track_growth();
                self.track_sizes();
                self.follow(zone, 1000);
                self.flapped = Some((zone, before, self.now + ms));
                self.has_uncertain_progress[zone] = true;
                if ms < CONFIRM_MS {
                    self.waits[zone].plugged_bytes = self.host.zones[zone].plugged_bytes;
                }
                return Some(self.step(Event::Tick));
            }
            VmEvent::Short { zone, permille } => self.fall_short(zone, permille),
            VmEvent::Pool { mib } => self.host.pool_free_bytes = mib * MIB,
            VmEvent::Pin { zone, mib } => {
                self.resize_by_client(zone, mib * MIB);
            }
            VmEvent::Resume { zone } => {
                self.controller.resume(zone.map(|zone| self.host.zones[zone].id));
                (0..ZONES)
                    .filter(|i| zone.is_none_or(|zone| zone == *i))
                    .for_each(|i| self.pinned[i] = false);
                self.paused = self.paused && zone.is_some();
            }
            VmEvent::Pause { on } => {
                self.paused = on;
                if on { self.controller.pause() } else { self.controller.unpause() }
            }
            VmEvent::DryRun { on } => {
                (self.dry_run, self.shown_plans) = (on, 0);
                self.controller.set_dry_run(on);
            }
            VmEvent::Squeeze { zones, above } => {
                for zone in (0..ZONES).filter(|zone| zones[*zone]) {
                    self.resize_by_client(zone, if above { u64::MAX } else { 0 });
                }
                let all_blocks = self.host.requested_bytes() / BLOCK_BYTES;
                let (floor, ceiling) =
                    if above { (0, all_blocks / 2) } else { (all_blocks + 32, 1 << 20) };
                self.set_bounds(floor * BLOCK_BYTES, ceiling * BLOCK_BYTES);
            }
            VmEvent::Oom { pages } => {
                let sizes = &mut self.host.zones[BALLOON];
                sizes.plugged_bytes = (sizes.plugged_bytes + pages * 4096).min(sizes.max_bytes);
                if sizes.plugged_bytes > sizes.requested_bytes {
                    sizes.requested_bytes = sizes.plugged_bytes.next_multiple_of(BLOCK_BYTES);
                }
            }
            VmEvent::Policy { index } => {
                // The new policy may want more memory.
                (self.left_bytes, self.max_available_bytes) = (None, None);
                self.controller.set_policy(policy(index)).expect("in range")
            }
            VmEvent::Fix { mib } => {
                let size_bytes = mib * MIB / BLOCK_BYTES * BLOCK_BYTES;
                let fixed = Policy::Fixed(fixed::Params { size_bytes });
                self.controller.set_policy(fixed).expect("in range");
            }
            VmEvent::Bounds { floor_mib, more_mib } => {
                let blocks = |mib: u64| mib * MIB / BLOCK_BYTES * BLOCK_BYTES;
                self.set_bounds(blocks(floor_mib), blocks(floor_mib + more_mib));
            }
            VmEvent::Online { movable } => self.movable = movable,
        }
        None
    }

    fn resize_by_client(&mut self, zone: usize, bytes: u64) {
        self.end_flap();
        self.controller.observe(&self.host, self.now);
        self.controller.pin(self.host.zones[zone].id);
        // At this point, the controller observes all zones.
        self.track_growth();
        self.track_sizes();
        let sizes = &mut self.host.zones[zone];
        sizes.requested_bytes =
            bytes.clamp(sizes.floor_bytes, sizes.max_bytes) / BLOCK_BYTES * BLOCK_BYTES;
        sizes.shortfall = None;
        (self.pinned[zone], self.resized_by_client[zone]) = (true, true);
    }

    fn fall_short(&mut self, zone: usize, permille: u64) {
        let sizes = &mut self.host.zones[zone];
        let least_bytes = sizes.plugged_bytes.next_multiple_of(BLOCK_BYTES).max(sizes.floor_bytes);
        let missing_bytes = sizes.requested_bytes.saturating_sub(least_bytes);
        let has_bytes = missing_bytes * permille / 1000 / BLOCK_BYTES * BLOCK_BYTES;
        if has_bytes < missing_bytes {
            let wanted_bytes =
                std::mem::replace(&mut sizes.requested_bytes, least_bytes + has_bytes);
            sizes.shortfall = Some(Shortfall { reason: "pool-full", wanted_bytes });
            self.has_host_shortfall = true;
        }
    }

    /// Unplugs memory that was plugged temporarily, unless less memory is requested now.
    fn end_flap(&mut self) {
        if let Some((zone, before, _)) = self.flapped.take_if(|(.., until)| *until <= self.now) {
            let sizes = &mut self.host.zones[zone];
            if sizes.plugged_bytes > before && sizes.requested_bytes >= sizes.plugged_bytes {
                let wait = &mut self.waits[zone];
                if wait.plugged_bytes == sizes.plugged_bytes {
                    (wait.plugged_bytes, wait.has_flapped) = (before, true);
                }
                sizes.plugged_bytes = before;
            }
        }
    }

    fn set_bounds(&mut self, floor_bytes: u64, ceiling_bytes: u64) {
        self.set_rules(Rules { floor_bytes, ceiling_bytes, ..self.controller.rules().clone() });
    }

    fn set_rules(&mut self, rules: Rules) {
        self.shown_plans = 0;
        // A learned cool-down is kept within the new bounds.
        let is_doubled = self.cool_down_ms != self.controller.rules().cool_down_ms;
        let most_ms = if is_doubled { rules.max_cool_down_ms } else { rules.cool_down_ms };
        self.cool_down_ms = self.cool_down_ms.clamp(rules.cool_down_ms, most_ms);
        self.controller.set_rules(Rules { dry_run: self.dry_run, ..rules }).expect("in range");
    }

    /// Resets the learned cool-down by setting bounds that permit only one value.
    fn forget_cool_down(&mut self) {
        let rules = self.controller.rules().clone();
        if self.controller.status().cool_down_ms > rules.cool_down_ms {
            let most = Rules { max_cool_down_ms: rules.cool_down_ms, ..rules.clone() };
            self.controller.set_rules(most).expect("in range");
            self.controller.set_rules(rules).expect("in range");
        }
    }

    fn count(&mut self, stall_ms: u64, counted: Counted) {
        self.stall.some_us += stall_ms * 1000;
        self.counters.pswpout += counted.swapped_out;
        self.counters.pswpin += counted.swapped_in;
        self.counters.workingset_refault_anon += counted.anon_refaults;
        self.counters.workingset_refault_file += counted.file_refaults;
        let swapped = counted.swapped_out + counted.swapped_in;
        let refaulted = counted.anon_refaults + counted.file_refaults;
        for (times, count) in self.counted_ms.iter_mut().zip([swapped, refaulted, stall_ms]) {
            times.extend((count > 0).then_some(self.now.0));
        }
    }

    /// Records whether the report is late. A late report misleads a policy for as long as the
    /// policy takes it into account.
    fn track_lateness(&mut self, report: &Report) {
        if report.monotonic_ms() < self.now.0 {
            (self.is_misled, self.in_time_since) = (true, None);
        } else {
            let since = *self.in_time_since.get_or_insert(self.now);
            self.is_misled &= self.now.since(since) <= HISTORY_MS;
        }
    }

    /// Records a grow if a zone has grown without a plan since it was last observed.
    fn track_growth(&mut self) {
        let has_grown = (0..ZONES).any(|zone| {
            let is_exempt = self.pinned[zone] || self.resized_by_client[zone];
            !is_exempt && self.host.zones[zone].requested_bytes > self.waits[zone].requested_bytes
        });
        if has_grown {
            self.record_grow();
        }
    }

    /// Doubles the cool-down if a grow follows soon after a shrink, because the shrink was too
    /// early.
    fn record_grow(&mut self) {
        let rules = self.controller.rules();
        let is_early_grow =
            self.last_shrink.is_some_and(|at| self.now.since(at) < rules.max_cool_down_ms);
        if !is_early_grow {
            self.cool_down_ms = rules.cool_down_ms;
        } else if self.last_shrink > self.last_grow {
            self.cool_down_ms = (2 * self.cool_down_ms).min(rules.max_cool_down_ms);
        }
        self.last_grow = Some(self.now);
    }

    /// Returns true if the policy found a shortage in the last report. The checks in
    /// `expected_need.rs` examine the report itself.
    fn found_shortage(&self) -> bool {
        self.controller.status().last_decision.is_some_and(|decision| decision.pressure)
    }

    /// Returns true if a client's request to a zone may have made no progress for too long, so that
    /// it is not waited for. If memory was plugged for long enough but was unplugged between two
    /// observations, the controller did not count it as progress.
    fn is_stuck(&self, zone: usize) -> bool {
        let (wait, progress_ms) = (self.waits[zone], self.controller.rules().progress_ms);
        let since = if self.has_uncertain_progress[zone] { wait.requested_at } else { wait.since };
        self.pinned[zone] && self.now.since(since) >= progress_ms
    }

    /// Returns true if no report has arrived for too long.
    fn are_reports_lost(&self) -> bool {
        self.last_report
            .is_some_and(|(at, _)| self.now.since(at) >= self.controller.rules().lost_ms)
    }

    /// Updates the outstanding requests with the present sizes. A change that may be progress
    /// restarts the time of a request. Memory that is immediately unplugged again does not count as
    /// progress.
    fn track_sizes(&mut self) {
        for (zone, wait) in self.host.zones.iter().zip(&mut self.waits) {
            let sizes = (zone.requested_bytes, zone.plugged_bytes);
            if sizes != (wait.requested_bytes, wait.plugged_bytes) {
                self.shown_plans = 0;
                let (requested_bytes, plugged_bytes) = sizes;
                let is_asked = requested_bytes != wait.requested_bytes;
                *wait = Wait {
                    requested_bytes,
                    plugged_bytes,
                    requested_at: if is_asked { self.now } else { wait.requested_at },
                    since: self.now,
                    restarted_at: self.now,
                    has_flapped: false,
                };
            }
        }
    }

    /// Returns true if the controller's request to a zone has made no progress for too long.
    fn is_due(&self, zone: usize) -> bool {
        self.is_due_since(zone, self.waits[zone].restarted_at)
    }

    /// Returns true if the controller's request to a zone may have made no progress for too long.
    /// The controller may not have observed that temporarily plugged memory counted as progress.
    fn may_be_due(&self, zone: usize) -> bool {
        self.is_due(zone)
            || (self.has_uncertain_progress[zone]
                && self.is_due_since(zone, self.waits[zone].requested_at))
    }

    fn is_due_since(&self, zone: usize, since: TimeMs) -> bool {
        let is_flapping = self.flapped.is_some_and(|(flapped, ..)| flapped == zone);
        let outstanding = self.host.zones[zone].outstanding_grow_bytes();
        !self.pinned[zone]
            && !is_flapping
            && outstanding >= BLOCK_BYTES
            && self.now.since(since) >= self.controller.rules().progress_ms
    }

    /// Returns true if the controller makes decisions, whether they are carried out or not.
    fn decides(&self) -> bool {
        !self.paused && *self.controller.policy() != Policy::Off
    }

    /// Returns the sizes on which a plan is based. In a dry run, requests that rule 5 would
    /// withdraw count as withdrawn.
    fn base(&self) -> HostView {
        let mut base = self.host.clone();
        let is_exempt = self.dry_run && self.decides();
        for (index, zone) in base.zones.iter_mut().enumerate().filter(|_| is_exempt) {
            let is_flapping = self.flapped.is_some_and(|(flapped, ..)| flapped == index);
            let is_shrink = zone.outstanding_shrink_bytes() > 0;
            let waited_ms = self.now.since(self.waits[index].restarted_at);
            if !self.pinned[index]
                && !is_flapping
                && (is_shrink || zone.outstanding_grow_bytes() >= BLOCK_BYTES)
                && waited_ms >= self.controller.rules().progress_ms
            {
                let there = zone.plugged_bytes / BLOCK_BYTES * BLOCK_BYTES;
                let whole = if is_shrink {
                    zone.plugged_bytes.next_multiple_of(BLOCK_BYTES)
                } else {
                    there
                };
                zone.requested_bytes = whole.max(zone.floor_bytes);
            }
        }
        base
    }

    /// Returns true if the plan is from rule 3 or rule 5, which do not depend on the policy.
    fn is_by_rule(&self, plan: &Plan) -> bool {
        let is_withdrawn = (plan.direction, plan.reason) == (Direction::Hold, Reason::NoProgress)
            && plan.wanted_bytes == self.host.requested_bytes();
        is_withdrawn || [Reason::BelowFloor, Reason::AboveCeiling].contains(&plan.reason)
    }

    fn follow(&mut self, zone: usize, permille: u64) {
        let unit = if zone == BALLOON { 4096 } else { BLOCK_BYTES };
        let zone = &mut self.host.zones[zone];
        let part = |bytes: u64| bytes * permille / 1000 / unit * unit;
        let (grow, shrink) =
            (part(zone.outstanding_grow_bytes()), part(zone.outstanding_shrink_bytes()));
        zone.plugged_bytes = zone.plugged_bytes + grow - shrink;
    }

    /// Managed memory of each node including plugged DRAM, in the order of the zones.
    fn managed_pages(&self) -> [u64; ZONES] {
        let boot = [0, 0, BOOT_MIB[0], BOOT_MIB[1]];
        std::array::from_fn(|zone| {
            boot[zone] * PAGES_PER_MIB + self.host.zones[zone].plugged_bytes / 4096
        })
    }

    fn report(&mut self, free_pages: [u64; ZONES], cached_permille: u64) -> Report {
        self.seq += 1;
        let online_policy =
            if self.movable { OnlinePolicy::OnlineMovable } else { OnlinePolicy::Online };
        let managed_pages = self.managed_pages();
        let bytes = |pages: [u64; ZONES]| pages.iter().sum::<u64>() * 4096;
        let (total_bytes, free_bytes) = (bytes(managed_pages), bytes(free_pages));
        let cached_bytes = (total_bytes - free_bytes) / 1000 * cached_permille;
        let zone = |index: usize| {
            let sizes = &self.host.zones[index];
            let pm = sizes.tier == Tier::Pm;
            Zone {
                node: sizes.guest_numa_node,
                kind: if pm { ZoneKind::Movable } else { ZoneKind::Normal },
                free_pages: free_pages[index],
                min_pages: if pm { 32 } else { 500 },
                low_pages: if pm { 160 } else { 750 },
                high_pages: if pm { 288 } else { 1000 },
                managed_pages: managed_pages[index],
                largest_free_blocks: self.seq.is_multiple_of(2).then_some(free_pages[index] / 1024),
                user_pages: Some(managed_pages[index].saturating_sub(free_pages[index])),
                protected_pages: None,
            }
        };
        let idle = self.idle.map_or(vec![], |(permille, span_ms)| {
            let of_node = |index: usize| NodeIdle {
                node: self.host.zones[index].guest_numa_node,
                idle_bytes: managed_pages[index] * permille / 1000 * 4096,
                span_ms: span_ms.min(self.now.0),
            };
            // The result is ordered by node number.
            [2, 3, 1, 0].map(of_node).to_vec()
        });
        Report::try_from(RawReport {
            version: PROTOCOL_VERSION,
            seq: self.seq,
            monotonic_ms: self.now.0,
            memory: Memory {
                total_bytes,
                free_bytes,
                available_bytes: (free_bytes + cached_bytes).saturating_sub(8 * MIB),
                cached_bytes,
                swap_total_bytes: 1 << 40,
                swap_free_bytes: (1 << 40) - self.swap_used_mib * MIB,
                ..Memory::default()
            },
            stall: Stall { some_us: self.stall.some_us.min(self.now.0 * 1000), ..self.stall },
            zones: (0..ZONES).map(zone).collect(),
            idle,
            counters: self.counters,
            blocks: Blocks { online_policy, ..Blocks::default() },
            ..RawReport::default()
        })
        .expect("sound")
    }

    fn carry_out(&mut self, plan: &Plan) {
        self.has_tried_without_report |= self.are_reports_lost() && !is_hold_for_lost_reports(plan);
        if plan.dry_run {
            self.shown_plans += usize::from(self.is_by_rule(plan));
            return;
        }
        match plan.direction {
            Direction::Grow => {
                self.record_grow();
                self.has_host_shortfall &= plan.reason != Reason::HostShort;
            }
            Direction::Shrink => {
                self.last_shrink = Some(self.now);
                self.left_bytes = self.left_bytes(plan);
                self.max_available_bytes = self.left_bytes;
            }
            Direction::Hold => {}
        }
        for (zone, target) in self.host.zones.iter_mut().zip(&plan.targets) {
            if zone.requested_bytes != target.requested_bytes {
                zone.requested_bytes = target.requested_bytes;
                zone.shortfall = None;
            }
        }
        // After a withdrawal, the controller waits again from this time, even if it has kept the
        // request for the floor, which it does not report each time. Without a floor, no request
        // remains unchanged. A controller that makes no decisions does not withdraw requests.
        let has_floor = self.controller.rules().floor_bytes > 0;
        if self.decides() && (plan.reason == Reason::NoProgress || has_floor) {
            for zone in 0..ZONES {
                let is_withdrawn =
                    if has_floor { self.may_be_due(zone) } else { self.is_due(zone) };
                if is_withdrawn {
                    self.waits[zone].restarted_at = self.now;
                }
            }
        }
        self.track_sizes();
    }

    fn run_events(&mut self, events: &[(VmEvent, u64)]) -> Result<(), TestCaseError> {
        for (event, ms) in events {
            self.now = self.now + *ms;
            if let Some(plan) = self.apply(event) {
                self.check(&plan)?;
                self.carry_out(&plan);
            }
        }
        Ok(())
    }

    /// Checks that plans stop changing sizes after some time, if the guest uses `used_mib` and
    /// follows each request.
    fn check_stabilizes(&mut self, used_mib: u64) -> Result<(), TestCaseError> {
        self.apply(&VmEvent::Resume { zone: None });
        self.apply(&VmEvent::DryRun { on: false });
        // With other rules, the sizes might take days to stabilize.
        let Rules { floor_bytes, ceiling_bytes, .. } = *self.controller.rules();
        self.set_rules(Rules { floor_bytes, ceiling_bytes, ..Rules::default() });
        self.movable = true;
        let mut changed = Vec::new();
        for second in 0..1_500 {
            self.now = self.now + 1_000;
            // The guest fills DRAM before PM.
            let managed = self.managed_pages();
            let (mut used, mut free) = (used_mib * PAGES_PER_MIB, managed);
            for zone in [2, 3, 1, 0] {
                let in_zone = used.min(managed[zone]);
                (free[zone], used) = (managed[zone] - in_zone, used - in_zone);
            }
            let report = self.report(free, 0);
            let plan = self.step(Event::Report(&report));
            self.check(&plan)?;
            if plan.changes(&self.host).next().is_some() {
                changed.push((second, plan.direction, plan.reason, plan.requested_bytes() / MIB));
            }
            self.carry_out(&plan);
            (0..ZONES).for_each(|zone| self.follow(zone, 1000));
        }
        let late: Vec<_> = changed.iter().filter(|(second, ..)| *second >= 1_000).collect();
        prop_assert!(
            late.is_empty(),
            "{} with {} MiB: {:?}",
            self.controller.policy().name(),
            used_mib,
            late
        );
        Ok(())
    }
}

/// Returns true if a plan changes nothing because reports are lost.
fn is_hold_for_lost_reports(plan: &Plan) -> bool {
    (plan.direction, plan.reason) == (Direction::Hold, Reason::ReportsLost)
}

/// Returns true if each DRAM zone has its maximum size.
fn dram_is_full(host: &HostView, plan: &Plan) -> bool {
    let mut zones =
        host.zones.iter().zip(&plan.targets).filter(|(zone, _)| zone.tier == Tier::Dram);
    zones.all(|(zone, target)| target.requested_bytes == zone.max_bytes)
}

/// Uses the same cases in each run, so that a change that breaks an invariant fails immediately. If
/// `FORESHORE_MODEL_CASES` is set, that number of different cases is used instead.
fn config(cases: u32) -> ProptestConfig {
    let others =
        std::env::var("FORESHORE_MODEL_CASES").ok().map(|cases| cases.parse().expect("a number"));
    match others {
        Some(cases) => ProptestConfig { cases, ..ProptestConfig::default() },
        None => ProptestConfig { cases, rng_seed: RngSeed::Fixed(5), ..ProptestConfig::default() },
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn rules_hold_in_any_sequence_of_events((index, rules, events) in event_sequence()) {
        World::under(rules, policy(index), None).run_events(&events)?;
    }

    #[test]
    fn dram_is_full_before_pm_grows_if_guest_follows(
        index in 0..POLICIES.len(),
        rules in rules::rules(),
        steps in prop::collection::vec((report(), 50u64..3000), 1..120),
    ) {
        let mut world = World::under(rules, policy(index), None);
        for (report, ms) in steps {
            world.now = world.now + ms;
            let Some(plan) = world.apply(&report) else { continue };
            world.check(&plan)?;
            let pm_grows = (0..2).any(|pm| {
                plan.targets[pm].requested_bytes > world.host.zones[pm].requested_bytes
            });
            prop_assert!(!pm_grows || dram_is_full(&world.host, &plan), "{:?}", plan);
            world.carry_out(&plan);
            (0..ZONES).for_each(|zone| world.follow(zone, 1000));
        }
    }

    #[test]
    fn same_events_result_in_same_plans((index, rules, events) in event_sequence()) {
        let run = || {
            let mut world = World::under(rules.clone(), policy(index), None);
            let mut plans = Vec::new();
            for (event, ms) in &events {
                world.now = world.now + *ms;
                if let Some(plan) = world.apply(event) {
                    world.carry_out(&plan);
                    plans.push(plan);
                }
            }
            plans
        };
        prop_assert_eq!(run(), run());
    }
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn guest_with_constant_use_comes_to_rest((index, rules, events) in event_sequence(), used_mib in 0u64..1_800) {
        let mut world = World::under(rules, policy(index), None);
        world.run_events(&events)?;
        world.check_stabilizes(used_mib)?;
    }
}
