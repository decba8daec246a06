//! A VM around the governor, and what must hold of its requests.

use balloon::controller::Rules;
use balloon::governor::{
    Change, Devices, Event, Governor, Note, Onlining, Request, ResizeTarget, StepNotes,
};
use balloon::plan::{Direction, Plan};
use balloon::policy::Policy;
use balloon::proto::{
    AgentMessage, Blocks, Memory, OnlinePolicy, PROTOCOL_VERSION, RawReport, Refusal, Report, Zone,
    ZoneKind,
};
use balloon::statistics::{BalloonState, Sample, Statistics};
use balloon::{
    BLOCK_BYTES, DriverState, HostView, MIB, Shortfall, Tier, TimeMs, ZoneId, ZoneSizes, parse_line,
};

use super::broken::Broken;
use super::policy;

/// The balloon, DRAM and two zones of PM.
pub const ZONES: usize = 4;

const HELLO: &[u8] = br#"{"type":"hello","version":1,"agent_version":"0.1.0","kernel_release":"6.12","preemption":"voluntary","page_size_bytes":4096}"#;

const BOOT_BYTES: u64 = 512 * MIB;

/// An event of the VM, or a change of its host or guest.
#[derive(Clone, Debug)]
pub enum Happening {
    Report {
        free_permille: u64,
        movable: bool,
    },
    /// Repeats the number of the last report.
    StaleReport,
    RefusedLine,
    /// The agent connects or leaves.
    Agent {
        on: bool,
    },
    Tick,
    /// The guest follows a zone's request, by this share.
    Follow {
        zone: usize,
        permille: u64,
    },
    Driver {
        zone: usize,
        driver: usize,
    },
    /// The host has this share of a zone's maximum from now on.
    Host {
        zone: usize,
        permille: u64,
    },
    Pool {
        mib: u64,
    },
    /// The balloon's driver sends statistics.
    Statistics {
        free_permille: u64,
    },
    Size {
        zone: usize,
        blocks: u64,
        at_boot: bool,
    },
    Resume {
        zone: Option<usize>,
    },
    Pause {
        on: bool,
    },
    DryRun {
        on: bool,
    },
    Policy {
        index: usize,
    },
    /// Bounds of all zones together, in blocks.
    Bounds {
        floor: u64,
        ceiling: u64,
    },
    Dimm,
}

/// Devices and what a client has set, as the checks know them.
#[derive(Clone, Debug)]
pub struct State {
    pub host: HostView,
    /// Memory that the host has for each zone.
    available_bytes: [u64; ZONES],
    pub pinned: [bool; ZONES],
    is_paused: bool,
    is_dry_run: bool,
    rules: Rules,
    follows: bool,
    broken: Option<Broken>,
    /// Requests of each step since the last event, with the host before them.
    steps: Vec<(Vec<Request>, HostView)>,
    wrong: Vec<String>,
}

pub struct World {
    governor: Governor,
    state: State,
    now: TimeMs,
    seq: u64,
    sample: u64,
    is_connected: bool,
}

impl State {
    pub fn zone(&self, id: ZoneId) -> &ZoneSizes {
        &self.host.zones[id.0 as usize]
    }

