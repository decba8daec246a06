//! Tests that flushed data is as durable as the pool's media allows.

use anyhow::{Result, bail, ensure};
use guest_tests::disk::{HeldWriteback, LimitedTmpfs, LoopDevice, need_dax};
use guest_tests::pool::pmvol;
use guest_tests::user::need_proc;
use guest_tests::{Disk, Guest, Pool};
use serde_json::Value;

use crate::raw_volume;
use crate::volume::{
    IO_LIMIT, check_acknowledged, guest_with, wait_for_disk, with_volume, write_files_and_kill,
};

guest_tests::tests![
    acknowledged_files_survive_a_power_cut: 300 (long) x several,
    a_failed_flush_pauses_a_guest_with_an_nvdimm: 300 on [V6_1],
    vm_paused_by_a_failed_flush_can_be_rebooted: 300,
    a_failed_flush_is_an_error_by_virtio_pmem: 300,
    persistent_memory_has_no_flush_hints x 2,
];

/// Returns how many flushes with this result the guest has requested.
pub(crate) fn flushes(guest: &Guest, result: &str) -> Result<f64> {
    let labels = [("volume", "data"), ("result", result)];
    guest.metric("foreshore_volume_flushes_total", &labels)
}

/// Returns true if the guest's driver has flush hints. Without flush hints, its flush is only a
/// fence.
pub(crate) fn has_hints(guest: &Guest) -> Result<bool> {
    match guest.run("cat /sys/bus/nd/devices/region0/deep_flush")?.trim() {
        "1" => Ok(true),
        "0" => Ok(false),
        other => bail!("deep_flush is {other:?}"),
    }
}

pub(crate) fn write_blocks(guest: &Guest, count: u32) -> Result<()> {
    guest
        .run_within(IO_LIMIT, &format!("guest-tool write-blocks /dev/pmem0s direct 0 {count} 1 1"))
        .map(drop)
}

pub(crate) fn pool_on_disk(tmpfs_mib: u64) -> Result<(Disk, Pool)> {
    let (disk, pool) = raw_volume::pool_on_disk(tmpfs_mib)?;
    Ok((disk, with_volume(pool)?))
}

fn acknowledged_files_survive_a_power_cut() -> Result<()> {
    let (disk, pool) = pool_on_disk(1024)?;
    files_survive_a_power_cut(&disk, &pool, "interface=nvdimm", "/dev/pmem0s")
}

/// Cuts the power of the host, instead of only killing the VMM, so that only data on the disk
/// survives.
pub(crate) fn files_survive_a_power_cut(
    disk: &Disk,
    pool: &Pool,
    options: &str,
    device: &str,
) -> Result<()> {
    let _held = HeldWriteback::hold()?;
    let device_exists = format!("test -b {device}");
    let mount = format!("mkdir -p /mnt/data && mount -t ext4 {device} /mnt/data");
    let guest = guest_with(pool, options).cpus(2).boot()?;
    guest.wait_until_run("the volume exists", IO_LIMIT, &device_exists)?;
    let make = "mkfs.ext4 -q -b 4096 -N 1024 -E lazy_journal_init=1,nodiscard";
    guest.run_within(IO_LIMIT, &format!("{make} {device} && {mount}"))?;
    let acknowledged = write_files_and_kill(guest, 15)?;
    let pool = Pool::at(&disk.after_power_loss()?);
    pool.check()?;
    let guest = guest_with(&pool, options).boot()?;
    guest.wait_until_run("the volume exists", IO_LIMIT, &device_exists)?;
    guest.run(&mount)?;
    check_acknowledged(&guest, &acknowledged)?;
    guest.run_within(IO_LIMIT, &format!("umount /mnt/data && e2fsck -fn {device}"))?;
    guest.no_kernel_complaints()
}

fn a_failed_flush_pauses_a_guest_with_an_nvdimm() -> Result<()> {
    let (disk, pool) = pool_on_disk(128)?;
    let guest = guest_with(&pool, "interface=nvdimm").boot()?;
    wait_for_disk(&guest)?;
    write_blocks(&guest, 10)?;
    disk.fill_up()?;
    let writer = guest.start_script(
        IO_LIMIT,
        "exec guest-tool write-blocks /dev/pmem0s direct 1000 4000 2 1000",
    )?;
    wait_for_failure(&guest)?;
    let log = guest.vmm_log()?;
    for words in ["The VM is paused", "flush of data failed"] {
        ensure!(log.contains(words), "{words:?} is missing in the log:\n{log}");
    }
    drop(writer);
    Ok(())
}

/// Waits until the VM is paused because of a failed flush, and all interfaces report this.
fn wait_for_failure(guest: &Guest) -> Result<()> {
    guest.wait_until("the VM is paused", IO_LIMIT, || {
        Ok(guest.get("vm.info")?["state"] == "Paused")
    })?;
    // If the vCPU had continued to run until the pause, it would have flushed again, and failed
    // again.
    let failed = flushes(guest, "error")?;
    ensure!(failed == 1.0, "{failed} flushes have failed before the VM was paused");
    let reason = guest.get("vm.info")?["pause_reason"].clone();
    ensure!(reason.as_str().is_some_and(|text| text.contains("flush of data failed")), "{reason}");
    ensure!(
        status(guest)?["state"] == "failed",
        "The volume's state in vm.volumes: {}",
        status(guest)?
    );
    ensure!(has_failed(guest)? == 1.0, "The metrics do not report the failed volume");
    let refused = guest.try_api("PUT", "vm.resume", None)?;
    ensure!(refused.status == 409 && refused.body.contains("flush of data failed"), "{refused:?}");
    ensure!(guest.get("vm.info")?["state"] == "Paused", "The VM was resumed");
    Ok(())
}

