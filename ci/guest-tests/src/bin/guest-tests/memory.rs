//! Tests that memory can be plugged and unplugged while the guest runs, and that unplugged memory
//! is returned to the host.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::runner::this_tests_dir;
use guest_tests::{BOOT_LIMIT, Guest, ResourceCounts};
use serde_json::json;

use crate::zones::{MIB, mem_total_mib, wait_until_mem_total, zone};

guest_tests::tests![
    dram_is_plugged_unplugged_and_returned_on_6_12: 180 =>
        goes_back_to_the_host(&grows_and_shrinks()?),
    dram_is_plugged_and_unplugged_on_6_1: 180 on [V6_1] => grows_and_shrinks().map(drop),
    a_resize_without_a_driver_ends_with_a_reason,
    a_driver_that_is_too_old_is_reported_and_a_newer_one_is_served,
    plugged_memory_is_requested_again_after_a_reboot: 240 => is_requested_again(1),
    plugged_memory_is_requested_again_after_twenty_reboots: 1500 (extended) =>
        is_requested_again(20),
];

/// Number of reboots after which the VMM's resources should no longer grow.
pub(crate) const WARM_UP: usize = 2;
const PLUG_LIMIT: Duration = Duration::from_secs(60);

fn resizable() -> guest_tests::GuestBuilder {
    Guest::builder().memory("size=384M,hotplug_method=virtio-mem,hotplug_size=512M").pressure("off")
}

fn resize_to(guest: &Guest, mib: u64) -> Result<()> {
    guest.put("vm.resize", json!({ "desired_ram": mib * MIB })).map(drop)
}

fn wait_until_plugged(guest: &Guest, mib: u64) -> Result<()> {
    guest.wait_until(&format!("{mib} MiB are plugged"), PLUG_LIMIT, || {
        let zone = zone(guest, "dram")?;
        Ok(zone.plugged_bytes == mib * MIB
            && zone.requested_bytes == mib * MIB
            && zone.state == "reached")
    })
}

fn grows_and_shrinks() -> Result<Guest> {
    let guest = resizable().boot()?;
    bounds_are_refused(&guest)?;
    let before = mem_total_mib(&guest)?;
    // Requesting the current size is not an error.
    for _ in 0..2 {
        resize_to(&guest, 640)?;
        wait_until_plugged(&guest, 256)?;
    }
    wait_until_mem_total(&guest, before + 256, PLUG_LIMIT)?;
    is_movable(&guest, 256)?;
    wait_until_metered(&guest, 256)?;
    resize_to(&guest, 384)?;
    wait_until_plugged(&guest, 0)?;
    wait_until_mem_total(&guest, before, PLUG_LIMIT)?;
    wait_until_metered(&guest, 0)?;
    guest.no_kernel_complaints()?;
    Ok(guest)
}

fn bounds_are_refused(guest: &Guest) -> Result<()> {
    for mib in [382, 898, 383, 385] {
        let response = guest.try_put("vm.resize", json!({ "desired_ram": mib * MIB }))?;
        ensure!(response.status == 400, "{mib} MiB: status {}: {}", response.status, response.body);
    }
    ensure!(
        zone(guest, "dram")?.requested_bytes == 0,
        "A refused resize changed the requested size"
    );
    wait_until_metered(guest, 0)
}

fn is_movable(guest: &Guest, mib: u64) -> Result<()> {
    let pages = guest.run(
        "awk '/^Node/ { zone = $4 } zone == \"Movable\" && $1 == \"present\" { print $2 }' /proc/zoneinfo",
    )?;
    let pages: u64 =
        pages.trim().parse().with_context(|| format!("Pages in Movable: {pages:?}"))?;
    ensure!(pages * 4096 >= mib * MIB, "Only {pages} pages are movable, fewer than plugged");
    Ok(())
}

fn wait_until_metered(guest: &Guest, mib: u64) -> Result<()> {
    guest.wait_until(&format!("the metric shows {mib} MiB"), PLUG_LIMIT, || {
        let plugged = guest.metric("foreshore_memory_plugged_bytes", &[("zone", "dram")])?;
        Ok(plugged == (mib * MIB) as f64)
    })
}

fn goes_back_to_the_host(guest: &Guest) -> Result<()> {
    let before = guest.rss_bytes()?;
    resize_to(guest, 896)?;
    wait_until_plugged(guest, 512)?;
    // The load exceeds the boot memory, so plugged memory is used.
    let hog = guest.hog(640, PLUG_LIMIT)?;
    let at_the_top = guest.rss_bytes()?;
    ensure!(
        at_the_top >= before + 400 * MIB,
        "The RSS was {before} bytes, now {at_the_top} with 640 MiB in use"
    );
    drop(hog);
    resize_to(guest, 384)?;
    wait_until_plugged(guest, 0)?;
    let after = guest.rss_bytes()?;
    ensure!(
        after + 350 * MIB <= at_the_top,
        "The RSS was {before} bytes, then {at_the_top}, and {after} after the unplug"
    );
    guest.no_kernel_complaints()
}

