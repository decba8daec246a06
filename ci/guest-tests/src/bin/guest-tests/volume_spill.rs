//! Tests of memory that borrows the space of a thin volume, and is moved when the guest writes.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::LimitedTmpfs;
use guest_tests::user::need_root;
use guest_tests::{Disk, Guest, Pool};
use serde_json::json;

use crate::volume::IO_LIMIT;
use crate::volume_thin::USERFAULTS;
use crate::zones::{MIB, wait_until_plugged, zone};

guest_tests::tests![
    writes_get_borrowed_memory_although_the_guest_keeps_it: 400 x 2 =>
        writes_get_borrowed_memory("virtio-blk", "/dev/vda", None).map(drop),
    writes_get_borrowed_memory_on_6_1: 400 (extended) on [V6_1] =>
        writes_get_borrowed_memory("virtio-blk", "/dev/vda", None).map(drop),
    borrowed_memory_is_moved_to_a_file_on_a_disk: 400 x 2 => memory_is_moved_to_a_disk(),
    borrowed_memory_is_moved_to_dram_when_its_file_system_is_full: 400 (long) =>
        memory_is_moved_beside_a_full_tmpfs(),
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

/// Moved bytes of the zone.
struct Moved {
    all: u64,
    to_file: u64,
}

/// Returns a field of the zone. Checks that the API and the metrics report the same.
fn zone_bytes(guest: &Guest, field: &str) -> Result<u64> {
    let memory = guest.get("vm.memory")?;
    let zones = memory["zones"].as_array().context("vm.memory has no zones")?;
    let pm = zones.iter().find(|zone| zone["id"] == "pm").context("No zone of PM")?;
    let bytes = pm[field].as_u64().with_context(|| format!("No {field}: {pm}"))?;
    let metric = guest.metric(&format!("foreshore_memory_{field}"), &[("zone", "pm")])?;
    ensure!(metric == bytes as f64, "The metric is {metric}, but the API reports {bytes}");
    Ok(bytes)
}

fn spilled_bytes(guest: &Guest) -> Result<u64> {
    zone_bytes(guest, "spilled_bytes")
}

/// Starts a loop that stores and compares files while memory is moved.
const STORES: &str = "mkdir -p /mnt/hot && mount -t tmpfs -o size=8M none /mnt/hot && \
    touch /mnt/hot/runs && \
    (n=0; while test -e /mnt/hot/runs; do n=$((n + 1)); \
        sum=$(yes $n | head -c 2097152 | tee /mnt/hot/file | cksum); \
        [ \"$sum\" = \"$(cksum </mnt/hot/file)\" ] || touch /mnt/hot/differs; \
    done; echo $n >/mnt/hot/rounds) >/dev/null 2>&1 </dev/null &";

fn failures(guest: &Guest) -> Result<f64> {
    guest.metric("foreshore_memory_spill_file_failures_total", &[("zone", "pm")])
}

fn resize(guest: &Guest, mib: u64) -> Result<()> {
    guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": mib * MIB }))?;
    wait_until_plugged(guest, "pm", mib * MIB, IO_LIMIT)
}

/// The volume is an NVDIMM, so vCPUs wait in page faults until memory was moved.
fn stores_get_borrowed_memory() -> Result<()> {
    need_root(USERFAULTS)?;
    writes_get_borrowed_memory("auto", "/dev/pmem0s", None).map(drop)
}

fn memory_is_moved_to_a_disk() -> Result<()> {
    need_root(USERFAULTS)?;
    let disk = Disk::create(160, 200)?;
    let (moved, failures) = writes_get_borrowed_memory("auto", "/dev/pmem0s", Some(disk.dir()))?;
    ensure!(
        moved.to_file == moved.all,
        "Only {} of {} bytes are in the file",
        moved.to_file,
        moved.all
    );
    ensure!(failures == 0.0, "{failures} moves failed");
    Ok(())
}

/// The file system has space for less than the memory that is moved.
fn memory_is_moved_beside_a_full_tmpfs() -> Result<()> {
    need_root(USERFAULTS)?;
    let tmpfs = LimitedTmpfs::create(20)?;
    let folder = Some(tmpfs.dir());
    let (moved, failures) = writes_get_borrowed_memory("virtio-blk", "/dev/vda", folder)?;
    ensure!(
        (16 * MIB..=20 * MIB).contains(&moved.to_file),
        "{} bytes are in the file",
        moved.to_file
    );
    ensure!(failures > 0.0, "No move failed");
    Ok(())
}

/// No unplug is requested from the guest, so it keeps all of its memory. Returns the moved memory,
/// and the number of failed moves to the spill file.
fn writes_get_borrowed_memory(
    interface: &str,
    disk: &str,
    spill_file: Option<&Path>,
) -> Result<(Moved, f64)> {
    let pool = Pool::create("160M")?;
    let name = pool.name();
    let spill_file = spill_file.map(|folder| format!(",spill_file={}", folder.display()));
    let spill = format!("{SPILL_MIB}M{}", spill_file.unwrap_or_default());
    let guest = Guest::builder()
        .memory("size=256M")
        .pressure("off")
        .pm_memory(&format!("pool={name},size={ZONE_MIB}M,spill={spill},{MARKS}"))
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
    guest.run(STORES)?;

    let bytes = format!("blockdev --getsize64 {disk}");
    let source = format!("cat /mnt/full/d*/f* | head -c $({bytes})");
    let write = format!("dd of={disk} bs=1M iflag=fullblock oflag=direct");
    guest.run_within(IO_LIMIT, &format!("{source} | {write}"))?;
    let allocated = guest.metric("foreshore_volume_allocated_bytes", &[("volume", "data")])?;
    ensure!(allocated as u64 >= (VOLUME_MIB - 8) * MIB, "Only {allocated} bytes are allocated");
    let [all, to_file] = ["spilled_bytes", "spilled_file_bytes"].map(|at| zone_bytes(&guest, at));
    let (moved, failures) = (Moved { all: all?, to_file: to_file? }, failures(&guest)?);
    ensure!((32 * MIB..=SPILL_MIB * MIB).contains(&moved.all), "{} bytes were moved", moved.all);
    guest.run("rm /mnt/hot/runs")?;
    guest.wait_until_run("the stores end", IO_LIMIT, "test -s /mnt/hot/rounds")?;
    guest.run("test ! -e /mnt/hot/differs")?;
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
    pool.check()?;
    Ok((moved, failures))
}
