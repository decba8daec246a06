//! Virtink (pkg/cloudhypervisor). It queries the state of a VM before the VM exists, and interprets
//! an error as "not yet".

use anyhow::{Result, ensure};
use serde_json::json;

use crate::vm::{UntilUp, Vm};
use crate::wire::{Connection, GO};

pub(super) fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    // Each call uses a new client and a new connection.
    let call = |request: &str| Connection::open(&vm.api_socket)?.call(request);
    let info = call(&GO.get("vm.info"))?;
    ensure!(info.status >= 400, "{info:?} without a VM");
    let config = vm.config(json!({
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
        "memory": {"size": 512u64 << 20},
        "disks": [{"id": "container-disk", "path": vm.disks[0], "readonly": false, "direct": false}],
        "rng": {"src": "/dev/urandom"},
    }));
    for (name, body) in [("vm.create", config.to_string()), ("vm.boot", String::new())] {
        let answer = call(&GO.put(name, &body))?;
        ensure!(answer.status == 204, "{name}: {answer:?}");
    }
    until_up()?;
    let info = call(&GO.get("vm.info"))?.json()?;
    ensure!(info["state"] == "Running", "{info}");
    for name in ["vm.pause", "vm.resume", "vm.reboot"] {
        let answer = call(&GO.put(name, ""))?;
        ensure!(answer.status == 204, "{name}: {answer:?}");
    }
    until_up()?;
    for name in ["vm.shutdown", "vm.delete"] {
        let answer = call(&GO.put(name, ""))?;
        ensure!(answer.status == 204, "{name}: {answer:?}");
    }
    let info = call(&GO.get("vm.info"))?;
    ensure!(info.status >= 400, "{info:?} after the VM");
    Ok(())
}