fn a_resize_without_a_driver_ends_with_a_reason() -> Result<()> {
    let guest = resizable().cmdline("foreshore.skip=virtio_mem").boot()?;
    resize_to(&guest, 640)?;
    guest.wait_until("the resize has ended with a reason", PLUG_LIMIT, || {
        Ok(zone(&guest, "dram")?.state == "no-driver")
    })?;
    ensure!(zone(&guest, "dram")?.plugged_bytes == 0, "Memory is plugged without a driver");
    // The driver is loaded late, but the target size should still be valid.
    guest.run("modprobe virtio_mem")?;
    wait_until_plugged(&guest, 256)
}

/// PCI device ID of a virtio-mem device.
const MEM: &str = "0x1058";

/// Negotiates like the driver of Linux 5.8 to 5.15, which lacks
/// VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE.
fn a_driver_that_is_too_old_is_reported_and_a_newer_one_is_served() -> Result<()> {
    let events = this_tests_dir().join("events");
    let guest = resizable()
        .cmdline("foreshore.skip=virtio_mem")
        .argument("--event-monitor", &format!("path={}", events.display()))
        .boot()?;
    resize_to(&guest, 640)?;
    for _ in 0..2 {
        guest.run(&format!("guest-tool negotiate-without {MEM} 1"))?;
    }
    let zone = guest.get("vm.memory")?["zones"][0].clone();
    let reason = zone["status"]["reason"].as_str().unwrap_or_default();
    ensure!(
        zone["driver"] == "unsupported"
            && zone["requested_bytes"] == 0
            && reason.starts_with("driver: "),
        "{zone}"
    );
    let body = json!({ "desired_ram": 640 * MIB });
    let refused = guest.try_put("vm.resize", body)?;
    ensure!(
        refused.status == 409 && refused.body.contains("5.16"),
        "{}: {}",
        refused.status,
        refused.body
    );
    // The last event of the refusal is the withdrawal of the request.
    guest.wait_until("the refusal is reported", PLUG_LIMIT, || {
        Ok(std::fs::read_to_string(&events)?.contains("\"reason\": \"driver\""))
    })?;
    let (reported, log) = (std::fs::read_to_string(&events)?, guest.vmm_log()?);
    ensure!(
        reported.matches("memory-driver-unsupported").count() == 1,
        "Not exactly one event: {reported}"
    );
    let warnings = log.lines().filter(|line| line.contains("WARN Guest driver refused")).count();
    ensure!(warnings == 1, "{warnings} warnings: {log}");
    let state = [("zone", "dram"), ("state", "unsupported")];
    ensure!(guest.metric("foreshore_memory_driver_state", &state)? == 1.0, "The metric is not 1");
    // The running kernel does support the feature.
    let bind = format!(
        "for dev in /sys/bus/pci/devices/*; do [ $(cat $dev/device) = {MEM} ] && basename $dev; done \
         >/sys/bus/pci/drivers/virtio-pci/bind && modprobe virtio_mem"
    );
    guest.run(&bind)?;
    guest.wait_until("the newer driver is ready", PLUG_LIMIT, || {
        Ok(guest.get("vm.memory")?["zones"][0]["driver"] == "ready")
    })?;
    resize_to(&guest, 640)?;
    wait_until_plugged(&guest, 256)
}

/// Reboots the guest from inside or through the API.
pub(crate) fn reboot(guest: &Guest, round: usize) -> Result<()> {
    if round.is_multiple_of(2) {
        return guest.reboot_from_inside();
    }
    guest.command("vm.reboot")?;
    guest.wait_for_shell(BOOT_LIMIT)
}

/// Returns the resources of the VMM after the agent has connected. Both ends of that connection
/// belong to the VMM.
pub(crate) fn resource_counts(guest: &Guest) -> Result<ResourceCounts> {
    guest.wait_until("the agent is connected", BOOT_LIMIT, || {
        Ok(guest.get("vm.pressure?decisions=1")?["agent"] == "live")
    })?;
    guest.resource_counts()
}

fn is_requested_again(rounds: usize) -> Result<()> {
    let guest = resizable().boot()?;
    let (pid, before) = (guest.pid(), mem_total_mib(&guest)?);
    resize_to(&guest, 640)?;
    wait_until_plugged(&guest, 256)?;
    let mut first_counts = None;
    for round in 0..rounds {
        reboot(&guest, round)?;
        wait_until_plugged(&guest, 256)?;
        if round == WARM_UP {
            first_counts = Some(resource_counts(&guest)?);
        }
        wait_until_mem_total(&guest, before + 256, PLUG_LIMIT)?;
        let info = guest.get("vm.info")?;
        ensure!(info["memory_actual_size"] == 640 * MIB, "Reboot {round}: {info}");
    }
    ensure!(guest.pid() == pid, "The reboot changed the VMM's process");
    if let Some(first_counts) = first_counts {
        println!(
            "After {rounds} reboots {:?}, at first {first_counts:?}",
            guest.resource_counts()?
        );
        guest.wait_until_resources_are_freed(&first_counts)?;
    }
    // After memory was unplugged, a reboot requests none.
    resize_to(&guest, 384)?;
    wait_until_plugged(&guest, 0)?;
    reboot(&guest, rounds)?;
    ensure!(zone(&guest, "dram")?.requested_bytes == 0, "Unplugged memory is still requested");
    guest.no_kernel_complaints()
}
