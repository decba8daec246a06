//! Tests of `--pm-volume size=remaining` with `--pm-memory`: the volume should leave the memory
//! that the zone may need.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::GuestBuilder;
use guest_tests::pool::{create_keys, pmvol};
use guest_tests::{Guest, Pool};
use serde_json::json;

use crate::pressure::{GROW_LIMIT, fill};
use crate::volume::{IO_LIMIT, wait_for_disk};
use crate::zones::{MIB, vmstat, wait_until_plugged, zone};

guest_tests::tests![
    remaining_volume_leaves_memory_for_the_guest: 300 on [V6_12, V6_1],
    remaining_volume_leaves_memory_by_other_interfaces: 240 (long),
    failed_start_leaves_nothing_behind on none,
];

/// Size of the volume. A pool of 1 GiB has 1020 MiB for volumes and memory.
const REMAINING_BYTES: u64 = (1020 - 512) * MIB;

fn pool() -> Result<Pool> {
    let dir = guest_tests::runner::this_tests_dir();
    fs::create_dir_all(&dir)?;
    let pool = Pool::at(&dir);
    pmvol(&["create", &pool.name(), "--size", "1G", "--reserve", "128M"])?;
    Ok(pool)
}

fn guest(pool: &Pool, interface: &str) -> GuestBuilder {
    Guest::builder()
        .memory("size=384M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .pm_volume(&format!(
            "pool={},name=rest,size=remaining,interface={interface},{}",
            pool.name(),
            create_keys()
        ))
}

/// Checks the volume's size in the pool. For a virtio-blk volume, the API reports the size of the
/// disk, without the BTT's own data.
fn check_size(pool: &Pool) -> Result<()> {
    let info = pool.info()?;
    ensure!(
        info["provisioned_bytes"] == REMAINING_BYTES && info["volumes"] == 1,
        "The volume does not have {REMAINING_BYTES} bytes: {info}"
    );
    Ok(())
}

/// Boots the command line of docs/reference/volumes.md with a load that does not fit into DRAM.
fn remaining_volume_leaves_memory_for_the_guest() -> Result<()> {
    let pool = pool()?;
    let builder = guest(&pool, "virtio-pmem").pressure("psi");
    let first = builder.boot()?;
    check_size(&pool)?;
    let (hog, held) = fill(&first, 700)?;
    ensure!(held, "The load was killed: {}", first.get("vm.memory")?);
    ensure!(vmstat(&first, "oom_kill")? == 0, "A process was killed");
    let lent_bytes = zone(&first, "pm")?.plugged_bytes;
    ensure!(lent_bytes >= 320 * MIB, "Only {lent_bytes} bytes of PM are lent");
    drop(hog);
    wait_for_disk(&first)?;
    first.run_within(IO_LIMIT, "guest-tool write-blocks /dev/pmem0s direct 0 50 1 1")?;
    first.no_kernel_complaints()?;
    first.power_off()?;
    let second = builder.boot()?;
    check_size(&pool)?;
    wait_for_disk(&second)?;
    second.run("guest-tool check-blocks /dev/pmem0s 0 50 1 1")?;
    second.power_off()?;
    pool.check().map(drop)
}

/// The whole zone can be plugged in addition to the volume.
fn remaining_volume_leaves_memory_by_other_interfaces() -> Result<()> {
    for interface in ["nvdimm", "virtio-blk"] {
        let pool = pool()?;
        let guest = guest(&pool, interface).pressure("off").boot()?;
        check_size(&pool).with_context(|| format!("interface={interface}"))?;
        guest.put("vm.resize-zone", json!({ "id": "pm", "desired_ram": 512 * MIB }))?;
        wait_until_plugged(&guest, "pm", 512 * MIB, GROW_LIMIT)?;
        guest.power_off()?;
        pool.check()?;
        fs::remove_file(pool.path())?;
    }
    Ok(())
}

fn names_in(dir: &Path) -> Result<BTreeSet<String>> {
    let name = |entry: std::io::Result<fs::DirEntry>| {
        Ok(entry?.file_name().to_string_lossy().into_owned())
    };
    fs::read_dir(dir)?.map(name).collect()
}

/// The governor's recording is opened last, after the volumes have been created.
fn failed_start_leaves_nothing_behind() -> Result<()> {
    let pool = pool()?;
    let dir = guest_tests::runner::this_tests_dir();
    let before = names_in(&dir)?;
    for interface in ["virtio-pmem", "nvdimm", "virtio-blk"] {
        let refusal = guest(&pool, interface)
            .pm_volume(&format!(
                "pool={},name=more,size=32M,interface={interface},{}",
                pool.name(),
                create_keys()
            ))
            .pressure("psi,record=/proc/nowhere/trace")
            .verbose()
            .expect_refusal()?;
        ensure!(
            refusal.message.contains("/proc/nowhere/trace"),
            "Refused for another reason: {}",
            refusal.message
        );
        ensure!(
            refusal.message.contains("deleted the volume"),
            "The VMM did not create the volume: {}",
            refusal.message
        );
        ensure_no_volumes(&pool)?;
        pool.check()?;
    }
    let left: Vec<_> = names_in(&dir)?.difference(&before).cloned().collect();
    ensure!(left.iter().all(|name| name.ends_with(".log")), "The failed starts left {left:?}");
    // The refusal should contain the numbers, and should precede the creation of anything.
    let refusal = guest(&pool, "nvdimm")
        .pm_volume(&format!("pool={},name=more,size=600M,create=on", pool.name()))
        .expect_refusal()?;
    for part in ["--pm-memory", "512 MiB", "420 MiB", "600 MiB"] {
        ensure!(refusal.message.contains(part), "{part:?} is missing in: {}", refusal.message);
    }
    ensure_no_volumes(&pool)
}

fn ensure_no_volumes(pool: &Pool) -> Result<()> {
    let info = pool.info()?;
    ensure!(info["volumes"] == 0, "The pool has volumes: {info}");
    Ok(())
}
