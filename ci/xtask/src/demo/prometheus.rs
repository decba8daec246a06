//! Debian's Prometheus, which scrapes both VMs every second. It is not installed.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};

use super::free_port;
use crate::apt::Apt;
use crate::checkout::{Checkout, create_folder, write};
use crate::jobs::{self, Job, Scratch};
use crate::programs;

const REQUEST: &[u8] = b"GET /-/ready HTTP/1.0\r\n\r\n";
const POLL: Duration = Duration::from_millis(100);
/// Number of lines of its log that are shown if it ends early.
const LAST_LINES: usize = 3;

/// A running Prometheus, which ends on drop.
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
        while !is_ready(port) {
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

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

fn configuration(ports: [u16; 2]) -> String {
    let targets = ports.map(|port| format!("\"127.0.0.1:{port}\"")).join(", ");
    format!(
        "global: {{ scrape_interval: 1s, scrape_timeout: 1s }}\n\
         scrape_configs:\n  - job_name: foreshore\n    static_configs: [ {{ targets: [ {targets} ] }} ]\n"
    )
}

/// True if it answers a request with 200. It refuses connections while it starts.
fn is_ready(port: u16) -> bool {
    let request = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(REQUEST)?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(line)
    };
    request().is_ok_and(|line| line.contains(" 200 "))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn server_is_ready_when_it_answers_with_200() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::scope(|scope| {
            scope.spawn(|| {
                for status in ["503 Service Unavailable", "200 OK"] {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut request = [0; REQUEST.len()];
                    stream.read_exact(&mut request).unwrap();
                    write!(stream, "HTTP/1.0 {status}\r\n\r\n").unwrap();
                }
            });
            assert_eq!([(); 2].map(|()| is_ready(port)), [false, true]);
        });
        drop(listener);
        assert!(!is_ready(port));
    }

    #[test]
    fn both_vms_are_targets() {
        let expected = "static_configs: [ { targets: [ \"127.0.0.1:1\", \"127.0.0.1:2\" ] } ]\n";
        assert!(configuration([1, 2]).ends_with(expected));
    }
}
