//! libvirt's driver for Cloud Hypervisor (src/ch/ch_monitor.c): libcurl for calls.

use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::vm::{UntilUp, Vm};
use crate::wire::{Answer, Connection, Style};

/// As libcurl writes them; a PUT without a body is an upload of nothing.
const STYLE: Style = Style {
    base: "",
    headers: "Host: localhost\r\nAccept: application/json\r\n",
    with_body: "Content-Type: application/json\r\n",
    says_empty: true,
};

/// It takes two statuses for consent, and opens a connection for each call.
fn put(socket: &Path, call: &str, body: &str) -> Result<Answer> {
    let answer = Connection::open(socket)?.call(&STYLE.put(call, body))?;
    ensure!([200, 204].contains(&answer.status), "{call}: {answer:?}");
    Ok(answer)
}

pub fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    let socket = &vm.api_socket;
    let config = json!({
        "serial": {"mode": "File", "file": vm.console},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 2},
        "memory": {"size": 512u64 << 20},
        "payload": {"kernel": vm.kernel, "cmdline": Vm::CMDLINE, "initramfs": vm.initramfs},
        "disks": [{"path": vm.disks[0]}, {"path": vm.disks[1], "readonly": true}],
        // Not libvirt's: by this we talk to the guest.
        "vsock": {"cid": 3, "socket": vm.vsock}, "console": {"mode": "Off"},
    });
    put(socket, "vm.create", &config.to_string())?;
    put(socket, "vm.boot", "")?;
    let info = Connection::open(socket)?.expect(200, &STYLE.get("vm.info"))?.json()?;
    ensure!(info["state"] == "Running" && info["config"].is_object(), "{info}");
    until_up()?;
    for call in ["vm.pause", "vm.resume", "vm.reboot"] {
        put(socket, call, "")?;
    }
    until_up()?;
    put(socket, "vm.shutdown", "")?;
    put(socket, "vmm.shutdown", "")?;
    Ok(())
}
