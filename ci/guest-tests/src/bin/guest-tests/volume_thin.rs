//! Tests of thin volumes. Only the first write of the guest to a chunk allocates it.

use anyhow::{Context, Result, ensure};
use guest_tests::pool::pmvol;
use guest_tests::{Guest, GuestBuilder, Pool};

use crate::blocks;
use crate::volume::{IO_LIMIT, guest_with};

guest_tests::tests![
    only_writes_allocate_chunks_of_a_thin_volume: 300 x 2,
    only_writes_allocate_chunks_of_a_thin_volume_on_6_1: 300 (long) on [V6_1] x 2 =>
        only_writes_allocate_chunks_of_a_thin_volume(),
    thin_volume_is_converted_and_becomes_an_nvdimm: 400 (long) x 2,
];

const THIN: &str = "size=96M,create=on,thin=on";
const MIB: u64 = 1 << 20;

fn boot(builder: GuestBuilder, device: &str) -> Result<Guest> {
    let guest = builder.boot()?;
    guest.wait_until_run("the disk exists", IO_LIMIT, &format!("test -b {device}"))?;
    Ok(guest)
}

/// Allocated bytes of the volume. Checks that the API and the metrics report the same.
fn allocated_bytes(guest: &Guest) -> Result<u64> {
    let volumes = guest.get("vm.volumes")?;
    let bytes = volumes["volumes"][0]["allocated_bytes"].as_u64();
    let bytes = bytes.with_context(|| format!("No allocated_bytes: {volumes}"))?;
    let labels = [("volume", "data"), ("interface", "virtio-blk")];
    let metric = guest.metric("foreshore_volume_allocated_bytes", &labels)?;
    ensure!(metric == bytes as f64, "The metric is {metric}, but the API reports {bytes}");
    Ok(bytes)
}

fn only_writes_allocate_chunks_of_a_thin_volume() -> Result<()> {
    let pool = Pool::create("256M")?;
    let guest = boot(guest_with(&pool, THIN), "/dev/vda")?;
    let volumes = guest.get("vm.volumes")?;
    ensure!(volumes["volumes"][0]["interface"] == "virtio-blk", "{volumes}");
    let empty = allocated_bytes(&guest)?;
    ensure!(empty <= 8 * MIB, "{empty} bytes are allocated in a new volume");

    // udev and the kernel have already read the first sectors.
    guest.run_within(IO_LIMIT, "dd if=/dev/vda of=/dev/null bs=1M")?;
    guest.run_within(IO_LIMIT, "blkdiscard /dev/vda")?;
    ensure!(allocated_bytes(&guest)? == empty, "Reads or discards have allocated chunks");

    let write = "dd if=/dev/urandom of=/dev/vda bs=1M count=20 seek=40 oflag=direct";
    guest.run_within(IO_LIMIT, write)?;
    let written = allocated_bytes(&guest)?;
    // The data may begin and end within chunks. The map and the lanes' blocks need a few more.
    ensure!((20 * MIB..=32 * MIB).contains(&(written - empty)), "{empty} bytes grew to {written}");
    guest.run_within(IO_LIMIT, write)?;
    let again = allocated_bytes(&guest)?;
    // 256 lanes have a block each, which a write exchanges with the block of its sector.
    ensure!(again - written <= 2 * MIB, "Overwrites increased {written} bytes to {again}");
    guest.no_kernel_complaints()?;
    guest.kill9()?;
    pool.check()?;
    let info = pool.info()?;
    ensure!(info["promised_bytes"] == 96 * MIB, "{info}");
    ensure!(info["volume_bytes"] == again, "{info}");
    Ok(())
}

fn thin_volume_is_converted_and_becomes_an_nvdimm() -> Result<()> {
    let pool = Pool::create("256M")?;
    let guest = boot(guest_with(&pool, THIN), "/dev/vda")?;
    blocks::write(&guest, "/dev/vda", ["direct", "buffered", "direct"], 2)?;
    guest.kill9()?;
    pool.check()?;
    let guest = boot(guest_with(&pool, "interface=virtio-blk"), "/dev/vda")?;
    blocks::check(&guest, "/dev/vda", 2)?;
    guest.power_off()?;

    pmvol(&["volume", "convert", &pool.name(), "data", "--thick"])?;
    let info = pool.info()?;
    ensure!(info["volume_bytes"] == 96 * MIB, "{info}");
    // The guest's own driver should be able to read the data that our engine wrote.
    let guest = boot(guest_with(&pool, "interface=nvdimm"), "/dev/pmem0s")?;
    blocks::check(&guest, "/dev/pmem0s", 2)?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;

    pmvol(&["volume", "convert", &pool.name(), "data", "--thin"])?;
    let guest = boot(guest_with(&pool, "interface=auto"), "/dev/vda")?;
    blocks::check(&guest, "/dev/vda", 2)?;
    guest.power_off()?;
    pool.check().map(drop)
}
