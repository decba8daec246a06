//! Tests of memory that borrows the space of a thin volume, and is moved when the guest writes.

use anyhow::{Context, Result, ensure};
use guest_tests::user::need_root;
use guest_tests::{Guest, Pool};
use serde_json::json;

use crate::volume::IO_LIMIT;
use crate::volume_thin::USERFAULTS;
use crate::zones::{MIB, wait_until_plugged, zone};

guest_tests::tests![
    writes_get_borrowed_memory_although_the_guest_keeps_it: 400 x 2 =>
        writes_get_borrowed_memory("virtio-blk", "/dev/vda"),
    writes_get_borrowed_memory_on_6_1: 400 (long) on [V6_1] =>
        writes_get_borrowed_memory("virtio-blk", "/dev/vda"),
    stores_get_borrowed_memory_although_the_guest_keeps_it: 400 x 2 => stores_get_borrowed_memory(),
];

const VOLUME_MIB: u64 = 80;
/// The pool has 156 MiB, so 52 MiB of this memory belong to the volume.
const ZONE_MIB: u64 = 128;
const SPILL_MIB: u64 = 72;
/// Less than the pool has free when the memory is plugged.
const MARKS: &str = "storage_min=8M,storage_low=12M,storage_high=16M";
/// More than the DRAM of the guest, so that files are in all of the memory.
const FILES_MIB: u64 = 240;

/// Moved bytes of the zone. Checks that the API and the metrics report the same.
fn spilled_bytes(guest: &Guest) -> Result<u64> {
    let memory = guest.get("vm.memory")?;
    let zones = memory["zones"].as_array().context("vm.memory has no zones")?;
    let pm = zones.iter().find(|zone| zone["id"] == "pm").context("No zone of PM")?;
    let bytes = pm["spilled_bytes"].as_u64().with_context(|| format!("No spilled_bytes: {pm}"))?;
    let metric = guest.metric("foreshore_memory_spilled_bytes", &[("zone", "pm")])?;
    ensure!(metric == bytes as f64, "The metric is {metric}, but the API reports {bytes}");
    Ok(bytes)
}

fn resize(guest: &Guest, mib: u64) -> Result<()> {
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": mib * MIB }))?;
    wait_until_plugged(guest, "pm", mib * MIB, IO_LIMIT)
}

/// The volume is an NVDIMM, so vCPUs wait in page faults until memory was moved.
fn stores_get_borrowed_memory() -> Result<()> {
    need_root(USERFAULTS)?;
    writes_get_borrowed_memory("auto", "/dev/pmem0s")
}

/// No unplug is requested from the guest, so it keeps all of its memory.
fn writes_get_borrowed_memory(interface: &str, disk: &str) -> Result<()> {
    let pool = Pool::create("160M")?;
    let name = pool.name();
    let guest = Guest::builder()
        .memory("size=256M")
        .pressure("off")
        .pm_memory(&format!("pool={name},size={ZONE_MIB}M,spill={SPILL_MIB}M,{MARKS}"))
        .pm_volume(&format!(
            "pool={name},name=data,size={VOLUME_MIB}M,create=on,interface={interface}"
        ))
        .boot()?;
    guest.wait_until_run("the disk exists", IO_LIMIT, &format!("test -b {disk}"))?;
    resize(&guest, ZONE_MIB)?;
    let mount = format!("mount -t tmpfs -o size={FILES_MIB}M none /mnt/full");
    guest.run(&format!("mkdir -p /mnt/full && {mount}"))?;
    let count = guest.run_within(IO_LIMIT, "guest-tool fill-files /mnt/full 7")?;
    let count = count.trim();
    ensure!(spilled_bytes(&guest)? == 0, "Memory was moved before a write needed it");

    let bytes = format!("blockdev --getsize64 {disk}");
    let source = format!("cat /mnt/full/d*/f* | head -c $({bytes})");
    let write = format!("dd of={disk} bs=1M iflag=fullblock oflag=direct");
    guest.run_within(IO_LIMIT, &format!("{source} | {write}"))?;
    let allocated = guest.metric("foreshore_volume_allocated_bytes", &[("volume", "data")])?;
    ensure!(allocated as u64 >= (VOLUME_MIB - 8) * MIB, "Only {allocated} bytes are allocated");
    let spilled = spilled_bytes(&guest)?;
    ensure!((32 * MIB..=SPILL_MIB * MIB).contains(&spilled), "{spilled} bytes were moved");
    ensure!(zone(&guest, "pm")?.plugged_bytes == ZONE_MIB * MIB, "The guest has lost memory");
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    guest.run_within(IO_LIMIT, &format!("{source} | cmp -n $({bytes}) - {disk}"))?;
    guest.run_within(IO_LIMIT, &format!("guest-tool check-filled /mnt/full 7 {count}"))?;

    // Unplugged memory may be borrowed again.
    guest.run("umount /mnt/full")?;
    resize(&guest, 0)?;
    ensure!(spilled_bytes(&guest)? == 0, "Unplugged memory counts as moved");
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check().map(drop)
}
