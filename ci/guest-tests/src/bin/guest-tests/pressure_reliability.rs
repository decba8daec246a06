//! Tests the reliability of the governor: the agent is stopped, killed, floods the VMM or sends
//! false reports, the host is busy, or the guest cannot plug or unplug.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, Script};
use guest_tests::{Guest, Pool};
use serde_json::{Value, json};

use crate::decisions::{decisions_total, has_decided, pressure, wait_for_agent};
use crate::zones::{MIB, vmstat, wait_until_plugged, zone};

guest_tests::tests![
    busy_cpus_and_false_reports_do_not_block_decisions: 400 (long) x 2,
    memory_with_pinned_pages_stays_and_the_rest_goes_back: 600 (long) x 2,
    guest_without_dram_for_descriptors_gets_no_request: 600 (long) x 2,
];

const LIMIT: Duration = Duration::from_secs(120);
/// Time for a shrink, including cool-downs and pauses.
const SHRINK_LIMIT: Duration = Duration::from_secs(400);

fn small_guest(pool: &Pool) -> GuestBuilder {
    guest_with_pm(pool, 512)
}

fn guest_with_pm(pool: &Pool, pm_mib: u64) -> GuestBuilder {
    Guest::builder()
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pm_memory(&format!("pool={},size={pm_mib}M", pool.name()))
}

fn refused(guest: &Guest, reason: &str) -> Result<f64> {
    Ok(guest.metrics()?.sum("foreshore_pressure_refused_reports_total", &[("reason", reason)]))
}

/// PM of the guest whose agent is replaced. psi requests more memory for a load that grows faster,
/// and on a fast host some must be left for the later steps.
const LARGE_PM_MIB: u64 = 1024;
/// Largest total size of that guest's zones.
const ALL: u64 = (128 + LARGE_PM_MIB) * MIB;

fn requested_bytes(guest: &Guest) -> Result<u64> {
    Ok(zone(guest, "dram")?.requested_bytes + zone(guest, "pm")?.requested_bytes)
}

fn plugged_bytes(guest: &Guest) -> Result<u64> {
    Ok(zone(guest, "dram")?.plugged_bytes + zone(guest, "pm")?.plugged_bytes)
}

fn reports(guest: &Guest) -> Result<f64> {
    guest.metric("foreshore_pressure_reports_total", &[])
}

/// First message from an agent.
const HELLO: &str = r#"{"type":"hello","version":1,"agent_version":"0","kernel_release":"6.12","preemption":"voluntary","page_size_bytes":4096}"#;

/// False report that claims that the guest has no memory left. `seq` starts at 1.
fn false_report(seq: u32, uptime_ms: u64, total_bytes: u64) -> String {
    let memory = json!({ "total_bytes": total_bytes, "free_bytes": 0, "available_bytes": 0 });
    let zone = json!({ "node": 0, "kind": "dma32", "free_pages": 60_000, "min_pages": 0, "low_pages": 0,
        "high_pages": 0, "managed_pages": 90_000 });
    json!({ "type": "report", "version": 1, "seq": seq, "monotonic_ms": uptime_ms, "memory": memory, "zones": [zone] })
        .to_string()
}

fn uptime_ms(guest: &Guest) -> Result<u64> {
    let uptime_s: f64 = guest.run("cut -d ' ' -f 1 /proc/uptime")?.trim().parse()?;
    Ok((uptime_s * 1000.0) as u64)
}

/// Returns the guest's actual memory, for false reports that are otherwise plausible. The VMM
/// treats plugged memory that is missing from a report as not yet online.
fn total_bytes(guest: &Guest) -> Result<u64> {
    let kib: u64 = guest.run("awk '/^MemTotal:/ { print $2 }' /proc/meminfo")?.trim().parse()?;
    Ok(kib * 1024)
}

