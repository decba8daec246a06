//! Parser for OpenMetrics text. The parser is strict, so that malformed text fails a test.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Name of the metric with its suffix, for example `foreshore_plans_total` or
    /// `foreshore_plug_seconds_bucket`.
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics {
    samples: Vec<Sample>,
}

impl Metrics {
    pub fn parse(text: &str) -> Result<Self> {
        let mut samples = Vec::new();
        let mut ended = false;
        for (index, line) in text.lines().enumerate() {
            ensure!(!ended, "Line {} follows # EOF: {line:?}", index + 1);
            if line == "# EOF" {
                ended = true;
            } else if !line.starts_with('#') {
                samples.push(
                    parse_sample(line).with_context(|| format!("Line {}: {line:?}", index + 1))?,
                );
            }
        }
        ensure!(ended, "The exposition does not end with # EOF");
        Ok(Self { samples })
    }

    /// Returns the value of the only sample with this name and at least these labels.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        let mut found = self.matching(name, labels);
        let sample = found.next().with_context(|| format!("No metric {name} {labels:?}"))?;
        if let Some(other) = found.next() {
            bail!(
                "More than one metric {name} {labels:?}: {:?} and {:?}",
                sample.labels,
                other.labels
            );
        }
        Ok(sample.value)
    }

    /// Returns the sum of all samples with this name and these labels, or zero if no sample
    /// matches.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|sample| sample.value).sum()
    }

    /// Returns a quantile of a histogram: the upper bound of the bucket in which this share of the
    /// observations is reached.
    pub fn quantile(&self, histogram: &str, share: f64) -> Result<f64> {
        let count = self.value(&format!("{histogram}_count"), &[])?;
        ensure!(count > 0.0, "{histogram} has no observations");
        let bucket = format!("{histogram}_bucket");
        let mut bounds = self
            .matching(&bucket, &[])
            .map(|sample| match sample.labels.get("le").map(String::as_str) {
                Some("+Inf") => Ok((f64::INFINITY, sample.value)),
                Some(bound) => Ok((bound.parse()?, sample.value)),
                None => bail!("Bucket without a bound: {sample:?}"),
            })
            .collect::<Result<Vec<(f64, f64)>>>()?;
        bounds.sort_by(|one, other| one.0.total_cmp(&other.0));
        let reached = bounds.iter().find(|(_, below)| *below >= share * count);
        Ok(reached.context("The histogram has no bucket +Inf")?.0)
    }

    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    fn matching<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| {
            sample.name == name
                && labels
                    .iter()
                    .all(|(key, value)| sample.labels.get(*key).is_some_and(|v| v == value))
        })
    }
}

/// Parses `name{label="value",...} value [timestamp]`.
fn parse_sample(line: &str) -> Result<Sample> {
    let name_len = line.find(['{', ' ']).context("The line has no value")?;
    let (name, rest) = line.split_at(name_len);
    ensure!(
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':'),
        "Not a metric name: {name:?}"
    );
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => parse_labels(rest)?,
        None => (BTreeMap::new(), rest),
    };
    // An exemplar may follow, and is ignored.
    let value = rest.split_whitespace().next().context("The line has no value")?;
    let value = match value {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        "NaN" => f64::NAN,
        number => number.parse().with_context(|| format!("Not a number: {number:?}"))?,
    };
    Ok(Sample { name: name.to_owned(), labels, value })
}

fn parse_labels(mut rest: &str) -> Result<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(rest) = rest.strip_prefix('}') {
            return Ok((labels, rest));
        }
        let (key, after) = rest.split_once("=\"").context("Label without a value")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next().context("The value of a label has no end")? {
                (end, '"') => break end,
                (_, '\\') => match chars.next().context("The value of a label has no end")?.1 {
                    'n' => value.push('\n'),
                    escaped => value.push(escaped),
                },
                (_, c) => value.push(c),
            }
        };
        ensure!(labels.insert(key.to_owned(), value).is_none(), "Duplicate label: {key}");
        rest = &after[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# HELP foreshore_zone_plugged_bytes Memory that the guest has.
# TYPE foreshore_zone_plugged_bytes gauge
# UNIT foreshore_zone_plugged_bytes bytes
foreshore_zone_plugged_bytes{zone=\"dram\",tier=\"dram\"} 134217728
foreshore_zone_plugged_bytes{zone=\"pm\",tier=\"pm\"} 0
foreshore_plans_total{reason=\"a \\\"b\\\" \\\\ c\"} 3 # {trace=\"1\"} 1.0
foreshore_up 1
foreshore_plug_seconds_bucket{le=\"+Inf\"} 2
# EOF
";

    #[test]
    fn samples_are_found_by_name_and_labels() {
        let metrics = Metrics::parse(TEXT).unwrap();
        assert_eq!(
            metrics.value("foreshore_zone_plugged_bytes", &[("zone", "dram")]).unwrap(),
            134_217_728.0
        );
        assert_eq!(metrics.value("foreshore_up", &[]).unwrap(), 1.0);
        assert_eq!(metrics.sum("foreshore_zone_plugged_bytes", &[]), 134_217_728.0);
        assert!(metrics.value("foreshore_plans_total", &[("reason", "a \"b\" \\ c")]).is_ok());
    }

    #[test]
    fn missing_or_duplicate_value_is_an_error() {
        let metrics = Metrics::parse(TEXT).unwrap();
        assert!(metrics.value("foreshore_zone_plugged_bytes", &[]).is_err());
        assert!(metrics.value("foreshore_nothing", &[]).is_err());
    }

    #[test]
    fn malformed_expositions_are_errors() {
        for text in [
            "foreshore_up 1\n",
            "foreshore_up\n# EOF\n",
            "a{b=\"c} 1\n# EOF\n",
            "a x\n# EOF\n",
            "# EOF\na 1\n",
        ] {
            assert!(Metrics::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn quantile_is_the_upper_bound_of_its_bucket() {
        let text = "h_bucket{le=\"0.001\"} 98\nh_bucket{le=\"0.0001\"} 50\nh_bucket{le=\"0.005\"} 99\n\
                    h_bucket{le=\"+Inf\"} 100\nh_count 100\nh_sum 1\n# EOF\n";
        let metrics = Metrics::parse(text).unwrap();
        let of = |share| metrics.quantile("h", share).unwrap();
        assert_eq!((of(0.5), of(0.51), of(0.99), of(1.0)), (0.0001, 0.001, 0.005, f64::INFINITY));
        assert!(metrics.quantile("nothing", 0.5).is_err());
    }
}
