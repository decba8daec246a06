//! A simulated VM for tests of the governor, with checks of the governor's requests.

use std::fmt::Debug;

use balloon::controller::Rules;
use balloon::governor::{Change, Devices, Event, Governor, Note, Onlining, Request, ResizeTarget};
use balloon::plan::{Direction, Plan};
use balloon::policy::Policy;
use balloon::proto::{
    AgentMessage, Blocks, Counters, Memory, OnlinePolicy, PROTOCOL_VERSION, RawReport, Refusal,
    Report, Stall, Zone, ZoneKind,
};
use balloon::statistics::{BalloonState, Sample, Statistics};
use balloon::{
    BLOCK_BYTES, DriverState, HostView, MIB, Shortfall, Tier, TimeMs, ZoneId, ZoneSizes, parse_line,
};

use super::fault::Fault;
use super::policy;

/// The zones are the balloon, DRAM and two zones of PM.
pub(crate) const ZONES: usize = 4;

const HELLO: &[u8] = br#"{"type":"hello","version":1,"agent_version":"0.1.0","kernel_release":"6.12","preemption":"voluntary","page_size_bytes":4096}"#;

const BOOT_BYTES: u64 = 512 * MIB;

/// An event of the VM, or a change of its host or guest. Shares are in thousandths.
#[derive(Clone, Debug)]
pub(crate) enum VmEvent {
    /// Sends a report in which this share of the memory is free.
    Report(u64, OnlinePolicy),
    /// Sends a report with arbitrary memory, free pages, watermark and counters.
    FalseReport([u64; 4]),
    /// Sends a report with the number of the previous one.
    StaleReport,
    RefusedLine,
    /// The agent connects or disconnects.
    Agent(bool),
    Tick,
    /// The guest carries out this share of the request to a zone.
    Follow(usize, u64),
    Driver(usize, DriverState),
    /// From now on, the host can provide only this share of a zone's maximum.
    Host(usize, u64),
    /// Sets the pool's free memory, in MiB.
    Pool(u64),
    /// The balloon driver reports statistics in which this share of the memory is free.
    Statistics(u64),
    /// A client resizes a zone to this number of blocks.
    Resize(usize, u64),
    /// A zone is given this number of blocks at boot.
    Boot(usize, u64),
    Resume(Option<usize>),
    Pause(bool),
    DryRun(bool),
    Policy(usize),
    /// Floor and ceiling for all zones in total, in blocks.
    Bounds(u64, u64),
    Dimm,
}

/// State of the devices and a client's settings, as far as the checks need them.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    pub host: HostView,
    /// Memory that the host can provide to each zone.
    available_bytes: [u64; ZONES],
    pub pinned: [bool; ZONES],
    /// Goal of each zone. Each step should bring the zone closer to it.
    goals: [Option<u64>; ZONES],
    is_paused: bool,
    rules: Rules,
    follows: bool,
    fault: Option<Fault>,
    /// True while the same event is handled for the second time.
    pub is_repeated: bool,
    /// Requests of each step since the last event, with the host's state before that step.
    steps: Vec<(Vec<Request>, HostView)>,
    /// All requests since the start of the test.
    pub requests: Vec<Request>,
    /// All notes since the start of the test.
    pub notes: Vec<Note>,
    violations: Vec<String>,
}

pub(crate) struct World {
    pub governor: Governor,
    pub state: State,
    pub now: TimeMs,
    /// Sequence number of the last report.
    pub seq: u64,
    /// Total time for which the host was suspended.
    pub suspended_ms: u64,
    /// Start time of the guest's kernel.
    pub booted_ms: u64,
    /// True if Linux counts the memory in the balloon as used.
    pub is_counted: bool,
    /// Generation of the balloon driver.
    pub driver_generation: u64,
    is_connected: bool,
}

/// Returns the part of `size_bytes` that exceeds both the requested and the plugged size of the
/// zone.
fn new_bytes(zone: &ZoneSizes, size_bytes: u64) -> u64 {
    size_bytes.saturating_sub(zone.requested_bytes.max(zone.plugged_bytes))
}

