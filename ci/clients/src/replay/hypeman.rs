//! hypeman (lib/vmm), a client written in Go. It accepts only 204 as success, and waits until the
//! memory size is stable.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::vm::{POLL_INTERVAL, TIMEOUT, UntilUp, Vm};
use crate::wire::{Connection, GO};

/// Number of equal consecutive sizes after which the size counts as stable.
const SAME: usize = 3;

fn actual_size(connection: &mut Connection) -> Result<Value> {
    Ok(connection.expect(200, &GO.get("vm.info"))?.json()?["memory_actual_size"].clone())
}

pub(super) fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    let mut connection = Connection::open(&vm.api_socket)?;
    connection.expect(200, &GO.get("vmm.ping"))?;
    let config = vm.config(json!({
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
        "memory": {"size": 512u64 << 20, "hotplug_size": 256u64 << 20, "hotplug_method": "VirtioMem"},
        "disks": [{"path": vm.disks[0], "readonly": true}, {"path": vm.disks[1]}],
        "balloon": {"size": 0, "deflate_on_oom": true, "free_page_reporting": true},
    }));
    connection.expect(204, &GO.put("vm.create", &config.to_string()))?;
    connection.expect(204, &GO.put("vm.boot", ""))?;
    until_up()?;

    let expected = 640u64 << 20;
    let resize = json!({ "desired_ram": expected });
    connection.expect(204, &GO.put("vm.resize", &resize.to_string()))?;
    let start = Instant::now();
    let (mut last, mut same) = (Value::Null, 0);
    while same < SAME || last != expected {
        ensure!(start.elapsed() < TIMEOUT, "The memory size stays at {last}");
        std::thread::sleep(POLL_INTERVAL);
        let now = actual_size(&mut connection)?;
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    connection.expect(204, &GO.put("vm.pause", ""))?;
    connection.expect(204, &GO.put("vm.resume", ""))?;
    connection.expect(204, &GO.put("vm.shutdown", ""))?;
    connection.expect(204, &GO.put("vmm.shutdown", ""))?;
    Ok(())
}
