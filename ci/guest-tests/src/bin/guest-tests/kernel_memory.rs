//! Tests that the kernel of a growing guest has enough DRAM for page descriptors and for its own
//! memory. A guest should not kill a process or panic for lack of DRAM while other memory is free.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use balloon::controller::Rules;
use balloon::policy::Policy;
use balloon::proto::kernel_reserve_bytes;
use balloon::sim::{
    Demand, Governed, Guest as SimulatedGuest, GuestConfig, HostPool, Segment, Skip, SwapDevice,
    VmSetup, run_host,
};
use balloon::{HostView, Tier, TimeMs, ZoneSizes};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::host_memory::free_bytes;
use guest_tests::runner::{skip, this_tests_dir};
use guest_tests::{Guest, Pool};
use serde_json::json;

use crate::zones::{MIB, mem_total_mib, vmstat, wait_until_plugged, zone};

guest_tests::tests![
    pm_of_many_times_dram_is_used_as_in_the_simulator: 600 (long) on [V6_12, V6_1 extended] =>
        pm_is_used_as_in_the_simulator(&EXTREME_RATIOS),
    pm_of_some_times_dram_is_used_as_in_the_simulator_on_6_12: 600 (extended) =>
        pm_is_used_as_in_the_simulator(&BETWEEN),
    pm_of_many_times_dram_is_used_beside_dram_to_plug: 600 (extended),
    resize_to_sixty_times_dram_completes_with_an_agent: 400 (long),
    resize_without_agent_stops_at_a_multiple_of_boot_memory,
    boot_with_24_gib_without_agent_stops_at_a_multiple_of_boot_memory: 240 (long),
    fixed_size_beyond_descriptors_leaves_the_guest_alive: 300 (long),
    small_files_fill_kernel_memory_and_nothing_dies: 600 (long) on [V6_12, V6_1 extended] =>
        is_held(&FILES),
    boot_memory_around_the_hole_is_there_and_keeps_the_reserve,
    sockets_fill_all_but_a_seventh_of_dram_before_their_owner_dies: 600 (extended),
    processes_beyond_dram_are_the_only_ones_to_die: 600 (extended),
    sockets_fill_kernel_memory_and_nothing_dies: 300 (long) => is_held(&SOCKETS),
    missing_files_fill_kernel_memory_and_nothing_dies: 600 (extended) =>
        is_held(&MISSING_FILES),
    processes_fill_kernel_memory_and_nothing_dies: 400 (long) => is_held(&PROCESSES),
    small_files_kill_a_guest_whose_kernel_gets_no_blocks: 600 (extended) =>
        is_killed_without_blocks(&FILES),
    sockets_kill_their_owner_if_the_kernel_gets_no_blocks: 300 (extended) =>
        is_killed_without_blocks(&SOCKETS),
    pm_of_3584_mib_is_used_by_a_guest_of_512_mib: 600 (extended) => all_pm_is_used(3584),
    pm_of_7_gib_is_used_by_a_guest_of_512_mib: 900 (extended) => all_pm_is_used(7168),
];

/// Time limit of a load. Some loads make 400,000 system calls in an emulated guest.
pub(crate) const LOAD_LIMIT: Duration = Duration::from_secs(400);
const RESIZE_LIMIT: Duration = Duration::from_secs(200);

/// Checks that no process was killed, and that the guest's kernel has not reported a problem.
pub(crate) fn nothing_died(guest: &Guest) -> Result<()> {
    let killed = vmstat(guest, "oom_kill")?;
    ensure!(
        killed == 0,
        "{killed} processes were killed: {}",
        guest.run("dmesg | grep -v 'KB$' | tail -n 60")?
    );
    guest.no_kernel_complaints()
}

const SMALL_DRAM_MIB: u64 = 192;
/// Plugged PM may differ between guest and simulator by its size divided by this number. The rate
/// of the real load varies, and psi adds memory that depends on the rate. A minimum difference is
/// always allowed.
const DIFFERENCE_PART: u64 = 8;
const DIFFERENCE_BYTES: u64 = 128 * MIB;

