//! The VMM's own process.

use std::fmt;

use super::expose::{Exposer, Family};
use crate::events::EventCounters;
use crate::vm::owner::RestartMetrics;

pub(super) fn expose(out: &mut Exposer<'_>, events: &EventCounters) -> fmt::Result {
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    out.gauges(Family("build_info", "The version that runs; always 1.", None), [(version, 1.0)])?;
    // Without /proc there is nothing to tell, and the other metrics still count.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let samples = resident(&status).into_iter().map(|(kind, bytes)| (vec![("kind", kind.to_owned())], bytes));
    out.bytes("process_resident", "The VMM's resident memory, that of the guest included.", samples)?;
    let told = events.told().into_iter().map(|((source, event), count)| {
        (vec![("source", source.to_owned()), ("event", event.to_owned())], count)
    });
    out.counters(Family("events", "Events that were told.", None), told)?;
    let lost = Family("events_lost", "Events that somebody who watches was too slow for.", None);
    out.counters(lost, [(Vec::new(), events.lost())])?;
    let withheld =
        Family("events_withheld", "Events that a guest caused too often to be told at once.", None);
    out.counters(withheld, [(Vec::new(), events.withheld())])
}

/// Restarts of the guest that had to wait.
pub(super) fn expose_restarts(out: &mut Exposer<'_>, restarts: &RestartMetrics) -> fmt::Result {
    let delayed = Family("delayed_restarts", "Restarts of the guest that were delayed.", None);
    out.counters(delayed, [(Vec::new(), restarts.delayed())])?;
    let delay = [(Vec::new(), restarts.delay().as_secs_f64())];
    out.seconds_total(
        "restart_delay",
        "Delays imposed on restarts of the guest; a client may end one early.",
        delay,
    )
}

/// A filter that was requested and is not installed.
pub(super) fn expose_missing_seccomp(out: &mut Exposer<'_>, is_missing: bool) -> fmt::Result {
    let help = "1 if --seccomp asks for a system call filter; none is installed, because there is none yet.";
    out.gauges(Family("seccomp_missing", help, None), [(Vec::new(), f64::from(u8::from(is_missing)))])
}

/// Resident memory by kind, from the text of proc_pid_status(5).
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
        assert_eq!(resident(status), [("anonymous", 60 << 10), ("file", 30 << 10), ("shared", 10 << 10)]);
        assert_eq!(resident(""), []);
        let own = std::fs::read_to_string("/proc/self/status").unwrap();
        assert!(resident(&own).iter().any(|(kind, bytes)| *kind == "anonymous" && *bytes > 0));
    }
}
