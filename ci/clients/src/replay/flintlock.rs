//! flintlock (infrastructure/microvm/cloudhypervisor): starts the program with flags for all of it; the API has the VM from the
//! start. Here the flags' VM is made by a call first.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::vm::{UntilUp, Vm};
use crate::wire::{Connection, Style};

const STYLE: Style = Style {
    base: "",
    headers: "Host: localhost\r\nUser-Agent: Go-http-client/1.1\r\nAccept-Encoding: gzip\r\n",
    with_body: "Content-Type: application/json\r\n",
    says_empty: true,
};

pub fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    let mut connection = Connection::open(&vm.api_socket)?;
    let config = json!({
        "payload": {"kernel": vm.kernel, "initramfs": vm.initramfs, "cmdline": Vm::CMDLINE},
        "disks": [{"path": vm.disks[0], "readonly": true}, {"path": vm.disks[1]}],
        "serial": {"mode": "File", "file": vm.console}, "console": {"mode": "Off"},
        "vsock": {"cid": 3, "socket": vm.vsock},
    });
    connection.expect(204, &STYLE.put("vm.create", &config.to_string()))?;
    connection.expect(204, &STYLE.put("vm.boot", ""))?;
    until_up()?;
    let info = connection.expect(200, &STYLE.get("vm.info"))?.json()?;
    ensure!(info["state"] == "Running", "{info}");
    let counters = connection.expect(200, &STYLE.get("vm.counters"))?.json()?;
    // Its client reads a map of maps of int64.
    let all = counters.as_object().into_iter().flat_map(|devices| devices.values());
    let numbers: Vec<_> =
        all.filter_map(|device| device.as_object()).flat_map(|device| device.values()).collect();
    ensure!(!numbers.is_empty() && numbers.iter().all(|number| number.as_i64().is_some()), "{counters}");
    connection.expect(204, &STYLE.put("vm.shutdown", ""))?;
    connection.expect(204, &STYLE.put("vm.delete", ""))?;
    Ok(())
}
