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
    /// File of the serial console.
    pub console: PathBuf,
    /// Socket of the vsock device, which has CID 3.
    pub vsock: PathBuf,
    /// Images of two disks of 64 MiB: one is present from the start, the other is added.
    pub disks: [PathBuf; 2],
    /// File of 128 MiB that is added as persistent memory.
    pub pmem: PathBuf,
    /// FIFO of events. Only libvirt reads it, and its VMM waits until it is opened.
    pub events: PathBuf,
    /// Tap interfaces. The VM of a client that passes descriptors has a NIC for each.
    pub taps: Vec<String>,
    /// Opens the only queue of a tap.
    pub open_tap: fn(&str) -> Result<Vec<File>>,
}

/// NIC whose tap interface the client opens.
#[derive(Debug)]
pub struct Nic {
    pub mac: String,
    /// Passed descriptors.
    pub queues: Vec<File>,
}

impl Vm {
    pub const CMDLINE: &str = "console=ttyS0 loglevel=5";

    /// Path in the form of JSON and of the crate's models.
    pub fn text(path: &std::path::Path) -> String {
        path.display().to_string()
    }

    /// Configuration that nearly all clients have in common, plus `sections`.
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

    /// Opens the NICs one after another.
    pub fn nics(&self) -> impl Iterator<Item = Result<Nic>> {
        self.taps.iter().enumerate().map(|(nth, tap)| {
            let mac = format!("02:f5:00:00:c1:{nth:02x}");
            Ok(Nic { mac, queues: (self.open_tap)(tap)? })
        })
    }
}

/// Waits until the guest is up, because its drivers answer no requests before.
pub type UntilUp<'a> = &'a dyn Fn() -> Result<()>;

/// Time limit of a guest's reaction. It is only exceeded if the guest hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Interval of checks.
pub const LOOK: Duration = Duration::from_millis(20);
