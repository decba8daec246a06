//! Tests of `--pm-volume ...,interface=virtio-blk`: the VMM translates the sectors of a volume and
//! serves them as a disk.

use anyhow::{Result, ensure};
use guest_tests::disk::sparse_file;
use guest_tests::{Guest, Pool};

use crate::blocks;
use crate::disk::{make_root, runs_from};
use crate::volume::{IO_LIMIT, guest_with, with_volume};

guest_tests::tests![
    a_volume_as_a_disk_holds_and_is_an_nvdimm_later: 300 (extended) x 2,
    a_volume_as_a_disk_holds_on_6_1: 300 (extended) on [V6_1] x 2,
    a_volume_as_a_disk_shows_its_shape_and_discards x 2,
    a_guest_lives_on_a_volume_and_has_a_disk_and_an_nvdimm_beside: 300 (long) x 2,
];

fn pool_with_volume() -> Result<Pool> {
    with_volume(Pool::create("256M")?)
}

fn wait_for_disk(guest: &Guest, device: &str) -> Result<()> {
    guest.wait_until_run("the disk exists", IO_LIMIT, &format!("test -b {device}"))
}

fn write_hard(guest: &Guest) -> Result<()> {
    blocks::write(guest, "/dev/vda", ["direct", "buffered", "direct"], 2)?;
    blocks::check(guest, "/dev/vda", 2)
}

fn a_volume_as_a_disk_holds_and_is_an_nvdimm_later() -> Result<()> {
    let pool = pool_with_volume()?;
    let guest = guest_with(&pool, "interface=virtio-blk").boot()?;
    wait_for_disk(&guest, "/dev/vda")?;
    write_hard(&guest)?;
    let labels =
        [("volume", "data"), ("interface", "virtio-blk"), ("operation", "write"), ("result", "ok")];
    let writes = guest.metric("foreshore_volume_operations_total", &labels)?;
    ensure!(writes >= 1800.0, "The metrics count only {writes} writes");
    let volumes = guest.get("vm.volumes")?;
    ensure!(volumes["volumes"][0]["interface"] == "virtio-blk", "{volumes}");
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check()?;
    // The guest's own driver should be able to read the data that our engine wrote.
    let guest = guest_with(&pool, "interface=nvdimm").boot()?;
    wait_for_disk(&guest, "/dev/pmem0s")?;
    blocks::check(&guest, "/dev/pmem0s", 2)?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

fn a_volume_as_a_disk_holds_on_6_1() -> Result<()> {
    let pool = pool_with_volume()?;
    let guest = guest_with(&pool, "interface=virtio-blk").boot()?;
    wait_for_disk(&guest, "/dev/vda")?;
    write_hard(&guest)?;
    guest.run_within(IO_LIMIT, "mkfs.ext4 -q /dev/vda && e2fsck -fn /dev/vda")?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

fn a_volume_as_a_disk_shows_its_shape_and_discards() -> Result<()> {
    let pool = pool_with_volume()?;
    let guest = guest_with(&pool, "interface=virtio-blk").boot()?;
    wait_for_disk(&guest, "/dev/vda")?;
    ensure!(guest.run("ls /sys/block/vda/mq")?.split_whitespace().count() == 2, "Not two queues");
    for (file, expected) in [
        ("serial", "data"),
        ("queue/logical_block_size", "4096"),
        ("queue/physical_block_size", "4096"),
        ("queue/discard_granularity", "4096"),
        ("ro", "0"),
    ] {
        let value = guest.run(&format!("cat /sys/block/vda/{file}"))?;
        ensure!(value.trim() == expected, "{file} is {value:?} instead of {expected:?}");
    }
    guest.run_within(IO_LIMIT, "dd if=/dev/urandom of=/dev/vda bs=1M count=8 oflag=direct")?;
    guest.run_within(IO_LIMIT, "blkdiscard -o 1048576 -l 4194304 /dev/vda")?;
    guest.run("test $(dd if=/dev/vda bs=1M skip=1 count=4 | tr -d '\\0' | wc -c) = 0")?;
    guest.run("test $(dd if=/dev/vda bs=1M skip=5 count=3 | tr -d '\\0' | wc -c) -gt 3000000")?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check().map(drop)
}

fn a_guest_lives_on_a_volume_and_has_a_disk_and_an_nvdimm_beside() -> Result<()> {
    let pool = Pool::create("384M")?;
    pool.create_volume("data", "160M")?;
    pool.create_volume("more", "64M")?;
    let more = format!("pool={},name=more,interface=nvdimm", pool.name());
    let image = sparse_file("image", 16 << 20)?;
    let builder = guest_with(&pool, "interface=virtio-blk")
        .argument("--pm-volume", &more)
        .argument("--disk", &format!("path={}", image.display()));
    let guest = builder.boot()?;
    // Disks come before volumes.
    wait_for_disk(&guest, "/dev/vdb")?;
    ensure!(guest.run("cat /sys/block/vdb/serial")?.trim() == "data", "vdb is another disk");
    make_root(&guest, "/dev/vdb")?;
    guest.power_off()?;
    let guest = builder.cmdline("foreshore.root=/dev/vdb").boot()?;
    runs_from(&guest, "/dev/vdb")?;
    wait_for_disk(&guest, "/dev/pmem0s")?;
    guest.run("dd if=/dev/urandom of=/dev/vda bs=4k count=16 oflag=direct")?;
    guest.run("dd if=/dev/urandom of=/dev/pmem0s bs=4k count=16 oflag=direct")?;
    guest.no_kernel_complaints()?;
    drop(guest);
    pool.check().map(drop)
}
