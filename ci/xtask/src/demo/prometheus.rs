//! Runs Debian's Prometheus, which scrapes both VMs every second. The package is unpacked but not
//! installed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::free_port;
use crate::apt::Apt;
use crate::checkout::{Checkout, create_folder, write};
use crate::jobs::{self, Job, Scratch};
use crate::programs;

/// Query one point per second, because Prometheus scrapes every second.
const STEP_S: u64 = 1;
const POLL: Duration = Duration::from_millis(100);
/// Longest wait for the next byte of a response.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of log lines to show if Prometheus exits early.
const LAST_LINES: usize = 3;

/// Time range in whole seconds, with both ends included.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub start_s: u64,
    pub end_s: u64,
}

impl Range {
    pub(super) fn len_s(&self) -> u64 {
        self.end_s - self.start_s
    }
}

/// Values by time in seconds.
pub(super) type Series = BTreeMap<u64, f64>;

/// Running Prometheus. Drop ends it.
pub(super) struct Prometheus {
    port: u16,
    _job: Job,
    _data: Scratch,
}

impl Prometheus {
    pub(super) fn start(checkout: &Checkout, demo: &Path, metrics_ports: [u16; 2]) -> Result<Self> {
        let program = Apt::new(checkout).unpacked("prometheus")?.join("usr/bin/prometheus");
        let folder = demo.join("prometheus");
        create_folder(&folder)?;
        let (port, data) = (free_port()?, Scratch::new(Some(&folder), "data.")?);
        let config = folder.join("prometheus.yml");
        write(&config, configuration(metrics_ports))?;
        let log = File::create(folder.join("prometheus.log"))?;
        let mut command = programs::ending_with_this_one("TERM", &program, programs::user_path())?;
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", data.path().display()));
        command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
        let mut job = jobs::spawn_killable(command.stdout(log.try_clone()?).stderr(log))?;
        // Prometheus refuses connections while it starts.
        while get(port, "/-/ready").is_err() {
            if job.try_wait()?.is_some() {
                let log = fs::read_to_string(folder.join("prometheus.log"))?;
                let lines: Vec<_> = log.lines().collect();
                bail!(
                    "Prometheus ended: {}",
                    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
                );
            }
            thread::sleep(POLL);
        }
        Ok(Self { port, _job: job, _data: data })
    }

    /// Returns the values of an expression over a time range, grouped by the label `vm`. See
    /// Prometheus' documentation, "HTTP API", range queries.
    pub(super) fn query(
        &self,
        expression: &str,
        range: &Range,
    ) -> Result<BTreeMap<String, Series>> {
        let (query, Range { start_s, end_s }) = (percent_encoded(expression), range);
        let path =
            format!("/api/v1/query_range?query={query}&start={start_s}&end={end_s}&step={STEP_S}");
        get(self.port, &path).and_then(|body| parse(&body)).with_context(|| expression.to_owned())
    }
}

fn configuration(ports: [u16; 2]) -> String {
    let targets = ports.map(|port| format!("\"127.0.0.1:{port}\"")).join(", ");
    format!(
        "global: {{ scrape_interval: 1s, scrape_timeout: 1s }}\n\
         scrape_configs:\n  - job_name: foreshore\n    static_configs: [ {{ targets: [ {targets} ] }} ]\n"
    )
}

/// Requests a page and returns its body. An HTTP/1.0 server sends the body in one piece and then
/// closes the connection.
fn get(port: u16, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").context("no HTTP response")?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(status.contains(" 200 "), "{status}: {body}");
    Ok(body.to_owned())
}

/// Percent-encodes all characters except the unreserved ones of RFC 3986.
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
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn body_is_returned_only_with_status_200() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::scope(|scope| {
            scope.spawn(|| {
                for status in ["503 Service Unavailable", "200 OK"] {
                    let (mut stream, _) = listener.accept().unwrap();
                    let request = "GET /-/ready HTTP/1.0\r\n\r\n";
                    let mut received = vec![0; request.len()];
                    stream.read_exact(&mut received).unwrap();
                    assert_eq!(received, request.as_bytes());
                    write!(stream, "HTTP/1.0 {status}\r\n\r\nbody").unwrap();
                }
            });
            get(port, "/-/ready").unwrap_err();
            assert_eq!(get(port, "/-/ready").unwrap(), "body");
        });
        drop(listener);
        get(port, "/-/ready").unwrap_err();
    }

    #[test]
    fn both_vms_are_targets() {
        let expected = "static_configs: [ { targets: [ \"127.0.0.1:1\", \"127.0.0.1:2\" ] } ]\n";
        assert!(configuration([1, 2]).ends_with(expected));
    }

    #[test]
    fn response_becomes_series_by_vm() {
        let body = r#"{"status":"success","data":{"resultType":"matrix","result":[
            {"metric":{"vm":"demo"},"values":[[10,"1"],[11.000,"2.5"]]},
            {"metric":{"vm":"other"},"values":[[10,"NaN"]]}]}}"#;
        let series = parse(body).unwrap();
        assert_eq!(series["demo"], Series::from([(10, 1.0), (11, 2.5)]));
        assert!(series["other"][&10].is_nan());
    }

    #[test]
    fn other_responses_are_errors() {
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
    fn expression_is_encoded_for_a_url() {
        assert_eq!(percent_encoded("a{b=\"c\"}+1"), "a%7Bb%3D%22c%22%7D%2B1");
    }
}
