//! Tests of the agent in a guest: its cost at rest, its reconnection to a restarted VMM, and its
//! reports of idle memory. The test itself listens on its own port in place of the VMM.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::{Guest, Pool};
use serde_json::{Value, json};

use crate::zones::MIB;

guest_tests::tests![
    idle_agent_is_small_and_reconnects_to_a_vmm_that_returns: 240 (long) x 2,
    agent_on_6_1_is_small_and_runs_without_newer_features: 240 (extended) on [V6_1] x 2,
    tasks_stalled_on_memory_are_reported_by_an_unstalled_agent: 240 (long) x 2,
    huge_pages_come_from_pm_as_well: 240 (long) on [V6_12, V6_1 extended] x 2,
    idle_memory_is_reported_and_accessed_memory_is_not: 600 (extended) x 2,
];

const PORT: u32 = 9800;
const LIMIT: Duration = Duration::from_secs(120);
const MAX_RSS_KIB: u64 = 3 * 1024;
const IDLE_REPORTS: u64 = 8;
/// Maximum number of sleeps per second. At rest, the agent checks memory ten times per second and
/// reports once. 20 sleeps would be too many.
const MAX_SLEEPS_PER_REPORT: f64 = 13.0;
/// Maximum CPU use, to detect an agent that spins. On an emulated host, the agent uses 1 to 2 %.
/// The share includes vCPU time that other programs on the machine take unnoticed by the guest's
/// kernel. `ci/bench --only agent` measures instructions and compares them with the target.
const MAX_CPU_SHARE: f64 = 0.1;
const MONITORS: &str = "/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds";

/// Listener in place of the VMM.
struct Vmm {
    listener: UnixListener,
    path: PathBuf,
}

impl Vmm {
    fn listen(guest: &Guest) -> Result<Self> {
        let mut path = guest.vsock_socket().into_os_string();
        path.push(format!("_{PORT}"));
        let path = PathBuf::from(path);
        Ok(Vmm {
            listener: UnixListener::bind(&path).context("Cannot listen for the agent")?,
            path,
        })
    }

