//! Tests of hostile guests that repeat requests which are expensive for the host. The VMM should
//! limit their rate, and should serve its API in the meantime.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_tests::guest::Script;
use guest_tests::limits::{open_files_shortage, priority_shortage};
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Pool, skip};
use serde_json::json;

use crate::firmware;
use crate::zones::MIB;

guest_tests::tests![
    plug_storm_is_held_to_the_rate x 2,
    guest_that_resets_at_once_is_slowed_down,
    agent_connects_while_a_program_holds_all_connections,
    flood_of_reports_is_parsed_at_normal_priority x 2,
    console_flood_is_held_to_the_rate_without_loss: 900 (extended),
];

/// Time limit for every wait, and the duration of an attack.
const LIMIT: Duration = Duration::from_secs(60);
const ATTACK: Duration = Duration::from_secs(3);
/// Pause between API calls. The attack also needs the host's single CPU.
const BETWEEN_CALLS: Duration = Duration::from_millis(100);
/// Time limit of an API call. On an emulated host, a call takes about 10 ms.
const CALL_LIMIT: Duration = Duration::from_secs(2);

const GOVERNOR_NICE: i32 = -10;

fn slowest_call(guest: &Guest, time: Duration) -> Result<Duration> {
    let started = Instant::now();
    let mut slowest = Duration::ZERO;
    while started.elapsed() < time {
        for call in ["vmm.ping", "vm.info"] {
            let called = Instant::now();
            guest.get(call)?;
            slowest = slowest.max(called.elapsed());
        }
        thread::sleep(BETWEEN_CALLS);
    }
    ensure!(slowest < CALL_LIMIT, "An API call took {slowest:?}");
    Ok(slowest)
}

struct Thread {
    is_vcpu: bool,
    nice: i64,
    cpu: Duration,
}

fn threads(pid: u32) -> Result<Vec<Thread>> {
    // SAFETY: the call takes no pointers.
    let ticks_per_s = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) })?;
    let mut threads = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended in the meantime is ignored.
        let Ok(stat) = fs::read_to_string(thread?.path().join("stat")) else { continue };
        let (begin, fields) = stat.rsplit_once(')').context("stat has no name")?;
        // The third field follows the thread's name (proc_pid_stat(5)).
        let fields: Vec<_> = fields.split_whitespace().collect();
        let field = |nth: usize| {
            fields.get(nth - 3).with_context(|| format!("stat has no field {nth}: {stat}"))
        };
        let (utime, stime, nice) = (field(14)?, field(15)?, field(19)?);
        let ticks = utime.parse::<u64>()? + stime.parse::<u64>()?;
        threads.push(Thread {
            is_vcpu: begin.contains("(vcpu"),
            nice: nice.parse()?,
            cpu: Duration::from_millis(ticks * 1000 / ticks_per_s),
        });
    }
    Ok(threads)
}

/// Returns the CPU time of all VMM threads except vCPUs. A vCPU's time is spent in the guest.
fn cpu_time_without_vcpus(pid: u32) -> Result<Duration> {
    Ok(threads(pid)?.iter().filter(|thread| !thread.is_vcpu).map(|thread| thread.cpu).sum())
}

/// Returns the part of [`cpu_time_without_vcpus`] that was used with a negative nice value.
fn cpu_time_before_others(pid: u32) -> Result<Duration> {
    let threads = threads(pid)?;
    ensure!(
        threads.iter().any(|thread| thread.nice < 0),
        "All threads of the VMM have normal priority"
    );
    Ok(threads.iter().filter(|thread| thread.nice < 0).map(|thread| thread.cpu).sum())
}

/// Plugged bytes, erased bytes and delayed requests so far.
struct PlugWork {
    plugged_bytes: u64,
    erased_bytes: u64,
    delayed: u64,
}

impl PlugWork {
    fn of(guest: &Guest) -> Result<Self> {
        let metrics = guest.metrics()?;
        let count =
            |name, labels: &[(&str, &str)]| metrics.value(name, labels).map(|value| value as u64);
        Ok(Self {
            plugged_bytes: count("foreshore_memory_plug_bytes_total", &[("zone", "pm")])?,
            erased_bytes: count("foreshore_pool_scrubbed_bytes_total", &[])?,
            delayed: count("foreshore_memory_throttled_requests_total", &[("zone", "pm")])?,
        })
    }
}

fn start_plug_storm(guest: &Guest, stop: &str) -> Result<Script> {
    let mut storm =
        guest.start_script(LIMIT, &format!("exec guest-tool hostile-plugs 8 {stop}"))?;
    match storm.next_line() {
        Some(line) if line == "storm: begins" => Ok(storm),
        other => {
            let ended = storm.finish()?;
            anyhow::bail!("The storm did not start: {other:?}, {}", ended.stderr)
        }
    }
}

