//! Metrics of the VMM process.

use foreshore_devices::metrics::{Expose, Exposition, Family, one};

/// Version and resident memory of the VMM process.
#[derive(Debug)]
pub(super) struct ProcessMetrics;

impl Expose for ProcessMetrics {
    fn expose(&self, out: &mut Exposition) {
        let version = one("version", env!("CARGO_PKG_VERSION"));
        out.gauges(Family("build_info", "Version of the VMM; always 1.", None), [(version, 1.0)]);
        // If /proc is not mounted, the other metrics are still exposed.
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let samples = resident(&status).into_iter().map(|(kind, bytes)| (one("kind", kind), bytes));
        out.bytes(
            "process_resident",
            "Resident memory of the VMM, including guest memory.",
            samples,
        );
    }
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

/// Parses resident memory by kind from a text in the format of proc_pid_status(5).
fn resident(status: &str) -> Vec<(&'static str, u64)> {
    let kib = |name: &str| -> Option<u64> {
        let value = status.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().strip_suffix(" kB")?.parse().ok()
    };
    [("anonymous", "RssAnon:"), ("file", "RssFile:"), ("shared", "RssShmem:")]
        .into_iter()
        .filter_map(|(kind, name)| Some((kind, kib(name)? << 10)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_read_by_kind() {
        let status = "Name:\tforeshore\nVmRSS:\t    100 kB\nRssAnon:\t      60 kB\nRssFile:\t      30 kB\n\
                      RssShmem:\t      10 kB\n";
        assert_eq!(
            resident(status),
            [("anonymous", 60 << 10), ("file", 30 << 10), ("shared", 10 << 10)]
        );
        assert_eq!(resident(""), []);
        let own = std::fs::read_to_string("/proc/self/status").unwrap();
        assert!(resident(&own).iter().any(|(kind, bytes)| *kind == "anonymous" && *bytes > 0));
    }
}
