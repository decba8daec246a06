//! Text formats of the metrics, and their choice by the `Accept` header of a request.

use std::collections::BTreeSet;
use std::fmt::Write;

use axum::http::{HeaderMap, header};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Prometheus text format 0.0.4, which all scrapers and `promtool check metrics` accept.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// Chooses the format by an `Accept` header (RFC 9110, 12.5.1). As in other exporters, a client
    /// gets OpenMetrics if it names that format and does not prefer plain text.
    pub(super) fn negotiate(accept: &str) -> Self {
        let mut quality = [0u32; 2];
        for (media, permille) in preferences(accept) {
            let index = if media.eq_ignore_ascii_case("application/openmetrics-text") {
                1
            } else if ["text/plain", "text/*", "*/*"]
                .iter()
                .any(|other| media.eq_ignore_ascii_case(other))
            {
                0
            } else {
                continue;
            };
            quality[index] = quality[index].max(permille);
        }
        let [plain, open] = quality;
        if open > 0 && open >= plain { Format::OpenMetrics } else { Format::Prometheus }
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Converts metrics in the OpenMetrics format into this format.
    pub(super) fn convert(self, open_metrics: String) -> String {
        match self {
            Format::OpenMetrics => open_metrics,
            Format::Prometheus => to_prometheus(&open_metrics),
        }
    }
}

/// Values of a header such as `Accept`, with their qualities in thousandths (RFC 9110, 12.4.2).
fn preferences(header: &str) -> impl Iterator<Item = (&str, u32)> {
    header.split(',').map(|item| {
        let mut parts = item.split(';').map(str::trim);
        let value = parts.next().unwrap_or_default();
        let quality = parts
            .find_map(|part| part.strip_prefix("q="))
            .map_or(1.0, |quality| quality.parse().unwrap_or(0.0));
        (value, (f64::clamp(quality, 0.0, 1.0) * 1000.0) as u32)
    })
}

/// Returns true if the client accepts gzip (RFC 9110, 12.5.3).
pub(super) fn accepts_gzip(request: &HeaderMap) -> bool {
    let values = request.get_all(header::ACCEPT_ENCODING).iter();
    let accepted: Vec<_> =
        values.filter_map(|value| value.to_str().ok()).flat_map(preferences).collect();
    let quality = |coding: &str| {
        let named = accepted.iter().find(|(accepted, _)| accepted.eq_ignore_ascii_case(coding));
        named.map(|(_, permille)| *permille)
    };
    quality("gzip").or_else(|| quality("*")).is_some_and(|permille| permille > 0)
}

/// Converts to format 0.0.4, in which the family of a counter has the same name as its samples. In
/// OpenMetrics, the name of the family lacks `_total`. Format 0.0.4 has neither units nor an end
/// marker.
fn to_prometheus(open_metrics: &str) -> String {
    let families = open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let counters: BTreeSet<_> =
        families.filter_map(|family| family.strip_suffix(" counter")).collect();
    let mut out = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            out.push_str(line);
            out.push('\n');
            continue;
        };
        let mut words = comment.splitn(3, ' ');
        let (kind, name, rest) = (
            words.next().unwrap_or_default(),
            words.next().unwrap_or_default(),
            words.next().unwrap_or_default(),
        );
        if matches!(kind, "HELP" | "TYPE") {
            let suffix = if counters.contains(name) { "_total" } else { "" };
            writeln!(out, "# {kind} {name}{suffix} {rest}").expect("a String takes all");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_metrics_is_sent_to_clients_that_name_it() {
        let prometheus_2 = "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;\
                            version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, format) in [
            ("", Format::Prometheus),
            ("*/*", Format::Prometheus),
            ("text/plain;version=0.0.4", Format::Prometheus),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Format::Prometheus),
            ("application/openmetrics-text", Format::OpenMetrics),
            ("Application/OpenMetrics-Text; version=1.0.0; charset=utf-8", Format::OpenMetrics),
            (prometheus_2, Format::OpenMetrics),
            ("application/openmetrics-text;q=0.2,text/plain;q=0.9", Format::Prometheus),
            ("application/openmetrics-text;q=0", Format::Prometheus),
            ("application/openmetrics-text;q=much", Format::Prometheus),
        ] {
            assert_eq!(Format::negotiate(accept), format, "{accept}");
        }
    }

    #[test]
    fn gzip_is_for_clients_that_accept_it() {
        for (encodings, expected) in [
            (&[][..], false),
            (&["gzip"], true),
            (&["deflate, GZIP;q=0.5"], true),
            (&["deflate", "gzip"], true),
            (&["*"], true),
            (&["gzip;q=0, *"], false),
            (&["gzip;q=0"], false),
            (&["identity"], false),
            (&["gzip;q=much"], false),
        ] {
            let headers = encodings
                .iter()
                .map(|value| (header::ACCEPT_ENCODING, value.parse().unwrap()))
                .collect();
            assert_eq!(accepts_gzip(&headers), expected, "{encodings:?}");
        }
    }

    #[test]
    fn counters_are_named_as_their_samples_in_format_0_0_4() {
        let open = "# HELP a_seconds Time.\n# TYPE a_seconds counter\n# UNIT a_seconds seconds\n\
                    a_seconds_total{vm=\"# HELP x\"} 1\n# HELP b Size of a_seconds.\n# TYPE b gauge\nb 2\n# EOF\n";
        let expected = "# HELP a_seconds_total Time.\n# TYPE a_seconds_total counter\n\
                        a_seconds_total{vm=\"# HELP x\"} 1\n# HELP b Size of a_seconds.\n# TYPE b gauge\nb 2\n";
        assert_eq!(Format::Prometheus.convert(open.to_owned()), expected);
        assert_eq!(Format::OpenMetrics.convert(open.to_owned()), open);
    }
}