fn busy_cpus_and_false_reports_do_not_block_decisions() -> Result<()> {
    const FLOOD: u32 = 600;
    let pool = Pool::create("2G")?;
    // The guest has swap that should remain unused.
    let guest =
        guest_with_pm(&pool, LARGE_PM_MIB).cmdline("foreshore.zram=256M").pressure("psi").boot()?;
    wait_for_agent(&guest, "live")?;
    for zone in pressure(&guest)?["zones"].as_array().context("vm.pressure has no zones")? {
        ensure!(zone["driver_ready"] == true, "The driver is not ready: {zone}");
    }
    // 1. All vCPUs are busy, and so is a host with one CPU. The guest should still get memory
    //    before it swaps.
    let busy = guest.start_script(LIMIT, "while :; do :; done & while :; do :; done")?;
    let hog = guest.hog(512, LIMIT)?;
    let grown = |decision: &Value| {
        decision["direction"] == "grow" && decision["outcome"]["state"] == "reached"
    };
    guest.wait_until("a grow is reached", LIMIT, || has_decided(&guest, grown))?;
    ensure!(vmstat(&guest, "oom_kill")? == 0, "A process was killed");
    let swapped = vmstat(&guest, "pswpout")?;
    ensure!(swapped == 0, "{swapped} pages were swapped out");
    drop((busy, hog));
    // From here on, a guest without reports gets no memory. Otherwise the rule for a lost agent
    // could request all memory, and nothing would be left to request for the reports below.
    guest.put("vm.pressure", json!({ "rules": { "lost_steps": 0 } }))?;
    // 2. The agent is stopped and then killed.
    guest.run("killall -STOP foreshore-agent")?;
    wait_for_agent(&guest, "silent")?;
    guest.run("killall -KILL foreshore-agent")?;
    wait_for_agent(&guest, "gone")?;
    // 3. Another program floods the VMM instead of the agent. Only one agent can be connected, so
    //    no other agent can send reports at the same time. The flood contains one report of a guest
    //    that is short of memory. It should lead to a decision while the flood continues. The flood
    //    continues until it is ended.
    let (refused_before, decided) = (refused(&guest, "not_json")?, decisions_total(&guest)?);
    let left = ALL - requested_bytes(&guest)?;
    println!("{} MiB can still be requested", left / MIB);
    ensure!(left > 0, "No memory can be requested");
    let short = false_report(1, uptime_ms(&guest)?, total_bytes(&guest)?);
    let flood = format!(
        "line=$(head -c 4000 /dev/zero | tr '\\0' x); \
         {{ echo '{HELLO}'; yes $line | head -n {FLOOD}; echo '{short}'; yes $line; }} | guest-tool vsock-send 9746"
    );
    let flood = guest.start_script(LIMIT, &flood)?;
    guest.wait_until("the governor decides during the flood", LIMIT, || {
        has_decided(&guest, |decision| {
            let is_new =
                decision["seq"].as_u64() > Some(decided) && decision["direction"] == "grow";
            is_new && decision["input"]["report"]["available_bytes"] == 0
        })
    })?;
    let amid = refused(&guest, "not_json")?;
    ensure!(
        amid - refused_before >= f64::from(FLOOD),
        "The metrics do not count the lines before the report"
    );
    guest.wait_until("the flood continues", LIMIT, || Ok(refused(&guest, "not_json")? > amid))?;
    // The connection ends when the sender is killed. Lines are long, so that few of them are in
    // transit.
    guest.run("killall yes")?;
    drop(flood);
    wait_for_agent(&guest, "gone")?;
    // Memory that is still being plugged would also be included in decisions about the next
    // reports.
    guest.wait_until("the grow has ended", LIMIT, || {
        Ok(plugged_bytes(&guest)? == requested_bytes(&guest)?)
    })?;
    // 4. False reports claim that the guest has no available memory. These reports lead to requests
    //    for all memory of the zones, but not for more. A report of more memory than possible is
    //    refused and counted.
    let requested = requested_bytes(&guest)?;
    let (accepted, out_of_range) = (reports(&guest)?, refused(&guest, "out_of_range")?);
    let (uptime_ms, total_bytes) = (uptime_ms(&guest)?, total_bytes(&guest)?);
    let false_reports = (1..=5).map(|seq| false_report(seq, uptime_ms, total_bytes));
    let false_reports = false_reports.chain([false_report(6, uptime_ms, 384 * MIB + ALL + 4096)]);
    let false_reports: Vec<_> = std::iter::once(HELLO.to_owned()).chain(false_reports).collect();
    guest
        .run(&format!("printf '%s\\n' '{}' | guest-tool vsock-send 9746", lines(&false_reports)))?;
    guest.wait_until("the false reports are processed", LIMIT, || {
        Ok(pressure(&guest)?["agent"] == "gone" && refused(&guest, "out_of_range")? > out_of_range)
    })?;
    let (accepted, out_of_range) =
        (reports(&guest)? - accepted, refused(&guest, "out_of_range")? - out_of_range);
    ensure!(
        (accepted, out_of_range) == (5.0, 1.0),
        "{accepted} false reports were accepted, {out_of_range} were refused"
    );
    let has_grown = requested_bytes(&guest)? > requested || requested == ALL;
    ensure!(has_grown, "The governor did not grow a guest with a shortage");
    let (dram, pm) = (zone(&guest, "dram")?, zone(&guest, "pm")?);
    ensure!(
        dram.requested_bytes <= 128 * MIB && pm.requested_bytes <= LARGE_PM_MIB * MIB,
        "More memory is requested than exists"
    );
    // 5. The agent returns.
    guest.run("setsid foreshore-agent >/run/agent.log 2>&1 </dev/null &")?;
    wait_for_agent(&guest, "live")?;
    let metrics = guest.metrics()?;
    let plan = "foreshore_pressure_report_to_plan_seconds";
    let count = metrics.value(&format!("{plan}_count"), &[])?;
    let quick = metrics.value(&format!("{plan}_bucket"), &[("le", "0.001")])?;
    // The time is only logged, and not checked.
    println!("{quick} of {count} lines of the agent took less than 1 ms from report to plan");
    guest.no_kernel_complaints()
}

