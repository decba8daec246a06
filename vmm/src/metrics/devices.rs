//! Entropy, console and balloon.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use balloon::statistics::Tag;
use prometheus_client::registry::Unit;

use super::expose::{Exposer, Family, one};
use crate::host_console::ConsoleFileMetrics;
use crate::serial::SerialMetrics;
use crate::virtio::balloon::{BalloonMetrics, Refusal};
use crate::virtio::console::ConsoleMetrics;
use crate::virtio::rng::RngMetrics;
use crate::virtio::watchdog::WatchdogMetrics;

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

pub(super) fn expose_rng(out: &mut Exposer<'_>, counters: &RngMetrics) -> fmt::Result {
    out.counters(
        Family("rng_requests", "Requests answered with entropy.", None),
        [(vec![], get(&counters.requests))],
    )?;
    out.counters(
        Family("rng", "Entropy given to the guest.", Some(Unit::Bytes)),
        [(vec![], get(&counters.bytes))],
    )?;
    out.counters(
        Family("rng_bad_requests", "Requests without a buffer that can be written.", None),
        [(vec![], get(&counters.bad_requests))],
    )?;
    out.counters(
        Family("rng_source_failures", "Times that the source failed or ended.", None),
        [(vec![], get(&counters.source_failures))],
    )
}

pub(super) fn expose_watchdog(out: &mut Exposer<'_>, counters: &WatchdogMetrics) -> fmt::Result {
    out.counters(Family("watchdog_pings", "Pings of the guest.", None), [(vec![], get(&counters.pings))])?;
    out.counters(
        Family("watchdog_bad_requests", "Requests without a byte that can be written.", None),
        [(vec![], get(&counters.bad_requests))],
    )
}

pub(super) fn expose_serial(out: &mut Exposer<'_>, counters: &SerialMetrics) -> fmt::Result {
    out.counters(
        Family("serial", "Bytes of COM1.", Some(Unit::Bytes)),
        [
            (one("direction", "from-guest"), get(&counters.output_bytes)),
            (one("direction", "to-guest"), get(&counters.input_bytes)),
        ],
    )?;
    out.counters(
        Family("serial_lost", "Output of COM1 that could not be written.", Some(Unit::Bytes)),
        [(vec![], get(&counters.lost_bytes))],
    )
}

pub(super) fn expose_console(out: &mut Exposer<'_>, counters: &ConsoleMetrics) -> fmt::Result {
    out.counters(
        Family("console", "Bytes of hvc0.", Some(Unit::Bytes)),
        [
            (one("direction", "from-guest"), get(&counters.output_bytes)),
            (one("direction", "to-guest"), get(&counters.input_bytes)),
        ],
    )?;
    out.counters(
        Family("console_lost", "Output of hvc0 that could not be written.", Some(Unit::Bytes)),
        [(vec![], get(&counters.lost_bytes))],
    )?;
    out.counters(
        Family("console_bad_requests", "Requests without a buffer that the device can use.", None),
        [(vec![], get(&counters.bad_requests))],
    )
}

pub(super) fn expose_balloon(out: &mut Exposer<'_>, counters: &BalloonMetrics) -> fmt::Result {
    out.bytes(
        "balloon_target",
        "What the guest is asked to have in its balloon.",
        [(vec![], get(&counters.target_bytes))],
    )?;
    out.bytes("balloon_actual", "What it says is in it.", [(vec![], get(&counters.actual_bytes))])?;
    out.counters(
        Family("balloon_given_back", "Memory that went back to the host.", Some(Unit::Bytes)),
        [
            (one("by", "inflate"), get(&counters.inflated_bytes)),
            (one("by", "report"), get(&counters.reported_bytes)),
        ],
    )?;
    out.counters(
        Family("balloon_deflated", "Memory that the guest took out of the balloon.", Some(Unit::Bytes)),
        [(vec![], get(&counters.deflated_bytes))],
    )?;
    out.counters(
        Family(
            "balloon_oom_deflated",
            "What of that it took unasked, because it had nothing else left.",
            Some(Unit::Bytes),
        ),
        [(vec![], get(&counters.oom_deflated_bytes))],
    )?;
    out.counters(
        Family("balloon_refused", "Pages and requests that were not taken.", None),
        Refusal::ALL.map(|reason| (one("reason", reason.as_str()), counters.refused(reason))),
    )?;
    out.counters(
        Family("balloon_discard_failures", "Calls by which the host should have taken pages.", None),
        [(vec![], get(&counters.discard_failures))],
    )?;
    out.counters(
        Family("balloon_statistics", "Sets of statistics that came.", None),
        [(vec![], get(&counters.statistics))],
    )?;
    let told = |bytes: bool| {
        let tags = Tag::ALL.into_iter().filter(move |tag| tag.is_bytes() == bytes);
        tags.filter_map(|tag| Some((one("statistic", tag.label()), counters.statistic(tag)?)))
    };
    out.bytes("balloon_guest", "What the guest's kernel says of its memory.", told(true))?;
    out.gauges(
        Family("balloon_guest_events", "What the guest's kernel has counted since it booted.", None),
        told(false).map(|(labels, value)| (labels, value as f64)),
    )
}

pub(super) fn expose_console_files(
    out: &mut Exposer<'_>,
    files: &[(&'static str, Arc<ConsoleFileMetrics>)],
) -> fmt::Result {
    out.counters(
        Family("console_file_rotations", "Times that a console's file has reached its limit.", None),
        files.iter().map(|(device, file)| (one("device", device), get(&file.rotations))),
    )?;
    out.counters(
        Family(
            "console_file_discarded",
            "Earlier output that was removed because a console's file reached its limit.",
            Some(Unit::Bytes),
        ),
        files.iter().map(|(device, file)| (one("device", device), get(&file.discarded_bytes))),
    )?;
    out.seconds_total(
        "console_file_throttled",
        "Time by which the rate limit of a console's file delayed its output.",
        files.iter().map(|(device, file)| (one("device", device), file.throttled.delay().as_secs_f64())),
    )
}
