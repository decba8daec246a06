//! VM that the clients create.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

#[derive(Clone, Debug)]
pub struct Vm {
    pub api_socket: PathBuf,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// Output file of the serial console.
    pub console: PathBuf,
    /// Socket of the vsock device. The device's CID is 3.
    pub vsock: PathBuf,
    /// Images of two disks of 64 MiB. One disk is present from the start, and the other is added
    /// later.
    pub disks: [PathBuf; 2],
    /// File of 128 MiB that is added as persistent memory.
    pub pmem: PathBuf,
    /// FIFO for events. Only libvirt reads it, and a VMM that libvirt starts waits until libvirt
    /// has opened it.
    pub events: PathBuf,
    /// Tap interfaces. If the client passes descriptors, its VM has a NIC for each tap.
    pub taps: Vec<String>,
    /// Opens the tap's only queue.
    pub open_tap: fn(&str) -> Result<Vec<File>>,
}

/// NIC whose tap the client opens itself.
#[derive(Debug)]
pub struct Nic {
    pub mac: String,
    /// Descriptors that the client passes.
    pub queues: Vec<File>,
}

impl Vm {
    pub const CMDLINE: &str = "console=ttyS0 loglevel=5";

    /// Converts a path to the form used in JSON and in the crate's models.
    pub fn text(path: &std::path::Path) -> String {
        path.display().to_string()
    }

    /// Returns the configuration that nearly all clients use, extended by `sections`.
    pub fn config(&self, sections: Value) -> Value {
        let mut config = json!({
            "payload": {"kernel": self.kernel, "initramfs": self.initramfs, "cmdline": Self::CMDLINE},
            "serial": {"mode": "File", "file": self.console}, "console": {"mode": "Off"},
            "vsock": {"cid": 3, "socket": self.vsock},
        });
        if let (Value::Object(all), Value::Object(more)) = (&mut config, sections) {
            all.extend(more);
        }
        config
    }

    /// Opens the NICs one by one.
    pub fn nics(&self) -> impl Iterator<Item = Result<Nic>> {
        self.taps.iter().enumerate().map(|(nth, tap)| {
            let mac = format!("02:f5:00:00:c1:{nth:02x}");
            Ok(Nic { mac, queues: (self.open_tap)(tap)? })
        })
    }
}

/// Waits until the guest is up. Before that, its drivers do not respond to requests.
pub type UntilUp<'a> = &'a dyn Fn() -> Result<()>;

/// Time limit for a reaction of the guest. The time limit is only exceeded if the guest hangs.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between checks.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);
