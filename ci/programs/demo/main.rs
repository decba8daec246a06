//! Demonstration of Foreshore's features on a real KVM host: `demo METRICS METRICS_OFF SECONDS`.
//!
//! It runs on the host of the VMs while ci/demo makes Prometheus scrape the two addresses. Each
//! claim is checked, and the demo fails if a claim does not hold. A line that begins with `* ` is
//! an event, and ci/demo marks it on the timeline.
//!
//! There are three VMs. `governed` (policy=psi) is killed and restarted in phase 4. `policy-off` is
//! used only in phase 2, and `boundary` in phase 5.

#![forbid(unsafe_code)]

mod boot;
mod boundary;
mod pressure;
mod redis;
mod shrink;
mod sizes;
mod volume;

use std::fs;
use std::path::PathBuf;
use std::process::{ExitCode, exit};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use guest_tests::guest::{GuestBuilder, complaints, without_logs};
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Image, Pool, scale_limits};

use crate::shrink::Spent;

const USAGE: &str = "usage: demo ADDRESS:PORT ADDRESS:PORT SECONDS (metrics endpoints of the VMs governed and \
     policy-off, and the time limit)";

/// Exit code after the time limit. timeout(1) uses the same code.
const CUT_OFF: i32 = 124;
/// Duration of the demo for which the time limits of single steps were chosen. On an emulated host
/// without other load, the demo takes about this long.
const DEFAULT_LIMIT: Duration = Duration::from_secs(240);
/// Number of lines of each log to print, because the complete logs may not be accessible.
const LAST_LINES: usize = 12;

/// Names of the VMs in Prometheus and in logs.
const GOVERNED: &str = "governed";
const POLICY_OFF: &str = "policy-off";
const BOUNDARY: &str = "boundary";

fn main() -> ExitCode {
    let shown = demo();
    if let Err(error) = &shown {
        println!("  NOT SEEN: {}", without_logs(error));
        print_causes();
    }
    let stored = store_logs();
    if let Err(error) = &stored {
        println!("  cannot keep the logs: {error:#}");
    }
    if shown.and(stored).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn demo() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [metrics, metrics_off, seconds] = arguments.as_slice() else { bail!("{USAGE}") };
    let limit = Duration::from_secs(seconds.parse().with_context(|| USAGE)?);
    scale_limits(stretch(limit));
    let _in_time = cut_off_after(limit);
    let pool = Pool::create("1280M")?;
    let vm = hybrid_guest(&memory_of(&pool), GOVERNED, metrics).pressure("psi");

    let guest = boot::show(&with_volume(&vm, &pool, "nvdimm").name(GOVERNED))?;
    let before = Spent::on(&guest, &pool)?;
    pressure::show(&guest, &policy_off(metrics_off))?;
    shrink::show(&guest, &pool, &before)?;
    volume::show(guest, &vm, &pool)?;
    boundary::show(&pool, metrics)
}

/// Returns a factor for the time limits of single steps. If the demo's time limit is longer, each
/// step also gets more time.
fn stretch(limit: Duration) -> f64 {
    limit.div_duration_f64(DEFAULT_LIMIT).max(1.0)
}

/// Ends the demo after the time limit, unless the returned sender has been dropped. If another
/// process ended the demo, its logs would be lost.
fn cut_off_after(limit: Duration) -> Sender<()> {
    let (in_time, ended) = mpsc::channel();
    thread::spawn(move || {
        if ended.recv_timeout(limit) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        println!(
            "  NOT SEEN: the rest; the demo reached its time limit of {} s (--within)",
            limit.as_secs()
        );
        print_causes();
        if let Err(error) = store_logs() {
            println!("  cannot keep the logs: {error:#}");
        }
        exit(CUT_OFF);
    });
    in_time
}

fn memory_of(pool: &Pool) -> String {
    format!("pool={},size=1G", pool.name())
}

/// Guest with 512 MiB of DRAM (384 MiB at boot), `pm_memory`, and swap that should remain unused.
fn hybrid_guest(pm_memory: &str, vm_name: &str, metrics: &str) -> GuestBuilder {
    Guest::builder()
        .image(Image::Redis)
        .cpus(2)
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pm_memory(pm_memory)
        .cmdline("foreshore.zram=256M")
        .metrics(&format!("{metrics},vm={vm_name}"))
        .verbose()
}

/// Adds a disk from the same pool that lends memory to the guest.
fn with_volume(vm: &GuestBuilder, pool: &Pool, interface: &str) -> GuestBuilder {
    let volume = format!("pool={},name=data,size=96M,interface={interface},create=on", pool.name());
    vm.clone().pm_volume(&volume)
}

