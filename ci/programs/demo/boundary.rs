//! Phase 5: memory holds the pool, gives way to a growing volume, and comes back after a trim.

use std::time::Duration;

use anyhow::Result;
use guest_tests::pool::pmvol;
use guest_tests::{Guest, Pool};

use crate::sizes::{MIB, Sizes};
use crate::{BOUNDARY, claim, event, hybrid_guest, phase};

const ZONE_MIB: u64 = 1152;
const VOLUME_MIB: u64 = 1100;
const FILES: u64 = 10;
const FILE_MIB: u64 = 60;
/// Pool space that may stay free although the policy requests more memory: watermark `storage_high`
/// and the pool's remainder.
const FREE_MIB: u64 = 192;
const LIMIT: Duration = Duration::from_secs(180);

/// Replaces the volume by a thin one, which may use nearly all of the pool.
pub(crate) fn show(pool: &Pool, metrics: &str) -> Result<()> {
    phase(5, "the boundary between memory and storage moves while the guest runs");
    pmvol(&["volume", "delete", &pool.name(), "data", "--force"])?;
    let memory = format!("pool={},size={ZONE_MIB}M,spill=1G", pool.name());
    // Discards of the guest give space back.
    let keys = "create=on,interface=virtio-blk";
    let volume = format!("pool={},name=thin,size={VOLUME_MIB}M,{keys}", pool.name());
    let guest = hybrid_guest(&memory, BOUNDARY, metrics)
        .pm_volume(&volume)
        .pressure("fixed,size=1280M")
        .name(BOUNDARY)
        .boot()?;
    event("thin volume");
    guest.wait_until_run("the disk exists", LIMIT, "test -b /dev/vda")?;
    guest.run_within(
        LIMIT,
        "mkfs.ext4 -q /dev/vda && mkdir -p /mnt/t && mount -t ext4 /dev/vda /mnt/t",
    )?;
    guest.wait_until("memory holds the pool", LIMIT, || {
        Ok(Sizes::of(&guest)?.pool_free_bytes <= FREE_MIB * MIB)
    })?;
    let (full, empty_bytes) = (Sizes::of(&guest)?, allocated_bytes(&guest)?);
    claim(
        full.pm.plugged_bytes >= (ZONE_MIB - FREE_MIB) * MIB,
        &format!("memory holds the pool: {full}, the volume {} MiB", empty_bytes / MIB),
    )?;

    event("files are written");
    write_files(&guest)?;
    let (written, volume_bytes) = (Sizes::of(&guest)?, allocated_bytes(&guest)?);
    claim(
        volume_bytes >= FILES * FILE_MIB * MIB,
        &format!("every write succeeded: the volume has {} MiB", volume_bytes / MIB),
    )?;
    let zone = guest.metric("foreshore_memory_spilled_bytes", &[("zone", "pm")])? as u64;
    let in_pool_bytes = written.pool_memory_bytes;
    claim(
        in_pool_bytes + 400 * MIB <= full.pool_memory_bytes,
        &format!(
            "memory gave way: {} MiB of the pool are left, {} MiB were moved to DRAM",
            in_pool_bytes / MIB,
            zone / MIB
        ),
    )?;
    check_files(&guest)?;
    claim(true, "all files are complete")?;

    event("files are deleted and trimmed");
    guest.run_within(LIMIT, "rm /mnt/t/* -rf && sync && fstrim /mnt/t")?;
    let trimmed_bytes = allocated_bytes(&guest)?;
    claim(
        trimmed_bytes <= empty_bytes + 96 * MIB,
        &format!("a trim gave back all but {} MiB of the volume", trimmed_bytes / MIB),
    )?;
    guest.wait_until("memory holds the pool again", LIMIT, || {
        Ok(Sizes::of(&guest)?.pm.plugged_bytes >= full.pm.plugged_bytes - 128 * MIB)
    })?;
    claim(true, &format!("memory came back: {}", Sizes::of(&guest)?))?;
    guest.no_kernel_complaints()?;
    guest.power_off()?;
    pool.check()?;
    claim(true, "pmvol check finds no damage at the end")
}

/// Writes copies of a file of random bytes, each durably.
fn write_files(guest: &Guest) -> Result<()> {
    let bytes = FILE_MIB * MIB;
    guest.run_within(LIMIT, &format!("head -c {bytes} /dev/urandom >/tmp/part"))?;
    let copies =
        format!("for n in $(seq {FILES}); do cp /tmp/part /mnt/t/$n; sync /mnt/t/$n; done");
    guest.run_within(LIMIT, &format!("set -e; {copies}")).map(drop)
}

/// Compares the files, read from the disk, with their source.
fn check_files(guest: &Guest) -> Result<()> {
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    let compare = format!("for n in $(seq {FILES}); do cmp /tmp/part /mnt/t/$n; done");
    guest.run_within(LIMIT, &format!("set -e; {compare}; rm /tmp/part")).map(drop)
}

fn allocated_bytes(guest: &Guest) -> Result<u64> {
    Ok(guest.metric("foreshore_volume_allocated_bytes", &[("volume", "thin")])? as u64)
}
