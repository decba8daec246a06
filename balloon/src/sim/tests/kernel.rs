//! Tests of loads that use kernel memory.

use foreshore_proto::{Report, Zone, ZoneKind};

use super::*;
use crate::plan::{Direction, Plan, Reason};

/// Kernel memory during the first [`REST_MS`]. After that, it grows for [`GROWTH_MS`].
const REST_MIB: u64 = 16;
const REST_MS: u64 = 10_000;
const GROWTH_MS: u64 = 20_000;
const END_MS: u64 = 60_000;

/// Guest with 512 MiB of DRAM and no other memory. Its kernel finally demands `kernel_mib`, and its
/// programs demand `anon_mib` during the whole run.
fn load(kernel_mib: u64, anon_mib: u64) -> VmSetup {
    let rest = Segment {
        anon_bytes: anon_mib * MIB,
        kernel_bytes: REST_MIB * MIB,
        hot_permille: 1000,
        ..Segment::default()
    };
    let rate = (kernel_mib - REST_MIB) * MIB * 1000 / GROWTH_MS;
    let growing = Segment { at: TimeMs(REST_MS), kernel_bytes_per_s: rate as i64, ..rest };
    let at = TimeMs(REST_MS + GROWTH_MS);
    let full = Segment { at, kernel_bytes: kernel_mib * MIB, ..rest };
    VmSetup {
        guest: GuestConfig { boot_bytes: 512 * MIB, ..GuestConfig::default() },
        host: HostView { boot_bytes: 512 * MIB, ..HostView::default() },
        demand: Demand::new(vec![rest, growing, full], TimeMs(END_MS)).expect("in order"),
    }
}

/// The guest of [`load`] with an additional 1 GiB of PM that is plugged from the start.
fn load_with_pm(kernel_mib: u64, anon_mib: u64) -> VmSetup {
    let mut setup = load(kernel_mib, anon_mib);
    let size_bytes = 1024 * MIB;
    setup.host.zones.push(ZoneSizes {
        requested_bytes: size_bytes,
        plugged_bytes: size_bytes,
        ..ZoneSizes::empty(1, Tier::Pm, size_bytes)
    });
    setup
}

/// Last report, and first violation of the invariants.
#[derive(Default)]
struct LastReportObserver {
    lawful: Lawful,
    last: Option<Report>,
}

impl Observer for LastReportObserver {
    fn report(&mut self, _: TimeMs, report: &Report) {
        self.last = Some(report.clone());
    }

    fn advanced(&mut self, guest: &Guest, segment: &Segment) {
        self.lawful.advanced(guest, segment);
    }
}

/// Runs a guest whose size does not change.
fn run(setup: VmSetup) -> (Vm, Report) {
    let mut observer = LastReportObserver::default();
    let governed = Governed { skip: Skip::Nothing, ..governed("off") };
    let mut vms = run_host(vec![setup], &mut HostPool::new(1024 * MIB), &governed, &mut observer)
        .expect("in range");
    assert_eq!(observer.lawful.0, None);
    (vms.remove(0), observer.last.expect("reports"))
}

fn pages(mib: u64) -> u64 {
    mib * MIB / 4096
}

fn kernel_zone(report: &Report) -> Zone {
    *report.zones().iter().find(|zone| zone.kind == ZoneKind::Dma32).expect("boot memory")
}

#[test]
fn kernel_memory_that_fits_is_reported_and_never_available() {
    let (vm, report) = run(load(200, 50));
    assert_eq!(vm.guest().kernel_bytes(), 200 * MIB);
    let kernel = report.kernel().expect("reported");
    assert_eq!((kernel.slab_unreclaimable_bytes, kernel.total_bytes()), (200 * MIB, 200 * MIB));
    let counters = report.counters();
    assert_eq!((counters.allocstall, counters.allocstall_kernel, counters.oom_kill), (0, 0, 0));
    let zone = kernel_zone(&report);
    let used_pages = zone.managed_pages - zone.free_pages;
    assert_eq!(used_pages - zone.user_pages.expect("reported"), pages(200));
    assert_eq!(report.memory().anon_bytes, 50 * MIB);
    let (_, small) = run(load(100, 50));
    let available = |report: &Report| report.memory().available_bytes;
    assert_eq!(available(&small) - available(&report), 100 * MIB);
}

