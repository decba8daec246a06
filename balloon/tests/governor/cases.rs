//! Sequences of events, each with one expected result. The checks in `World` run as well.

use balloon::controller::{ResizeStatus, Rules};
use balloon::governor::{AgentState, Change, Event, Note, Onlining, PlanNote, Request};
use balloon::plan::Reason;
use balloon::policy::{Policy, fixed};
use balloon::proto::OnlinePolicy::{Offline, OnlineMovable};
use balloon::proto::{Measure, RawReport};
use balloon::{BLOCK_BYTES, DriverState, MIB, ZoneId};

use super::policy;
use super::world::{VmEvent, World, ZONES};

const PSI: usize = 0;
const PMB: usize = 7;
const OFF: usize = 11;

const DRAM: usize = 1;
/// Index of the second PM zone, which always has a floor of 0.
const PM: usize = 3;

fn ready(index: usize) -> World {
    World::new(policy(index), true, None)
}

/// Guest that does not follow requests.
fn slow(index: usize) -> World {
    World::new(policy(index), false, None)
}

impl World {
    fn tick(&mut self, ms: u64) {
        self.apply(&VmEvent::Tick, ms);
    }

    fn report_free(&mut self, free_permille: u64) {
        self.apply(&VmEvent::Report(free_permille, OnlineMovable), 50);
    }

    /// Sends a report after `change` was applied to it, 1 s after the last event.
    fn report_with(&mut self, free_permille: u64, change: impl FnOnce(&mut RawReport)) {
        self.now = self.now + 1_000;
        self.seq += 1;
        let mut raw = self.raw(free_permille, OnlineMovable);
        change(&mut raw);
        self.send_report(raw);
    }

    /// Every 250 ms, sends statistics of a guest that uses `used_mib`.
    fn send_statistics_for(&mut self, seconds: u64, used_mib: u64) {
        for _ in 0..seconds * 4 {
            let free_permille = self.free_permille(used_mib);
            self.apply(&VmEvent::Statistics(free_permille), 250);
        }
    }

    fn free_permille(&self, used_mib: u64) -> u64 {
        let has_bytes = 360 * MIB + self.state.host.plugged_bytes();
        has_bytes.saturating_sub(used_mib * MIB) * 1000 / self.total_bytes()
    }

    fn requested_mib(&self) -> [u64; ZONES] {
        std::array::from_fn(|index| self.state.host.zones[index].requested_bytes / MIB)
    }

    fn status(&self, zone: usize) -> ResizeStatus {
        let tracker = self.governor.controller().tracker(ZoneId(zone as u32)).expect("a zone");
        tracker.status(0, 5_000, self.now)
    }

    fn refused(&self) -> Vec<(&str, u64)> {
        let refused = &self.governor.counters().refused;
        refused.iter().map(|(label, count)| (*label, *count)).collect()
    }

    /// Returns the total memory and the nodes in the last report.
    fn reported(&self) -> (u64, Vec<u32>) {
        let (_, report) = self.governor.last_report().expect("reported");
        let nodes = report.zones().iter().map(|zone| zone.node).collect();
        (report.memory().total_bytes, nodes)
    }

    fn reports(&self) -> u64 {
        self.governor.counters().reports
    }

    /// Zones for which the governor has requested to report that their size is out of reach.
    fn held(&self) -> Vec<u32> {
        let held = |request: &Request| match request {
            Request::ReportHeld(zone) => Some(zone.0),
            _ => None,
        };
        self.state.requests.iter().filter_map(held).collect()
    }

    /// Duration and size of each shortage that has ended.
    fn ended(&self) -> Vec<(u64, u64)> {
        let ended = |note: &Note| match note {
            Note::Online { took_ms, grown_bytes } => Some((*took_ms, *grown_bytes)),
            _ => None,
        };
        self.state.notes.iter().filter_map(ended).collect()
    }

    fn fix(&mut self, mib: u64, rules: Rules) {
        let policy = Policy::Fixed(fixed::Params { size_bytes: mib * MIB });
        let change = Change { policy: Some(policy), rules: Some(rules), ..Change::default() };
        self.handle(Event::Change(change));
    }

    fn statistics_requests(&self) -> usize {
        self.state.requests.iter().filter(|request| **request == Request::Statistics).count()
    }

    fn assert_sound(&self) {
        assert_eq!(self.first_violation(""), None);
    }
}