#[derive(Debug)]
struct IdleMemory {
    total_bytes: u64,
    used_bytes: u64,
}

/// Returns how much PM `psi` has plugged in the simulator after a load has grown to `load_mib`
/// within `load_ms`.
fn simulated_pm_bytes(
    idle_memory: &IdleMemory,
    pm_mib: u64,
    load_mib: u64,
    load_ms: u64,
) -> Result<u64> {
    const IDLE_MS: u64 = 5_000;
    let swap = SwapDevice::from_name("none", 0).context("No such swap device")?;
    let guest = GuestConfig { boot_bytes: SMALL_DRAM_MIB * MIB, swap, ..GuestConfig::default() };
    let pm = ZoneSizes { guest_numa_node: 1, ..ZoneSizes::empty(0, Tier::Pm, pm_mib * MIB) };
    let host = HostView {
        zones: vec![pm],
        boot_bytes: SMALL_DRAM_MIB * MIB,
        pool_free_bytes: pm_mib * MIB,
        ..HostView::default()
    };
    // The real kernel manages less memory than the simulated one. The difference counts as used
    // memory.
    let simulated_bytes =
        SimulatedGuest::new(guest.clone(), &[pm], &Segment::default()).total_bytes();
    let used_bytes =
        (idle_memory.used_bytes + simulated_bytes).saturating_sub(idle_memory.total_bytes);
    let idle = Segment { anon_bytes: used_bytes, hot_permille: 1000, ..Segment::default() };
    let rate = i64::try_from(load_mib * MIB * 1000 / load_ms.max(1))?;
    let load = Segment { at: TimeMs(IDLE_MS), anon_bytes_per_s: rate, ..idle };
    let demand = Demand::new(vec![idle, load], TimeMs(IDLE_MS + load_ms))?;
    let governed =
        Governed { policy: Policy::default(), rules: Rules::default(), skip: Skip::Nothing };
    let setup = VmSetup { guest, host, demand };
    let vms = run_host(vec![setup], &mut HostPool::new(pm_mib * MIB), &governed, &mut ())?;
    let guest = vms.first().context("The simulator has no VM")?.guest();
    let oom_kills = guest.totals().oom_kills;
    ensure!(
        oom_kills == 0,
        "The simulated guest had {oom_kills} kills under a load of {load_mib} MiB in {load_ms} ms: {idle_memory:?}"
    );
    Ok(guest.plugged_bytes())
}

/// Largest ratio of PM to DRAM in the papers (PM Buddy).
const LARGEST_RATIO: u64 = 14;
const EXTREME_RATIOS: [u64; 2] = [2, LARGEST_RATIO];
const BETWEEN: [u64; 3] = [4, 7, 8];

/// Starts processes that together hold `load_mib`, and waits until they hold all of it.
fn hold(guest: &Guest, load_mib: u64) -> Result<Vec<Script>> {
    const HOGS: u64 = 4;
    let start =
        |_| guest.start_script(LOAD_LIMIT, &format!("exec guest-tool hog {}", load_mib / HOGS));
    let mut hogs = (0..HOGS).map(start).collect::<Result<Vec<_>>>()?;
    let goal = format!("held {}", load_mib / HOGS);
    hogs.iter_mut().try_for_each(|hog| hog.wait_for_line(&goal))?;
    Ok(hogs)
}