#[test]
fn kernel_memory_larger_than_its_zones_ends_in_oom_kill_although_pm_is_free() {
    let (vm, report) = run(load_with_pm(600, 50));
    let counters = report.counters();
    assert!(counters.oom_kill > 0 && counters.allocstall_kernel > 0, "{counters:?}");
    assert_eq!(counters.pswpout, 0);
    assert!(report.memory().free_bytes > 1024 * MIB, "{:?}", report.memory());
    assert!(vm.guest().kernel_killed_bytes() > 0);
    // There is room for 600 MiB of user pages.
    let (vm, _) = run(load_with_pm(REST_MIB, 600));
    assert_eq!((vm.guest().totals().oom_kills, vm.guest().resident_bytes()), (0, 600 * MIB));
}

#[test]
fn killed_process_returns_its_kernel_memory() {
    let mut setup = load(100, 600);
    setup.guest.swap = SwapDevice::from_name("none", 0).expect("listed");
    let (vm, report) = run(setup);
    assert_eq!(report.counters().oom_kill, 1);
    assert_eq!((vm.guest().kernel_killed_bytes(), vm.guest().kernel_bytes()), (4 * MIB, 96 * MIB));
    assert!(vm.guest().killed_bytes() > 0);
}

/// The kernel's zone has 432 MiB. The boot memory's ZONE_MOVABLE has 48 MiB.
#[test]
fn user_pages_of_kernel_zones_move_to_pm_and_without_pm_to_swap() {
    let (vm, report) = run(load_with_pm(400, 300));
    let zone = kernel_zone(&report);
    assert_eq!(zone.managed_pages, pages(432));
    let totals = vm.guest().totals();
    assert_eq!((vm.guest().kernel_bytes(), vm.guest().resident_bytes()), (400 * MIB, 300 * MIB));
    assert_eq!((totals.swapped_out_bytes, totals.kernel_allocstalls), (0, 0));
    // ZONE_MOVABLE has no room for 252 MiB of the user pages.
    assert!(totals.demoted_bytes > 150 * MIB, "{totals:?}");
    let counters = report.counters();
    assert_eq!(counters.numa_other, counters.numa_miss + totals.demoted_bytes / 4096);

    let (vm, report) = run(load(400, 300));
    let totals = vm.guest().totals();
    assert_eq!((vm.guest().kernel_bytes(), totals.oom_kills), (400 * MIB, 0));
    assert!(vm.guest().swapped_bytes() > 200 * MIB, "{totals:?}");
    assert_eq!((report.counters().numa_miss, report.counters().numa_other), (0, 0));
}

#[test]
fn kernel_memory_uses_the_reserve_that_user_pages_leave() {
    let free_mib = |setup: VmSetup| kernel_zone(&run(setup).1).free_pages / 256;
    let kept_mib =
        kernel_zone(&run(load_with_pm(REST_MIB, 1000)).1).protected_pages.expect("reported") / 256;
    assert_eq!(free_mib(load_with_pm(REST_MIB, 1000)), kept_mib);
    let taken_mib = kept_mib - 8;
    let (vm, report) = run(load_with_pm(REST_MIB + taken_mib, 1000));
    assert_eq!(kernel_zone(&report).free_pages / 256, 8);
    assert_eq!(vm.guest().totals().demoted_bytes, 0, "{:?}", vm.guest().totals());
}

#[test]
fn user_pages_placed_in_pm_count_as_foreign() {
    let (vm, report) = run(load_with_pm(REST_MIB, 1000));
    let miss_mib = report.counters().numa_miss / 256;
    let zone = report.zones().iter().find(|zone| zone.node == 1).expect("PM");
    assert_eq!(report.counters().numa_miss, zone.user_pages.expect("reported"));
    assert!((500..700).contains(&miss_mib), "{miss_mib} MiB of {:?}", vm.guest().totals());
    assert_eq!(report.counters().numa_other, report.counters().numa_miss);
}

