//! Tests of memory pressure in a guest: the governor should plug memory on a shortage and unplug it
//! afterwards, without requests from a client.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::{Guest, Pool};
use serde_json::json;

use crate::decisions::wait_for_agent;
use crate::zones::{MIB, vmstat, wait_until_plugged, zone};

guest_tests::tests![
    pressure_grows_dram_first_and_pm_goes_back_first: 400 x 2,
    without_the_governor_the_same_load_swaps_or_is_killed: 240 (extended) x 2,
    a_ramp_is_served_before_kswapd_works: 240 (long) x 2,
    without_the_governor_kswapd_works_for_that_ramp: 240 (extended) x 2,
    only_a_process_that_exhausts_pm_as_well_is_killed: 300 (long) x 2,
    kernel_reserve_prevents_shortages_beside_pm: 400 (long) on [V6_12, V6_1 extended] x 2,
    kernel_is_short_of_memory_without_its_reserve: 400 (extended) x 2,
    a_silent_agent_is_noticed: 240 x 2,
];

/// Time for a decision and its execution under emulation.
pub(crate) const GROW_LIMIT: Duration = Duration::from_secs(120);
/// Time for a shrink. Shrinks are slow on purpose, and a cool-down precedes their steps.
const SHRINK_LIMIT: Duration = Duration::from_secs(240);

fn guest_without_swap(pool: &Pool) -> GuestBuilder {
    Guest::builder()
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
}

fn small_guest(pool: &Pool) -> GuestBuilder {
    guest_without_swap(pool).cmdline("foreshore.zram=256M")
}

/// Fills guest memory with incompressible data. Returns true if the guest held all of it.
pub(crate) fn fill(guest: &Guest, mib: u64) -> Result<(Script, bool)> {
    let mut hog = guest.start_script(GROW_LIMIT, &format!("exec guest-tool hog {mib}"))?;
    let held = hog.wait_for_line(&format!("held {mib}")).is_ok();
    Ok((hog, held))
}

/// Makes psi shrink without the default delays, for guests that have already grown. Unit tests
/// cover the delays.
fn give_back_soon(guest: &Guest) -> Result<()> {
    let soon = json!({ "params": { "idle": "1s" }, "rules": { "cool_down": "1s", "shrink_interval": "100ms" } });
    guest.put("vm.pressure", soon).map(drop)
}

fn pressure_grows_dram_first_and_pm_goes_back_first() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = small_guest(&pool).pressure("psi").boot()?;
    ensure!(zone(&guest, "pm")?.plugged_bytes == 0, "PM is plugged without a shortage");
    let idle_bytes = pool.occupied_bytes()?;
    let (hog, held) = fill(&guest, 640)?;
    ensure!(held, "The load was killed");
    let (dram, pm) = (zone(&guest, "dram")?, zone(&guest, "pm")?);
    ensure!(
        dram.plugged_bytes == 128 * MIB,
        "{} bytes of DRAM are plugged instead of 128 MiB",
        dram.plugged_bytes
    );
    ensure!(pm.plugged_bytes >= 192 * MIB, "Only {} bytes of PM are plugged", pm.plugged_bytes);
    let swapped = vmstat(&guest, "pswpout")?;
    ensure!(swapped == 0, "{swapped} pages were swapped out");
    ensure!(vmstat(&guest, "oom_kill")? == 0, "A process was killed");
    let top_bytes = pool.occupied_bytes()?;
    ensure!(
        top_bytes > idle_bytes + 128 * MIB,
        "The pool file grew only from {idle_bytes} to {top_bytes} bytes"
    );
    give_back_soon(&guest)?;
    drop(hog);
    let back = guest.wait_until("all PM is unplugged", SHRINK_LIMIT, || {
        let (dram, pm) = (zone(&guest, "dram")?, zone(&guest, "pm")?);
        ensure!(
            pm.plugged_bytes == 0 || dram.plugged_bytes == 128 * MIB,
            "DRAM shrank to {} bytes with {} bytes of PM plugged",
            dram.plugged_bytes,
            pm.plugged_bytes
        );
        Ok(pm.plugged_bytes == 0)
    });
    if back.is_err() {
        // Diagnostics for the log of a failed test.
        println!("{}", guest.get("vm.memory")?);
        println!("{}", guest.get("vm.pressure")?);
        println!("{}", guest.run("free -m; dmesg | tail -n 20; cat /run/agent.log")?);
    }
    back?;
    pool.wait_until_clean()?;
    let after_bytes = pool.occupied_bytes()?;
    ensure!(
        after_bytes <= idle_bytes + 4 * MIB,
        "The pool file occupied {idle_bytes} bytes, then {top_bytes}, now {after_bytes}"
    );
    ensure!(zone(&guest, "pm")?.resident_bytes == 0, "PM is still resident in the VMM");
    guest.no_kernel_complaints()
}