#[test]
fn agent_is_live_silent_or_gone() {
    let mut world = ready(PSI);
    world.report_free(500);
    let state = |world: &World, ms| world.governor.agent_state(world.now + ms);
    assert_eq!([0, 2_999].map(|ms| state(&world, ms)), [AgentState::Live; 2]);
    assert_eq!(state(&world, 3_000), AgentState::Silent);
    world.apply(&VmEvent::RefusedLine, 3_000);
    assert_eq!(state(&world, 0), AgentState::Silent, "a refused line does not count as a report");
    world.report_free(500);
    assert_eq!(state(&world, 0), AgentState::Live);
    world.apply(&VmEvent::Agent(false), 1);
    assert_eq!([0, 60_000].map(|ms| state(&world, ms)), [AgentState::Gone; 2]);
    world.apply(&VmEvent::Agent(true), 60_000);
    assert_eq!([0, 3_000].map(|ms| state(&world, ms)), [AgentState::Live, AgentState::Silent]);
}

#[test]
fn refusals_are_counted_by_reason_and_noted_at_powers_of_two() {
    let mut world = ready(PSI);
    world.apply(&VmEvent::Statistics(500), 250);
    world.report_free(500);
    (0..4).for_each(|_| world.apply(&VmEvent::RefusedLine, 1));
    world.apply(&VmEvent::StaleReport, 1);
    // A VM of this size cannot have 1 TiB of memory.
    world.report_with(500, |raw| raw.memory.total_bytes = 1 << 40);
    assert_eq!(world.refused(), [("not_utf8", 4), ("out_of_order", 1), ("out_of_range", 1)]);
    let noted = world.state.notes.iter().filter_map(|note| match note {
        Note::Refused { refusal, by_agent: true, count } => Some((refusal.label(), *count)),
        _ => None,
    });
    let [first, second, fourth] = [1, 2, 4].map(|count| ("not_utf8", count));
    let others = [("out_of_order", 1), ("out_of_range", 1)];
    assert!(noted.eq([first, second, fourth].into_iter().chain(others)));
    assert_eq!(world.reports(), 2);
    world.apply(&VmEvent::FalseReport([1 << 30, 9, 9, 9]), 1);
    assert_eq!(world.reports(), 3);
    // The first statistics of a new kernel are also refused, and the next ones are accepted.
    world.driver_generation += 1;
    world.apply(&VmEvent::Statistics(1_001), 250);
    let is_of_statistics = |note: &Note| matches!(note, Note::Refused { by_agent: false, .. });
    assert!(world.state.notes.iter().any(is_of_statistics));
    assert_eq!((world.reports(), world.refused()[2]), (3, ("out_of_range", 2)));
    world.apply(&VmEvent::Statistics(500), 250);
    assert_eq!(world.reports(), 4);
}

/// While the host is suspended, only the guest's clock runs.
#[test]
fn host_sleep_makes_reports_neither_invalid_nor_late() {
    let mut world = slow(PSI);
    world.report_free(0);
    let before = world.state.host.requested_bytes();
    world.suspended_ms = 8 * 3_600_000;
    // A pause has the same effect, because no time passes in it.
    (0..180).for_each(|_| world.tick(0));
    assert_eq!(world.state.host.requested_bytes(), before);
    world.report_free(0);
    assert_eq!((world.reports(), world.refused().len()), (2, 0));
    assert_eq!(world.governor.last_report().map(|(at, _)| at), Some(world.now));
    assert_eq!(world.governor.counters().reminders, 0);
    assert!(before > 16 * MIB && world.state.host.requested_bytes() >= before);
    world.assert_sound();
}