fn plug_storm_is_held_to_the_rate() -> Result<()> {
    const STOP: &str = "/run/storm-is-over";
    // Lowest rate that can be configured.
    const RATE: u64 = 64 * MIB;
    const ZONE_BYTES: u64 = 128 * MIB;
    let pool = Pool::create("256M")?;
    let memory = format!("pool={},size={ZONE_BYTES},plug_bandwidth={RATE}", pool.name());
    let guest = Guest::builder().memory("size=384M").pm_memory(&memory).pressure("off");
    // The attack uses its own driver, so the kernel's driver must not be loaded.
    let guest = guest.cmdline("foreshore.agent=off foreshore.skip=virtio_mem").boot()?;
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": ZONE_BYTES }))?;
    let (before, started) = (PlugWork::of(&guest)?, Instant::now());
    let storm = start_plug_storm(&guest, STOP)?;
    let plugged_bytes = |work: &PlugWork| work.plugged_bytes - before.plugged_bytes;
    guest.wait_until("the burst is used up", LIMIT, || {
        Ok(plugged_bytes(&PlugWork::of(&guest)?) > ZONE_BYTES)
    })?;
    let (burst, cpu_before) = (started.elapsed(), cpu_time_without_vcpus(guest.pid())?);
    let slowest = slowest_call(&guest, ATTACK)?;
    let cpu = cpu_time_without_vcpus(guest.pid())? - cpu_before;
    let work = PlugWork::of(&guest)?;
    let elapsed = started.elapsed();
    let (plugged_bytes, erased_bytes) =
        (plugged_bytes(&work), work.erased_bytes - before.erased_bytes);
    let figures = format!(
        "{} MiB plugged and {} MiB erased in {elapsed:.1?}; the VMM's CPU time was {cpu:?} in {:.1?}; {} requests were \
         delayed; an API call took at most {slowest:?}",
        plugged_bytes / MIB,
        erased_bytes / MIB,
        elapsed - burst,
        work.delayed
    );
    println!("{figures}");
    let max_bytes = ZONE_BYTES + (RATE as f64 * elapsed.as_secs_f64()) as u64;
    ensure!(
        plugged_bytes <= max_bytes && erased_bytes <= max_bytes,
        "The budget was exceeded: {figures}"
    );
    ensure!(work.delayed > 0 && cpu < (elapsed - burst) / 4, "{figures}");
    guest.run(&format!("touch {STOP}"))?;
    let ended = storm.finish()?;
    ensure!(ended.code == 0, "The storm ended with {}: {}", ended.code, ended.stderr);
    guest.power_off()
}

/// String that the guest writes at each start.
const STARTED: &[u8] = b"A guest starts, and resets its machine.\n";

/// Code that writes [`STARTED`] to COM1 with a single string instruction, and then writes to the
/// reset register. The code is entered in 32-bit protected mode.
fn resets_at_once() -> Vec<u8> {
    const CODE_BYTES: u32 = 29;
    let text = (firmware::ENTRY as u32 + CODE_BYTES).to_le_bytes();
    let len = (STARTED.len() as u32).to_le_bytes();
    let code = [
        // cld; mov $0x3f8, %dx
        &[0xfc, 0x66, 0xba, 0xf8, 0x03][..],
        // mov $text, %esi; mov $len, %ecx
        &[0xbe],
        &text,
        &[0xb9],
        &len,
        // rep outsb
        &[0xf3, 0x6e],
        // mov $0x602, %dx; mov $1, %al; out %al, %dx
        &[0x66, 0xba, 0x02, 0x06, 0xb0, 0x01, 0xee],
        // hlt; jmp to the hlt; nop
        &[0xf4, 0xeb, 0xfd, 0x90, 0x90],
    ]
    .concat();
    assert_eq!(code.len(), CODE_BYTES as usize);
    [&code, STARTED].concat()
}

/// Returns how often the guest has started, according to its output. The last string may be
/// incomplete.
fn starts(console: &Path) -> Result<u32> {
    let text = fs::read(console)?;
    ensure!(
        text.chunks(STARTED.len()).all(|chunk| STARTED.starts_with(chunk)),
        "A string instruction lost output: {:?}",
        String::from_utf8_lossy(&text)
    );
    Ok((text.len() / STARTED.len()) as u32)
}

/// Returns how many starts fit into `elapsed` with delays of 0, 1, 2, 4, 8, 16 and then 30 s.
/// `elapsed` should be shorter than 91 s.
fn max_starts(elapsed: Duration) -> u32 {
    let starts_s = [0, 0, 1, 3, 7, 15, 31, 61];
    starts_s.iter().filter(|start_s| elapsed >= Duration::from_secs(**start_s)).count() as u32
}

fn traces(dir: &Path) -> Result<usize> {
    let names =
        fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
    Ok(names.iter().filter(|name| name.to_string_lossy().starts_with("trace")).count())
}