/// Shows that the test above can fail: without the governor, the same load should not fit into
/// memory.
fn without_the_governor_the_same_load_swaps_or_is_killed() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = small_guest(&pool).pressure("off").boot()?;
    let (_hog, held) = fill(&guest, 640)?;
    let swapped = vmstat(&guest, "pswpout")?;
    ensure!(!held || swapped > 0, "The load fit without the governor and without swapping");
    ensure!(zone(&guest, "pm")?.plugged_bytes == 0, "PM was plugged with the policy off");
    Ok(())
}

/// Result of a load that grows slowly.
struct Ramp {
    held: bool,
    /// Number of pages that kswapd has scanned for reclaim.
    scanned_by_kswapd: u64,
    /// Number of pages that allocating tasks have scanned themselves.
    scanned_directly: u64,
    swapped_out: u64,
}

impl Ramp {
    /// In half a minute, allocates as much as [`fill`] in the other tests. This exceeds DRAM.
    fn climb(guest: &Guest) -> Result<Self> {
        const COUNTERS: [&str; 3] = ["pgscan_kswapd", "pgscan_direct", "pswpout"];
        let count =
            || COUNTERS.iter().map(|counter| vmstat(guest, counter)).collect::<Result<Vec<u64>>>();
        let before = count()?;
        let mut leak = guest.start_script(GROW_LIMIT, "exec guest-tool leak 640 24")?;
        let mut held = false;
        while !held && let Some(line) = leak.next_line() {
            held = line.starts_with("held 640 ");
        }
        let after = count()?;
        let [scanned_by_kswapd, scanned_directly, swapped_out] =
            std::array::from_fn(|index| after[index] - before[index]);
        Ok(Self { held, scanned_by_kswapd, scanned_directly, swapped_out })
    }
}

/// The governor should be faster than kswapd, which would also reclaim page cache that is in use,
/// and swap.
fn a_ramp_is_served_before_kswapd_works() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = small_guest(&pool).pressure("psi").boot()?;
    wait_for_agent(&guest, "live")?;
    let ramp = Ramp::climb(&guest)?;
    ensure!(ramp.held, "The load was killed");
    ensure!(ramp.scanned_by_kswapd == 0, "kswapd scanned {} pages", ramp.scanned_by_kswapd);
    ensure!(ramp.scanned_directly == 0, "Direct reclaim scanned {} pages", ramp.scanned_directly);
    ensure!(ramp.swapped_out == 0, "{} pages were swapped out", ramp.swapped_out);
    ensure!(zone(&guest, "pm")?.plugged_bytes >= 192 * MIB, "The load fit without PM");
    guest.no_kernel_complaints()
}

/// Shows that the test above can fail: without the governor, kswapd should have to reclaim memory
/// for this load.
fn without_the_governor_kswapd_works_for_that_ramp() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = small_guest(&pool).pressure("off").boot()?;
    let ramp = Ramp::climb(&guest)?;
    ensure!(
        ramp.scanned_by_kswapd > 0,
        "kswapd scanned no pages; the load was held: {}",
        ramp.held
    );
    Ok(())
}

/// A program that allocates 100 MB/s endlessly should not be killed before all PM has been plugged.
fn only_a_process_that_exhausts_pm_as_well_is_killed() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = guest_without_swap(&pool).pressure("psi").boot()?;
    let mut leak = guest.start_script(GROW_LIMIT, "exec guest-tool leak 4096 100")?;
    let mut held = String::new();
    while let Some(line) = leak.next_line() {
        held = line;
    }
    // The governor does not shrink the guest for 5 s after a grow.
    let (dram, pm) = (zone(&guest, "dram")?, zone(&guest, "pm")?);
    let end = leak.finish()?;
    ensure!(end.code == 137, "The leak was not killed: {end:?}");
    ensure!(vmstat(&guest, "oom_kill")? == 1, "Not exactly one process was killed");
    ensure!(
        dram.plugged_bytes == 128 * MIB && pm.plugged_bytes == 512 * MIB,
        "The leak was killed after {held:?} (MiB and ms), with {} bytes of DRAM and {} of PM plugged",
        dram.plugged_bytes,
        pm.plugged_bytes
    );
    let held_mib: u64 = held
        .split(' ')
        .nth(1)
        .and_then(|mib| mib.parse().ok())
        .context("The leak printed no size")?;
    ensure!(held_mib >= 768, "The leak had {held_mib} of 1024 MiB");
    Ok(())
}