fn pm_is_used_as_in_the_simulator(ratios: &[u64]) -> Result<()> {
    for &ratio in ratios {
        let pm_mib = SMALL_DRAM_MIB * ratio;
        // Programs can use only available memory. The kernel's reserve is not part of it.
        let load_mib = pm_mib - 96;
        let pool = Pool::create(&format!("{}M", pm_mib + 64))?;
        let guest = Guest::builder()
            .memory(&format!("size={SMALL_DRAM_MIB}M"))
            .pm_memory(&format!("pool={},size={pm_mib}M", pool.name()))
            .pressure("psi")
            .name(&format!("ratio{ratio}"))
            .boot()?;
        let idle_memory = idle_memory(&guest)?;
        let start = Instant::now();
        let hogs = hold(&guest, load_mib)?;
        let plugged_bytes = zone(&guest, "pm")?.plugged_bytes;
        let load_ms = u64::try_from(start.elapsed().as_millis())?;
        let expected_bytes = simulated_pm_bytes(&idle_memory, pm_mib, load_mib, load_ms)?;
        println!(
            "{ratio}:1: {} MiB of PM, simulated {} MiB",
            plugged_bytes / MIB,
            expected_bytes / MIB
        );
        let allowed_bytes = (expected_bytes / DIFFERENCE_PART).max(DIFFERENCE_BYTES);
        ensure!(
            plugged_bytes.abs_diff(expected_bytes) <= allowed_bytes,
            "{ratio}:1: {plugged_bytes} bytes of PM are plugged, {expected_bytes} in the simulator"
        );
        // psi plugs memory while some is still available. At the largest ratio, it therefore plugs
        // all PM.
        let min_bytes = if ratio == LARGEST_RATIO {
            pm_mib * MIB
        } else {
            load_mib * MIB - idle_memory.total_bytes
        };
        ensure!(
            plugged_bytes >= min_bytes,
            "{ratio}:1: only {plugged_bytes} bytes of PM are plugged"
        );
        nothing_died(&guest)?;
        drop((hogs, guest));
        fs::remove_file(pool.path())?;
    }
    Ok(())
}

fn idle_memory(guest: &Guest) -> Result<IdleMemory> {
    let memory = || Ok::<_, anyhow::Error>(guest.get("vm.pressure")?["details"]["memory"].clone());
    guest.wait_until("the agent has reported", RESIZE_LIMIT, || {
        Ok(memory()?["total_bytes"].is_u64())
    })?;
    let memory = memory()?;
    let bytes = |key: &str| {
        memory[key].as_u64().with_context(|| format!("The report has no {key}: {memory}"))
    };
    let total_bytes = bytes("total_bytes")?;
    // Free memory is used, because available memory excludes the kernel's reserve once the agent
    // has set it.
    Ok(IdleMemory { total_bytes, used_bytes: total_bytes - bytes("free_bytes")? })
}

/// One block of DRAM can also be plugged. The agent cannot convert it, because the node must retain
/// movable memory.
fn pm_of_many_times_dram_is_used_beside_dram_to_plug() -> Result<()> {
    const PM_MIB: u64 = SMALL_DRAM_MIB * LARGEST_RATIO;
    let pool = Pool::create(&format!("{}M", PM_MIB + 64))?;
    let guest = Guest::builder()
        .memory(&format!("size={SMALL_DRAM_MIB}M,hotplug_method=virtio-mem,hotplug_size=128M"))
        .pm_memory(&format!("pool={},size={PM_MIB}M", pool.name()))
        .pressure("psi")
        .boot()?;
    let hogs = hold(&guest, PM_MIB)?;
    let (dram, pm) = (zone(&guest, "dram")?, zone(&guest, "pm")?);
    println!(
        "{} MiB of DRAM and {} MiB of PM are plugged",
        dram.plugged_bytes / MIB,
        pm.plugged_bytes / MIB
    );
    ensure!(pm.plugged_bytes == PM_MIB * MIB, "Only {} bytes of PM are plugged", pm.plugged_bytes);
    nothing_died(&guest)?;
    drop(hogs);
    Ok(())
}

fn guest_of_24_gib() -> GuestBuilder {
    Guest::builder().memory("size=384M,hotplug_method=virtio-mem,hotplug_size=24G")
}

