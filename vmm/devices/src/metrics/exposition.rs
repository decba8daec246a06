//! Metric families, collected from all sources on each scrape.
//!
//! The format requires that all samples of a family are contiguous, but several sources, such as
//! two disks, have samples in one family. Sources therefore add samples in any order, and then each
//! family is encoded once, with all its samples.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::latency::LatencySample;

pub trait Expose: Send + Sync {
    /// Adds the current samples.
    fn expose(&self, out: &mut Exposition);
}

impl<A: Expose, B: Expose> Expose for (A, B) {
    fn expose(&self, out: &mut Exposition) {
        self.0.expose(out);
        self.1.expose(out);
    }
}

/// Names and values of labels.
pub type Labels = Vec<(&'static str, String)>;

/// Returns labels with one entry.
pub fn one(name: &'static str, value: &str) -> Labels {
    vec![(name, value.to_owned())]
}

/// Returns `labels` with one more entry.
pub fn and(labels: &Labels, name: &'static str, value: &str) -> Labels {
    labels.iter().cloned().chain([(name, value.to_owned())]).collect()
}

pub fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Family of metrics: its name (without prefix, unit and `_total`), its description and its unit.
pub struct Family(pub &'static str, pub &'static str, pub Option<Unit>);

/// Value of a sample. The variant is the metric type of the family.
#[derive(Debug)]
enum Value {
    Gauge(f64),
    /// A separate variant, so that whole numbers of bytes are exact and readable.
    Bytes(u64),
    Counter(u64),
    SecondsTotal(f64),
    Latency(LatencySample),
}

impl Value {
    fn metric_type(&self) -> MetricType {
        match self {
            Self::Gauge(_) | Self::Bytes(_) => MetricType::Gauge,
            Self::Counter(_) | Self::SecondsTotal(_) => MetricType::Counter,
            Self::Latency(_) => MetricType::Histogram,
        }
    }

    fn encode(&self, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        match self {
            Self::Gauge(value) => encoder.encode_gauge(value),
            // No size reaches 2^63.
            Self::Bytes(bytes) => encoder.encode_gauge(&i64::try_from(*bytes).unwrap_or(i64::MAX)),
            Self::Counter(count) => encoder.encode_counter::<NoLabelSet, _, u64>(count, None),
            Self::SecondsTotal(seconds) => {
                encoder.encode_counter::<NoLabelSet, _, u64>(seconds, None)
            }
            Self::Latency(sample) => {
                let sum_s = sample.sum_ns as f64 / 1e9;
                encoder.encode_histogram::<NoLabelSet>(
                    sum_s,
                    sample.count(),
                    &sample.seconds(),
                    None,
                )
            }
        }
    }
}

/// Samples of a family.
#[derive(Debug)]
struct Samples {
    help: &'static str,
    unit: Option<Unit>,
    samples: Vec<(Labels, Value)>,
}

/// All samples of a scrape, by family.
#[derive(Debug, Default)]
pub struct Exposition {
    families: BTreeMap<&'static str, Samples>,
    without_prefix: Option<Box<Exposition>>,
}

impl Exposition {
    /// Adds families whose names have no prefix, because other programs use the same names.
    pub fn without_prefix(&mut self, fill: impl FnOnce(&mut Exposition)) {
        fill(self.without_prefix.get_or_insert_default());
    }

    /// Removes the families without a prefix, and returns them.
    pub(super) fn take_without_prefix(&mut self) -> Exposition {
        self.without_prefix.take().map(|families| *families).unwrap_or_default()
    }

    /// Adds values that can increase and decrease.
    pub fn gauges(&mut self, family: Family, samples: impl IntoIterator<Item = (Labels, f64)>) {
        self.add(family, samples, Value::Gauge);
    }

    /// Adds states. True is encoded as 1.
    pub fn flags(&mut self, family: Family, samples: impl IntoIterator<Item = (Labels, bool)>) {
        self.add(family, samples, |is_set| Value::Gauge(f64::from(u8::from(is_set))));
    }

    /// Adds sizes in bytes that can increase and decrease.
    pub fn bytes(
        &mut self,
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        self.add(Family(name, help, Some(Unit::Bytes)), samples, Value::Bytes);
    }

    /// Adds whole numbers that only increase.
    pub fn counters(&mut self, family: Family, samples: impl IntoIterator<Item = (Labels, u64)>) {
        self.add(family, samples, Value::Counter);
    }

    /// Adds numbers of seconds that only increase.
    pub fn seconds_total(
        &mut self,
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        self.add(Family(name, help, Some(Unit::Seconds)), samples, Value::SecondsTotal);
    }

    pub fn latencies(
        &mut self,
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, LatencySample)>,
    ) {
        self.add(Family(name, help, Some(Unit::Seconds)), samples, Value::Latency);
    }

    fn add<V>(
        &mut self,
        Family(name, help, unit): Family,
        samples: impl IntoIterator<Item = (Labels, V)>,
        value: impl Fn(V) -> Value,
    ) {
        let family =
            self.families.entry(name).or_insert(Samples { help, unit, samples: Vec::new() });
        // Release builds use the first description, because a scrape must not end a guest.
        debug_assert_eq!(family.help, help, "two descriptions of {name}");
        family.samples.extend(samples.into_iter().map(|(labels, sample)| (labels, value(sample))));
    }
}

impl Collector for Exposition {
    /// Encodes every family that has a sample.
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, Samples { help, unit, samples }) in &self.families {
            let Some((_, first)) = samples.first() else { continue };
            let mut family =
                encoder.encode_descriptor(name, help, unit.as_ref(), first.metric_type())?;
            for (labels, value) in samples {
                if labels.is_empty() {
                    value.encode(&mut family)?;
                } else {
                    value.encode(&mut family.encode_family(labels)?)?;
                }
            }
        }
        Ok(())
    }
}
