//! Tests of VMs that are created through the API, as Cloud Hypervisor's clients do.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::runner::this_tests_dir;
use guest_tests::{BOOT_LIMIT, Guest, GuestBuilder, Image, Kernel, Pool};
use serde_json::{Value, json};

guest_tests::tests![
    a_vm_is_created_booted_deleted_and_created_again_by_the_api,
    deletion_of_a_vm_releases_its_pool_and_sockets,
    requests_to_a_paused_vm_take_effect_on_resume_with_events x several,
];

const START_LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn without_a_vm() -> GuestBuilder {
    let flags = [
        "--kernel",
        "--initramfs",
        "--cmdline",
        "--cpus",
        "--memory",
        "--serial",
        "--console",
        "--rng",
        "--vsock",
    ];
    flags.into_iter().fold(Guest::builder(), |builder, flag| builder.without(flag))
}

/// Starts a VMM without a VM, and waits until its API responds.
pub(crate) fn empty_vmm() -> Result<Guest> {
    let vmm = without_a_vm().start()?;
    vmm.wait_until("the VMM answers", START_LIMIT, || Ok(vmm.get("vmm.ping").is_ok()))?;
    Ok(vmm)
}

/// Returns a configuration as a client would send it, including default values.
pub(crate) fn config(vmm: &Guest) -> Value {
    json!({
        "payload": {
            "kernel": Kernel::V6_12.path(),
            "initramfs": Image::Basic.path(Kernel::V6_12),
            "cmdline": "console=ttyS0 loglevel=5",
            "firmware": null,
        },
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "topology": null, "kvm_hyperv": false},
        "memory": {"size": 512 << 20, "mergeable": false, "shared": false, "hugepages": false, "zones": null},
        "serial": {"mode": "File", "file": vmm.console_file(), "iommu": false},
        "console": {"mode": "Off"},
        "vsock": {"cid": 3, "socket": vmm.vsock_socket(), "iommu": false},
        "net": null,
        "watchdog": false,
    })
}

fn status(vmm: &Guest, method: &str, call: &str) -> Result<u16> {
    Ok(vmm.try_api(method, call, None)?.status)
}

fn a_vm_is_created_booted_deleted_and_created_again_by_the_api() -> Result<()> {
    let vmm = empty_vmm()?;
    for (method, call) in [
        ("GET", "vm.info"),
        ("PUT", "vm.boot"),
        ("PUT", "vm.shutdown"),
        ("GET", "vm.memory"),
        ("GET", "pool.info"),
    ] {
        ensure!(status(&vmm, method, call)? == 404, "{call} without a VM");
    }
    vmm.metrics()?;
    vmm.put("vm.create", config(&vmm))?;
    let created = vmm.get("vm.info")?;
    ensure!(created["state"] == "Created", "{created}");
    ensure!(
        status(&vmm, "PUT", "vm.pause")? == 405,
        "vm.pause of a VM that does not run did not return 405"
    );
    ensure!(
        status(&vmm, "GET", "pool.info")? == 405,
        "pool.info of a VM that does not run did not return 405"
    );
    ensure!(
        vmm.try_put("vm.create", config(&vmm))?.status == 405,
        "A second vm.create did not return 405"
    );
    // The VM should boot with the changed configuration.
    vmm.put("vm.resize", json!({"desired_ram": 640 << 20}))?;
    vmm.command("vm.boot")?;
    vmm.wait_for_shell(BOOT_LIMIT)?;
    let mib: u64 =
        vmm.run("awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo")?.trim().parse()?;
    ensure!((580..=640).contains(&mib), "MemTotal is {mib} MiB");
    let running = vmm.get("vm.info")?;
    ensure!(
        running["state"] == "Running" && running["memory_actual_size"] == 640 << 20,
        "{running}"
    );
    // The reported configuration should be usable to create the same VM again.
    vmm.command("vm.delete")?;
    ensure!(status(&vmm, "GET", "vm.info")? == 404, "vm.info of a deleted VM did not return 404");
    vmm.put("vm.create", running["config"].clone())?;
    vmm.command("vm.boot")?;
    vmm.wait_for_shell(BOOT_LIMIT)?;
    vmm.no_kernel_complaints()?;
    vmm.power_off()
}