/// kexec restarts the agent, the drivers and the guest's clock. The drivers unplug all memory
/// (virtio_mem_init_hotplug). The VM itself continues.
#[test]
fn kernel_started_by_kexec_gets_memory_like_the_first_one() {
    let mut world = ready(PSI);
    world.report_free(0);
    (0..100).for_each(|_| world.report_free(400));
    let before = world.requested_mib();
    assert!((2..900).contains(&before.iter().sum::<u64>()), "{before:?}");
    (0..ZONES).for_each(|zone| world.apply(&VmEvent::Driver(zone, DriverState::Absent), 0));
    world.apply(&VmEvent::Agent(false), 0);
    (0..7).for_each(|_| world.tick(500));
    world.state.host.zones.iter_mut().for_each(|zone| zone.plugged_bytes = 0);
    (0..ZONES).for_each(|zone| world.apply(&VmEvent::Driver(zone, DriverState::Ready), 100));
    assert_eq!(world.requested_mib(), before, "the first kernel's requests");
    let zones = &mut world.state.host.zones;
    zones.iter_mut().for_each(|zone| zone.plugged_bytes = zone.requested_bytes);
    (world.booted_ms, world.seq) = (world.now.0 - 10, 0);
    world.apply(&VmEvent::Agent(true), 10);
    world.report_free(0);
    assert!(world.refused().is_empty());
    assert!(world.requested_mib().iter().sum::<u64>() > before.iter().sum());
    (0..2_000).for_each(|_| world.report_free(900));
    assert!(world.requested_mib().iter().sum::<u64>() < before.iter().sum());
    world.assert_sound();
}

#[test]
fn guest_without_agent_gets_memory_if_short_and_returns_it() {
    for (index, is_counted) in [(PSI, false), (PSI, true), (PMB, false)] {
        let mut world = ready(index);
        world.is_counted = is_counted;
        world.send_statistics_for(20, 100);
        assert_eq!(world.requested_mib(), [0; ZONES]);
        world.send_statistics_for(20, 800);
        assert!(world.state.host.plugged_bytes() > 440 * MIB, "{:?}", world.requested_mib());
        // Reports made from statistics are split into nodes. An agent's reports are not changed.
        let has_bytes = 360 * MIB + world.state.host.plugged_bytes();
        assert_eq!(world.reported(), (has_bytes, vec![0, 2]));
        world.report_free(500);
        assert_eq!(world.reported(), (has_bytes, vec![0]));
        world.send_statistics_for(200, 100);
        let [balloon, dram, pm @ ..] = world.requested_mib();
        assert_eq!(pm, [0, 0], "{index}");
        assert!(index == PMB || [balloon, dram] == [0, 0], "{balloon} and {dram} MiB");
        assert!(world.refused().is_empty());
        world.assert_sound();
    }
}

#[test]
fn online_policy_limits_virtio_mem_but_not_the_balloon() {
    let mut world = ready(PSI);
    (0..100).for_each(|_| world.apply(&VmEvent::Report(40, Offline), 50));
    let [balloon, dram, ..] = world.requested_mib();
    assert_eq!((balloon, dram), (128, 64), "a quarter is lent");
}

#[test]
fn statistics_are_used_while_no_agent_reports() {
    let mut world = ready(PSI);
    world.send_statistics_for(2, 100);
    assert_eq!(world.reports(), 8);
    assert_eq!(world.governor.by_statistics(), Some(true));
    for _ in 0..12 {
        world.report_free(500);
        assert_eq!(world.governor.by_statistics(), Some(false));
        world.send_statistics_for(1, 100);
    }
    assert_eq!(world.reports(), 8 + 12);
    world.send_statistics_for(8, 100);
    assert_eq!(world.reports(), 20, "the agent has 10 s");
    world.send_statistics_for(1, 100);
    assert!(world.reports() > 20);
    assert_eq!(world.governor.by_statistics(), Some(true));
    // If an agent connects but does not report, statistics are still used.
    let before = world.reports();
    for is_connected in [false, true, false, true] {
        world.apply(&VmEvent::Agent(is_connected), 0);
        world.send_statistics_for(3, 100);
    }
    assert_eq!(world.reports(), before + 48);
    world.report_free(500);
    assert_eq!(world.governor.by_statistics(), Some(false));
}

#[test]
fn statistics_wait_for_agent_that_sets_online_policy() {
    let mut world = ready(PSI);
    world.governor.use_statistics(Onlining::Agent);
    world.send_statistics_for(8, 100);
    assert_eq!((world.reports(), world.statistics_requests()), (0, 8));
    world.send_statistics_for(2, 100);
    assert!(world.reports() > 0);
}

#[test]
fn statistics_of_a_new_driver_do_not_wait_for_the_old_kernels_agent() {
    let mut world = ready(PSI);
    world.send_statistics_for(1, 100);
    world.report_free(500);
    world.apply(&VmEvent::Agent(false), 0);
    let before = world.reports();
    world.send_statistics_for(2, 100);
    assert_eq!(world.reports(), before, "the agent may restart");
    world.driver_generation += 1;
    world.send_statistics_for(1, 100);
    assert_eq!(world.reports(), before + 4);
}

