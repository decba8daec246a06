//! Tests of DRAM that grows by ACPI DIMMs. A DIMM cannot be removed from a running guest, and
//! becomes boot memory when the guest reboots.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use guest_tests::{Guest, GuestBuilder, Pool};
use serde_json::{Value, json};

use crate::memory::{WARM_UP, reboot, resource_counts};
use crate::zones::{
    MIB, check_plugged_in_pool_info, mem_total_mib, wait_until_mem_total, wait_until_plugged, zone,
};

guest_tests::tests![
    memory_comes_by_acpi: 240 on [V6_12, V6_1 extended],
    reboots_have_dimms_as_boot_memory: 240 (long),
    twenty_reboots_have_dimms_as_boot_memory: 1500 (extended) => are_boot_memory(10),
    smaller_size_takes_effect_at_the_next_boot: 180 (extended),
    dimms_stay_while_pm_is_plugged_and_unplugged: 240,
    invalid_dimms_are_refused_and_all_dimms_can_be_used: 300,
];

const ONLINE_LIMIT: Duration = Duration::from_secs(60);

/// Hotpluggable guest without a `hotplug_method`. As in Cloud Hypervisor, the default is ACPI.
fn growing() -> GuestBuilder {
    Guest::builder().memory("size=384M,hotplug_size=2G")
}

fn try_resize(guest: &Guest, mib: u64) -> Result<u16> {
    let response = guest.try_put("vm.resize", json!({ "desired_ram": mib * MIB }))?;
    Ok(response.status)
}

fn resize_to(guest: &Guest, mib: u64) -> Result<()> {
    guest.put("vm.resize", json!({ "desired_ram": mib * MIB })).map(drop)
}

fn info(guest: &Guest, path: &str) -> Result<u64> {
    let info = guest.get("vm.info")?;
    info.pointer(path)
        .and_then(Value::as_u64)
        .with_context(|| format!("vm.info has no {path}: {info}"))
}

fn memory_comes_by_acpi() -> Result<()> {
    let guest = growing().boot()?;
    let before = mem_total_mib(&guest)?;
    resize_to(&guest, 512)?;
    wait_until_mem_total(&guest, before + 128, ONLINE_LIMIT)?;
    resize_to(&guest, 1536)?;
    wait_until_mem_total(&guest, before + 1152, ONLINE_LIMIT)?;
    ensure!(
        info(&guest, "/config/memory/size")? == 1536 * MIB,
        "The configuration does not have the new size"
    );
    ensure!(
        info(&guest, "/memory_actual_size")? == 1536 * MIB,
        "memory_actual_size does not include the DIMMs"
    );
    let dram = zone(&guest, "dram")?;
    ensure!(
        dram.plugged_bytes == 1152 * MIB && dram.state == "reached",
        "vm.info has {} bytes",
        dram.plugged_bytes
    );
    // The agent reports which part of the DIMMs is online.
    guest.wait_until("the DIMMs are online", ONLINE_LIMIT, || {
        let memory = guest.get("vm.memory")?;
        Ok(memory.pointer("/zones/0/online_bytes").and_then(Value::as_u64) == Some(1152 * MIB))
    })?;
    let metrics = guest.metrics()?;
    ensure!(
        metrics.value("foreshore_memory_plugged_bytes", &[("zone", "dram")])?
            == 1152.0 * MIB as f64
    );
    let added = metrics.value("foreshore_hotplug_total", &[("kind", "dimm"), ("result", "ok")])?;
    ensure!(added == 2.0, "The metrics count {added} DIMMs");
    // The load exceeds the boot memory, which proves that the DIMMs are real memory.
    let hog = guest.hog(700, ONLINE_LIMIT)?;
    let resident = zone(&guest, "dram")?.resident_bytes;
    ensure!(resident >= 700 * MIB, "{resident} bytes are resident with 700 MiB in use");
    drop(hog);
    guest.no_kernel_complaints()
}

/// In each round, a DIMM is added, and a reboot turns it into boot memory. Then it is removed,
/// which takes effect at the next reboot.
fn are_boot_memory(rounds: usize) -> Result<()> {
    let guest = growing().boot()?;
    let mut first_counts = None;
    for round in 0..rounds {
        if round == WARM_UP {
            first_counts = Some(resource_counts(&guest)?);
        }
        let before = mem_total_mib(&guest)?;
        resize_to(&guest, 768)?;
        wait_until_mem_total(&guest, before + 384, ONLINE_LIMIT)?;
        reboot(&guest, round)?;
        let dram = zone(&guest, "dram")?;
        ensure!(
            dram.plugged_bytes == 0,
            "{} bytes are plugged after the reboot",
            dram.plugged_bytes
        );
        ensure!(
            info(&guest, "/memory_actual_size")? == 768 * MIB,
            "memory_actual_size is not the requested size"
        );
        // The memory is now boot memory, so MemTotal excludes the part that the kernel reserves.
        let booted = mem_total_mib(&guest)?;
        ensure!(
            booted > before + 350,
            "MemTotal was {before} MiB, now {booted} MiB after the reboot"
        );
        // More memory can still be added.
        resize_to(&guest, 896)?;
        wait_until_mem_total(&guest, booted + 128, ONLINE_LIMIT)?;
        resize_to(&guest, 384)?;
        reboot(&guest, round + 1)?;
        let after = mem_total_mib(&guest)?;
        ensure!(after == before, "MemTotal was {before} MiB, now {after} MiB without DIMMs");
    }
    if let Some(first_counts) = first_counts {
        println!("After {rounds} rounds {:?}, at first {first_counts:?}", guest.resource_counts()?);
        guest.wait_until_resources_are_freed(&first_counts)?;
    }
    guest.no_kernel_complaints()
}