fn resize_to_24_gib(guest: &Guest) -> Result<()> {
    guest.put("vm.resize", json!({ "desired_ram": 24_576 * MIB })).map(drop)
}

/// 24 GiB of memory have 384 MiB of page descriptors, as much as all DRAM that the guest boots
/// with.
fn resize_to_sixty_times_dram_completes_with_an_agent() -> Result<()> {
    let guest = guest_of_24_gib().pressure("off").boot()?;
    resize_to_24_gib(&guest)?;
    guest.wait_until("24 GiB are plugged", RESIZE_LIMIT, || {
        let zone = zone(&guest, "dram")?;
        Ok(zone.plugged_bytes == (24_576 - 384) * MIB && zone.state == "reached")
    })?;
    let held = guest.metric("foreshore_memory_held_bytes", &[("zone", "dram")])?;
    ensure!(held == 0.0, "{held} bytes are held back");
    let delayed = guest.metric("foreshore_memory_throttled_requests_total", &[("zone", "dram")])?;
    ensure!(delayed == 0.0, "The plug budget delayed {delayed} requests of the first grow");
    nothing_died(&guest)
}

fn resize_without_agent_stops_at_a_multiple_of_boot_memory() -> Result<()> {
    let events = this_tests_dir().join("events");
    let guest = guest_of_24_gib()
        .pressure("off")
        .cmdline("foreshore.agent=off")
        .argument("--event-monitor", &format!("path={}", events.display()))
        .boot()?;
    // A warning at start should mention the ratio.
    let log = guest.vmm_log()?;
    ensure!(
        log.lines().any(|line| line.contains("WARN") && line.contains("24 GiB can be added")),
        "The log has no warning: {log}"
    );
    resize_to_24_gib(&guest)?;
    guest.wait_until("the resize is stuck", RESIZE_LIMIT, || {
        Ok(zone(&guest, "dram")?.state == "stuck")
    })?;
    let zone = zone(&guest, "dram")?;
    ensure!(zone.plugged_bytes == 8 * 384 * MIB, "{} bytes are plugged", zone.plugged_bytes);
    let memory = guest.get("vm.memory")?;
    ensure!(memory.to_string().contains("descriptors"), "vm.memory has no reason: {memory}");
    let held = guest.metric("foreshore_memory_held_bytes", &[("zone", "dram")])?;
    ensure!(held == ((24_576 - 384 - 8 * 384) * MIB) as f64, "{held} bytes are held back");
    wait_for_held_event(&guest, &events)?;
    nothing_died(&guest)
}

fn wait_for_held_event(guest: &Guest, events: &Path) -> Result<()> {
    guest.wait_until("the event is sent", RESIZE_LIMIT, || {
        let events = fs::read_to_string(events)?;
        Ok(events.contains("memory-refused") && events.contains("\"reason\": \"descriptors\""))
    })
}

/// The configuration requests the memory, at the first start and again at a reboot.
fn boot_with_24_gib_without_agent_stops_at_a_multiple_of_boot_memory() -> Result<()> {
    let memory = "size=384M,hotplug_method=virtio-mem,hotplug_size=24G,hotplugged_size=24G";
    let guest = Guest::builder()
        .memory(memory)
        .pressure("off")
        .cmdline("foreshore.agent=off panic=-1")
        .boot()?;
    for boot in ["start", "reboot"] {
        if boot == "reboot" {
            guest.reboot_from_inside()?;
        }
        wait_until_plugged(&guest, "dram", 8 * 384 * MIB, RESIZE_LIMIT)?;
        guest.wait_until("the rest is stuck", RESIZE_LIMIT, || {
            Ok(zone(&guest, "dram")?.state == "stuck")
        })?;
        nothing_died(&guest)?;
    }
    Ok(())
}