    fn accept(&self) -> Result<Lines> {
        self.listener.set_nonblocking(true)?;
        let stream = guest_tools::wait::wait_for("the agent connects", LIMIT, || {
            match self.listener.accept() {
                Ok((stream, _)) => Ok(Some(stream)),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
                Err(error) => Err(error.into()),
            }
        })?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut lines = Lines(BufReader::new(stream));
        let hello = lines.next()?;
        ensure!(hello["type"] == "hello", "The first message is not a hello: {hello}");
        Ok(lines)
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

struct Lines(BufReader<UnixStream>);

impl Lines {
    fn next(&mut self) -> Result<Value> {
        let mut line = String::new();
        ensure!(
            self.0.read_line(&mut line).context("Cannot read a line of the agent")? > 0,
            "The agent closed the connection"
        );
        serde_json::from_str(&line).with_context(|| format!("{line:?} is not JSON"))
    }

    fn send(&mut self, message: &Value) -> Result<()> {
        writeln!(self.0.get_mut(), "{message}").context("Cannot send a message to the agent")
    }

    fn idle_bytes(&mut self, node: u64) -> Result<Option<u64>> {
        let report = self.next()?;
        let idle = report["idle"].as_array();
        let idle = idle.and_then(|idle| idle.iter().find(|idle| idle["node"] == node));
        Ok(idle.and_then(|idle| idle["idle_bytes"].as_u64()))
    }
}

fn end(guest: &Guest, signal: &str) -> Result<()> {
    guest.run(&format!("killall -{signal} foreshore-agent"))?;
    guest.wait_until_run("the agent has ended", LIMIT, "! pidof foreshore-agent")
}

fn monitors(guest: &Guest) -> Result<String> {
    Ok(guest.run(&format!("cat {MONITORS}"))?.trim().to_owned())
}

/// Restarts the agent so that it sends its reports to the test instead of the VMM.
fn redirect(guest: &Guest, signal: &str) -> Result<()> {
    end(guest, signal)?;
    guest.run(&format!("foreshore-agent --port {PORT} >>/run/agent.log 2>&1 & echo"))?;
    Ok(())
}

fn status_kib(guest: &Guest, field: &str) -> Result<u64> {
    let command = format!("awk '/^{field}:/ {{ print $2 }}' /proc/$(pidof foreshore-agent)/status");
    let text = guest.run(&command)?;
    text.trim().parse().with_context(|| format!("{field} is {text:?}"))
}

/// Checks that the agent is small, that all of its memory is locked, and that every zone reports
/// its number of large free blocks.
fn is_small_and_reports_free_blocks(guest: &Guest, lines: &mut Lines) -> Result<()> {
    for seq in 1..=3 {
        let report = lines.next()?;
        ensure!(report["seq"] == seq, "Report {seq} has another number: {report}");
        let zones = report["zones"].as_array().context("The report has no zones")?;
        let known = |zone: &&Value| zone["largest_free_blocks"].is_u64();
        ensure!(
            zones.iter().filter(known).count() == zones.len(),
            "A zone has no largest_free_blocks: {report}"
        );
        let free =
            zones.iter().filter_map(|zone| zone["largest_free_blocks"].as_u64()).sum::<u64>();
        ensure!(free > 0, "An idle guest has no free block of 4 MiB: {report}");
    }
    let (rss_kib, locked_kib) = (status_kib(guest, "VmRSS")?, status_kib(guest, "VmLck")?);
    ensure!(rss_kib < MAX_RSS_KIB, "The agent uses {rss_kib} KiB");
    ensure!(locked_kib >= rss_kib, "Only {locked_kib} of {rss_kib} KiB are locked");
    println!("the agent uses {rss_kib} KiB, all locked");
    is_idle(guest, lines)
}

/// Resources that the agent has used so far, according to the guest's counters and clock.
struct Spent {
    uptime_s: f64,
    cpu_s: f64,
    sleeps: f64,
}

impl Spent {
    fn read(guest: &Guest) -> Result<Self> {
        let text = guest.run(
            "pid=$(pidof foreshore-agent); cut -d ' ' -f 1 /proc/uptime; cut -d ' ' -f 1 /proc/$pid/schedstat; \
                awk '/^voluntary/ { print $2 }' /proc/$pid/status",
        )?;
        let numbers = text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>();
        match numbers.with_context(|| format!("Unexpected CPU statistics: {text:?}"))?[..] {
            [uptime_s, cpu_ns, sleeps] => Ok(Self { uptime_s, cpu_s: cpu_ns / 1e9, sleeps }),
            _ => bail!("Unexpected CPU statistics: {text:?}"),
        }
    }
}

/// Reads `reports` reports, and returns the time between the first and the last one by the guest's
/// clock, in milliseconds.
fn span_ms(lines: &mut Lines, reports: u64) -> Result<u64> {
    let mut of_next = || -> Result<(u64, u64)> {
        let report = lines.next()?;
        let number = |field: &str| {
            report[field].as_u64().with_context(|| format!("The report has no {field}: {report}"))
        };
        Ok((number("seq")?, number("monotonic_ms")?))
    };
    let (first, start_ms) = of_next()?;
    loop {
        let (seq, now_ms) = of_next()?;
        if seq >= first + reports {
            return Ok(now_ms - start_ms);
        }
    }
}

/// Checks the rates at rest given in docs/reference/agent.md: one report and ten checks per second.
/// On a busy machine they may be lower but never higher, so they are compared with upper limits by
/// the guest's clock.
fn is_idle(guest: &Guest, lines: &mut Lines) -> Result<()> {
    // After connecting, the agent needs three seconds to come to rest.
    span_ms(lines, 4)?;
    let before = Spent::read(guest)?;
    let took_ms = span_ms(lines, IDLE_REPORTS)?;
    let after = Spent::read(guest)?;
    let seconds = after.uptime_s - before.uptime_s;
    let (sleeps, cpu) =
        ((after.sleeps - before.sleeps) / seconds, (after.cpu_s - before.cpu_s) / seconds);
    println!(
        "at rest: {IDLE_REPORTS} reports in {took_ms} ms, {sleeps:.1} sleeps a second, {:.2} % of a CPU",
        cpu * 100.0
    );
    // One report may be early, because a program in the guest has allocated and freed memory.
    ensure!(
        took_ms >= (IDLE_REPORTS - 1) * 1000,
        "{IDLE_REPORTS} reports at rest took {took_ms} ms"
    );
    ensure!(sleeps < MAX_SLEEPS_PER_REPORT, "The agent wakes {sleeps:.1} times a second at rest");
    ensure!(cpu < MAX_CPU_SHARE, "The agent uses {:.2} % of a CPU at rest", cpu * 100.0);
    Ok(())
}

fn idle_agent_is_small_and_reconnects_to_a_vmm_that_returns() -> Result<()> {
    let guest = Guest::builder().pressure("off").boot()?;
    let vmm = Vmm::listen(&guest)?;
    guest.wait_until("the agent looks for idle memory", LIMIT, || Ok(monitors(&guest)? != "0"))?;
    // A killed agent leaves its monitors behind. The next agent takes them over, and removes them
    // when it ends.
    redirect(&guest, "KILL")?;
    ensure!(monitors(&guest)? != "0", "The agent has no monitors");
    let mut lines = vmm.accept()?;
    is_small_and_reports_free_blocks(&guest, &mut lines)?;
    // Shows that these checks can fail: the same counts detect an agent that reports more often, as
    // requested here.
    lines.send(
        &json!({ "type": "settings", "version": 1, "watermark_bytes": 0, "rest_interval_ms": 50,
        "watermark_interval_ms": 50 }),
    )?;
    let took_ms = span_ms(&mut lines, IDLE_REPORTS)?;
    ensure!(
        took_ms < (IDLE_REPORTS - 1) * 1000,
        "With shorter intervals, {IDLE_REPORTS} reports took {took_ms} ms"
    );
    drop((lines, vmm));
    // A new VMM starts without any state of the old connection.
    let vmm = Vmm::listen(&guest)?;
    let mut lines = vmm.accept()?;
    let report = lines.next()?;
    ensure!(report["seq"] == 1, "The first report to a new VMM is not number 1: {report}");
    end(&guest, "TERM")?;
    ensure!(monitors(&guest)? == "0", "The ended agent left its monitors");
    // The agent does not change another program's monitor.
    guest.run(&format!(
        "echo 1 >{MONITORS}; foreshore-agent --port {PORT} >/run/agent.log 2>&1 & echo"
    ))?;
    drop(vmm.accept()?);
    guest.wait_until_run(
        "the agent logs that DAMON is in use",
        LIMIT,
        "grep 'another program uses DAMON' /run/agent.log",
    )?;
    end(&guest, "TERM")?;
    ensure!(monitors(&guest)? == "1", "The agent removed another program's monitor");
    guest.no_kernel_complaints()
}

fn agent_on_6_1_is_small_and_runs_without_newer_features() -> Result<()> {
    let guest = Guest::builder().pressure("off").boot()?;
    let vmm = Vmm::listen(&guest)?;
    redirect(&guest, "TERM")?;
    let mut lines = vmm.accept()?;
    is_small_and_reports_free_blocks(&guest, &mut lines)?;
    guest.run("grep 'Cannot look for idle memory' /run/agent.log")?;
    guest.no_kernel_complaints()
}

fn tasks_stalled_on_memory_are_reported_by_an_unstalled_agent() -> Result<()> {
    let small = Guest::builder().memory("size=384M").cmdline("foreshore.zram=256M");
    let guest = small.pressure("off").boot()?;
    let vmm = Vmm::listen(&guest)?;
    redirect(&guest, "TERM")?;
    let mut lines = vmm.accept()?;
    lines.next()?;
    let major_faults = || guest.run("awk '{ print $12 }' /proc/$(pidof foreshore-agent)/stat");
    let before = major_faults()?;
    // The size exceeds the guest's memory, and the content is incompressible.
    let hog = guest.start_script(LIMIT, "exec guest-tool hog 460")?;
    let mut stalls = 0;
    for _ in 0..1000 {
        let report = lines.next()?;
        if report["cause"] == "stall" {
            let waited_us = report["stall"]["some_us"].as_u64();
            ensure!(waited_us > Some(0), "The report has no stall time: {report}");
            stalls += 1;
        }
        if stalls == 3 {
            break;
        }
    }
    ensure!(stalls == 3, "1000 reports include {stalls} stall reports instead of 3");
    drop(hog);
    let after = major_faults()?;
    ensure!(before == after, "The agent had {} major faults, now {}", before.trim(), after.trim());
    Ok(())
}

fn idle_memory_is_reported_and_accessed_memory_is_not() -> Result<()> {
    const TOUCHED_MIB: u64 = 192;
    let pool = Pool::create("1G")?;
    let guest = Guest::builder()
        .memory("size=512M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pressure("off")
        .boot()?;
    let vmm = Vmm::listen(&guest)?;
    let mut toucher = guest
        .start_script(Duration::from_secs(600), &format!("exec guest-tool touch {TOUCHED_MIB}"))?;
    ensure!(toucher.next_line().as_deref() == Some("touching"), "guest-tool touch did not start");
    redirect(&guest, "TERM")?;
    let mut lines = vmm.accept()?;
    let mut wait_for_idle = |description: &str, enough: &dyn Fn(u64) -> bool| -> Result<u64> {
        for _ in 0..240 {
            if let Some(idle) = lines.idle_bytes(0)?.filter(|idle| enough(*idle)) {
                println!("{description}: {} MiB are idle", idle / MIB);
                return Ok(idle);
            }
        }
        bail!("240 reports do not show that {description}")
    };
    // DAMON finds idle memory gradually.
    let while_touched = wait_for_idle("memory is touched", &|idle| idle > 64 * MIB)?;
    let max_bytes = (512 - TOUCHED_MIB / 2) * MIB;
    ensure!(
        while_touched < max_bytes,
        "{} MiB are idle with {TOUCHED_MIB} MiB in use",
        while_touched / MIB
    );
    // The memory still exists but is no longer accessed.
    guest.run("killall -STOP guest-tool")?;
    wait_for_idle("memory is no longer touched", &|idle| {
        idle > while_touched + TOUCHED_MIB / 2 * MIB
    })?;
    let ticks = guest.run(
        "awk '{ print $14 + $15 }' /proc/$(cat /sys/kernel/mm/damon/admin/kdamonds/0/pid)/stat",
    )?;
    println!("the monitor used {} ticks of 10 ms", ticks.trim());
    guest.no_kernel_complaints()
}

/// Settings that the agent changes while the guest has PM.
const SETTINGS: &str = "cd /sys/kernel/mm/transparent_hugepage && \
    cat enabled defrag khugepaged/defrag /proc/sys/vm/watermark_boost_factor";
/// Size of a load that exceeds the guest's DRAM.
const LOAD_MIB: u64 = 300;

/// Returns the number of page faults with and without a huge page during a load that exceeds DRAM.
/// The kernel reclaims no memory for this load.
fn huge_faults(guest: &Guest) -> Result<(u64, u64)> {
    let counters = || -> Result<BTreeMap<String, u64>> {
        let text = guest.run("cat /proc/vmstat")?;
        let counter = |line: &str| {
            Some((line.split_once(' ')?.0.to_owned(), line.split_once(' ')?.1.parse().ok()?))
        };
        Ok(text.lines().filter_map(counter).collect())
    };
    let before = counters()?;
    guest.run_within(LIMIT, &format!("exec guest-tool load touch {LOAD_MIB}"))?;
    let after = counters()?;
    let rise = |name: &str| {
        let known = after
            .get(name)
            .zip(before.get(name))
            .with_context(|| format!("The kernel does not count {name}"));
        known.map(|(after, before)| after - before)
    };
    for name in ["pswpout", "pgscan_kswapd", "pgscan_direct"] {
        ensure!(rise(name)? == 0, "{name} rose by {} with PM free", rise(name)?);
    }
    Ok((rise("thp_fault_alloc")?, rise("thp_fault_fallback")?))
}

fn huge_pages_come_from_pm_as_well() -> Result<()> {
    let pool = Pool::create("512M")?;
    // Linux disables huge pages in a guest that boots with less than 512 MiB.
    let guest = Guest::builder()
        .memory("size=256M")
        .cmdline("transparent_hugepage=always foreshore.zram=64M")
        .pm_memory(&format!("pool={},size=384M", pool.name()))
        .pressure("fixed,size=384M")
        .boot()?;
    let set = |description: &str, expected: &[&str]| {
        guest.wait_until(description, LIMIT, || {
            let text = guest.run(SETTINGS)?;
            // If a setting has alternatives, the current one is in brackets.
            let chosen = |line: &str| match line.split_once('[') {
                Some((_, rest)) => rest.split(']').next().unwrap_or_default().to_owned(),
                None => line.trim().to_owned(),
            };
            Ok(text.lines().map(chosen).eq(expected.iter().copied()))
        })
    };
    set("settings are those for PM", &["always", "always", "0", "0"])?;
    let online = "awk '/MemTotal/ { exit !($2 > 550 * 1024) }' /proc/meminfo";
    guest.wait_until_run("all of PM is online", LIMIT, online)?;
    let (huge, small) = huge_faults(&guest)?;
    println!("{huge} faults got a huge page, {small} did not");
    ensure!(
        huge > 8 * small && huge > LOAD_MIB / 4,
        "{small} of {} faults got small pages",
        huge + small
    );
    // Shows that this check can fail: with the kernel's own setting, PM would only serve small
    // pages.
    guest.run("echo madvise >/sys/kernel/mm/transparent_hugepage/defrag")?;
    let (huge, small) = huge_faults(&guest)?;
    println!("{huge} and {small} with the kernel's own setting");
    ensure!(
        small > huge,
        "The kernel needs no setting: {huge} huge and {small} small pages without it"
    );
    // A setting that another program has changed is kept. The agent restores the other settings
    // when it ends. After a kill, the next agent restores them once the PM has been unplugged.
    guest.run("echo defer >/sys/kernel/mm/transparent_hugepage/defrag")?;
    let (with_pm, usual) = (["always", "defer", "0", "0"], ["always", "defer", "1", "15000"]);
    let start = || guest.run("foreshore-agent >>/run/agent.log 2>&1 & echo");
    end(&guest, "TERM")?;
    set("settings go back with the agent", &usual)?;
    start()?;
    set("settings are those for PM again", &with_pm)?;
    end(&guest, "KILL")?;
    set("settings outlast an agent that is killed", &with_pm)?;
    start()?;
    guest.put("vm.pressure", json!({ "policy": "fixed", "size": 0 }))?;
    set("settings go back with the memory", &usual)?;
    guest.no_kernel_complaints()
}
