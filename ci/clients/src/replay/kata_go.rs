//! Kata Containers' runtime in Go (virtcontainers, clh.go): the client that OpenAPI Generator has
//! made of the description.

use anyhow::{Context, Result, ensure};
use guest_tests::wait_until;
use serde_json::{Value, json};

use crate::vm::{Nic, PATIENCE, UntilUp, Vm};
use crate::wire::{Connection, Style};

const STYLE: Style = Style {
    base: "",
    headers: "Host: localhost\r\nUser-Agent: OpenAPI-Generator/1.0.0/go\r\nAccept: application/json\r\n",
    with_body: "Content-Type: application/json\r\n",
    // net/http says so of a PUT.
    says_empty: true,
};

/// Its transport compresses nothing and keeps connections; one is enough.
struct Kata(Connection);

impl Kata {
    /// Whatever is 300 or more is an error to it.
    fn put(&mut self, call: &str, body: &str) -> Result<Option<Value>> {
        let answer = self.0.call(&STYLE.put(call, body))?;
        ensure!(answer.status < 300, "{call}: {answer:?}");
        if answer.body.is_empty() { Ok(None) } else { answer.json().map(Some) }
    }

    fn info(&mut self) -> Result<Value> {
        self.0.expect(200, &STYLE.get("vm.info"))?.json()
    }
}

/// NICs are told of on a connection of their own, each in a request as httputil.DumpRequest writes
/// it, without what a transport would add: headers in the order of their names.
fn add_nics(vm: &Vm) -> Result<()> {
    let mut stream = Connection::open(&vm.api_socket)?;
    for nic in vm.nics() {
        let Nic { mac, queues } = nic?;
        // The generated client's defaults, among them a host's address that means nothing here.
        let net = json!({"ip": "192.168.249.1", "mask": "255.255.255.0", "mac": mac, "iommu": false,
                         "num_queues": 2, "queue_size": 256, "vhost_user": false, "vhost_mode": "Client",
                         "pci_segment": 0});
        let body = net.to_string();
        let head =
            "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n";
        let request = format!(
            "{head}Content-Length: {}\r\nContent-Type: application/json\r\n\r\n{body}",
            body.len()
        );
        stream.write_with(&request, queues)?;
        let answer = stream.answer()?;
        // A body would have to be a device's place.
        ensure!([200, 204].contains(&answer.status), "vm.add-net: {answer:?}");
        ensure!(
            answer.body.is_empty() || answer.json()?["bdf"].is_string(),
            "vm.add-net: {answer:?}"
        );
    }
    Ok(())
}

fn config(vm: &Vm) -> Value {
    vm.config(json!({
        "platform": {"num_pci_segments": 2},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 2,
                 "topology": {"threads_per_core": 1, "cores_per_die": 2, "dies_per_package": 1, "packages": 1}},
        // Without a method: by ACPI.
        "memory": {"size": 512u64 << 20, "shared": true, "hugepages": false, "hotplug_size": 1u64 << 30},
        "rng": {"src": "/dev/urandom", "iommu": false},
        "balloon": {"size": 0, "free_page_reporting": true},
        "disks": [{"path": vm.disks[0], "readonly": true, "image_type": "Raw"}],
    }))
}

pub(super) fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    let mut kata = Kata(Connection::open(&vm.api_socket)?);
    kata.0.expect(200, &STYLE.get("vmm.ping"))?;
    kata.put("vm.create", &config(vm).to_string())?;
    ensure!(kata.info()?["state"] == "Created", "{:?}", kata.info());
    add_nics(vm)?;
    kata.put("vm.boot", "")?;
    ensure!(kata.info()?["state"] == "Running", "{:?}", kata.info());
    until_up()?;

    let disk = json!({"path": vm.disks[1], "readonly": false, "image_type": "Raw", "vhost_user": false,
                      "num_queues": 1, "queue_size": 1024, "direct": false});
    let added = kata.put("vm.add-disk", &disk.to_string())?.context("No answer to vm.add-disk")?;
    let bdf = added["bdf"].as_str().unwrap_or_default().to_owned();
    // It takes the address apart, and looks for the disk by it.
    ensure!(bdf.starts_with("0000:00:") && bdf.ends_with(".0") && bdf.len() == 12, "{added}");
    kata.put("vm.remove-device", &json!({"id": added["id"]}).to_string())?;

    let boot_bytes = kata.info()?["config"]["memory"]["size"].as_u64().context("No size")?;
    let wanted = boot_bytes + (128 << 20);
    kata.put("vm.resize", &json!({"desired_ram": wanted}).to_string())?;
    let has_come = wait_until("the guest has more memory", PATIENCE, || {
        Ok(kata.info()?["memory_actual_size"] == wanted)
    });
    has_come.with_context(|| format!("{wanted} bytes: {:?}", kata.info()))?;
    // What it takes for the size that there is now, when the next container comes.
    ensure!(kata.info()?["config"]["memory"]["size"] == wanted, "{:?}", kata.info());
    kata.put("vm.resize", &json!({"desired_vcpus": 2}).to_string())?;
    kata.put("vmm.shutdown", "")?;
    Ok(())
}