fn fixed_size_beyond_descriptors_leaves_the_guest_alive() -> Result<()> {
    let events = this_tests_dir().join("events");
    let guest = guest_of_24_gib()
        .pressure("fixed,size=20G")
        .cmdline("foreshore.agent_args=--kernel-blocks=off")
        .argument("--event-monitor", &format!("path={}", events.display()))
        .boot()?;
    guest.wait_until("descriptors limit the plan", RESIZE_LIMIT, || {
        let hold = [("direction", "hold"), ("reason", "descriptors")];
        let metrics = guest.metrics()?;
        Ok(metrics.value("foreshore_pressure_plans_total", &hold).is_ok_and(|plans| plans > 0.0))
    })?;
    guest.wait_until("the reports raise the limit", RESIZE_LIMIT, || {
        Ok(zone(&guest, "dram")?.plugged_bytes > 8 << 30)
    })?;
    wait_for_held_event(&guest, &events)?;
    nothing_died(&guest)
}

/// Load that allocates kernel memory only.
pub(crate) struct Load {
    pub(crate) command: &'static str,
    pub(crate) goal: &'static str,
    /// Minimum amount of kernel memory that the load allocates.
    pub(crate) kernel_mib: u64,
}

/// Returns the kernel memory: all memory except free pages, page cache and anonymous pages.
pub(crate) fn kernel_mib(guest: &Guest) -> Result<u64> {
    const COMMAND: &str = "awk '/^MemTotal:/ { n += $2 } /^(MemFree|Buffers|Cached|SwapCached|AnonPages):/ { n -= $2 } \
                           END { print int(n / 1024) }' /proc/meminfo";
    Ok(guest.run(COMMAND)?.trim().parse()?)
}

const FILES: Load = Load {
    command: "mkdir /files && mount -t tmpfs -o size=4G,nr_inodes=0 files /files && \
              guest-tool make-files /files 400000 && exec echo all",
    goal: "all",
    kernel_mib: 400,
};
const SOCKETS: Load =
    Load { command: "exec guest-tool fill-sockets 300", goal: "held 300", kernel_mib: 350 };
/// Linux can reclaim the entries for these names. kernfs caches names of missing files.
const MISSING_FILES: Load = Load {
    command: "guest-tool miss-files /sys 2000000 && exec echo all",
    goal: "all",
    kernel_mib: 50,
};
const PROCESSES: Load = Load {
    command: "dd if=/dev/zero of=/run/mapped bs=1M count=8 2>/dev/null && \
              echo 8192 >/proc/sys/kernel/pid_max && exec guest-tool map-by-processes /run/mapped 2000",
    goal: "held 2000",
    kernel_mib: 180,
};

/// Guest with 384 MiB of boot memory, to which 256 MiB of DRAM and 512 MiB of PM can be added.
fn guest_of_640_mib_of_dram(pool: &Pool) -> GuestBuilder {
    Guest::builder()
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=256M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pressure(&format!("psi,record={}", this_tests_dir().join("trace").display()))
}

pub(crate) fn run_to_goal(guest: &Guest, load: &Load) -> Result<Option<Script>> {
    let mut script = guest.start_script(LOAD_LIMIT, load.command)?;
    let is_reached = script.wait_for_line(load.goal).is_ok();
    Ok(is_reached.then_some(script))
}

fn is_held(load: &Load) -> Result<()> {
    let pool = Pool::create("640M")?;
    let guest = guest_of_640_mib_of_dram(&pool).boot()?;
    let idle_mib = kernel_mib(&guest)?;
    let Some(_script) = run_to_goal(&guest, load)? else {
        bail!(
            "The load ended early: {}",
            guest.run("dmesg | grep -v 'KB$' | tail -n 60; cat /run/agent.log")?
        );
    };
    let used_mib = kernel_mib(&guest)?.saturating_sub(idle_mib);
    println!("The load takes {used_mib} MiB of kernel memory");
    ensure!(used_mib >= load.kernel_mib, "The load takes only {used_mib} MiB of kernel memory");
    nothing_died(&guest)
}

