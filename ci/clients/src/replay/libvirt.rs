//! libvirt's driver for Cloud Hypervisor (src/ch). It uses libcurl with one handle and one
//! connection for calls, a raw connection to add NICs, a FIFO for events, and a pseudo terminal as
//! the serial console. Its VMM waits until the FIFO has been opened.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::vm::{Nic, TIMEOUT, UntilUp, Vm};
use crate::wire::{Connection, Style};

/// Format of libcurl's requests. A PUT without a body is sent as an empty upload.
const STYLE: Style = Style {
    base: "",
    headers: "Host: localhost\r\nAccept: application/json\r\n",
    with_body: "Content-Type: application/json\r\n",
    sends_zero_length: true,
};
/// Format of queries. They have a content type but no body.
const QUERY_STYLE: Style = Style {
    headers: "Host: localhost\r\nAccept: application/json\r\nContent-Type: application/json\r\n",
    ..STYLE
};
/// Size of the buffer for reading from the FIFO.
const EVENT_BUFFER_BYTES: usize = 4096 - 1;

struct Curl(Connection);

impl Curl {
    /// Makes a PUT call. Two statuses count as success.
    fn put(&mut self, call: &str, body: &str) -> Result<()> {
        let answer = self.0.call(&STYLE.put(call, body))?;
        ensure!([200, 204].contains(&answer.status), "{call}: {answer:?}");
        Ok(())
    }

    fn info(&mut self) -> Result<Value> {
        self.0.expect(200, &QUERY_STYLE.get("vm.info"))?.json()
    }
}

/// Adds each NIC with one message, and parses the part of the response that a single `recv`
/// returns. (libvirt gives up after 500 ms, but this test does not check the time.)
fn add_nics(vm: &Vm) -> Result<()> {
    let mut stream = Connection::open(&vm.api_socket)?;
    for (nth, nic) in vm.nics().enumerate() {
        let Nic { mac, queues } = nic?;
        // A pair of queues is counted as two queues.
        let body = json!({"id": format!("net_{nth}"), "mac": mac, "num_queues": 2 * queues.len()})
            .to_string();
        let head = "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
        stream
            .write_with(&format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()), queues)?;
        let answer = stream.receive()?;
        // libvirt parses the status with sscanf("HTTP/1.%*d %d").
        let status = answer.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1));
        ensure!(
            status.is_some_and(|status| ["200", "204"].contains(&status)),
            "vm.add-net: {answer:?}"
        );
    }
    Ok(())
}

/// Reader for event names, in the form `source:event`.
struct Events(Receiver<Result<String>>);

impl Events {
    /// Opens the FIFO, which the VMM has waited for, and reads it until the VMM ends.
    fn open(path: &Path) -> Result<Self> {
        let mut fifo = File::open(path).with_context(|| format!("Cannot open {path:?}"))?;
        let (sender, names) = mpsc::channel();
        thread::spawn(move || {
            let mut documents = Documents::default();
            let mut buffer = [0; EVENT_BUFFER_BYTES];
            while let Ok(len @ 1..) = fifo.read(&mut buffer) {
                for document in documents.take(&buffer[..len]) {
                    let _ = sender.send(name(&document));
                }
            }
        });
        Ok(Self(names))
    }

    /// Waits for an event. Returns the events that preceded it.
    fn until(&self, expected: &str) -> Result<Vec<String>> {
        let mut before = Vec::new();
        loop {
            let waited = self.0.recv_timeout(TIMEOUT);
            match waited.with_context(|| format!("No event {expected} after {before:?}"))?? {
                name if name == expected => return Ok(before),
                name => before.push(name),
            }
        }
    }
}

fn name(document: &[u8]) -> Result<String> {
    let text = String::from_utf8_lossy(document);
    let event: Value =
        serde_json::from_slice(document).with_context(|| format!("Not an event: {text}"))?;
    match (event["source"].as_str(), event["event"].as_str()) {
        (Some(source), Some(name)) => Ok(format!("{source}:{name}")),
        _ => bail!("Not an event: {text}"),
    }
}

/// Splits data at braces, including braces in strings.
#[derive(Default)]
struct Documents {
    partial: Vec<u8>,
    open: usize,
}

impl Documents {
    fn take(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut complete = Vec::new();
        for &byte in bytes {
            self.open += usize::from(byte == b'{');
            if self.open > 0 {
                self.partial.push(byte);
            }
            if byte == b'}' && self.open > 0 {
                self.open -= 1;
                if self.open == 0 {
                    complete.push(std::mem::take(&mut self.partial));
                }
            }
        }
        complete
    }
}

/// Reads the path of the terminal after a boot and after each `vm:rebooted`. A program that follows
/// the terminal (`virsh console`) keeps reading.
fn follow(info: &Value, followed: &mut Option<String>, log: &Path) -> Result<()> {
    ensure!(info["state"] == "Running" && info["config"].is_object(), "{info}");
    let serial = &info["config"]["serial"];
    ensure!(serial["mode"] == "Pty", "The serial console is not a Pty: {serial}");
    // The fake VM task without machines has no terminal.
    let path = serial["file"].as_str().map(str::to_owned);
    if path.is_some() && path != *followed {
        let mut terminal = File::open(path.as_deref().unwrap_or_default())?;
        let mut log = File::options().create(true).append(true).open(log)?;
        // The thread ends together with the VMM.
        thread::spawn(move || io::copy(&mut terminal, &mut log));
        *followed = path;
    }
    Ok(())
}

pub(super) fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    let events = Events::open(&vm.events)?;
    let mut curl = Curl(Connection::open(&vm.api_socket)?);
    let config = vm.config(json!({
        "serial": {"mode": "Pty"},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 2},
        "memory": {"size": 512u64 << 20},
        "disks": [{"path": vm.disks[0]}, {"path": vm.disks[1], "readonly": true}],
    }));
    curl.put("vm.create", &config.to_string())?;
    add_nics(vm)?;
    curl.put("vm.boot", "")?;
    let mut followed = None;
    follow(&curl.info()?, &mut followed, &vm.console)?;
    until_up()?;
    events.until("vm:booted")?;
    for call in ["vm.pause", "vm.resume", "vm.reboot"] {
        curl.put(call, "")?;
    }
    events.until("vm:rebooted")?;
    follow(&curl.info()?, &mut followed, &vm.console)?;
    until_up()?;
    curl.put("vm.shutdown", "")?;
    events.until("vm:shutdown")?;
    curl.put("vmm.shutdown", "")?;
    events.until("vmm:shutdown")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_split_at_braces_independent_of_reads() {
        let mut documents = Documents::default();
        assert_eq!(documents.take(b"x {\"a\": {}"), Vec::<Vec<u8>>::new());
        assert_eq!(documents.take(b"}\n\n{}}{"), [b"{\"a\": {}}".to_vec(), b"{}".to_vec()]);
        assert_eq!(documents.take(b"}"), [b"{}".to_vec()]);
    }
}
