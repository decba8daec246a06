//! curl with `--unix-socket` and several URLs per run. It reuses the connection.

use anyhow::{Result, ensure};
use serde_json::json;

use crate::vm::{UntilUp, Vm};
use crate::wire::{Connection, Style};

const STYLE: Style = Style {
    base: "",
    headers: "Host: localhost\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\n",
    // Default content type of a body given with `-d`.
    with_body: "Content-Type: application/x-www-form-urlencoded\r\n",
    sends_zero_length: false,
};

pub(super) fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    let mut curl = Connection::open(&vm.api_socket)?;
    for _ in 0..2 {
        curl.expect(200, &STYLE.get("vmm.ping"))?;
    }
    curl.expect(404, &STYLE.get("vm.info"))?;
    curl.expect(204, &STYLE.put("vm.create", &vm.config(json!({})).to_string()))?;
    curl.expect(204, &STYLE.put("vm.boot", ""))?;
    until_up()?;
    // The connection was kept open while the guest booted.
    let info = curl.expect(200, &STYLE.get("vm.info"))?.json()?;
    ensure!(info["state"] == "Running", "{info}");
    curl.expect(405, &STYLE.put("vm.boot", ""))?;
    curl.expect(204, &STYLE.put("vm.delete", ""))?;
    Ok(())
}
