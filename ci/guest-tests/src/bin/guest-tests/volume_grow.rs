//! Tests that a grown volume is a larger disk with its old content, with the guest's stock driver.

use anyhow::{Context, Result, ensure};
use guest_tests::pool::pmvol;
use guest_tests::{Guest, Pool};

use crate::pool_media::refused;
use crate::volume::{
    IO_LIMIT, MOUNT, check_acknowledged, guest_with, make_file_system, wait_for_disk,
};
use crate::zones::MIB;

guest_tests::tests![
    a_grown_volume_is_a_larger_disk_by_nvdimm: 300 (long) on [V6_12, V6_1 extended],
    a_grown_volume_is_a_larger_disk_by_virtio_pmem: 300 (extended),
];

/// Number of files that are acknowledged before the volume grows.
const FILES: u32 = 20;
/// Number of blocks in a file on the grown file system. The file is larger than the volume was
/// before.
const LARGE_FILE_BLOCKS: u64 = 34 * MIB / 4096;

/// Writes to the disk without a file system. With virtio-pmem, each write costs four flushes.
fn a_grown_volume_is_a_larger_disk_by_virtio_pmem() -> Result<()> {
    let pool = small_pool()?;
    let builder = guest_with(&pool, "interface=virtio-pmem");
    let before = builder.boot()?;
    wait_for_disk(&before)?;
    before.run("guest-tool write-blocks /dev/pmem0s direct 0 100 1 1")?;
    let size_bytes = disk_bytes(&before)?;
    before.power_off()?;
    grow(&pool)?;

    let guest = builder.boot()?;
    wait_for_disk(&guest)?;
    let grown_bytes = disk_bytes(&guest)?;
    check_growth(size_bytes, grown_bytes)?;
    // One place is at the border between the old and the new arena, and the other at the new end.
    let blocks = [size_bytes / 4096 - 50, grown_bytes / 4096 - 100];
    for (seed, first) in (2..).zip(blocks) {
        guest.run(&format!("guest-tool write-blocks /dev/pmem0s direct {first} 100 {seed} 1"))?;
    }
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    for (seed, first) in (1..).zip([0, blocks[0], blocks[1]]) {
        guest.run(&format!("guest-tool check-blocks /dev/pmem0s {first} 100 {seed} 1"))?;
    }
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// The guest grows its mounted file system and fills the new part.
fn a_grown_volume_is_a_larger_disk_by_nvdimm() -> Result<()> {
    let pool = small_pool()?;
    let builder = guest_with(&pool, "interface=nvdimm");
    let before = builder.boot()?;
    wait_for_disk(&before)?;
    make_file_system(&before)?;
    before.run(MOUNT)?;
    let acknowledged = acknowledge_files(&before)?;
    holder_is_named(&pool, &before)?;
    let size_bytes = disk_bytes(&before)?;
    before.run("umount /mnt/data")?;
    before.power_off()?;
    grow(&pool)?;

    let guest = builder.boot()?;
    wait_for_disk(&guest)?;
    check_growth(size_bytes, disk_bytes(&guest)?)?;
    guest.run(MOUNT)?;
    check_acknowledged(&guest, &acknowledged)?;
    guest.run_within(IO_LIMIT, "resize2fs /dev/pmem0s")?;
    let large = format!("/mnt/data/large buffered 0 {LARGE_FILE_BLOCKS} 1 1");
    guest
        .run_within(IO_LIMIT, &format!(": >/mnt/data/large && guest-tool write-blocks {large}"))?;
    guest.run("umount /mnt/data && e2fsck -fn /dev/pmem0s && echo 3 >/proc/sys/vm/drop_caches")?;
    guest.run(MOUNT)?;
    check_acknowledged(&guest, &acknowledged)?;
    let check = format!("guest-tool check-blocks /mnt/data/large 0 {LARGE_FILE_BLOCKS} 1 1");
    guest.run_within(IO_LIMIT, &check)?;
    guest.run("umount /mnt/data")?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

/// Returns a full pool with the volume `data` and a second volume. Because of the second volume,
/// `data` cannot grow in one piece.
fn small_pool() -> Result<Pool> {
    let pool = Pool::create("64M")?;
    pool.create_volume("data", "32M")?;
    pool.create_volume("beside", "24M")?;
    Ok(pool)
}

fn acknowledge_files(guest: &Guest) -> Result<String> {
    let mut writer =
        guest.start_script(IO_LIMIT, "exec guest-tool write-files /mnt/data/files 20000")?;
    let mut acknowledged = String::new();
    for _ in 0..FILES {
        acknowledged += &(writer.next_line().context("The writer ended")? + "\n");
    }
    drop(writer);
    guest.wait_until_run("the writer has ended", IO_LIMIT, "! pidof guest-tool")?;
    Ok(acknowledged)
}

/// Neither the pool nor the volume can grow while a VM uses them.
fn holder_is_named(pool: &Pool, guest: &Guest) -> Result<()> {
    let holder = format!("process {} (foreshore)", guest.pid());
    let size = pool.path().metadata()?.len();
    refused(
        &["volume", "resize", &pool.name(), "data", "--size", "48M"],
        &[&pool.name(), &holder],
    )?;
    refused(&["grow", &pool.name(), "--size", "128M"], &[&pool.name(), &holder])?;
    ensure!(pool.path().metadata()?.len() == size, "The size of a pool in use has changed");
    Ok(())
}

/// The pool is too small at first. The pool grows, and then the volume grows. A VM that expects
/// the volume's old size should be refused.
fn grow(pool: &Pool) -> Result<()> {
    let resize = ["volume", "resize", &pool.name(), "data", "--size", "96M"];
    refused(&resize, &["full", "64 MiB"])?;
    pmvol(&["grow", &pool.name(), "--size", "144M"])?;
    pmvol(&resize)?;
    pool.check()?;
    let refusal = guest_with(pool, "size=32M").expect_refusal()?;
    for word in ["--pm-volume", "data", "32 MiB", "96 MiB"] {
        ensure!(refusal.message.contains(word), "{word:?} is missing in: {}", refusal.message);
    }
    Ok(())
}

fn disk_bytes(guest: &Guest) -> Result<u64> {
    Ok(guest.run("cat /sys/block/pmem0s/size")?.trim().parse::<u64>()? * 512)
}

/// The disk gets a second arena of 64 MiB. Its map, its log and 256 spare blocks are not usable as
/// sectors.
fn check_growth(before_bytes: u64, after_bytes: u64) -> Result<()> {
    let more = after_bytes.saturating_sub(before_bytes);
    ensure!(
        (60 * MIB..=64 * MIB).contains(&more),
        "The disk grew from {before_bytes} to {after_bytes} bytes"
    );
    Ok(())
}
