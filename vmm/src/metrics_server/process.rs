//! Metrics of the VMM process and of its vCPU threads, from /proc.

use foreshore_devices::metrics::{Expose, Exposition, Family, Labels, one};
use procfs::process::{LimitValue, Process, Stat, Status};
use procfs::{ProcResult, WithCurrentSystemInfo};
use prometheus_client::registry::Unit;

/// Prefix of the names of vCPU threads. The number of the vCPU follows.
const VCPU_THREAD: &str = "vcpu";

/// Version, resources and vCPU times of the VMM process. If /proc is not mounted, only the version
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
        if let Ok(vcpus) = vcpu_times(&process) {
            expose_vcpus(out, &vcpus);
        }
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

/// Times of a vCPU's thread since its start.
#[derive(Debug, PartialEq)]
struct VcpuTimes {
    vcpu: String,
    run_s: f64,
    /// Time in which the thread could have run, but the host's CPUs were busy with other threads.
    steal_s: f64,
}

/// Returns the times of all vCPU threads, in the order of the vCPUs' numbers.
fn vcpu_times(process: &Process) -> ProcResult<Vec<VcpuTimes>> {
    let mut vcpus = Vec::new();
    for task in process.tasks()?.flatten() {
        // A thread may end while it is read.
        let (Ok(stat), Ok(times)) = (task.stat(), task.schedstat()) else { continue };
        let Some(number) = stat.comm.strip_prefix(VCPU_THREAD).and_then(|n| n.parse::<u8>().ok())
        else {
            continue;
        };
        let seconds = |ns: u64| ns as f64 / 1e9;
        let (run_s, steal_s) = (seconds(times.sum_exec_runtime), seconds(times.run_delay));
        vcpus.push((number, VcpuTimes { vcpu: number.to_string(), run_s, steal_s }));
    }
    vcpus.sort_by_key(|(number, _)| *number);
    Ok(vcpus.into_iter().map(|(_, times)| times).collect())
}

fn expose_vcpus(out: &mut Exposition, vcpus: &[VcpuTimes]) {
    let samples = |time: fn(&VcpuTimes) -> f64| -> Vec<(Labels, f64)> {
        vcpus.iter().map(|times| (one("vcpu", &times.vcpu), time(times))).collect()
    };
    out.seconds_total(
        "vcpu_run",
        "CPU time of the vCPU's thread, in the guest and in the VMM.",
        samples(|times| times.run_s),
    );
    out.seconds_total(
        "vcpu_steal",
        "Time in which the vCPU's thread waited for a CPU of the host.",
        samples(|times| times.steal_s),
    );
}

/// True if `--seccomp` requests a system call filter. Foreshore does not have one yet.
#[derive(Debug)]
pub(super) struct MissingSeccomp(pub bool);

impl Expose for MissingSeccomp {
    fn expose(&self, out: &mut Exposition) {
        let help =
            "1 if --seccomp requests a system call filter, which Foreshore does not have yet.";
        out.flags(Family("seccomp_missing", help, None), [(vec![], self.0)]);
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
    use std::sync::mpsc;
    use std::thread;

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

    #[test]
    fn times_are_those_of_threads_named_after_vcpus() {
        let (end, ended) = mpsc::channel::<()>();
        let (started, start) = mpsc::channel();
        // Numbers of vCPUs that no other test of this process uses.
        let thread = thread::Builder::new().name("vcpu251".to_owned()).spawn(move || {
            started.send(()).unwrap();
            // Fails when the sender is dropped.
            let _ = ended.recv();
        });
        start.recv().unwrap();
        // The kernel updates the time when the thread leaves its CPU.
        let times = loop {
            let times = vcpu_times(&Process::myself().unwrap()).unwrap();
            let mine: Vec<_> = times.iter().filter(|times| times.vcpu == "251").collect();
            assert_eq!(mine.len(), 1, "{times:?}");
            if mine[0].run_s > 0.0 {
                break times;
            }
        };
        assert!(times.iter().all(|times| times.vcpu.parse::<u8>().is_ok()), "{times:?}");
        drop(end);
        thread.unwrap().join().unwrap();
    }
}