/// The guest has 3.5 GiB of boot memory. 512 MiB of it are above the hole, and half of those are
/// movable. Therefore, ZONE_DMA32 should keep a part of the reserve.
fn boot_memory_around_the_hole_is_there_and_keeps_the_reserve() -> Result<()> {
    const PAGE_BYTES: u64 = 4096;
    let pool = Pool::create("128M")?;
    let guest = Guest::builder()
        .memory("size=3584M,hotplug_method=virtio-mem,hotplug_size=14G")
        .pm_memory(&format!("pool={},size=64M", pool.name()))
        .pressure("psi")
        .boot()?;
    let mib = mem_total_mib(&guest)?;
    ensure!((3350..=3584).contains(&mib), "MemTotal is {mib} MiB");
    ensure!(guest.run("cat /proc/iomem")?.contains("100000000-"), "No memory begins at 4 GiB");
    let reserve_bytes = kernel_reserve_bytes(3584 * MIB, (14 << 30) + 64 * MIB);
    // `protection: (0, 0, NORMAL, MOVABLE, DEVICE)` gives the pages that allocations for a higher
    // zone leave free.
    let reserve_script = "awk '/^Node/ { zone = $4 } $1 == \"managed\" { managed = $2 } /protection:/ { gsub(/[(),]/, \"\") } \
                /protection:/ && /[0-9]/ { user = $5 < managed ? $5 : managed } \
                /protection:/ && zone == \"DMA32\" { n += user - $4 } /protection:/ && zone == \"Normal\" { n += user } \
                END { print n }' /proc/zoneinfo";
    // Zones keep less than the full reserve, because boot allocations use up to an eighth of
    // ZONE_MOVABLE. If ZONE_DMA32 kept nothing, half of the reserve would be missing.
    let min_bytes = reserve_bytes - reserve_bytes / 8;
    guest.wait_until("the agent has set the reserve", RESIZE_LIMIT, || {
        let reserved_bytes = guest.run(reserve_script)?.trim().parse::<u64>()? * PAGE_BYTES;
        Ok(reserved_bytes >= min_bytes)
    })?;
    guest.no_kernel_complaints()
}

/// Fills sockets until the OOM killer kills their owner, which frees them. Files on a tmpfs would
/// not be freed, so Linux would kill one process after another. Linux may kill a second process
/// before the sockets of the first one have been closed.
fn sockets_fill_all_but_a_seventh_of_dram_before_their_owner_dies() -> Result<()> {
    const DRAM_MIB: u64 = 640;
    const KERNEL_PERCENT: u64 = 85;
    let pool = Pool::create("640M")?;
    let guest = guest_of_640_mib_of_dram(&pool).boot()?;
    let sampler = "while sleep 0.1; do awk '/MemUsed/ { n += $4 } /FilePages|AnonPages/ { n -= $4 } END { print n }' \
                   /sys/devices/system/node/node0/meminfo >>/run/samples; done";
    let _sampler = guest.start_script(LOAD_LIMIT, sampler)?;
    let mut load = guest.start_script(LOAD_LIMIT, "exec guest-tool fill-sockets 4000")?;
    while load.next_line().is_some() {}
    let max_kib: u64 = guest.run("sort -n /run/samples | tail -n 1")?.trim().parse()?;
    println!("The kernel used {} of {DRAM_MIB} MiB of DRAM", max_kib / 1024);
    ensure!(
        max_kib / 1024 >= DRAM_MIB * KERNEL_PERCENT / 100,
        "The kernel used only {max_kib} KiB"
    );
    let killed = killed_names(&guest)?;
    ensure!(killed.first().is_some_and(|name| name == "guest-tool"), "Killed: {killed:?}");
    Ok(())
}

/// Returns true if the OOM killer has killed a process. Reads the console, because the guest's
/// shell may be the killed process.
pub(crate) fn has_killed(guest: &Guest) -> Result<bool> {
    Ok(guest.console_log()?.contains("Out of memory: Killed process"))
}