fn guest_that_resets_at_once_is_slowed_down() -> Result<()> {
    const MAX_TRACES: usize = 16;
    let firmware = firmware::write("firmware.elf", &firmware::elf(&resets_at_once()))?;
    let dir = this_tests_dir();
    let events = dir.join("events");
    let started = Instant::now();
    let guest = firmware::with_firmware(&firmware)
        .memory("size=128M,hotplug_method=virtio-mem,hotplug_size=128M")
        .argument("--pressure", &format!("policy=psi,record={}", dir.join("trace").display()))
        .argument("--event-monitor", &format!("path={}", events.display()))
        .start()?;
    let has_waited = |delay_ms: u32| -> Result<bool> {
        // The VMM may not have created the file so far.
        let text = fs::read_to_string(&events).unwrap_or_default();
        Ok(text.contains(&format!("\"delay_ms\": \"{delay_ms}\"")))
    };
    let console = guest.console_file();
    guest.wait_until("the guest has restarted twice", LIMIT, || {
        Ok(console.exists() && starts(&console)? >= 3)
    })?;
    let slowest = slowest_call(&guest, ATTACK)?;
    let (starts_so_far, elapsed) = (starts(&console)?, started.elapsed());
    println!("{starts_so_far} starts in {elapsed:.1?}; an API call took at most {slowest:?}");
    let max = max_starts(elapsed);
    ensure!(
        (3..=max).contains(&starts_so_far),
        "{starts_so_far} starts in {elapsed:?}, must be at most {max}"
    );
    let delays = guest.metric("foreshore_events_total", &[("event", "restart-delayed")])?;
    ensure!(delays >= 2.0, "The metrics count only {delays} delays");
    guest.wait_until("the guest waits for 8 s", LIMIT, || has_waited(8000))?;
    guest.command("vm.shutdown")?;
    ensure!(guest.get("vm.info")?["state"] == "Created", "The VM was not shut down");
    guest.command("vm.boot")?;
    // Reboots by a client are not delayed. They create traces just like those of the guest.
    for _ in 0..MAX_TRACES {
        guest.command("vm.reboot")?;
    }
    ensure!(traces(&dir)? == MAX_TRACES, "{} traces", traces(&dir)?);
    guest.command("vmm.shutdown")?;
    let status = guest.wait_for_exit(LIMIT)?;
    ensure!(status.success(), "The VMM ended with {status}");
    Ok(())
}

fn agent_connections(guest: &Guest) -> Result<f64> {
    guest.metric("foreshore_pressure_agent_connections_total", &[])
}

fn agent_connects_while_a_program_holds_all_connections() -> Result<()> {
    const PORT: u32 = 9800;
    /// Maximum number of connections to a vsock device.
    const MAX_SOCKETS: u64 = 1023;
    const RESTART: &str = "killall -KILL foreshore-agent; while pidof foreshore-agent >/dev/null; do :; done; \
                           exec foreshore-agent >/run/agent.log 2>&1";
    // A vsock device uses at most half of the files that the VMM may open.
    if let Some(shortage) = open_files_shortage(2 * MAX_SOCKETS) {
        return skip(shortage);
    }
    let guest = Guest::builder().memory("size=384M").pressure("psi").boot()?;
    guest.wait_until("the agent is connected", LIMIT, || Ok(agent_connections(&guest)? >= 1.0))?;
    let before = agent_connections(&guest)?;
    let path = format!("{}_{PORT}", guest.vsock_socket().display());
    // The test does not accept connections. A waiting connection already occupies a socket of the
    // VMM.
    let listener = UnixListener::bind(&path)?;
    let mut storm =
        guest.start_script(LIMIT, &format!("exec guest-tool vsock-hold {PORT} '{RESTART}'"))?;
    let held = storm.next_line().context("The storm has ended")?;
    let started = Instant::now();
    guest.wait_until("the restarted agent is connected", LIMIT, || {
        Ok(agent_connections(&guest)? > before)
    })?;
    let metrics = guest.metrics()?;
    let (open, refused) = (
        metrics.value("foreshore_vsock_open_connections", &[])?,
        metrics.value("foreshore_vsock_resets_total", &[])?,
    );
    println!(
        "A program {held} connections, {open} are open, {refused} were refused; the agent reconnected after {:.1?}",
        started.elapsed()
    );
    ensure!(open > 1000.0 && refused > 0.0, "{open} connections are open, {refused} were refused");
    drop((storm, listener));
    guest.wait_for_shell(LIMIT)?;
    guest.power_off()
}

