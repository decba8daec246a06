//! Regression tests: runs that failed in the past, shortened as much as possible.

use super::*;

/// Values of a report: the free share of each zone and the cached share of the rest, in
/// thousandths, and the increases of counters.
#[derive(Default)]
struct Report {
    free_permille: [u64; ZONES],
    cached_permille: u64,
    stall_ms: u64,
    file_refaults: u64,
    idle: Idle,
    late: bool,
}

fn report(report: Report) -> VmEvent {
    VmEvent::Report {
        free_permille: report.free_permille,
        cached_permille: report.cached_permille,
        stall_ms: report.stall_ms,
        counted: Counted { file_refaults: report.file_refaults, ..Counted::default() },
        swap_used_mib: 0,
        idle: report.idle,
        late: report.late,
    }
}

fn free(free_permille: [u64; ZONES], cached_permille: u64) -> VmEvent {
    report(Report { free_permille, cached_permille, ..Report::default() })
}

fn full() -> VmEvent {
    report(Report::default())
}

fn squeeze(zone: usize) -> VmEvent {
    VmEvent::Squeeze { zones: std::array::from_fn(|index| index == zone), above: true }
}

fn resume() -> VmEvent {
    VmEvent::Resume { zone: None }
}

fn follow(zone: usize) -> VmEvent {
    VmEvent::Follow { zone, permille: 1000 }
}

fn run_from(index: usize, events: &[(VmEvent, u64)]) {
    World::new(policy(index), None).run_events(events).expect("as it must be");
}

/// `memorage` and `pmb` counted memory that had arrived but was not free yet as surplus, and
/// removed other memory in its place.
#[test]
fn memory_that_has_just_arrived_is_no_surplus() {
    let bounds = |floor_mib, more_mib| VmEvent::Bounds { floor_mib, more_mib };
    let calm = [
        (bounds(258, 0), 1),
        (free([0, 0, 0, 367], 0), 1),
        (VmEvent::Follow { zone: 3, permille: 25 }, 6_202),
        (bounds(0, 258), 32),
        (follow(2), 341),
        (full(), 3_269),
        (follow(3), 66),
        (full(), 90),
    ];
    run_from(9, &calm);
    let units = [
        (squeeze(1), 1),
        (VmEvent::Tick, 1),
        (resume(), 2_626),
        (full(), 2_374),
        (full(), 200),
        (full(), 4_800),
        (follow(1), 1),
        (free([0, 100, 0, 0], 0), 1),
    ];
    run_from(7, &units);
}

/// A client had requested memory that had not arrived yet. `psi` counted it as idle, and removed
/// page cache that was in use.
#[test]
fn memory_on_its_way_is_not_idle() {
    let touched =
        report(Report { cached_permille: 208, idle: Some((19, 10_000)), ..Report::default() });
    let events = [
        (VmEvent::Squeeze { zones: [false; ZONES], above: false }, 1),
        (free([0, 0, 14, 0], 103), 4),
        (full(), 1),
        (VmEvent::Pin { zone: 1, mib: 76 }, 6_567),
        (follow(3), 2),
        (touched, 3_430),
    ];
    run_from(0, &events);
}

/// All page cache counts as used once evicted pages of it were read back. The checks had counted
/// free memory as available.
#[test]
fn missed_page_cache_is_not_available() {
    let missing = report(Report { cached_permille: 139, file_refaults: 256, ..Report::default() });
    let free_permille = [59, 0, 0, 642];
    let waiting =
        report(Report { free_permille, cached_permille: 165, stall_ms: 301, ..Report::default() });
    let events = [
        (follow(0), 1),
        (VmEvent::Oom { pages: 16_163 }, 1),
        (free([0; ZONES], 111), 1),
        (free([0, 0, 0, 434], 256), 1_875),
        (missing, 76),
        (waiting, 49),
    ];
    run_from(1, &events);
}

/// The test delivered a report after newer ones. Such a report is refused. Otherwise, it would show
/// less memory than was plugged, and the next report would seem to add memory.
#[test]
fn overtaken_report_misleads_no_policy() {
    let late = report(Report { late: true, ..Report::default() });
    let touched = report(Report { idle: Some((0, 1_000)), ..Report::default() });
    let events = [
        (squeeze(1), 1),
        (resume(), 1),
        (full(), 1),
        (full(), 2_451),
        (late, 101),
        (full(), 2_268),
        (full(), 180),
        (VmEvent::Oom { pages: 13_360 }, 1),
        (resume(), 1),
        (VmEvent::Oom { pages: 18_242 }, 1),
        (full(), 1),
        (follow(1), 1),
        (VmEvent::Policy { index: 1 }, 1),
        (VmEvent::Pin { zone: 3, mib: 36 }, 1),
        (resume(), 1),
        (VmEvent::Tick, 1),
        (full(), 1),
        (full(), 1),
        (VmEvent::Bounds { floor_mib: 0, more_mib: 496 }, 1),
        (VmEvent::Arrival, 4_796),
        (follow(3), 180),
        (touched, 16),
    ];
    let mut world = World::new(policy(0), None);
    world.run_events(&events).expect("as it must be");
    assert!(!world.is_misled);
}

/// If the total is above the ceiling, a dry run shows the whole shrink to the ceiling with the
/// policy's reason. The checks had assumed that `pmb` wanted all of it.
#[test]
fn dry_run_above_ceiling_shrinks_by_more_than_policy_wants() {
    let events = [
        (full(), 1),
        (follow(2), 1),
        (squeeze(0), 1),
        (resume(), 1),
        (VmEvent::Policy { index: 7 }, 1),
        (VmEvent::DryRun { on: true }, 4_694),
        (follow(0), 123),
        (full(), 179),
        (full(), 1),
        (free([32, 0, 0, 294], 0), 1),
    ];
    run_from(2, &events);
}

/// The checks had assumed that a paused controller withdraws a request.
#[test]
fn paused_controller_withdraws_nothing() {
    let events = [
        (VmEvent::Squeeze { zones: [false; ZONES], above: false }, 1),
        (full(), 1),
        (VmEvent::Pause { on: true }, 1),
        (VmEvent::Tick, 4_999),
        (resume(), 1),
        (VmEvent::DryRun { on: true }, 1),
        (full(), 1),
        (full(), 1),
    ];
    run_from(0, &events);
}

/// Memory was plugged for long enough, but was unplugged between two observations. The controller
/// observed no progress and withdrew the request, but kept it because of the floor. The checks had
/// measured the time since the memory was plugged.
#[test]
fn request_kept_for_floor_is_withdrawn_when_controller_reports_it() {
    let bounds = |zone: Option<usize>, above| VmEvent::Squeeze {
        zones: std::array::from_fn(|index| zone == Some(index)),
        above,
    };
    let events = [
        (VmEvent::Fix { mib: 402 }, 1),
        (free([0, 0, 0, 57], 0), 1),
        (full(), 5_000),
        (VmEvent::Flap { zone: 3, ms: 1 }, 1),
        (bounds(Some(3), false), 1),
        (follow(2), 4_673),
        (full(), 180),
        (VmEvent::Tick, 1_000),
        (follow(2), 2_574),
        (VmEvent::Flap { zone: 1, ms: 1_000 }, 69),
        (full(), 2_172),
        (full(), 185),
        (VmEvent::Short { zone: 0, permille: 0 }, 1),
        (bounds(None, true), 1_628),
        (full(), 14),
        (full(), 1_000),
    ];
    run_from(0, &events);
}
