//! Tests of raw volumes. Any guest may use their plain bytes through virtio-pmem. They are refused
//! as NVDIMMs if a guest would wrongly assume that its data is durable.

use anyhow::{Result, ensure};
use guest_tests::guest::GuestBuilder;
use guest_tests::{Disk, Guest, Pool};

use crate::blocks;
use crate::volume::{IO_LIMIT, guest_with};
use crate::volume_flush::{files_survive_a_power_cut, flushes};

guest_tests::tests![
    raw_holds_with_two_cpus: 300 on [V6_12, V6_1 extended] x 2,
    raw_files_survive_a_power_cut: 300 (extended) x several,
    raw_flush_failures_are_errors: 300 x 2,
    raw_is_an_nvdimm_where_a_fence_is_a_flush: 300 (long) x 2,
];

/// Options that all raw volumes in these tests use.
pub(crate) const RAW: &str = "format=raw,size=96M,create=on";

/// Waits until the guest's driver has found the device.
pub(crate) fn wait_for_bytes(guest: &Guest) -> Result<()> {
    guest.wait_until_run("/dev/pmem0 exists", IO_LIMIT, "test -b /dev/pmem0")
}

/// Guest with the raw volume `data`, which is created if it is missing.
pub(crate) fn raw_guest(pool: &Pool, options: &str) -> GuestBuilder {
    guest_with(pool, &format!("{RAW},{options}"))
}

/// Creates a pool on a disk whose image has space for `tmpfs_mib`.
pub(crate) fn pool_on_disk(tmpfs_mib: u64) -> Result<(Disk, Pool)> {
    let disk = Disk::create(384, tmpfs_mib)?;
    let pool = Pool::create_in(disk.dir(), "256M")?;
    ensure!(pool.durability()? == "page-cache", "A pool on a disk is {}", pool.durability()?);
    Ok((disk, pool))
}

/// Direct and buffered writers run concurrently, and each of them flushes. The device's thread
/// serves the flushes.
fn raw_holds_with_two_cpus() -> Result<()> {
    let (_disk, pool) = pool_on_disk(1024)?;
    let guest = raw_guest(&pool, "interface=auto").boot()?;
    wait_for_bytes(&guest)?;
    ensure!(
        guest.run("ls /sys/block")?.lines().all(|name| name != "pmem0s"),
        "The raw volume has a BTT"
    );
    blocks::write(&guest, "/dev/pmem0", ["direct", "buffered", "buffered"], 3)?;
    blocks::check(&guest, "/dev/pmem0", 3)?;
    // Two buffered writers run three rounds each. Each round ends with an fdatasync.
    let done = flushes(&guest, "ok")?;
    ensure!(done >= 6.0, "Only {done} flushes");
    ensure!(flushes(&guest, "error")? == 0.0, "Flushes have failed");
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

fn raw_files_survive_a_power_cut() -> Result<()> {
    let (disk, pool) = pool_on_disk(1024)?;
    files_survive_a_power_cut(&disk, &pool, &format!("{RAW},interface=virtio-pmem"), "/dev/pmem0")
}

fn raw_flush_failures_are_errors() -> Result<()> {
    let (disk, pool) = pool_on_disk(128)?;
    let guest = raw_guest(&pool, "interface=virtio-pmem").boot()?;
    wait_for_bytes(&guest)?;
    let write = |first: u32, count: u32| {
        let command = format!("guest-tool write-blocks /dev/pmem0 buffered {first} {count} 2 1");
        guest.try_run(IO_LIMIT, &command)
    };
    ensure!(write(0, 10)?.code == 0, "A flush failed on an intact disk");
    disk.fill_up()?;
    let output = write(1000, 4000)?;
    ensure!(output.code != 0, "A flush of lost data succeeded");
    ensure!(
        output.stderr.contains("Cannot sync"),
        "The write failed for another reason: {}",
        output.stderr
    );
    ensure!(flushes(&guest, "error")? >= 1.0, "No flush has failed");
    // The data has been lost, so the next flush should not succeed.
    ensure!(write(0, 1)?.code != 0, "A flush succeeded after a failed flush");
    let state = guest.get("vm.info")?["state"].clone();
    ensure!(state == "Running", "The VM is {state}");
    guest.run("true").map(drop)
}

fn raw_is_an_nvdimm_where_a_fence_is_a_flush() -> Result<()> {
    let pool = Pool::create("256M")?;
    let guest = raw_guest(&pool, "interface=nvdimm").boot()?;
    wait_for_bytes(&guest)?;
    guest.run_within(IO_LIMIT, "guest-tool write-blocks /dev/pmem0 buffered 0 200 1 1")?;
    let config = guest.get("vm.info")?["config"]["pm_volumes"][0].clone();
    ensure!(config["format"] == "raw", "Unexpected configuration in vm.info: {config}");
    guest.power_off()?;
    // The other interface should provide the same bytes.
    let guest = raw_guest(&pool, "interface=virtio-pmem").boot()?;
    wait_for_bytes(&guest)?;
    guest.run_within(IO_LIMIT, "guest-tool check-blocks /dev/pmem0 0 200 1 1")?;
    guest.no_kernel_complaints()
}