    fn expect(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.wrong.push(what());
        }
    }

    /// Checks a request before it is performed.
    fn check(&mut self, request: Request) {
        let aligned = |bytes: u64| bytes.is_multiple_of(BLOCK_BYTES);
        match request {
            Request::Size(id, bytes) => {
                let (zone, index) = (*self.zone(id), id.0 as usize);
                // A client may have sized the zone below its floor.
                let floor_bytes = zone.floor_bytes.min(zone.requested_bytes);
                let is_valid = aligned(bytes) && (floor_bytes..=zone.max_bytes).contains(&bytes);
                self.expect(is_valid, || format!("{bytes} bytes of {zone:?}"));
                self.expect(!self.pinned[index], || format!("{id} is pinned"));
                self.expect(!self.is_dry_run, || format!("{id} is sized in a dry run"));
                self.expect(!self.is_paused, || format!("{id} is sized in a pause"));
                // The device ignores a request for less. Memory stays until a driver unplugs it.
                let is_served =
                    zone.driver != DriverState::Unsupported || bytes <= zone.requested_bytes;
                self.expect(is_served, || format!("{id} has no driver for {bytes} bytes"));
            }
            Request::Step { zone: id, size_bytes, goal_bytes } => {
                let zone = *self.zone(id);
                let is_valid = aligned(size_bytes)
                    && aligned(goal_bytes)
                    && size_bytes <= goal_bytes
                    && goal_bytes <= zone.max_bytes;
                self.expect(is_valid, || format!("{size_bytes} of {goal_bytes} of {zone:?}"));
            }
            Request::Remind(id) => {
                let is_expected = !self.is_dry_run || self.pinned[id.0 as usize];
                self.expect(is_expected, || format!("{id} is reminded in a dry run"));
            }
            Request::ReportHeld(_) | Request::AskStatistics => {}
        }
    }

    /// Sets the size as far as the host has memory, as a device does. A device that has refused its
    /// driver ignores the request.
    fn size(&mut self, id: ZoneId, size_bytes: u64, goal_bytes: u64) {
        let available_bytes = self.available_bytes[id.0 as usize];
        let zone = &mut self.host.zones[id.0 as usize];
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
        if self.follows {
            zone.plugged_bytes = zone.requested_bytes;
        }
    }

    /// Checks a plan with the requests that follow from it.
    fn check_plan(&mut self, plan: &Plan, before: &HostView) {
        // A dry run decides upon sizes that no device has.
        if plan.dry_run {
            return;
        }
        let targets = || before.zones.iter().zip(&plan.targets).zip(self.pinned);
        let requested: u64 = plan.targets.iter().map(|target| target.requested_bytes).sum();
        let kept = requested >= self.rules.floor_bytes.min(before.requested_bytes());
        let is_shrink = plan.direction == Direction::Shrink;
        let takes_dram = targets().any(|((zone, target), _)| {
            zone.tier == Tier::Dram && target.requested_bytes < zone.requested_bytes
        });
        let leaves_pm = targets().any(|((zone, target), pinned)| {
            zone.tier == Tier::Pm && !pinned && target.requested_bytes > zone.floor_bytes
        });
        let gives_pm = targets().any(|((zone, target), _)| {
            zone.tier == Tier::Pm && target.requested_bytes > zone.requested_bytes
        });
        let leaves_dram = targets().any(|((zone, target), _)| {
            zone.tier == Tier::Dram && target.requested_bytes < zone.max_bytes
        });
        self.expect(kept, || format!("below the floor: {plan:?}"));
        self.expect(!(is_shrink && takes_dram && leaves_pm), || format!("DRAM first: {plan:?}"));
        let is_in_order = !self.follows || !gives_pm || !leaves_dram;
        self.expect(is_in_order, || format!("PM before DRAM: {plan:?}"));
    }
}

impl Devices for State {
    fn perform(&mut self, mut requests: Vec<Request>) {
        if let Some(broken) = self.broken {
            broken.distort(&mut requests, self);
        }
        let before = self.host.clone();
        for request in &requests {
            self.check(*request);
            match *request {
                Request::Size(zone, bytes) => self.size(zone, bytes, bytes),
                Request::Step { zone, size_bytes, goal_bytes } => {
                    self.size(zone, size_bytes, goal_bytes);
                }
                Request::Remind(_) | Request::ReportHeld(_) | Request::AskStatistics => {}
            }
        }
        let is_sized = requests.iter().any(|request| matches!(request, Request::Size(..)));
        let (sum, old) = (self.host.requested_bytes(), before.requested_bytes());
        // A device lowers requests that its host cannot serve, which is not the governor's doing.
        let is_lowered = self.host.zones.iter().any(|zone| zone.shortfall.is_some());
        let kept = !is_sized || is_lowered || sum >= self.rules.floor_bytes.min(old);
        self.expect(kept, || format!("{sum} bytes are below the floor"));
        self.steps.push((requests, before));
    }

    fn host(&mut self) -> HostView {
        let mut host = self.host.clone();
        self.broken.iter().for_each(|broken| broken.distort_host(&mut host));
        host
    }
}