fn flood_of_reports_is_parsed_at_normal_priority() -> Result<()> {
    /// Report of almost the maximum length. Only at its end does the parser find that a field is
    /// missing.
    const FLOOD: &str = r#"zeros=$(printf '0,%.0s' $(seq 32000)); echo begins;
                           yes "{\"type\":\"report\",\"zeros\":[${zeros}0]}" | guest-tool vsock-send 9746"#;
    if let Some(shortage) = priority_shortage(GOVERNOR_NICE) {
        return skip(shortage);
    }
    let guest = Guest::builder().memory("size=384M").pressure("psi");
    let guest = guest.cmdline("foreshore.agent=off").boot()?;
    let sum = |name: &str| Ok::<_, anyhow::Error>(guest.metrics()?.sum(name, &[]) as u64);
    let refused = || sum("foreshore_pressure_refused_reports_total");
    let mut flood = guest.start_script(LIMIT, FLOOD)?;
    ensure!(
        flood.next_line().as_deref() == Some("begins"),
        "The flood did not start: {:?}",
        flood.finish()?
    );
    guest.wait_until("the first second's lines are refused", LIMIT, || Ok(refused()? >= 200))?;
    let (started, lines_before) = (Instant::now(), refused()?);
    let (all_before, first_before) =
        (cpu_time_without_vcpus(guest.pid())?, cpu_time_before_others(guest.pid())?);
    let slowest = slowest_call(&guest, ATTACK)?;
    let all = cpu_time_without_vcpus(guest.pid())? - all_before;
    let first = cpu_time_before_others(guest.pid())? - first_before;
    let (lines, elapsed) = (refused()? - lines_before, started.elapsed());
    println!(
        "{lines} reports refused in {elapsed:.1?}; the VMM's CPU time was {all:?}, {first:?} of it at high priority; \
         an API call took at most {slowest:?}"
    );
    ensure!(lines > 0 && first < all / 4, "{lines} reports: {first:?} of {all:?} at high priority");
    drop(flood);
    guest.power_off()
}

/// Measurements of a guest that floods its console file.
struct ConsoleFlood {
    bytes: f64,
    lost_bytes: f64,
    throttled_s: f64,
    elapsed: Duration,
}

impl ConsoleFlood {
    fn run(mib: u64, max_rate: u64) -> Result<Self> {
        const FLOOD_LIMIT: Duration = Duration::from_secs(300);
        let file = this_tests_dir().join(format!("hvc0-{max_rate}"));
        let console = format!("file={},max_size=16M,max_rate={max_rate}", file.display());
        let guest = Guest::builder().memory("size=384M").argument("--console", &console).boot()?;
        let started = Instant::now();
        let flood = format!(
            "dd if=/dev/zero of=/dev/hvc0 bs=64k count={} 2>/dev/null",
            mib * MIB / (64 << 10)
        );
        guest.run_within(FLOOD_LIMIT, &flood)?;
        let (elapsed, metrics) = (started.elapsed(), guest.metrics()?);
        guest.power_off()?;
        Ok(Self {
            bytes: metrics
                .value("foreshore_console_bytes_total", &[("direction", "from-guest")])?,
            lost_bytes: metrics.value("foreshore_console_lost_bytes_total", &[])?,
            throttled_s: metrics.value(
                "foreshore_console_file_throttled_seconds_total",
                &[("device", "console")],
            )?,
            elapsed,
        })
    }

    fn mib_per_s(&self) -> f64 {
        self.bytes / MIB as f64 / self.elapsed.as_secs_f64()
    }
}

fn console_flood_is_held_to_the_rate_without_loss() -> Result<()> {
    const FLOOD_MIB: u64 = 160;
    const BURST_MIB: u64 = 64;
    /// Size of the VMM's output queue.
    const QUEUE_MIB: u64 = 1;
    let limited = ConsoleFlood::run(FLOOD_MIB, MIB)?;
    let unlimited = ConsoleFlood::run(FLOOD_MIB, 0)?;
    let figures = format!(
        "{FLOOD_MIB} MiB to hvc0: {:.1} MiB/s with max_rate=1M, of which {:.1} s were delays; {:.1} MiB/s with \
         max_rate=0",
        limited.mib_per_s(),
        limited.throttled_s,
        unlimited.mib_per_s()
    );
    println!("{figures}");
    for flood in [&limited, &unlimited] {
        ensure!(
            flood.bytes >= (FLOOD_MIB * MIB) as f64,
            "Received only {} bytes: {figures}",
            flood.bytes
        );
        ensure!(flood.lost_bytes == 0.0, "{} bytes were lost: {figures}", flood.lost_bytes);
    }
    let max_mib = (BURST_MIB + QUEUE_MIB) as f64 + limited.elapsed.as_secs_f64();
    ensure!(limited.bytes / MIB as f64 <= max_mib, "The rate was exceeded: {figures}");
    ensure!(limited.throttled_s > 0.0 && unlimited.throttled_s == 0.0, "{figures}");
    Ok(())
}
