//! Metrics of the VMM process, from /proc.

use foreshore_confinement::seccomp::SeccompMode;
use foreshore_devices::metrics::{Expose, Exposition, Family, one};
use procfs::WithCurrentSystemInfo;
use procfs::process::{LimitValue, Process, Stat, Status};
use prometheus_client::registry::Unit;

/// Version and resources of the VMM process. If /proc is not mounted, only the version
/// is exposed.
#[derive(Debug)]
pub(super) struct ProcessMetrics;

impl Expose for ProcessMetrics {
    fn expose(&self, out: &mut Exposition) {
        let version = one("version", env!("CARGO_PKG_VERSION"));
        out.gauges(Family("build_info", "Version of the VMM; always 1.", None), [(version, 1.0)]);
        let Ok(process) = Process::myself() else { return };
        if let Ok(status) = process.status() {
            let samples =
                resident(&status).into_iter().map(|(kind, bytes)| (one("kind", kind), bytes));
            out.bytes(
                "process_resident",
                "Resident memory of the VMM, including guest memory.",
                samples,
            );
        }
        if let Ok(stat) = process.stat() {
            out.without_prefix(|out| expose_stat(out, &stat));
        }
        out.without_prefix(|out| expose_descriptors(out, &process));
    }
}

/// Exposes CPU time, memory and start time under the names that Prometheus' client libraries use.
fn expose_stat(out: &mut Exposition, stat: &Stat) {
    let ticks_per_s = procfs::ticks_per_second() as f64;
    out.seconds_total(
        "process_cpu",
        "User and system CPU time of the process.",
        [(vec![], (stat.utime + stat.stime) as f64 / ticks_per_s)],
    );
    out.bytes("process_virtual_memory", "Size of the address space.", [(vec![], stat.vsize)]);
    out.bytes(
        "process_resident_memory",
        "Resident memory of the process.",
        [(vec![], stat.rss_bytes().get())],
    );
    if let Ok(boot_s) = procfs::boot_time_secs() {
        let family = Family(
            "process_start_time",
            "Start of the process, in seconds since 1970.",
            Some(Unit::Seconds),
        );
        out.gauges(family, [(vec![], boot_s as f64 + stat.starttime as f64 / ticks_per_s)]);
    }
}

fn expose_descriptors(out: &mut Exposition, process: &Process) {
    if let Ok(open) = process.fd_count() {
        let family = Family("process_open_fds", "Open file descriptors.", None);
        out.gauges(family, [(vec![], open as f64)]);
    }
    if let Ok(limits) = process.limits()
        && let LimitValue::Value(limit) = limits.max_open_files.soft_limit
    {
        let family = Family("process_max_fds", "Limit of open file descriptors.", None);
        out.gauges(family, [(vec![], limit as f64)]);
    }
}

/// System call filters of the threads.
#[derive(Debug)]
pub(super) struct SeccompMetrics(pub SeccompMode);

impl Expose for SeccompMetrics {
    fn expose(&self, out: &mut Exposition) {
        let help = "1 if system calls that a thread does not need are refused.";
        let is_refused = matches!(self.0, SeccompMode::Enforce | SeccompMode::Errno);
        out.flags(Family("seccomp_enabled", help, None), [(vec![], is_refused)]);
    }
}

/// Returns resident memory by kind.
fn resident(status: &Status) -> Vec<(&'static str, u64)> {
    [("anonymous", status.rssanon), ("file", status.rssfile), ("shared", status.rssshmem)]
        .into_iter()
        .filter_map(|(kind, kib)| Some((kind, kib? << 10)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read_by_kind() {
        let status = Process::myself().unwrap().status().unwrap();
        let kinds = resident(&status);
        assert_eq!(
            kinds.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(),
            ["anonymous", "file", "shared"]
        );
        let sum_bytes: u64 = kinds.iter().map(|(_, bytes)| bytes).sum();
        assert_eq!(sum_bytes, status.vmrss.unwrap() << 10);
    }
}