impl World {
    pub fn new(policy: Policy, follows: bool, broken: Option<Broken>) -> Self {
        let zone = |id, tier, floor_bytes, max_mib| ZoneSizes {
            floor_bytes,
            requested_bytes: floor_bytes,
            plugged_bytes: floor_bytes,
            ..ZoneSizes::empty(id, tier, max_mib * MIB)
        };
        let host = HostView {
            zones: vec![
                zone(0, Tier::Dram, 0, 128),
                zone(1, Tier::Dram, 0, 256),
                zone(2, Tier::Pm, if follows { 0 } else { 16 * MIB }, 512),
                zone(3, Tier::Pm, 0, 640),
            ],
            boot_bytes: BOOT_BYTES,
            pool_free_bytes: 2048 * MIB,
            balloon: Some(ZoneId(0)),
            ..HostView::default()
        };
        let rules = Rules::default();
        let mut state = State {
            host,
            available_bytes: [u64::MAX; ZONES],
            pinned: [false; ZONES],
            is_paused: false,
            is_dry_run: false,
            rules: rules.clone(),
            follows,
            broken,
            steps: Vec::new(),
            wrong: Vec::new(),
        };
        let host = state.host();
        let mut governor = Governor::new(policy, rules, false, &host, TimeMs(0)).expect("in range");
        governor.use_statistics(Onlining::CommandLine);
        let mut world =
            World { governor, state, now: TimeMs(1_000), seq: 0, sample: 0, is_connected: false };
        world.connect();
        world
    }

    /// Violated invariants.
    pub fn wrong(&self) -> &[String] {
        &self.state.wrong
    }

    fn connect(&mut self) {
        self.is_connected = true;
        self.handle(Event::AgentConnected);
        self.message(parse_line(HELLO));
    }

    fn message(&mut self, message: Result<AgentMessage, Refusal>) {
        self.handle(Event::Message { message, with_sleep: self.now });
    }

    fn change(&mut self, change: Change) {
        self.handle(Event::Change(change));
    }

    /// Handles an event twice from the same state, and checks that the effects are the same.
    fn handle(&mut self, event: Event) {
        let (mut governor, mut state) = (self.governor.clone(), self.state.clone());
        let steps = self.run(event.clone());
        let effects = format!("{:?} {:?}", self.state.steps, steps);
        std::mem::swap(&mut self.governor, &mut governor);
        std::mem::swap(&mut self.state, &mut state);
        if self.state.broken == Some(Broken::Wavers) {
            self.now = self.now + 100_000;
        }
        let again = self.run(event);
        let again = format!("{:?} {:?}", self.state.steps, again);
        self.state.expect(effects == again, || "effects differ upon the same inputs".to_owned());
    }

    fn run(&mut self, event: Event) -> Vec<StepNotes> {
        self.state.steps.clear();
        let host = self.state.host();
        let steps = self.governor.run(event, host, &mut self.state, self.now);
        let count = self.state.steps.len();
        self.state.expect(count == steps.len() && count <= 3, || format!("{count} steps"));
        let before: Vec<_> = self.state.steps.iter().map(|(_, host)| host.clone()).collect();
        for (step, before) in steps.iter().zip(&before) {
            for note in &step.notes {
                if let Note::Decided(decided) = note {
                    self.state.check_plan(&decided.plan, before);
                }
            }
        }
        steps
    }

    pub fn happen(&mut self, happening: &Happening, ms: u64) {
        self.now = self.now + ms;
        match *happening {
            Happening::Report { free_permille, movable } => {
                self.seq += 1;
                self.report(free_permille, movable);
            }
            Happening::StaleReport => self.report(500, true),
            Happening::RefusedLine => self.message(Err(Refusal::NotUtf8)),
            Happening::Agent { on: true } => self.connect(),
            Happening::Agent { on: false } => {
                self.is_connected = false;
                self.handle(Event::AgentGone);
            }
            Happening::Tick => self.handle(Event::Tick),
            Happening::Follow { zone, permille } => {
                let zone = &mut self.state.host.zones[zone];
                let share = |bytes: u64| bytes * permille / 1000 / BLOCK_BYTES * BLOCK_BYTES;
                if zone.driver == DriverState::Ready {
                    zone.plugged_bytes += share(zone.outstanding_grow_bytes());
                    zone.plugged_bytes -= share(zone.outstanding_shrink_bytes());
                }
            }
            Happening::Driver { zone, driver } => self.set_driver(zone, DriverState::ALL[driver]),
            Happening::Host { zone, permille } => {
                let bytes = self.state.host.zones[zone].max_bytes * permille / 1000;
                self.state.available_bytes[zone] = bytes / BLOCK_BYTES * BLOCK_BYTES;
            }
            Happening::Pool { mib } => self.state.host.pool_free_bytes = mib * MIB,
            Happening::Statistics { free_permille } => self.send_statistics(free_permille),
            Happening::Size { zone, blocks, at_boot } => self.size(zone, blocks, at_boot),
            Happening::Resume { zone } => {
                for (index, pinned) in self.state.pinned.iter_mut().enumerate() {
                    *pinned &= zone.is_some_and(|zone| zone != index);
                }
                self.state.is_paused &= zone.is_some();
                let zone = zone.map(|zone| ZoneId(zone as u32));
                self.change(Change { resume: Some(zone), ..Change::default() });
            }
            Happening::Pause { on } => {
                self.state.is_paused = on;
                let paused = (self.state.broken != Some(Broken::ActsInPause)).then_some(on);
                self.change(Change { paused, ..Change::default() });
            }
            Happening::DryRun { on } => {
                self.state.is_dry_run = on;
                let dry_run = (self.state.broken != Some(Broken::ActsInDryRun)).then_some(on);
                self.change(Change { dry_run, ..Change::default() });
            }
            Happening::Policy { index } => {
                self.change(Change { policy: Some(policy(index)), ..Change::default() });
            }
            Happening::Bounds { floor, ceiling } => {
                let rules = Rules {
                    floor_bytes: floor * BLOCK_BYTES,
                    ceiling_bytes: ceiling * BLOCK_BYTES,
                    ..self.governor.controller().rules().clone()
                };
                self.state.rules = rules.clone();
                self.change(Change { rules: Some(rules), ..Change::default() });
            }
            Happening::Dimm => self.handle(Event::AddDimm(128 * MIB)),
        }
    }