impl State {
    pub(crate) fn zone(&self, id: ZoneId) -> &ZoneSizes {
        &self.host.zones[id.0 as usize]
    }

    fn ballooned_bytes(&self) -> u64 {
        let balloon = self.zone(ZoneId(0));
        balloon.max_bytes.saturating_sub(balloon.plugged_bytes)
    }

    fn expect(&mut self, holds: bool, what: &str, of: impl Debug) {
        if !holds {
            self.violations.push(format!("{what}: {of:?}"));
        }
    }

    /// Returns `value`, or `None` if the caller has the fault `fault`.
    fn unless_fault<T>(&self, fault: Fault, value: T) -> Option<T> {
        (self.fault != Some(fault)).then_some(value)
    }

    /// Checks a policy's request to a zone before it is carried out.
    fn check_size(&mut self, id: ZoneId, bytes: u64) {
        let (zone, is_pinned) = (*self.zone(id), self.pinned[id.0 as usize]);
        // A client may have resized the zone to less than its floor.
        let floor_bytes = zone.floor_bytes.min(zone.requested_bytes);
        // With an unsupported driver, the device ignores a request for more memory. Plugged memory
        // remains until a driver unplugs it.
        let is_served = zone.driver != DriverState::Unsupported || bytes <= zone.requested_bytes;
        for (holds, what) in [
            (bytes.is_multiple_of(BLOCK_BYTES), "not whole blocks"),
            (bytes <= zone.max_bytes, "above the maximum"),
            (bytes >= floor_bytes, "below the zone's floor"),
            (!is_pinned, "zone is pinned"),
            (!self.rules.dry_run, "sized in a dry run"),
            (!self.is_paused, "sized in a pause"),
            (is_served, "sized without a driver"),
        ] {
            self.expect(holds, what, (bytes, zone));
        }
    }

    /// Checks the total of a policy's requests before they are carried out.
    fn check_sum(&mut self, requests: &[Request]) {
        let old = self.host.requested_bytes();
        let (mut sum, mut pm) = (old, 0);
        for request in requests {
            let Request::Size(id, bytes) = request else { continue };
            let zone = self.zone(*id);
            sum = sum + bytes - zone.requested_bytes;
            pm += if zone.tier == Tier::Pm { new_bytes(zone, *bytes) } else { 0 };
        }
        // If the guest does not follow a shrink, the request is increased again, but not beyond the
        // plugged size.
        let zones = self.host.zones.iter();
        let left = zones.map(|zone| zone.requested_bytes.max(zone.plugged_bytes)).sum();
        let (floor, ceiling) =
            (self.rules.floor_bytes.min(old), self.rules.ceiling_bytes.max(left));
        let pool = self.host.pool_free_bytes;
        self.expect(sum >= floor, "below the floor of all zones", (sum, floor));
        self.expect(sum <= ceiling, "above the ceiling of all zones", (sum, ceiling));
        self.expect(pm <= pool, "more PM than the pool has", (pm, pool));
    }

    /// Checks a step before it is carried out. If the zone has no goal, the step should end an
    /// earlier goal at the size that is already requested.
    fn check_step(&mut self, id: ZoneId, size_bytes: u64, goal_bytes: u64) {
        let (zone, goal) = (*self.zone(id), self.goals[id.0 as usize]);
        let is_expected = match goal {
            Some(goal) => goal == goal_bytes,
            None => [size_bytes, goal_bytes] == [zone.requested_bytes; 2],
        };
        let is_served = zone.driver != DriverState::Unsupported || goal_bytes == zone.plugged_bytes;
        let is_valid = size_bytes.is_multiple_of(BLOCK_BYTES) && size_bytes <= goal_bytes;
        let step = (size_bytes, goal_bytes, zone);
        self.expect(is_expected, "no goal of a client", step);
        self.expect(is_served, "steps without a driver", step);
        self.expect(is_valid, "no step to the goal", step);
    }

