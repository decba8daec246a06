//! flintlock (infrastructure/microvm/cloudhypervisor). It starts the VMM with flags that describe
//! the whole VM, and queries the VM's state through the API.

use anyhow::{Result, ensure};

use crate::vm::{UntilUp, Vm};
use crate::wire::{Connection, GO};

pub(super) fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    until_up()?;
    let mut connection = Connection::open(&vm.api_socket)?;
    let info = connection.expect(200, &GO.get("vm.info"))?.json()?;
    ensure!(info["state"] == "Running", "{info}");
    let counters = connection.expect(200, &GO.get("vm.counters"))?.json()?;
    // flintlock's client parses the counters as a map of maps of int64.
    let all = counters.as_object().into_iter().flat_map(|devices| devices.values());
    let numbers: Vec<_> =
        all.filter_map(|device| device.as_object()).flat_map(|device| device.values()).collect();
    ensure!(
        !numbers.is_empty() && numbers.iter().all(|number| number.as_i64().is_some()),
        "{counters}"
    );
    connection.expect(204, &GO.put("vm.shutdown", ""))?;
    Ok(())
}
