//! Tests that `pmvol btt` and a guest's stock driver can read each other's data, and that parts of
//! a volume can be used as disks.

use anyhow::{Result, ensure};
use guest_tests::guest::GuestBuilder;
use guest_tests::pool::pmvol;
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Pool};

use crate::pool_media::refused;
use crate::volume::{IO_LIMIT, wait_for_disk};

guest_tests::tests![
    exported_volume_can_be_imported_for_another_guest: 300 x several,
    parts_of_a_volume_are_empty_disks: 300 (extended) x several,
];

const BLOCKS: u32 = 300;

fn guest_with(pool: &Pool, volume: &str) -> GuestBuilder {
    Guest::builder()
        .memory("size=384M")
        .pressure("off")
        .pm_volume(&format!("pool={},name={volume},interface=nvdimm", pool.name()))
}

fn written(pool: &Pool, volume: &str) -> Result<()> {
    let guest = guest_with(pool, volume).cpus(2).boot()?;
    wait_for_disk(&guest)?;
    guest.run_within(
        IO_LIMIT,
        &format!("guest-tool write-blocks /dev/pmem0s direct 7 {BLOCKS} 1 2"),
    )?;
    refused(
        &["btt", "export", &pool.name(), volume, "--to", "nothing"],
        &["in use by", "foreshore"],
    )?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pmvol(&["btt", "check", &pool.name(), volume]).map(drop)
}

fn exported_volume_can_be_imported_for_another_guest() -> Result<()> {
    let pool = Pool::create("160M")?;
    pool.create_volume("data", "64M")?;
    pool.create_volume("copy", "72M")?;
    written(&pool, "data")?;
    let image = this_tests_dir().join("image").display().to_string();
    pmvol(&["btt", "export", &pool.name(), "data", "--to", &image])?;
    pmvol(&["btt", "import", &pool.name(), "copy", "--from", &image])?;

    let guest = guest_with(&pool, "copy").boot()?;
    wait_for_disk(&guest)?;
    guest.run_within(IO_LIMIT, &format!("guest-tool check-blocks /dev/pmem0s 7 {BLOCKS} 1 2"))?;
    // Sectors that had never been written were not copied. It should be possible to write them.
    guest.run_within(
        IO_LIMIT,
        &format!("guest-tool write-blocks /dev/pmem0s buffered 4000 {BLOCKS} 2 1"),
    )?;
    guest.run("sync; echo 3 >/proc/sys/vm/drop_caches")?;
    guest.run_within(IO_LIMIT, &format!("guest-tool check-blocks /dev/pmem0s 7 {BLOCKS} 1 2"))?;
    guest
        .run_within(IO_LIMIT, &format!("guest-tool check-blocks /dev/pmem0s 4000 {BLOCKS} 2 1"))?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

fn parts_of_a_volume_are_empty_disks() -> Result<()> {
    let pool = Pool::create("80M")?;
    pool.create_volume("data", "64M")?;
    written(&pool, "data")?;
    let split =
        ["volume", "split", &pool.name(), "data", "--into", "system=24M", "--into", "home=rest"];
    refused(&split, &["data", "holds data", "--force"])?;
    pmvol(&[&split[..], &["--force"]].concat())?;
    for (seed, part) in [(3, "system"), (4, "home")] {
        let guest = guest_with(&pool, part).boot()?;
        wait_for_disk(&guest)?;
        let bytes: u64 = guest.run("cat /sys/block/pmem0s/size")?.trim().parse::<u64>()? * 512;
        let zeros = format!("head -c {bytes} /dev/zero | cmp - /dev/pmem0s");
        guest.run_within(IO_LIMIT, &zeros)?;
        let blocks = format!("/dev/pmem0s direct 0 {BLOCKS} {seed} 2");
        guest.run_within(IO_LIMIT, &format!("guest-tool write-blocks {blocks}"))?;
        guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
        guest.run_within(
            IO_LIMIT,
            &format!("guest-tool check-blocks /dev/pmem0s 0 {BLOCKS} {seed} 2"),
        )?;
        guest.no_kernel_complaints()?;
        guest.power_off()?;
        let clean = pmvol(&["btt", "check", &pool.name(), part])?;
        ensure!(clean.starts_with("clean"), "{clean}");
    }
    pool.check().map(drop)
}