    /// Sets the size as a device does, limited to the memory that the host has. A device that has
    /// refused its driver ignores the request.
    fn size(&mut self, id: ZoneId, size_bytes: u64, goal_bytes: u64) {
        let index = id.0 as usize;
        let available_bytes = self.available_bytes[index];
        let zone = &mut self.host.zones[index];
        if zone.driver == DriverState::Unsupported && size_bytes != zone.plugged_bytes {
            return;
        }
        let least_bytes = available_bytes.max(zone.plugged_bytes.next_multiple_of(BLOCK_BYTES));
        (zone.shortfall, zone.is_withdrawn) = (None, false);
        zone.requested_bytes = size_bytes.min(least_bytes);
        zone.held_bytes = goal_bytes.saturating_sub(size_bytes);
        if zone.requested_bytes < size_bytes {
            zone.shortfall = Some(Shortfall { reason: "pool-full", wanted_bytes: goal_bytes });
            zone.held_bytes = 0;
        }
        if zone.held_bytes == 0 {
            self.goals[index] = None;
        }
        if self.follows {
            zone.plugged_bytes = zone.requested_bytes;
        }
    }

    /// Checks that a plan changes the tiers in the correct order.
    fn check_order(&mut self, plan: &Plan, before: &HostView) {
        // A dry run computes sizes that are never requested.
        if plan.dry_run {
            return;
        }
        let any = |tier, holds: fn(&ZoneSizes, u64, bool) -> bool| {
            before.zones.iter().zip(&plan.targets).zip(self.pinned).any(
                |((zone, target), pinned)| {
                    zone.tier == tier && holds(zone, target.requested_bytes, pinned)
                },
            )
        };
        let takes_dram = any(Tier::Dram, |zone, bytes, _| bytes < zone.requested_bytes);
        let leaves_pm = any(Tier::Pm, |zone, bytes, pinned| !pinned && bytes > zone.floor_bytes);
        let gives_pm = any(Tier::Pm, |zone, bytes, _| bytes > zone.requested_bytes);
        let leaves_dram = any(Tier::Dram, |zone, bytes, _| bytes < zone.max_bytes);
        let takes_dram_first = plan.direction == Direction::Shrink && takes_dram && leaves_pm;
        let gives_pm_first = self.follows && gives_pm && leaves_dram;
        self.expect(!takes_dram_first, "DRAM goes before PM", plan);
        self.expect(!gives_pm_first, "PM comes before DRAM", plan);
    }
}

impl Devices for State {
    fn perform(&mut self, mut requests: Vec<Request>) {
        if let Some(fault) = self.fault {
            fault.distort(&mut requests, self);
        }
        let before = self.host.clone();
        self.check_sum(&requests);
        for request in &requests {
            match *request {
                Request::Size(zone, bytes) => {
                    self.check_size(zone, bytes);
                    self.size(zone, bytes, bytes);
                }
                Request::Step { zone, size_bytes, goal_bytes } => {
                    self.check_step(zone, size_bytes, goal_bytes);
                    self.size(zone, size_bytes, goal_bytes);
                }
                Request::Remind(id) => {
                    let is_expected = !self.rules.dry_run || self.pinned[id.0 as usize];
                    self.expect(is_expected, "reminded in a dry run", id);
                }
                Request::ReportHeld(_) | Request::Statistics => {}
            }
        }
        self.requests.extend(&requests);
        self.steps.push((requests, before));
    }

    fn host(&mut self) -> HostView {
        let mut host = self.host.clone();
        let ballooned_bytes = self.ballooned_bytes();
        host.balloon_state.iter_mut().for_each(|state| state.ballooned_bytes = ballooned_bytes);
        self.fault.iter().for_each(|fault| fault.distort_host(&mut host));
        host
    }
}