/// Guest without hotpluggable DRAM. PM can only be used by programs.
fn guest_of_fixed_dram(pool: &Pool) -> GuestBuilder {
    Guest::builder()
        .memory("size=384M")
        .pm_memory(&format!("pool={},size=768M", pool.name()))
        .cmdline("foreshore.zram=256M")
        .pressure("psi")
}

/// Writes a file to a tmpfs, so that no process is an OOM victim because of its size. Returns true
/// if the whole file was written.
fn write_to_memory(guest: &Guest, mib: u64) -> Result<bool> {
    let write = format!(
        "mkdir -p /run/load && mount -t tmpfs -o size=2G load /run/load && \
         dd if=/dev/urandom of=/run/load/fill bs=1M count={mib} 2>/dev/null && stat -c %s /run/load/fill"
    );
    let written = guest.run_within(GROW_LIMIT, &write)?;
    Ok(written.trim().parse::<u64>()? == mib * MIB)
}

/// Message that is logged when no 2 MiB of DRAM are left for page descriptors
/// (mm/sparse-vmemmap.c).
const NO_ROOM_FOR_DESCRIPTORS: &str = "vmemmap alloc failure";

/// Counters that remain 0 while the guest's kernel has enough DRAM.
fn signs_of_shortage(guest: &Guest) -> Result<Vec<(&'static str, u64)>> {
    let failures = guest.console_log()?.matches(NO_ROOM_FOR_DESCRIPTORS).count();
    let mut counts = vec![(NO_ROOM_FOR_DESCRIPTORS, failures as u64)];
    for counter in ["pswpout", "oom_kill", "allocstall_dma32"] {
        counts.push((counter, vmstat(guest, counter)?));
    }
    Ok(counts)
}

fn kernel_reserve_prevents_shortages_beside_pm() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = guest_of_fixed_dram(&pool).boot()?;
    // The load is twice as large as DRAM. The load would leave no DRAM for page tables, page
    // descriptors, stacks and slabs.
    ensure!(write_to_memory(&guest, 700)?, "The guest did not write all data");
    let pm = zone(&guest, "pm")?;
    ensure!(pm.plugged_bytes >= 384 * MIB, "The data fit with {} bytes of PM", pm.plugged_bytes);
    for (counter, count) in signs_of_shortage(&guest)? {
        ensure!(count == 0, "{counter} is {count}");
    }
    // It should be possible to unplug all movable memory again.
    guest.run("umount /run/load")?;
    wait_until_plugged(&guest, "pm", 0, SHRINK_LIMIT)?;
    guest.no_kernel_complaints()
}

/// Returns true if the kernel has logged that it ran out of memory. It then killed a process, or
/// found none to kill (mm/oom_kill.c).
fn has_run_out(console: &str) -> bool {
    ["Out of memory", "Killed process", "System is deadlocked on memory"]
        .iter()
        .any(|message| console.contains(message))
}

/// Shows that the test of the reserve can fail: without a reserve for the kernel, its load should
/// cause a shortage.
fn kernel_is_short_of_memory_without_its_reserve() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = guest_of_fixed_dram(&pool).cmdline("movablecore=0").boot()?;
    match write_to_memory(&guest, 700) {
        Ok(held) => {
            let counts = signs_of_shortage(&guest)?;
            ensure!(
                !held || counts.iter().any(|(_, count)| *count > 0),
                "The load fit without a sign of a shortage"
            );
        }
        // In the worst case, the guest panics and cannot respond.
        Err(error) => {
            ensure!(
                has_run_out(&guest.console_log()?),
                "The guest did not run out of memory: {error:#}"
            )
        }
    }
    Ok(())
}

fn a_silent_agent_is_noticed() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = small_guest(&pool).pressure("psi").boot()?;
    let report_age_ms =
        || -> Result<Option<u64>> { Ok(guest.get("vm.pressure")?["report_age_ms"].as_u64()) };
    guest.wait_until("a report has arrived", GROW_LIMIT, || Ok(report_age_ms()?.is_some()))?;
    guest.run("killall -STOP foreshore-agent")?;
    guest.wait_until("the last report is 5 s old", GROW_LIMIT, || {
        Ok(report_age_ms()?.is_some_and(|age| age > 5000))
    })?;
    let plugged = zone(&guest, "pm")?.plugged_bytes;
    guest.run("killall -CONT foreshore-agent")?;
    guest.wait_until("reports arrive again", GROW_LIMIT, || {
        Ok(report_age_ms()?.is_some_and(|age| age < 5000))
    })?;
    let now = zone(&guest, "pm")?.plugged_bytes;
    ensure!(now == plugged, "PM changed from {plugged} to {now} bytes in an idle guest");
    guest.run("pidof foreshore-agent").context("The agent has ended")?;
    guest.no_kernel_complaints()
}