/// Boots a guest with the same memory but with its own pool, because a pool can have only one
/// owner.
fn policy_off(metrics: &str) -> impl Fn() -> Result<Guest> {
    let metrics = metrics.to_owned();
    move || {
        let dir = this_tests_dir().join(POLICY_OFF);
        fs::create_dir_all(&dir)?;
        let pool = Pool::create_in(&dir, "1280M")?;
        hybrid_guest(&memory_of(&pool), POLICY_OFF, &metrics)
            .name(POLICY_OFF)
            .pressure("off")
            .boot()
    }
}

fn claim(holds: bool, text: &str) -> Result<()> {
    if !holds {
        bail!("{text}");
    }
    println!("  ok: {text}");
    Ok(())
}

fn event(text: &str) {
    println!("* {text}");
}

fn phase(number: u32, text: &str) {
    println!("== {number}/6 {text}");
}

/// Returns the consoles, the logs of the VMMs and the list of acknowledged files, and the names
/// under which they are saved.
fn logs() -> Result<Vec<(String, PathBuf)>> {
    let mut logs = Vec::new();
    for entry in fs::read_dir(this_tests_dir())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            let name =
                path.file_name().and_then(|name| name.to_str()).context("File without a name")?;
            logs.push((plain_name(name), path));
        }
    }
    logs.sort();
    Ok(logs)
}

/// Copies the logs to the folder that ci/nested/host saves.
fn store_logs() -> Result<()> {
    let Some(out) = std::env::var_os("OUT").map(PathBuf::from) else { return Ok(()) };
    for (name, path) in logs()? {
        fs::copy(&path, out.join(name))
            .with_context(|| format!("Cannot keep {}", path.display()))?;
    }
    Ok(())
}

/// Prints evidence for a failure: problems reported by guest kernels, and the last lines of each
/// log.
fn print_causes() {
    let printed = logs().and_then(|logs| {
        for (name, path) in logs {
            let bytes =
                fs::read(&path).with_context(|| format!("Cannot read {}", path.display()))?;
            print!("{}", causes(&name, &String::from_utf8_lossy(&bytes)));
        }
        Ok(())
    });
    if let Err(error) = printed {
        println!("  cannot print the logs: {error:#}");
    }
}

fn causes(name: &str, log: &str) -> String {
    let log = log.replace('\r', "");
    let mut text = String::new();
    let mut section = |title: &str, lines: &[&str]| {
        if !lines.is_empty() {
            text += &format!("  {title} {name}:\n");
            text.extend(lines.iter().map(|line| format!("    | {line}\n")));
        }
    };
    let complaints = complaints(&log);
    section("kernel complaints in", &complaints[..complaints.len().min(LAST_LINES)]);
    let lines: Vec<&str> = log.lines().collect();
    section("last lines of", &lines[lines.len().saturating_sub(LAST_LINES)..]);
    text
}

/// Returns `governed.console.log` for `governed0.console.log`. File names contain the number of the
/// VM's start. In this demo, the names of VMs are unique without it.
fn plain_name(file: &str) -> String {
    let (vm, rest) = file.split_once('.').unwrap_or((file, ""));
    format!("{}.{rest}", vm.trim_end_matches(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_limits_grow_with_the_limit_of_the_demo() {
        let factor = |seconds| stretch(Duration::from_secs(seconds));
        assert_eq!((factor(780), factor(2400)), (3.25, 10.0));
        assert_eq!((factor(240), factor(1)), (1.0, 1.0));
    }

    #[test]
    fn logs_are_named_after_their_vm() {
        assert_eq!(plain_name("governed0.console.log"), "governed.console.log");
        assert_eq!(plain_name("restarted-nvdimm12.vmm.log"), "restarted-nvdimm.vmm.log");
        assert_eq!(plain_name("acknowledged.log"), "acknowledged.log");
    }

    #[test]
    fn causes_are_complaints_and_last_lines() {
        let lines: String = (0..20).map(|number| format!("line {number}\r\n")).collect();
        let log = format!("[    1.000000] BUG: unable to handle page fault\r\n{lines}");
        let text = causes("a.console.log", &log);
        let expected = "  kernel complaints in a.console.log:\n    | [    1.000000] BUG: unable to handle page \
                        fault\n  last lines of a.console.log:\n    | line 8\n";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with("    | line 19\n"), "{text}");
        assert_eq!(causes("empty.log", ""), "");
    }
}