fn reboots_have_dimms_as_boot_memory() -> Result<()> {
    are_boot_memory(1)
}

fn smaller_size_takes_effect_at_the_next_boot() -> Result<()> {
    let guest = growing().boot()?;
    let before = mem_total_mib(&guest)?;
    resize_to(&guest, 512)?;
    wait_until_mem_total(&guest, before + 128, ONLINE_LIMIT)?;
    resize_to(&guest, 256)?;
    ensure!(
        info(&guest, "/config/memory/size")? == 256 * MIB,
        "The configuration does not have the new size"
    );
    ensure!(
        info(&guest, "/memory_actual_size")? == 512 * MIB,
        "memory_actual_size does not include unplugged memory"
    );
    ensure!(
        guest.vmm_log()?.contains("cannot be removed before the next boot"),
        "The log does not report the effect at the next boot"
    );
    // Requesting at most the current size adds no DIMM.
    resize_to(&guest, 512)?;
    ensure!(
        zone(&guest, "dram")?.plugged_bytes == 128 * MIB,
        "A DIMM was added for existing memory"
    );
    resize_to(&guest, 256)?;
    ensure!(mem_total_mib(&guest)? == before + 128, "MemTotal has changed");
    guest.reboot_from_inside()?;
    let after = mem_total_mib(&guest)?;
    ensure!(after < before - 100, "MemTotal was {before} MiB, now {after} MiB after the reboot");
    guest.no_kernel_complaints()
}

fn dimms_stay_while_pm_is_plugged_and_unplugged() -> Result<()> {
    let pool = Pool::create("512M")?;
    let guest =
        growing().pm_memory(&format!("pool={},size=256M", pool.name())).pressure("off").boot()?;
    let before = mem_total_mib(&guest)?;
    resize_to(&guest, 512)?;
    wait_until_mem_total(&guest, before + 128, ONLINE_LIMIT)?;
    let resize_pm = |mib: u64| {
        guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": mib * MIB }))?;
        wait_until_plugged(&guest, "pm", mib * MIB, ONLINE_LIMIT)
    };
    resize_pm(256)?;
    wait_until_mem_total(&guest, before + 128 + 256, ONLINE_LIMIT)?;
    ensure!(
        info(&guest, "/memory_actual_size")? == (512 + 256) * MIB,
        "memory_actual_size does not include all memory"
    );
    check_plugged_in_pool_info(&guest, &pool)?;
    // The guest brings DIMMs and PM online in the same way, so PM can be unplugged.
    resize_pm(0)?;
    wait_until_mem_total(&guest, before + 128, ONLINE_LIMIT)?;
    ensure!(zone(&guest, "dram")?.plugged_bytes == 128 * MIB, "The DIMM was removed with PM");
    check_plugged_in_pool_info(&guest, &pool)?;
    guest.no_kernel_complaints()
}

fn invalid_dimms_are_refused_and_all_dimms_can_be_used() -> Result<()> {
    const DIMMS: u64 = 64;
    let guest = Guest::builder().memory("size=384M,hotplug_size=24G").boot()?;
    for mib in [385, 484, 384 + 24_576 + 128] {
        let status = try_resize(&guest, mib)?;
        ensure!(status == 400, "{mib} MiB: status {status}");
    }
    let by_zone = json!({ "id": "dram", "desired_ram": 512 * MIB });
    ensure!(guest.try_put("vm.resize-zone", by_zone)?.status == 400);
    ensure!(info(&guest, "/config/memory/size")? == 384 * MIB, "A refused resize changed the VM");
    // The page descriptors for 24 GiB would use up all of the guest's DRAM.
    let all = json!({ "desired_ram": (384 + 24_576) * MIB });
    let refusal = guest.try_put("vm.resize", all)?;
    ensure!(
        refusal.status == 409 && refusal.body.contains("page descriptors of 24 GiB"),
        "{refusal:?}"
    );
    ensure!(zone(&guest, "dram")?.plugged_bytes == 0, "A refused resize added a DIMM");
    let before = mem_total_mib(&guest)?;
    for dimm in 1..=DIMMS {
        resize_to(&guest, 384 + 128 * dimm)?;
    }
    wait_until_mem_total(&guest, before + 128 * DIMMS, ONLINE_LIMIT)?;
    let status = try_resize(&guest, 384 + 128 * (DIMMS + 1))?;
    ensure!(status == 400, "One DIMM more than the maximum: status {status}");
    guest.no_kernel_complaints()
}