/// The agent's clock and counters start with the guest's kernel, which starts after the governor.
#[test]
fn agent_that_takes_over_from_statistics_changes_no_request() {
    for uptime_ms in [3_000, 50_000] {
        let mut world = ready(PSI);
        world.send_statistics_for(5, 400);
        world.send_statistics_for(60, 300);
        let before = world.requested_mib();
        assert_ne!(before, [0; ZONES]);
        world.booted_ms = world.now.0 - uptime_ms;
        for second in 0..8 {
            world.report_with(world.free_permille(300), |raw| {
                let (pages, counters) = (100_000, &mut raw.counters);
                (counters.pswpin, counters.pgmajfault) = (pages, pages);
                (counters.workingset_refault_file, counters.pgscan_direct) = (pages, pages);
                counters.allocstall = pages;
                (raw.stall.some_us, raw.stall.full_us) = (1_000_000, 1_000_000);
            });
            world.tick(0);
            assert_eq!(world.requested_mib(), before, "{uptime_ms}, second {second}");
        }
        assert!(world.refused().is_empty());
    }
}

/// `pmb` uses free pages, and `psi` uses available memory.
#[test]
fn statistics_are_requested_faster_below_the_policys_watermark() {
    for (index, measure) in [(PSI, Measure::Available), (PMB, Measure::Free)] {
        let mut world = slow(index);
        let mut asked_for = |used_mib| {
            world.send_statistics_for(2, used_mib);
            let before = world.statistics_requests();
            world.send_statistics_for(5, used_mib);
            (world.governor.is_fast(), world.statistics_requests() - before)
        };
        assert_eq!(asked_for(50), (false, 5));
        assert_eq!(asked_for(360), (true, 20), "at each tick");
        assert_eq!(world.governor.settings().watermark_of, measure);
    }
}

#[test]
fn resize_repeats_size_that_device_has_lowered() {
    let mut world = ready(OFF);
    let resize = |world: &mut World, blocks| world.apply(&VmEvent::Resize(PM, blocks), 500);
    world.apply(&VmEvent::Host(PM, 125), 0);
    resize(&mut world, 100);
    let is_stuck = |world: &World, reason: &str| match world.status(PM) {
        ResizeStatus::Stuck(text) => text.starts_with(reason),
        _ => false,
    };
    assert!(is_stuck(&world, "pool-full: "));
    // The host can provide 80 MiB.
    assert_eq!(world.requested_mib()[PM], 80);
    resize(&mut world, 40);
    assert_eq!(world.status(PM), ResizeStatus::Reached);
    resize(&mut world, 100);
    world.apply(&VmEvent::Host(PM, 1000), 0);
    resize(&mut world, 100);
    assert_eq!((world.status(PM), world.requested_mib()[PM]), (ResizeStatus::Reached, 200));
    // If the driver is refused, a request ends in the same way.
    let mut world = slow(OFF);
    world.apply(&VmEvent::Driver(PM, DriverState::Absent), 0);
    resize(&mut world, 100);
    let hotplug_mib = |world: &World| world.governor.settings().hotplug_bytes / MIB;
    assert_eq!(hotplug_mib(&world), 256 + 512 + 640);
    world.apply(&VmEvent::Driver(PM, DriverState::Unsupported), 100);
    assert_eq!(hotplug_mib(&world), 256 + 512, "the agent reserves no DRAM for it");
    (0..20).for_each(|_| world.tick(6_000));
    assert!(is_stuck(&world, "driver: "));
    assert_eq!(world.governor.counters().reminders, 0);
    resize(&mut world, 0);
    assert_eq!(world.status(PM), ResizeStatus::Reached);
    world.assert_sound();
}

#[test]
fn dry_run_reminds_only_zones_that_a_client_has_sized() {
    let mut world = slow(PSI);
    world.report_free(40);
    assert!(world.requested_mib()[..2].iter().sum::<u64>() > 0);
    world.apply(&VmEvent::DryRun(true), 0);
    world.apply(&VmEvent::Resize(PM, 50), 0);
    (0..3).for_each(|_| world.tick(6_000));
    let requests = world.state.requests.iter();
    let reminded = requests.filter(|request| matches!(request, Request::Remind(_)));
    assert!(reminded.eq(&[Request::Remind(ZoneId(PM as u32)); 2]));
    world.assert_sound();
}

