//! vCPU metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use foreshore_devices::metrics::{Expose, Exposition, Family, Labels, one};
use parking_lot::Mutex;
use procfs::ProcResult;
use procfs::process::Process;

#[derive(Debug, Default)]
pub(crate) struct VcpuMetrics {
    /// vCPUs that are present in the guest, including added vCPUs that it has not brought online.
    pub present: AtomicU64,
    /// vCPUs whose ejection was requested and that the guest has not ejected yet.
    pub leaving: AtomicU64,
    /// vCPUs that the guest has ejected. Their threads wait until the vCPUs are added again.
    pub parked: AtomicU64,
    /// Threads of the vCPUs, parked ones included, by the vCPU's number.
    pub threads: Mutex<BTreeMap<u8, i32>>,
}

/// Times of a vCPU's thread since its start, in seconds.
struct ThreadTimes {
    run_s: f64,
    /// Time in which the thread could have run, but the host's CPUs were busy with other threads.
    steal_s: f64,
}

impl ThreadTimes {
    fn of(process: &Process, thread: i32) -> ProcResult<Self> {
        let times = process.task_from_tid(thread)?.schedstat()?;
        let seconds = |ns: u64| ns as f64 / 1e9;
        Ok(Self { run_s: seconds(times.sum_exec_runtime), steal_s: seconds(times.run_delay) })
    }
}

impl VcpuMetrics {
    /// Exposes the times of the threads. Nothing is exposed for a thread that has ended, or if
    /// /proc is not mounted.
    fn expose_times(&self, out: &mut Exposition) {
        let Ok(process) = Process::myself() else { return };
        let threads = self.threads.lock().clone();
        let times: Vec<_> = threads
            .into_iter()
            .filter_map(|(vcpu, thread)| {
                Some((one("vcpu", &vcpu.to_string()), ThreadTimes::of(&process, thread).ok()?))
            })
            .collect();
        let samples = |time: fn(&ThreadTimes) -> f64| -> Vec<(Labels, f64)> {
            times.iter().map(|(labels, times)| (labels.clone(), time(times))).collect()
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
}

impl Expose for VcpuMetrics {
    fn expose(&self, out: &mut Exposition) {
        let states =
            [("present", &self.present), ("leaving", &self.leaving), ("parked", &self.parked)];
        let samples = states
            .map(|(state, gauge)| (one("state", state), gauge.load(Ordering::Relaxed) as f64));
        out.gauges(Family("vcpus", "vCPUs by state.", None), samples);
        self.expose_times(out);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use foreshore_devices::metrics::Metrics;
    use rustix::thread::gettid;

    use super::*;

    #[test]
    fn times_are_those_of_the_given_threads() {
        let (end, ended) = mpsc::channel::<()>();
        let (started, start) = mpsc::channel();
        // The name alone does not make it a vCPU of this machine.
        let thread = thread::Builder::new().name("vcpu251".to_owned()).spawn(move || {
            started.send(gettid().as_raw_nonzero().get()).unwrap();
            // Fails when the sender is dropped.
            let _ = ended.recv();
        });
        let id = start.recv().unwrap();
        let metrics = VcpuMetrics::default();
        let registry = Metrics::new("a");
        let run_times = || -> Vec<(String, f64)> {
            let text = registry.encode(&metrics).unwrap();
            let lines = text.lines().filter_map(|line| line.split_once(' '));
            let run = lines.filter(|(name, _)| name.starts_with("foreshore_vcpu_run_seconds"));
            run.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
        };
        assert_eq!(run_times(), []);
        metrics.threads.lock().insert(3, id);
        // The kernel updates the time when the thread leaves its CPU.
        loop {
            let times = run_times();
            let [(name, seconds)] = &*times else { panic!("{times:?}") };
            assert_eq!(name, r#"foreshore_vcpu_run_seconds_total{vm="a",vcpu="3"}"#);
            if *seconds > 0.0 {
                break;
            }
        }
        drop(end);
        thread.unwrap().join().unwrap();
    }
}