fn deletion_of_a_vm_releases_its_pool_and_sockets() -> Result<()> {
    let pool = Pool::create("64M")?;
    let vmm = empty_vmm()?;
    let mut config = config(&vmm);
    config["pm_volumes"] =
        json!([{"pool": pool.path(), "name": "data", "size": 32 << 20, "create": true}]);
    vmm.put("vm.create", config)?;
    vmm.command("vm.boot")?;
    ensure!(pool.check().is_err(), "pmvol check of a pool in use succeeded");
    vmm.command("vm.delete")?;
    pool.check()?;
    ensure!(!vmm.vsock_socket().exists(), "The socket of vsock still exists");
    vmm.command("vmm.shutdown")?;
    let ended = vmm.wait_for_exit(START_LIMIT)?;
    ensure!(ended.success(), "The VMM ended with {ended}");
    Ok(())
}

fn requests_to_a_paused_vm_take_effect_on_resume_with_events() -> Result<()> {
    let file = this_tests_dir().join("events");
    let guest = Guest::builder()
        .cpus(2)
        .max_cpus(3)
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pressure("off")
        .argument("--event-monitor", &format!("path={}", file.display()))
        .boot()?;
    guest.command("vm.pause")?;
    guest.command("vm.nmi")?;
    guest.put("vm.resize", json!({"desired_ram": 512 << 20, "desired_vcpus": 3}))?;
    let info = guest.get("vm.info")?;
    ensure!(info["state"] == "Paused" && info["memory_actual_size"] == 384 << 20, "{info}");
    guest.command("vm.resume")?;
    // Linux logs an NMI that does not come from a device, and continues (arch/x86/kernel/nmi.c,
    // unknown_nmi_error).
    for cpu in 0..2 {
        let line = format!("dmesg | grep -q 'NMI received for unknown reason .* on CPU {cpu}'");
        guest.wait_until_run("the vCPU has received its NMI", START_LIMIT, &line)?;
    }
    guest.wait_until_run(
        "the vCPU is online",
        BOOT_LIMIT,
        "test $(cat /sys/devices/system/cpu/present) = 0-2",
    )?;
    guest.wait_until("the zone has its new size", BOOT_LIMIT, || {
        Ok(guest.get("vm.info")?["memory_actual_size"] == 512 << 20)
    })?;
    guest.wait_until("the resize is an event", BOOT_LIMIT, || {
        Ok(std::fs::read_to_string(&file)?.contains("\"plugged_bytes\": \"134217728\""))
    })?;
    guest.power_off()?;
    check_lifecycle_events(&std::fs::read_to_string(&file)?)
}

fn check_lifecycle_events(text: &str) -> Result<()> {
    let events: Vec<Value> =
        serde_json::Deserializer::from_str(text).into_iter().collect::<Result<_, _>>()?;
    // The order of events from devices is not fixed.
    let of_devices = |event: &&Value| event["source"] == "virtio-device";
    for event in ["activated", "reset"] {
        ensure!(
            events.iter().filter(of_devices).any(|other| other["event"] == event),
            "No {event} in {text}"
        );
    }
    let names: Vec<_> = events
        .iter()
        .filter(|event| event["event"] != "memory-reached" && !of_devices(event))
        .map(|event| format!("{}:{}", event["source"], event["event"]).replace('"', ""))
        .collect();
    let expected = "vmm:starting vm:booting vm:booted vm:pausing vm:paused vm:resizing foreshore:vcpus-resized \
                    vm:resized vm:resuming vm:resumed vm:shutdown vm:deleted vmm:shutdown";
    ensure!(names.join(" ") == expected, "{names:?}");
    Ok(())
}