#[test]
fn kernel_memory_of_a_workload_is_proportional_to_anonymous_memory() {
    let params = WorkloadParams { kernel_permille: 250, ..Workload::Ramp.defaults() };
    let demand = Workload::Ramp.demand(&params, 512 * MIB, 900_000, &mut Random::new(1, 0));
    let mut most_mib = 0;
    for segment in demand.segments() {
        assert_eq!(segment.kernel_bytes, segment.anon_bytes / 4);
        assert_eq!(segment.kernel_bytes_per_s, segment.anon_bytes_per_s / 4);
        most_mib = most_mib.max(segment.kernel_bytes / MIB);
    }
    assert_eq!(most_mib, 192);
}

#[test]
fn replay_repeats_recorded_kernel_memory() {
    let original = load_with_pm(300, 200);
    let trace = recorded(&original, "off");
    let (again, _) = replayed(&trace, &original.guest).expect("long enough");
    for at in (0..again.demand.end().0).step_by(1_000).map(TimeMs) {
        let wanted_mib = |demand: &Demand| {
            let segment =
                demand.segments().iter().rev().find(|segment| segment.at <= at).expect("from 0 on");
            [segment.kernel_bytes_at(at), segment.anon_bytes_at(at)].map(|bytes| bytes / MIB)
        };
        let [first, second] = [&original.demand, &again.demand].map(wanted_mib);
        let is_near = first.iter().zip(second).all(|(first, second)| first.abs_diff(second) <= 2);
        assert!(is_near, "{first:?} and {second:?} MiB at {at}");
    }
}

/// Guest with 384 MiB of boot memory that can plug 256 MiB of DRAM and 512 MiB of PM. Programs use
/// `anon_mib`, and kernel memory grows to `kernel_mib`.
fn load_with_dram(kernel_mib: u64, anon_mib: u64) -> VmSetup {
    let mut setup = load(kernel_mib, anon_mib);
    let boot_bytes = 384 * MIB;
    setup.guest = GuestConfig { boot_bytes, ..setup.guest };
    let zones =
        vec![ZoneSizes::empty(0, Tier::Dram, 256 * MIB), ZoneSizes::empty(1, Tier::Pm, 512 * MIB)];
    setup.host = HostView { boot_bytes, zones, ..HostView::default() };
    setup
}

/// Decisions of the policy, and the first violation of the invariants.
#[derive(Default)]
struct Decisions {
    lawful: Lawful,
    /// Times and reasons of the plans that requested more memory.
    grows: Vec<(TimeMs, Reason)>,
    /// Each new total size of the converted blocks, with the time of the change.
    blocks: Vec<(TimeMs, u64)>,
    last: Option<Report>,
}

impl Observer for Decisions {
    fn report(&mut self, _: TimeMs, report: &Report) {
        self.last = Some(report.clone());
    }

    fn plan(&mut self, at: TimeMs, plan: &Plan, host: &HostView) {
        if plan.direction == Direction::Grow && plan.changes(host).next().is_some() {
            self.grows.push((at, plan.reason));
        }
    }

    fn advanced(&mut self, guest: &Guest, segment: &Segment) {
        self.lawful.advanced(guest, segment);
        let bytes = guest.kernel_block_bytes();
        if bytes != self.blocks.last().map_or(0, |(_, bytes)| *bytes) {
            self.blocks.push((guest.now(), bytes));
        }
    }
}

fn decide(setup: VmSetup, policy: &str) -> (Vm, Decisions) {
    let mut decisions = Decisions::default();
    let mut vms =
        run_host(vec![setup], &mut HostPool::new(1024 * MIB), &governed(policy), &mut decisions)
            .expect("in range");
    assert_eq!(decisions.lawful.0, None);
    (vms.remove(0), decisions)
}

#[test]
fn rule_13_adds_movable_memory_for_blocks_of_the_kernel() {
    let (vm, decisions) = decide(load_with_dram(500, 0), "psi");
    let guest = vm.guest();
    assert_eq!((guest.kernel_bytes(), guest.totals().oom_kills), (500 * MIB, 0));
    assert_eq!(guest.kernel_block_bytes(), 256 * MIB, "all DRAM");
    let is_for_kernel = |(at, reason): &(TimeMs, Reason)| {
        *reason == Reason::KernelMemory
            && decisions.blocks.first().is_some_and(|(first, _)| at < first)
    };
    assert!(
        decisions.grows.iter().any(is_for_kernel),
        "{:?} {:?}",
        decisions.grows,
        decisions.blocks
    );

    let report = decisions.last.expect("reports");
    let normal = report.zones().iter().find(|zone| zone.kind == ZoneKind::Normal).expect("blocks");
    assert_eq!((normal.node, normal.managed_pages), (0, pages(256)));
    let node = report.blocks().nodes.iter().find(|node| node.node == 0).expect("boot memory");
    assert_eq!((node.online_bytes, node.movable_online_bytes), (640 * MIB, 0));

    let (vm, decisions) = decide(load_with_dram(500, 0), "off");
    assert!(vm.guest().totals().oom_kills > 0 && decisions.blocks.is_empty());
}

