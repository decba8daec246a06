//! As much of Prometheus' HTTP API as a timeline needs.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use guest_tests::http;
use serde_json::Value;

/// One point per second: that is how often ci/demo has it scrape.
const STEP_S: u64 = 1;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    start_s: u64,
    end_s: u64,
}

impl Range {
    /// Whole seconds that take in both ends.
    pub(crate) fn new(start_s: f64, end_s: f64) -> Result<Self> {
        ensure!(
            start_s.is_finite() && start_s > 0.0 && end_s > start_s,
            "The time from {start_s} to {end_s} is no span"
        );
        Ok(Self { start_s: start_s.floor() as u64, end_s: end_s.ceil() as u64 })
    }

    pub(crate) fn len_s(&self) -> u64 {
        self.end_s - self.start_s
    }

    pub(crate) fn steps(&self) -> impl Iterator<Item = u64> + use<> {
        (self.start_s..=self.end_s).step_by(STEP_S as usize)
    }
}

pub(crate) type Series = BTreeMap<u64, f64>;

pub(crate) struct Prometheus {
    address: String,
}

impl Prometheus {
    pub(crate) fn new(address: &str) -> Self {
        Self { address: address.to_owned() }
    }

    /// What an expression was over a span of time, by the label `vm`. See Prometheus'
    /// documentation, "HTTP API", range queries.
    pub(crate) fn ask(&self, expression: &str, range: &Range) -> Result<BTreeMap<String, Series>> {
        let path = format!(
            "/api/v1/query_range?query={}&start={}&end={}&step={STEP_S}",
            percent_encoded(expression),
            range.start_s,
            range.end_s
        );
        let response = http::request_tcp(&self.address, "GET", &path, None)?;
        ensure!(
            response.status == 200,
            "{expression}: status {}: {}",
            response.status,
            response.body
        );
        parse(&response.body).with_context(|| format!("The answer to {expression}"))
    }
}

/// Everything but what RFC 3986 calls unreserved.
fn percent_encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}

fn parse(body: &str) -> Result<BTreeMap<String, Series>> {
    let answer: Value =
        serde_json::from_str(body).with_context(|| format!("Not JSON: {body:?}"))?;
    ensure!(answer["status"] == "success", "No success: {body}");
    let results = answer["data"]["result"].as_array().context("No result")?;
    let mut by_vm = BTreeMap::new();
    for result in results {
        let vm = result["metric"]["vm"].as_str().context("A series without the label vm")?;
        let values = result["values"].as_array().context("A series without values")?;
        let series = values.iter().map(point).collect::<Result<Series>>()?;
        ensure!(by_vm.insert(vm.to_owned(), series).is_none(), "Two series of VM {vm}");
    }
    Ok(by_vm)
}

/// `[seconds, "value"]`
fn point(pair: &Value) -> Result<(u64, f64)> {
    let time_s = pair[0].as_f64().with_context(|| format!("No time: {pair}"))?;
    let value = pair[1].as_str().and_then(|text| text.parse().ok());
    Ok((time_s.round() as u64, value.with_context(|| format!("No value: {pair}"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_becomes_series_by_vm() {
        let body = r#"{"status":"success","data":{"resultType":"matrix","result":[
            {"metric":{"vm":"demo"},"values":[[10,"1"],[11.000,"2.5"]]},
            {"metric":{"vm":"other"},"values":[[10,"NaN"]]}]}}"#;
        let series = parse(body).unwrap();
        assert_eq!(series["demo"], Series::from([(10, 1.0), (11, 2.5)]));
        assert!(series["other"][&10].is_nan());
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        for body in [
            "",
            r#"{"status":"error","error":"bad"}"#,
            r#"{"status":"success","data":{"result":[{"metric":{},"values":[]}]}}"#,
            r#"{"status":"success","data":{"result":[{"metric":{"vm":"a"},"values":[[1,2]]}]}}"#,
        ] {
            assert!(parse(body).is_err(), "{body}");
        }
    }

    #[test]
    fn an_expression_survives_a_url() {
        assert_eq!(percent_encoded("a{b=\"c\"}+1"), "a%7Bb%3D%22c%22%7D%2B1");
    }
}