impl World {
    pub(crate) fn new(policy: Policy, follows: bool, fault: Option<Fault>) -> Self {
        let zone = ZoneSizes::empty;
        let mut pm = zone(2, Tier::Pm, 512 * MIB);
        if !follows {
            (pm.floor_bytes, pm.requested_bytes, pm.plugged_bytes) = (16 * MIB, 16 * MIB, 16 * MIB);
        }
        let (balloon, dram) = (zone(0, Tier::Dram, 128 * MIB), zone(1, Tier::Dram, 256 * MIB));
        let host = HostView {
            zones: vec![balloon, dram, pm, zone(3, Tier::Pm, 640 * MIB)],
            boot_bytes: BOOT_BYTES,
            pool_free_bytes: 2048 * MIB,
            balloon: Some(ZoneId(0)),
            ..HostView::default()
        };
        let available_bytes = [u64::MAX; ZONES];
        let mut state = State { host, available_bytes, follows, fault, ..State::default() };
        let (host, rules) = (state.host(), state.rules.clone());
        let mut governor = Governor::new(policy, rules, false, &host, TimeMs(0)).expect("in range");
        governor.use_statistics(Onlining::CommandLine);
        let mut world = World {
            governor,
            state,
            now: TimeMs(1_000),
            seq: 0,
            suspended_ms: 0,
            booted_ms: 0,
            is_counted: true,
            driver_generation: 1,
            is_connected: false,
        };
        world.connect();
        world
    }

    /// Returns the first violation whose message contains `text`.
    pub(crate) fn first_violation(&self, text: &str) -> Option<&String> {
        self.state.violations.iter().find(|violation| violation.contains(text))
    }

    fn connect(&mut self) {
        self.is_connected = true;
        self.handle(Event::AgentConnected);
        self.message(parse_line(HELLO));
    }

    fn message(&mut self, message: Result<AgentMessage, Refusal>) {
        self.handle(Event::Message { message, boottime: self.now + self.suspended_ms });
    }

    /// Handles an event twice from the same state, and checks that both results are the same.
    pub(crate) fn handle(&mut self, event: Event) {
        let (governor, state) = (self.governor.clone(), self.state.clone());
        let effects = self.run(event.clone());
        (self.governor, self.state) = (governor, State { is_repeated: true, ..state });
        let again = self.run(event);
        self.state.is_repeated = false;
        self.state.expect(
            effects == again,
            "effects differ upon the same inputs",
            (effects, again),
        );
    }

    fn run(&mut self, event: Event) -> String {
        self.state.steps.clear();
        let host = self.state.host();
        let notes = self.governor.run(event, host, &mut self.state, self.now);
        let steps = std::mem::take(&mut self.state.steps);
        let count = steps.len();
        self.state.expect(count == notes.len() && count <= 3, "number of steps", count);
        for ((requests, before), notes) in steps.iter().zip(&notes) {
            let stepped_bytes = requests.iter().map(|request| match *request {
                Request::Step { zone, size_bytes, .. } if before.balloon != Some(zone) => {
                    new_bytes(&before.zones[zone.0 as usize], size_bytes)
                }
                _ => 0,
            });
            let stepped_bytes: u64 = stepped_bytes.sum();
            let room_bytes = self.governor.controller().describable_bytes(before, self.now);
            let is_describable = stepped_bytes <= room_bytes;
            self.state.expect(is_describable, "more than the guest can describe", requests);
            self.state.notes.extend(notes.notes.iter().cloned());
            for note in &notes.notes {
                if let Note::Plan(decided) = note {
                    self.state.check_order(&decided.plan, before);
                }
            }
        }
        for (index, goal) in self.state.goals.into_iter().enumerate() {
            let zone = self.state.host.zones[index];
            let is_expected = zone.held_bytes == 0 || goal.is_some();
            self.state.expect(is_expected, "waits without a goal", zone);
        }
        format!("{steps:?} {notes:?}")
    }