fn status(guest: &Guest) -> Result<Value> {
    Ok(guest.get("vm.volumes")?["volumes"][0]["status"].clone())
}

fn has_failed(guest: &Guest) -> Result<f64> {
    guest.metric("foreshore_volume_failed", &[("volume", "data")])
}

/// A device fails and is repaired. The guest should find all flushed data, and should be able to
/// write again.
fn vm_paused_by_a_failed_flush_can_be_rebooted() -> Result<()> {
    let tmpfs = LimitedTmpfs::create(160)?;
    let device = LoopDevice::create_in(tmpfs.dir(), 128)?;
    let pool = Pool::by_path(device.path());
    pmvol(&["create", &pool.name()])?;
    pool.create_volume("data", "32M")?;
    ensure!(pool.durability()? == "page-cache", "A pool on a device is {}", pool.durability()?);
    device.dig_holes()?;
    let guest = guest_with(&pool, "interface=nvdimm").boot()?;
    wait_for_disk(&guest)?;
    write_blocks(&guest, 50)?;
    tmpfs.fill_up()?;
    let writer = guest.start_script(
        IO_LIMIT,
        "exec guest-tool write-blocks /dev/pmem0s direct 1000 2000 2 1000",
    )?;
    wait_for_failure(&guest)?;
    drop(writer);

    tmpfs.delete_filler()?;
    guest.command("vm.reboot")?;
    guest.wait_for_shell(IO_LIMIT)?;
    ensure!(guest.get("vm.info")?["pause_reason"].is_null(), "The VM still has a pause_reason");
    ensure!(status(&guest)?["state"] == "ok" && has_failed(&guest)? == 0.0, "{}", status(&guest)?);
    wait_for_disk(&guest)?;
    guest.run_within(IO_LIMIT, "guest-tool check-blocks /dev/pmem0s 0 50 1 1")?;
    write_blocks(&guest, 50)?;
    ensure!(flushes(&guest, "error")? == 0.0, "Flushes failed on a repaired device");
    // A client can pause and resume the VM again.
    guest.command("vm.pause")?;
    ensure!(guest.get("vm.info")?["state"] == "Paused", "The VM is not paused");
    guest.command("vm.resume")?;
    guest.run("true")?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

fn a_failed_flush_is_an_error_by_virtio_pmem() -> Result<()> {
    let (disk, pool) = pool_on_disk(128)?;
    let guest = guest_with(&pool, "interface=virtio-pmem").boot()?;
    wait_for_disk(&guest)?;
    write_blocks(&guest, 10)?;
    ensure!(flushes(&guest, "error")? == 0.0, "Flushes failed on an intact disk");
    disk.fill_up()?;
    let write = "guest-tool write-blocks /dev/pmem0s direct 1000 4000 2 1";
    let output = guest.try_run(IO_LIMIT, write)?;
    ensure!(output.code != 0, "A write that cannot be made durable succeeded");
    ensure!(
        output.stderr.contains("Cannot write"),
        "The write failed for another reason: {}",
        output.stderr
    );
    ensure!(flushes(&guest, "error")? >= 1.0, "No flush has failed");
    let output =
        guest.try_run(IO_LIMIT, "dd if=/dev/zero of=/dev/pmem0s bs=4096 count=1 conv=fsync")?;
    ensure!(
        output.code != 0 && output.stderr.contains("Input/output error"),
        "fsync succeeded: {output:?}"
    );
    ensure!(
        status(&guest)?["state"] == "failed",
        "The volume's state in vm.volumes: {}",
        status(&guest)?
    );
    ensure!(has_failed(&guest)? == 1.0, "The metrics do not report the failed volume");
    let state = guest.get("vm.info")?["state"].clone();
    ensure!(state == "Running", "The VM is {state}");
    guest.run("true").map(drop)
}

fn persistent_memory_has_no_flush_hints() -> Result<()> {
    let pool = with_volume(Pool::create_in(need_dax()?, "256M")?)?;
    ensure!(pool.durability()? == "dax-sync", "A pool on DAX is {}", pool.durability()?);
    let result = writes_synchronously_without_flushes(&pool);
    std::fs::remove_file(pool.path())?;
    result
}

/// Without MAP_SYNC, a fence in the guest would not make the file system's metadata for a page
/// durable.
fn writes_synchronously_without_flushes(pool: &Pool) -> Result<()> {
    let guest = guest_with(pool, "interface=nvdimm").boot()?;
    let smaps = std::fs::read_to_string(need_proc(guest.pid(), "smaps")?)?;
    let mut flags = Vec::new();
    let mut of_pool = false;
    for line in smaps.lines() {
        match line.split_once(' ') {
            // The first line of each mapping contains: addresses, permissions, ..., file.
            Some((range, _)) if range.contains('-') => of_pool = line.ends_with(&pool.name()),
            Some(("VmFlags:", found)) if of_pool => flags.push(found.to_owned()),
            _ => {}
        }
    }
    // Both the VMM's own mapping of the pool and the guest's mapping should be found.
    ensure!(flags.len() >= 2, "Mappings of the pool: {flags:?}");
    let asynchronous = flags.iter().find(|flags| !flags.split(' ').any(|flag| flag == "sf"));
    ensure!(asynchronous.is_none(), "A mapping of the pool is not synchronous: {asynchronous:?}");
    wait_for_disk(&guest)?;
    ensure!(!has_hints(&guest)?, "The guest has flush hints");
    write_blocks(&guest, 100)?;
    ensure!(flushes(&guest, "ok")? == 0.0, "The VMM received flushes");
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}