fn lines(lines: &[String]) -> String {
    lines.join("' '")
}

fn memory_with_pinned_pages_stays_and_the_rest_goes_back() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = small_guest(&pool).pressure("psi").boot()?;
    wait_for_agent(&guest, "live")?;
    let hog = guest.hog(640, LIMIT)?;
    let top = zone(&guest, "pm")?.plugged_bytes;
    ensure!(top >= 128 * MIB, "Only {top} bytes of PM are plugged");
    drop(hog);
    // The next load also fills PM and pins some of it.
    let mut pins = guest.start_script(LIMIT, "exec guest-tool pin 560")?;
    pins.wait_for_line("pinned")?;
    let tried = |decision: &Value| {
        decision["direction"] == "shrink"
            && ["partly", "withdrawn", "stuck"]
                .iter()
                .any(|state| decision["outcome"]["state"] == *state)
    };
    guest.wait_until("a shrink times out", SHRINK_LIMIT, || has_decided(&guest, tried))?;
    ensure!(zone(&guest, "dram")?.plugged_bytes == 128 * MIB, "DRAM was unplugged instead of PM");
    drop(pins);
    wait_until_plugged(&guest, "pm", 0, SHRINK_LIMIT)?;
    guest.no_kernel_complaints()
}

/// Takes the memory that the guest's kernel has left for page descriptors, and keeps it.
fn exhaust_memory(guest: &Guest) -> Result<Script> {
    // The page descriptors of a section take 2 MiB. If the guest has to kill a process for another
    // reason, it selects one of the sleepers.
    const EXHAUST: &str = "for sleeper in 1 2 3 4 5 6 7 8; do
            (echo 1000 >/proc/self/oom_score_adj; exec sleep 1000000) &
        done
        exec guest-tool dry 1024";
    let mut script = guest.start_script(LIMIT, EXHAUST)?;
    script.wait_for_line("dried")?;
    Ok(script)
}

fn guest_without_dram_for_descriptors_gets_no_request() -> Result<()> {
    /// Number of reports. Each one would otherwise lead to a request.
    const REPORTS: f64 = 20.0;
    let pool = Pool::create("1G")?;
    // The VMM makes a part of DRAM movable, for programs. Page descriptors come from the rest,
    // which is full.
    let guest = Guest::builder()
        .memory("size=384M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pressure("off")
        .boot()?;
    wait_for_agent(&guest, "live")?;
    let killed = vmstat(&guest, "oom_kill")?;
    let exhausted = exhaust_memory(&guest)?;
    guest.put("vm.pressure", json!({ "policy": "fixed", "size": 512 * MIB }))?;
    let held =
        |decision: &Value| decision["direction"] == "hold" && decision["reason"] == "descriptors";
    guest.wait_until("the request is held back", LIMIT, || has_decided(&guest, held))?;
    let before = reports(&guest)?;
    guest.wait_until("more reports arrive", LIMIT, || Ok(reports(&guest)? >= before + REPORTS))?;
    let pm = zone(&guest, "pm")?;
    ensure!(
        (pm.requested_bytes, pm.plugged_bytes) == (0, 0),
        "{} bytes are requested",
        pm.requested_bytes
    );
    // A size requested by a client should also be held back.
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": 128 * MIB }))?;
    ensure!(
        zone(&guest, "pm")?.requested_bytes == 0,
        "A size requested by a client is requested from the guest"
    );
    guest.put("vm.pressure", json!({ "resume": true }))?;
    drop(exhausted);
    wait_until_plugged(&guest, "pm", 512 * MIB, LIMIT)?;
    guest.run("pidof foreshore-agent").context("The agent was killed")?;
    ensure!(vmstat(&guest, "oom_kill")? == killed, "A process was killed");
    guest.no_kernel_complaints()
}