    pub(crate) fn apply(&mut self, event: &VmEvent, ms: u64) {
        self.now = self.now + ms;
        let state = &mut self.state;
        match *event {
            VmEvent::Report(free_permille, online_policy) => {
                self.seq += 1;
                self.report(free_permille, online_policy);
            }
            VmEvent::FalseReport(numbers) => {
                self.seq += 1;
                self.false_report(numbers);
            }
            VmEvent::StaleReport => self.report(500, OnlinePolicy::OnlineMovable),
            VmEvent::RefusedLine => self.message(Err(Refusal::NotUtf8)),
            VmEvent::Agent(true) => self.connect(),
            VmEvent::Agent(false) => {
                self.is_connected = false;
                self.handle(Event::AgentDisconnected);
            }
            VmEvent::Tick => self.handle(Event::Tick),
            VmEvent::Follow(zone, permille) => {
                let zone = &mut state.host.zones[zone];
                let share = |bytes: u64| bytes * permille / 1000 / BLOCK_BYTES * BLOCK_BYTES;
                if zone.driver == DriverState::Ready {
                    zone.plugged_bytes += share(zone.outstanding_grow_bytes());
                    zone.plugged_bytes -= share(zone.outstanding_shrink_bytes());
                }
            }
            VmEvent::Driver(zone, driver) => self.set_driver(zone, driver),
            VmEvent::Host(zone, permille) => {
                let bytes = state.host.zones[zone].max_bytes * permille / 1000;
                state.available_bytes[zone] = bytes / BLOCK_BYTES * BLOCK_BYTES;
            }
            VmEvent::Pool(mib) => state.host.pool_free_bytes = mib * MIB,
            VmEvent::Statistics(free_permille) => self.send_statistics(free_permille),
            VmEvent::Resize(zone, blocks) => self.size(zone, blocks, Event::Resize),
            VmEvent::Boot(zone, blocks) => self.size(zone, blocks, Event::BootSize),
            VmEvent::Dimm => self.handle(Event::AddDimm(128 * MIB)),
            _ => self.change(event),
        }
    }

    /// Changes the governor's settings as `event` describes.
    fn change(&mut self, event: &VmEvent) {
        let (state, mut change) = (&mut self.state, Change::default());
        match *event {
            VmEvent::Resume(zone) => {
                for index in (0..ZONES).filter(|index| zone.is_none_or(|zone| zone == *index)) {
                    (state.pinned[index], state.goals[index]) = (false, None);
                }
                state.is_paused &= zone.is_some();
                let zone = zone.map(|zone| ZoneId(zone as u32));
                change.resume = state.unless_fault(Fault::StepsAfterResume, zone);
            }
            VmEvent::Pause(on) => {
                state.is_paused = on;
                change.paused = state.unless_fault(Fault::ActsInPause, on);
            }
            VmEvent::DryRun(on) => {
                state.rules.dry_run = on;
                change.dry_run = state.unless_fault(Fault::ActsInDryRun, on);
            }
            VmEvent::Policy(index) => change.policy = Some(policy(index)),
            VmEvent::Bounds(floor, ceiling) => {
                state.rules.floor_bytes = floor * BLOCK_BYTES;
                state.rules.ceiling_bytes = ceiling * BLOCK_BYTES;
                change.rules = state.unless_fault(Fault::IgnoresCeiling, state.rules.clone());
            }
            _ => unreachable!("{event:?} does not change the governor's settings"),
        }
        self.handle(Event::Change(change));
    }

    /// Sets the state of a zone's driver. On the next tick, the governor drops goals that need the
    /// driver if it is not usable.
    fn set_driver(&mut self, index: usize, driver: DriverState) {
        let zone = &mut self.state.host.zones[index];
        if driver == DriverState::Unsupported {
            if self.state.host.balloon == Some(zone.id) {
                return;
            }
            self.state.goals[index] = None;
            if zone.driver != driver {
                zone.is_withdrawn = zone.requested_bytes + zone.held_bytes != zone.plugged_bytes;
                (zone.requested_bytes, zone.held_bytes) = (zone.plugged_bytes, 0);
            }
        }
        zone.driver = driver;
        self.handle(Event::Tick);
    }

    fn size(&mut self, zone: usize, blocks: u64, event: fn(ResizeTarget) -> Event) {
        let sizes = &self.state.host.zones[zone];
        let Ok(target) = ResizeTarget::parse(sizes, blocks * BLOCK_BYTES) else { return };
        let event = event(target);
        self.state.pinned[zone] |= matches!(event, Event::Resize(_));
        self.state.goals[zone] = Some(target.size_bytes());
        self.handle(event);
        let sizes = self.state.host.zones[zone];
        let has_bytes = sizes.requested_bytes + sizes.held_bytes;
        let is_carried_out = has_bytes == target.size_bytes() && sizes.lowered_by().is_none();
        let is_expected =
            is_carried_out || has_bytes < target.size_bytes() && sizes.shortfall.is_some();
        self.state.expect(is_expected, "size of a client is not requested", (target, sizes));
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        let ballooned_bytes = if self.is_counted { self.state.ballooned_bytes() } else { 0 };
        BOOT_BYTES - 152 * MIB + self.state.host.plugged_bytes() + ballooned_bytes
    }

