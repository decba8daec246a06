//! Load that allocates memory in one burst and reports when the guest's memory grows. Both times
//! are measured with the guest's clock.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
/// Resolution of the reported times.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Interval between lines from which a reader computes the offset between guest and host clock.
const TICK_INTERVAL: Duration = Duration::from_millis(50);

/// Touches `mib` of memory as fast as possible, and keeps it until killed. Prints `begin
/// MICROSECONDS`, `held MICROSECONDS`, and `total MICROSECONDS BYTES` for each growth of the
/// guest's memory. Regularly prints `tick MICROSECONDS`. If `mib` is 0, it only prints lines,
/// starting with `begin`.
pub(crate) fn burst(mib: u64) -> Result<()> {
    guest_tools::oom::prefer_as_victim()?;
    std::fs::write("/proc/sys/vm/overcommit_memory", "1").context("Cannot allow overcommit")?;
    let started = Instant::now();
    // The kernel allocates pages only when they are touched.
    let mut held = vec![0u8; usize::try_from(mib)? * MIB];
    let before = total_bytes()?;
    thread::spawn(move || {
        if let Err(error) = watch(started, before) {
            eprintln!("Error: {error:#}");
            std::process::exit(1);
        }
    });
    print_line(&format!("begin {}", started.elapsed().as_micros()))?;
    for page in held.chunks_exact_mut(PAGE) {
        page[0] = 1;
    }
    print_line(&format!("held {}", started.elapsed().as_micros()))?;
    loop {
        std::hint::black_box(&held);
        thread::park();
    }
}

fn watch(started: Instant, mut total: u64) -> Result<()> {
    let mut ticked = Duration::ZERO;
    loop {
        let now_total = total_bytes()?;
        let now = started.elapsed();
        if now_total > total {
            print_line(&format!("total {} {now_total}", now.as_micros()))?;
        }
        total = now_total;
        if now >= ticked + TICK_INTERVAL {
            print_line(&format!("tick {}", now.as_micros()))?;
            ticked = now;
        }
        thread::sleep(CHECK_INTERVAL);
    }
}

fn print_line(line: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    Ok(stdout.flush()?)
}

/// Returns MemTotal, using the cheapest system call that reports it.
fn total_bytes() -> Result<u64> {
    // SAFETY: a zeroed sysinfo is valid.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the structure outlives the call.
    let result = unsafe { libc::sysinfo(&raw mut info) };
    ensure!(result == 0, "sysinfo: {}", io::Error::last_os_error());
    Ok(info.totalram * u64::from(info.mem_unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_equals_that_of_proc_meminfo() {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
        assert_eq!(total_bytes().unwrap(), line.unwrap().parse::<u64>().unwrap() * 1024);
    }
}
