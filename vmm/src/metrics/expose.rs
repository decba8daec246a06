//! Writes metric families. It exists so that areas list what they have, and nothing else.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::latency::LatencySample;

/// Label names with values.
pub(super) type Labels = Vec<(&'static str, String)>;

/// One label.
pub(super) fn one(name: &'static str, value: &str) -> Labels {
    vec![(name, value.to_owned())]
}

/// A name without prefix, unit and `_total`; what it means, as a sentence; its unit.
pub(super) struct Family(pub &'static str, pub &'static str, pub Option<Unit>);

/// Where families are written to.
pub(super) struct Exposer<'a>(DescriptorEncoder<'a>);

impl<'a> Exposer<'a> {
    pub(super) fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// Values that go up and down.
    pub(super) fn gauges(
        &mut self,
        family: Family,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) -> fmt::Result {
        self.family(&family, MetricType::Gauge, samples, |encoder, value| encoder.encode_gauge(value))
    }

    /// Sizes in bytes that go up and down.
    pub(super) fn bytes(
        &mut self,
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let family = Family(name, help, Some(Unit::Bytes));
        // Whole numbers of bytes stay exact, and readable; nothing here comes near 2^63.
        self.family(&family, MetricType::Gauge, samples, |encoder, value| {
            encoder.encode_gauge(&i64::try_from(*value).unwrap_or(i64::MAX))
        })
    }

    /// Whole numbers that only grow.
    pub(super) fn counters(
        &mut self,
        family: Family,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        self.family(&family, MetricType::Counter, samples, |encoder, value| {
            encoder.encode_counter::<NoLabelSet, _, u64>(value, None)
        })
    }

    /// Seconds that only grow.
    pub(super) fn seconds_total(
        &mut self,
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) -> fmt::Result {
        let family = Family(name, help, Some(Unit::Seconds));
        self.family(&family, MetricType::Counter, samples, |encoder, value| {
            encoder.encode_counter::<NoLabelSet, _, u64>(value, None)
        })
    }

    /// Durations.
    pub(super) fn latencies(
        &mut self,
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, LatencySample)>,
    ) -> fmt::Result {
        let family = Family(name, help, Some(Unit::Seconds));
        self.family(&family, MetricType::Histogram, samples, |encoder, value| {
            let sum_s = value.sum_ns as f64 / 1e9;
            encoder.encode_histogram::<NoLabelSet>(sum_s, value.count(), &value.seconds(), None)
        })
    }

    /// Writes a family; nothing at all when it has no sample.
    fn family<V>(
        &mut self,
        Family(name, help, unit): &Family,
        kind: MetricType,
        samples: impl IntoIterator<Item = (Labels, V)>,
        encode: impl Fn(&mut MetricEncoder<'_>, &V) -> fmt::Result,
    ) -> fmt::Result {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        let mut encoder = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, value) in samples {
            if labels.is_empty() {
                encode(&mut encoder, &value)?;
            } else {
                encode(&mut encoder.encode_family(&labels)?, &value)?;
            }
        }
        Ok(())
    }
}