    fn report(&mut self, free_permille: u64, online_policy: OnlinePolicy) {
        self.send_report(self.raw(free_permille, online_policy));
    }

    fn false_report(&mut self, [total_bytes, free_pages, mark_pages, count]: [u64; 4]) {
        let mut raw = self.raw(0, OnlinePolicy::OnlineMovable);
        // A report with more memory than the VM can have is always refused. Therefore the total is
        // kept below that limit.
        let total_bytes = (total_bytes % self.state.host.max_memory_bytes()).max(128 * MIB);
        let free_pages = free_pages % (total_bytes / 4096);
        raw.memory = Memory {
            total_bytes,
            free_bytes: free_pages * 2048,
            available_bytes: free_pages * 4096,
            swap_total_bytes: total_bytes,
            swap_free_bytes: free_pages * 4096,
            ..Memory::default()
        };
        let high_pages = mark_pages % (total_bytes / 4096);
        let zone = &mut raw.zones[0];
        (zone.free_pages, zone.managed_pages) = (free_pages, total_bytes / 4096);
        (zone.min_pages, zone.low_pages, zone.high_pages) =
            (high_pages / 4, high_pages / 3, high_pages);
        let some_us = count % (raw.monotonic_ms * 1000);
        raw.stall = Stall { some_us, full_us: some_us / 2, ..Stall::default() };
        raw.counters = Counters {
            pswpin: count,
            pswpout: mark_pages,
            workingset_refault_anon: count,
            ..Counters::default()
        };
        self.send_report(raw);
    }

    pub(crate) fn send_report(&mut self, raw: RawReport) {
        if self.is_connected {
            let report = Report::try_from(raw).expect("sound");
            self.message(Ok(AgentMessage::Report(report)));
        }
    }

    pub(crate) fn raw(&self, free_permille: u64, online_policy: OnlinePolicy) -> RawReport {
        let total_bytes = self.total_bytes();
        let managed_pages = total_bytes / 4096;
        let free_pages = managed_pages * free_permille / 1000;
        RawReport {
            version: PROTOCOL_VERSION,
            seq: self.seq,
            monotonic_ms: self.now.0 + self.suspended_ms - self.booted_ms,
            memory: Memory {
                total_bytes,
                free_bytes: free_pages * 4096,
                available_bytes: (free_pages * 4096).saturating_sub(8 * MIB),
                ..Memory::default()
            },
            zones: vec![Zone {
                kind: ZoneKind::Dma32,
                free_pages,
                min_pages: 500,
                low_pages: 750,
                high_pages: 1000,
                managed_pages,
                ..Zone::default()
            }],
            blocks: Blocks { online_policy, block_bytes: 128 * MIB, ..Blocks::default() },
            ..RawReport::default()
        }
    }

    fn send_statistics(&mut self, free_permille: u64) {
        let total_bytes = self.total_bytes();
        let free_bytes = total_bytes * free_permille / 1000;
        // The tags are those of virtio 1.3, 5.5.6.4: free, total, available and caches.
        let entries = [(4u16, free_bytes), (5, total_bytes), (6, free_bytes), (7, 0)];
        let bytes =
            entries.map(|(tag, value)| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat());
        let statistics = Statistics::parse(&bytes.concat()).expect("whole entries");
        let sample =
            Sample { statistics, number: self.now.0, driver_generation: self.driver_generation };
        let (ballooned_bytes, is_counted) = (self.state.ballooned_bytes(), self.is_counted);
        self.state.host.balloon_state =
            Some(BalloonState { sample: Some(sample), ballooned_bytes, is_counted });
        self.handle(Event::Tick);
    }
}
