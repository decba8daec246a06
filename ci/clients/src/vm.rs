//! The VM that clients make.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

#[derive(Clone, Debug)]
pub struct Vm {
    /// Where the VMM's API is.
    pub api_socket: PathBuf,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// Where its serial console goes.
    pub console: PathBuf,
    /// Where its vsock device is, with the context id 3.
    pub vsock: PathBuf,
    /// Two disks' images of 64 MiB: one from the start, one to be added.
    pub disks: [PathBuf; 2],
    /// A file of 128 MiB, to be added as persistent memory.
    pub pmem: PathBuf,
    /// A FIFO of events. Only libvirt, whose VMM waits until it is read, reads one.
    pub events: PathBuf,
    /// Tap interfaces: the VM of a client that hands them in has a NIC for each.
    pub taps: Vec<String>,
    /// Opens the only queue of one of them.
    pub open_tap: fn(&str) -> Result<Vec<File>>,
}

/// A NIC whose tap interface the client opens.
#[derive(Debug)]
pub struct Nic {
    /// What the guest knows it by.
    pub mac: String,
    /// What is handed in.
    pub queues: Vec<File>,
}

impl Vm {
    pub const CMDLINE: &str = "console=ttyS0 loglevel=5";

    /// A path as JSON and the crate's models want it.
    pub fn text(path: &std::path::Path) -> String {
        path.display().to_string()
    }

    /// What nearly every client says of it, and these sections.
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

    /// Its NICs, opened one after another.
    pub fn nics(&self) -> impl Iterator<Item = Result<Nic>> {
        self.taps.iter().enumerate().map(|(nth, tap)| {
            let mac = format!("02:f5:00:00:c1:{nth:02x}");
            Ok(Nic { mac, queues: (self.open_tap)(tap)? })
        })
    }
}

/// Waits until the guest is up: what is asked of its drivers before that, nobody answers.
pub type UntilUp<'a> = &'a dyn Fn() -> Result<()>;

/// No guest takes longer for what it is asked, unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How often something is looked at.
pub const LOOK: Duration = Duration::from_millis(20);