#[test]
fn rest_of_a_partly_plugged_block_serves_the_kernel_as_well() {
    let (_, decisions) = decide(load_with_dram(350, 0), "psi");
    let sizes: Vec<u64> = decisions.blocks.iter().map(|(_, bytes)| bytes / MIB).collect();
    assert_eq!(sizes.last(), Some(&128), "{sizes:?}");
    assert!(sizes[0] < 128 && sizes.is_sorted(), "{sizes:?}");
}

/// Sizes of the zones in MiB, one hour after the kernel has freed all of its memory except
/// `rest_mib`.
fn plugged_after_an_hour_with(rest_mib: u64) -> (Vec<u64>, Vm) {
    let mut setup = load_with_dram(500, 100);
    let rest = setup.demand.segments()[0];
    let mut segments = setup.demand.segments().to_vec();
    segments.push(Segment { at: TimeMs(END_MS), kernel_bytes: rest_mib * MIB, ..rest });
    setup.demand = Demand::new(segments, TimeMs(END_MS + 3_600_000)).expect("in order");
    let (vm, decisions) = decide(setup, "psi");
    assert_eq!(decisions.blocks.iter().map(|(_, bytes)| bytes / MIB).max(), Some(256));
    (vm.guest().zones().iter().map(|zone| zone.plugged_bytes / MIB).collect(), vm)
}

#[test]
fn free_parts_of_kernel_blocks_can_be_unplugged() {
    let (plugged_mib, vm) = plugged_after_an_hour_with(REST_MIB);
    // Sum of the remaining kernel memory, and the page descriptors of the section that is still
    // plugged.
    let pinned_mib = REST_MIB + 2;
    assert_eq!(
        (plugged_mib, vm.guest().kernel_block_bytes()),
        (vec![pinned_mib, 0], pinned_mib * MIB)
    );
    assert_eq!((vm.guest().resident_bytes(), vm.guest().totals().oom_kills), (100 * MIB, 0));
    // When the rest of a partly plugged block is plugged again, it becomes kernel memory. Another
    // block becomes movable.
    let mut guest = vm.guest().clone();
    guest.request([256 * MIB, 0]);
    let segment = *vm.demand().segments().last().expect("one");
    guest.advance(guest.now() + 10_000, &segment, &mut HostPool::new(0));
    assert_eq!((guest.plugged_bytes(), guest.kernel_block_bytes()), (256 * MIB, 128 * MIB));
    let (plugged_mib, _) = plugged_after_an_hour_with(200);
    assert_eq!(plugged_mib[0], 200 + 4);
}

#[test]
fn guest_that_cannot_demote_swaps_for_its_kernel() {
    let mut setup = load_with_pm(400, 300);
    setup.guest.demotes = false;
    let (vm, _) = run(setup);
    let totals = vm.guest().totals();
    assert_eq!((vm.guest().kernel_bytes(), totals.demoted_bytes), (400 * MIB, 0));
    assert!(totals.swapped_out_bytes > 150 * MIB, "{totals:?}");
}

#[test]
fn demotion_ends_when_less_than_a_part_of_pm_is_free() {
    let mut setup = load_with_pm(400, 1320);
    setup.guest.swap = SwapDevice::from_name("disk", 1024 * MIB).expect("listed");
    let (vm, report) = run(setup);
    let zone = report.zones().iter().find(|zone| zone.node == 1).expect("PM");
    let full_pages = foreshore_proto::full_pm_pages(zone.managed_pages);
    let totals = vm.guest().totals();
    assert!(totals.demoted_bytes > 0 && totals.swapped_out_bytes > 0, "{totals:?}");
    assert!(zone.free_pages >= full_pages, "{zone:?}, less than {full_pages} free");
}
