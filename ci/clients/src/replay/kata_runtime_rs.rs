//! runtime-rs of Kata Containers (hypervisor/src/ch). It uses Cloud Hypervisor's own api_client, a
//! single connection for all calls, requests in several pieces, and JSON with explicit `null`
//! values.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use guest_tests::http::Response;
use serde_json::{Value, json};

use crate::vm::{Nic, UntilUp, Vm};
use crate::wire::Connection;

/// Makes a call. api_client writes the head, the length, the end of the headers and the body
/// separately.
fn call(
    stream: &mut Connection,
    method: &str,
    call: &str,
    body: Option<&Value>,
) -> Result<Response> {
    call_with(stream, method, call, body, Vec::new())
}

/// Makes a call and sends descriptors together with the head.
fn call_with(
    stream: &mut Connection,
    method: &str,
    call: &str,
    body: Option<&Value>,
    files: Vec<File>,
) -> Result<Response> {
    let head = format!("{method} /api/v1/{call} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n");
    stream.write_with(&head, files)?;
    let body = body.map(serde_json::to_string_pretty).transpose()?;
    if let Some(body) = &body {
        stream.write(&format!("Content-Length: {}\r\n", body.len()))?;
    }
    stream.write("\r\n")?;
    if let Some(body) = &body {
        stream.write(body)?;
    }
    let answer = stream.answer()?;
    ensure!([200, 204].contains(&answer.status), "{call}: {answer:?}");
    Ok(answer)
}

fn config(vm: &Vm) -> Value {
    let disk = json!({"path": vm.disks[0], "readonly": true, "direct": false, "iommu": false, "num_queues": 1,
                      "queue_size": 128, "vhost_user": false, "vhost_socket": null, "rate_limiter_config": null,
                      "id": null, "disable_io_uring": false, "disable_aio": false, "rate_limit_group": null,
                      "pci_segment": 0, "image_type": "Raw"});
    json!({
        "cpus": {"boot_vcpus": 1, "max_vcpus": 2,
                 "topology": {"threads_per_core": 1, "cores_per_die": 2, "dies_per_package": 1, "packages": 1},
                 "kvm_hyperv": false, "max_phys_bits": 46, "affinity": null, "features": {}},
        "memory": {"size": 512u64 << 20, "mergeable": false, "hotplug_method": "Acpi",
                   "hotplug_size": 1u64 << 30, "hotplugged_size": null, "shared": true, "hugepages": false,
                   "hugepage_size": null, "prefault": false, "zones": null, "thp": true},
        "payload": {"firmware": null, "kernel": vm.kernel, "cmdline": Vm::CMDLINE, "initramfs": vm.initramfs},
        "rate_limit_groups": null, "disks": [disk], "net": null,
        "rng": {"src": "/dev/urandom", "iommu": false},
        "balloon": null, "fs": null, "pmem": null,
        "serial": {"file": vm.console, "mode": "File", "iommu": false, "socket": null},
        "console": {"file": null, "mode": "Off", "iommu": false, "socket": null},
        "devices": null, "user_devices": null, "vdpa": null,
        "vsock": {"cid": 3, "socket": vm.vsock, "iommu": false, "id": null, "pci_segment": 0},
        "iommu": false, "sgx_epc": null, "numa": null, "watchdog": false, "pvpanic": false,
        "pci_segments": null, "platform": null, "tpm": null,
    })
}

/// NIC without its own name and without the name of its tap. All other fields are the same as
/// without descriptors.
fn net(mac: &str) -> Value {
    json!({"ip": "192.168.249.1", "mask": "255.255.255.0", "mac": mac, "iommu": false, "num_queues": 2,
           "queue_size": 256, "vhost_user": false, "vhost_mode": "Client"})
}

/// Checks that `vm.info` contains all fields that the runtime reads.
fn check(info: &Value, nics: usize) -> Result<()> {
    let of_a_nic = ["ip", "mask", "mac", "num_queues", "queue_size"];
    let of_nics =
        (0..nics).flat_map(|nth| of_a_nic.map(|field| format!("/config/net/{nth}/{field}")));
    let of_all = [
        "/state",
        "/config/cpus/boot_vcpus",
        "/config/cpus/max_vcpus",
        "/config/cpus/max_phys_bits",
        "/config/memory/size",
        "/config/payload/kernel",
        "/config/serial/mode",
        "/config/console/mode",
        "/config/disks/0/path",
        "/config/disks/0/num_queues",
        "/config/disks/0/queue_size",
        "/config/vsock/cid",
    ];
    for path in of_all.map(str::to_owned).into_iter().chain(of_nics) {
        ensure!(info.pointer(&path).is_some(), "vm.info lacks {path}: {info}");
    }
    Ok(())
}

pub(super) fn run(vm: &Vm, until_up: UntilUp) -> Result<()> {
    let mut stream = Connection::open(&vm.api_socket)?;
    call(&mut stream, "GET", "vmm.ping", None)?;
    call(&mut stream, "PUT", "vm.create", Some(&config(vm)))?;
    for nic in vm.nics() {
        let Nic { mac, queues } = nic?;
        call_with(&mut stream, "PUT", "vm.add-net", Some(&net(&mac)), queues)?;
    }
    call(&mut stream, "PUT", "vm.boot", None)?;
    until_up()?;
    let info = call(&mut stream, "GET", "vm.info", None)?.json()?;
    ensure!(info["state"] == "Running", "{info}");
    check(&info, vm.taps.len())?;
    let disk = json!({"path": vm.disks[1], "readonly": false, "direct": false, "iommu": false, "num_queues": 1,
                      "queue_size": 1024, "vhost_user": false, "vhost_socket": null, "rate_limiter_config": null,
                      "id": null, "rate_limit_group": null, "pci_segment": 0});
    let added = call(&mut stream, "PUT", "vm.add-disk", Some(&disk))?.json()?;
    let id = added["id"].as_str().with_context(|| format!("{added} has no id"))?;
    call(&mut stream, "PUT", "vm.remove-device", Some(&json!({ "id": id })))?;
    let resize = json!({"desired_vcpus": null, "desired_ram": (512u64 + 128) << 20, "desired_balloon": null});
    call(&mut stream, "PUT", "vm.resize", Some(&resize))?;
    call(&mut stream, "PUT", "vm.shutdown", None)?;
    call(&mut stream, "PUT", "vmm.shutdown", None)?;
    Ok(())
}