    fn set_driver(&mut self, zone: usize, driver: DriverState) {
        let is_balloon = self.state.host.balloon == Some(ZoneId(zone as u32));
        let zone = &mut self.state.host.zones[zone];
        if driver == DriverState::Unsupported && is_balloon {
            return;
        }
        if driver == DriverState::Unsupported && zone.driver != driver {
            zone.is_withdrawn = zone.requested_bytes + zone.held_bytes != zone.plugged_bytes;
            (zone.requested_bytes, zone.held_bytes) = (zone.plugged_bytes, 0);
        }
        zone.driver = driver;
    }

    fn size(&mut self, zone: usize, blocks: u64, at_boot: bool) {
        let Ok(target) = ResizeTarget::parse(&self.state.host.zones[zone], blocks * BLOCK_BYTES)
        else {
            return;
        };
        if at_boot {
            self.handle(Event::BootWith(target));
        } else {
            self.state.pinned[zone] = true;
            self.handle(Event::Resize(target));
        }
    }

    fn total_bytes(&self) -> u64 {
        BOOT_BYTES - 152 * MIB + self.state.host.plugged_bytes()
    }

    fn report(&mut self, free_permille: u64, movable: bool) {
        if !self.is_connected {
            return;
        }
        let total_bytes = self.total_bytes();
        let managed_pages = total_bytes / 4096;
        let free_pages = managed_pages * free_permille / 1000;
        let raw = RawReport {
            version: PROTOCOL_VERSION,
            seq: self.seq,
            monotonic_ms: self.now.0,
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
            blocks: Blocks {
                online_policy: match movable {
                    true => OnlinePolicy::OnlineMovable,
                    false => OnlinePolicy::Online,
                },
                block_bytes: 128 * MIB,
                ..Blocks::default()
            },
            ..RawReport::default()
        };
        let report = Report::try_from(raw).expect("sound");
        self.message(Ok(AgentMessage::Report(report)));
    }

    fn send_statistics(&mut self, free_permille: u64) {
        self.sample += 1;
        let total_bytes = self.total_bytes();
        let free_bytes = total_bytes * free_permille / 1000;
        // Tags of virtio 1.3, 5.5.6.4: free, total, available, caches.
        let entries = [(4u16, free_bytes), (5, total_bytes), (6, free_bytes), (7, 0)];
        let bytes =
            entries.map(|(tag, value)| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat());
        let statistics = Statistics::parse(&bytes.concat()).expect("whole entries");
        let sample = Sample { statistics, number: self.sample, driver_life: 1 };
        let balloon = &self.state.host.zones[0];
        let ballooned_bytes = balloon.max_bytes.saturating_sub(balloon.plugged_bytes);
        self.state.host.balloon_state =
            Some(BalloonState { sample: Some(sample), ballooned_bytes, is_counted: true });
        self.handle(Event::Tick);
    }
}