fn killed_names(guest: &Guest) -> Result<Vec<String>> {
    let names = guest.run("dmesg | sed -n 's/.*Killed process [0-9]* (\\([^)]*\\)).*/\\1/p'")?;
    Ok(names.lines().map(str::to_owned).collect())
}

/// Starts processes until the kernel has no memory for another one. The OOM killer may kill only
/// processes that prefer to be killed (`oom_score_adj`). The guest should keep running while the
/// other processes live.
fn processes_beyond_dram_are_the_only_ones_to_die() -> Result<()> {
    // For each kill, a list of thousands of processes would occupy the console for minutes.
    const PROCESSES: &str = "dd if=/dev/zero of=/run/mapped bs=1M count=8 2>/dev/null && \
              for limit in pid_max threads-max; do echo 32768 >/proc/sys/kernel/$limit; done && \
              echo 0 >/proc/sys/vm/oom_dump_tasks && exec guest-tool map-by-processes /run/mapped 20000";
    let pool = Pool::create("192M")?;
    let guest = Guest::builder()
        .memory(&format!("size={SMALL_DRAM_MIB}M"))
        .pm_memory(&format!("pool={},size=128M", pool.name()))
        .pressure("psi")
        .boot()?;
    let mut load = guest.start_script(LOAD_LIMIT, PROCESSES)?;
    let last = loop {
        let line = load.next_line().context("The load ended")?;
        if !line.starts_with("started ") {
            break line;
        }
    };
    println!("The load printed {last:?}; the kernel uses {} MiB", kernel_mib(&guest)?);
    ensure!(last.starts_with("killed after "), "The kernel had memory for all processes");
    let killed = killed_names(&guest)?;
    println!("{} processes were killed", killed.len());
    ensure!(
        !killed.is_empty() && killed.iter().all(|name| name == "guest-tool"),
        "Killed: {killed:?}"
    );
    guest.run("pidof foreshore-agent").context("The agent was killed")?;
    drop(load);
    Ok(())
}

/// Shows that the test of `load` can fail: if no blocks are converted, the OOM killer kills `load`.
/// Two loads have no such test, because Linux can reclaim the dentries of missing files, and
/// because the tables of 2,000 processes fit into boot memory.
fn is_killed_without_blocks(load: &Load) -> Result<()> {
    let pool = Pool::create("640M")?;
    let guest = guest_of_640_mib_of_dram(&pool)
        .cmdline("foreshore.agent_args=--kernel-blocks=off")
        .boot()?;
    let result = run_to_goal(&guest, load);
    ensure!(!matches!(result, Ok(Some(_))), "The load reached its goal without kernel blocks");
    ensure!(has_killed(&guest)?, "No process was killed");
    Ok(())
}

/// Uses all PM of a guest with 512 MiB of DRAM. PM Buddy's evaluation used 7 GiB of PM. The host of
/// `ci/test` does not have enough memory for that size: run it with `ci/nested/host --mem 16384`.
fn all_pm_is_used(pm_mib: u64) -> Result<()> {
    let host_mib = pm_mib + 1536;
    let free_mib = free_bytes()? / MIB;
    if free_mib < host_mib {
        return skip(format!(
            "the host has {free_mib} MiB of free memory, and {host_mib} are needed"
        ));
    }
    let pool = Pool::create(&format!("{}M", pm_mib + 64))?;
    let guest = Guest::builder()
        .memory("size=512M")
        .pm_memory(&format!("pool={},size={pm_mib}M", pool.name()))
        .pressure("psi")
        .boot()?;
    let hogs = hold(&guest, pm_mib)?;
    let plugged_bytes = zone(&guest, "pm")?.plugged_bytes;
    ensure!(plugged_bytes == pm_mib * MIB, "Only {plugged_bytes} bytes of PM are plugged");
    nothing_died(&guest)?;
    drop(hogs);
    Ok(())
}