#[test]
fn shortage_ends_when_another_zone_grows_instead() {
    let mut world = ready(PSI);
    [0, DRAM].into_iter().for_each(|zone| world.apply(&VmEvent::Host(zone, 0), 0));
    world.report_free(40);
    assert_eq!(world.requested_mib(), [0; ZONES]);
    (0..2).for_each(|_| world.tick(10));
    world.report_free(300);
    assert_eq!(world.ended(), [(70, world.state.host.plugged_bytes())]);
}

#[test]
fn memory_still_plugged_after_a_shrink_is_not_awaited() {
    let mut world = slow(OFF);
    world.is_counted = false;
    world.report_free(300);
    let zone = &mut world.state.host.zones[DRAM];
    (zone.requested_bytes, zone.plugged_bytes) = (64 * MIB, 128 * MIB);
    // In all zones together, 80 MiB are requested and 144 MiB are plugged.
    for (size_mib, ended) in [(112, vec![]), (176, vec![(50, 32 * MIB)])] {
        world.fix(size_mib, Rules::default());
        world.report_free(300);
        assert_eq!(world.state.host.requested_bytes(), size_mib * MIB);
        // Only the balloon grows beyond the size that is plugged.
        world.apply(&VmEvent::Follow(0, 1000), 0);
        world.report_free(300);
        assert_eq!(world.ended(), ended);
    }
}

/// Sends reports for 20 s from a guest that is short of memory and has no room for page
/// descriptors.
fn report_without_room(world: &mut World) {
    (0..400).for_each(|_| world.report_free(0));
}

#[test]
fn plan_held_back_by_descriptors_is_reported_once_until_it_proceeds() {
    let mut world = ready(PSI);
    (0..100).for_each(|_| world.report_free(0));
    assert_eq!((world.held().as_slice(), world.requested_mib()), (&[][..], [128, 0, 0, 0]));
    report_without_room(&mut world);
    assert_eq!(world.held(), [1]);
    // The guest first has room for the descriptors of DRAM, and then no room for those of PM.
    while world.requested_mib()[DRAM] < 256 {
        world.report_with(40, |raw| raw.memory.available_bytes = 0);
    }
    report_without_room(&mut world);
    assert_eq!(world.held(), [1, 2]);
    world.assert_sound();
}

#[test]
fn fixed_size_held_back_by_descriptors_is_reported_without_reports() {
    let mut world = ready(OFF);
    world.fix(1400, Rules { unreported_multiple: 1, ..Rules::default() });
    (0..60).for_each(|_| world.tick(1_000));
    assert_eq!(world.requested_mib(), [128, 256, 384, 0]);
    assert_eq!(world.held(), [2]);
    world.assert_sound();
}

#[test]
fn event_of_held_plan_names_zone_that_policy_may_grow() {
    let blocks = 64 * MIB / BLOCK_BYTES;
    for (cause, held) in [
        (VmEvent::Resize(DRAM, blocks), vec![2]),
        (VmEvent::Driver(DRAM, DriverState::Unsupported), vec![2]),
        (VmEvent::DryRun(true), vec![]),
    ] {
        let mut world = ready(PSI);
        (0..10).for_each(|_| world.report_free(0));
        world.apply(&cause, 0);
        report_without_room(&mut world);
        assert_eq!(world.held(), held, "{cause:?}");
        let is_held = |note: &Note| match note {
            Note::Plan(PlanNote { plan, .. }) => plan.reason == Reason::Descriptors,
            _ => false,
        };
        assert!(world.state.notes.iter().any(is_held));
        world.assert_sound();
    }
}

#[test]
fn client_size_without_room_for_descriptors_is_reported_once_per_request() {
    let mut world = ready(OFF);
    world.report_free(40);
    for round in 1..=2 {
        world.apply(&VmEvent::Resize(PM, 320), 0);
        (0..20).for_each(|_| world.tick(1_000));
        assert_eq!(world.held(), [PM as u32].repeat(round));
        assert!(world.state.host.zones[PM].held_bytes > 0);
        world.apply(&VmEvent::Resize(PM, 0), 0);
    }
    world.assert_sound();
}
