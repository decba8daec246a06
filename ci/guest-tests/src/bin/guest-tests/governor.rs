//! Tests how users control the governor: pauses through the API, and recordings that show the
//! decisions of another policy.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use balloon::plan::Direction;
use balloon::trace::{Entry, Trace};
use guest_tests::guest::{Script, program};
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Pool};
use serde_json::{Value, json};

use crate::decisions::{has_decided, pressure, wait_for_agent};
use crate::zones::{MIB, meminfo_mib, vmstat, zone};

guest_tests::tests![
    a_pause_outlasts_the_guests_reboot: 240 (extended) x 2,
    a_recording_is_a_trace_of_each_boot: 240 x 2,
];

const LIMIT: Duration = Duration::from_secs(120);
const BOOT_MIB: u64 = 384;
/// Amount of available memory that is below the minimum of every policy, so that the guest would
/// grow.
const LITTLE_MIB: u64 = 36;

/// Fills guest memory until only `left_mib` is available, and holds it.
fn fill_but(guest: &Guest, left_mib: u64) -> Result<Script> {
    let mib = meminfo_mib(guest, "MemAvailable")?
        .checked_sub(left_mib)
        .context("The guest has less free memory already")?;
    guest.hog(mib, LIMIT)
}

fn wait_until_grown(guest: &Guest) -> Result<()> {
    guest.wait_until("the guest has grown", LIMIT, || {
        has_decided(guest, |decision| {
            decision["direction"] == "grow" && decision["outcome"]["state"] == "reached"
        })
    })
}

fn a_pause_outlasts_the_guests_reboot() -> Result<()> {
    let pool = Pool::create("1G")?;
    let guest = Guest::builder()
        .memory(&format!("size={BOOT_MIB}M"))
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pressure("psi")
        .boot()?;
    wait_for_agent(&guest, "live")?;
    guest.put("vm.pressure", json!({ "pause": true }))?;
    guest.reboot_from_inside()?;
    wait_for_agent(&guest, "live")?;
    let is_paused = || guest.metric("foreshore_pressure_paused", &[]);
    ensure!(
        pressure(&guest)?["paused"] == true && is_paused()? == 1.0,
        "The reboot ended the governor's pause"
    );
    // The guest is short of memory, but its reports should not lead to a decision.
    let hog = fill_but(&guest, LITTLE_MIB)?;
    let held_times = |info: &Value| {
        let decisions = info["decisions"].as_array()?;
        decisions.iter().find(|decision| decision["reason"] == "paused")?["times"].as_u64()
    };
    let before = held_times(&pressure(&guest)?).context("No decision was held for the pause")?;
    guest.wait_until("reports of a shortage are held", LIMIT, || {
        Ok(held_times(&pressure(&guest)?).is_some_and(|times| times >= before + 20))
    })?;
    let pm = zone(&guest, "pm")?;
    ensure!(
        pm.requested_bytes == 0,
        "{} bytes were requested during the pause: {}",
        pm.requested_bytes,
        pressure(&guest)?
    );
    // Repeats the same shortage without a pause.
    guest.put("vm.pressure", json!({ "pause": false }))?;
    wait_until_grown(&guest)?;
    ensure!(zone(&guest, "pm")?.plugged_bytes > 0 && is_paused()? == 0.0, "The guest did not grow");
    ensure!(vmstat(&guest, "oom_kill")? == 0, "A process was killed");
    drop(hog);
    guest.no_kernel_complaints()
}

fn read(path: &Path) -> Result<Trace> {
    let file = File::open(path).with_context(|| format!("Cannot open {}", path.display()))?;
    let trace = Trace::read(BufReader::new(file)).with_context(|| format!("{}", path.display()))?;
    ensure!(!trace.cut_off, "The last line of {} is cut off", path.display());
    ensure!(
        trace.header.boot_bytes == BOOT_MIB * MIB,
        "The trace is of another guest: {:?}",
        trace.header
    );
    ensure!(trace.header.zones.len() == 1, "Not exactly one zone: {:?}", trace.header.zones);
    Ok(trace)
}

fn a_recording_is_a_trace_of_each_boot() -> Result<()> {
    let pool = Pool::create("1G")?;
    let file = this_tests_dir().join("trace");
    let guest = Guest::builder()
        .memory(&format!("size={BOOT_MIB}M"))
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pressure(&format!("psi,record={}", file.display()))
        .boot()?;
    wait_for_agent(&guest, "live")?;
    let hog = fill_but(&guest, 4)?;
    wait_until_grown(&guest)?;
    let grown_bytes = zone(&guest, "pm")?.plugged_bytes;
    let info = pressure(&guest)?;
    let recording = &info["recording"];
    ensure!(
        recording["status"]["state"] == "recording" && recording["lost_lines"] == 0,
        "{recording}"
    );
    let reports = guest.metric("foreshore_pressure_reports_total", &[])?;
    drop(hog);
    // A restarted guest counts as a new guest with its own trace.
    guest.reboot_from_inside()?;
    // The agent is live as soon as it connects, but only reports are recorded.
    guest.wait_until("the next boot's agent has reported", LIMIT, || {
        Ok(!pressure(&guest)?["report_age_ms"].is_null())
    })?;
    guest.power_off()?;

    let first = read(&file)?;
    let (mut recorded, mut grown, mut max_plugged_bytes) = (0, 0, 0);
    for entry in &first.entries {
        match entry {
            Entry::Report { report, .. } => {
                recorded += 1;
                ensure!(
                    report.memory().total_bytes >= 256 * MIB,
                    "The report has less memory than the guest: {report:?}"
                );
            }
            Entry::Host { zones, .. } => {
                max_plugged_bytes = max_plugged_bytes.max(zones[0].plugged_bytes)
            }
            Entry::Plan { plan, .. } if plan.direction == Direction::Grow => {
                grown += 1;
                ensure!(
                    !plan.reason.is_empty() && !plan.targets.is_empty(),
                    "The plan grows by 0 bytes: {plan:?}"
                );
            }
            Entry::Plan { .. } => {}
        }
    }
    ensure!(
        f64::from(recorded) >= reports,
        "The trace has {recorded} of at least {reports} reports"
    );
    ensure!(
        grown > 0 && max_plugged_bytes >= grown_bytes,
        "The trace has {grown} grows up to {max_plugged_bytes} bytes, but the guest had {grown_bytes}"
    );
    let mut second = file.clone().into_os_string();
    second.push(".2");
    let second = read(second.as_ref())?;
    let reports =
        second.entries.iter().filter(|entry| matches!(entry, Entry::Report { .. })).count();
    ensure!(reports > 0, "The second boot's trace has no report");
    // The simulator replays the recording.
    let output = Command::new(program("foreshore-sim"))
        .arg("--trace")
        .arg(&file)
        .args(["--policy", "psi"])
        .output()
        .context("Cannot start foreshore-sim")?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && stdout.contains("psi"),
        "Unexpected output of foreshore-sim: {output:?}"
    );
    Ok(())
}
