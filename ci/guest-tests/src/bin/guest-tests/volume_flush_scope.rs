//! Tests that a flush of a volume writes that volume to the disk, but not memory lent from the same
//! pool.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::HeldWriteback;
use guest_tests::user::need_proc;
use guest_tests::{Guest, Pool};

use crate::volume::{IO_LIMIT, guest_with, wait_for_disk};
use crate::volume_flush::{flushes, has_hints, pool_on_disk, write_blocks};
use crate::zones::{MIB, mem_total_mib};

guest_tests::tests![a_flush_leaves_lent_memory_alone: 300];

/// Size of the volume of [`pool_on_disk`]. The size distinguishes the volume's mapping from memory
/// mappings.
const VOLUME_BYTES: u64 = 96 * MIB;
/// Boot memory of [`guest_with`]. MemTotal is below this until the guest has been lent memory.
const BOOT_MIB: u64 = 384;
/// Size of a load that exceeds the guest's DRAM, so that it uses some lent memory.
const HOG_MIB: u64 = 380;

/// Dirty pages of a pool in the page cache, for each mapping in the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dirty {
    volume_bytes: u64,
    lent_bytes: u64,
}

impl Dirty {
    fn of(guest: &Guest, pool: &Pool) -> Result<Self> {
        let smaps = fs::read_to_string(need_proc(guest.pid(), "smaps")?)?;
        let all_bytes = fs::metadata(pool.path())?.len();
        let mut dirty = Self { volume_bytes: 0, lent_bytes: 0 };
        let mut mapped_bytes = None;
        for line in smaps.lines() {
            let Some((first, rest)) = line.split_once([' ', ':']) else { continue };
            if let Some((start, end)) = first.split_once('-') {
                let address =
                    |text| u64::from_str_radix(text, 16).context("Not an address of smaps");
                let of_pool = line.ends_with(&pool.name());
                mapped_bytes = of_pool.then_some(address(end)? - address(start)?);
            } else if let (Some(bytes), "Shared_Dirty" | "Private_Dirty") = (mapped_bytes, first) {
                let dirty_bytes = rest.trim().trim_end_matches(" kB").parse::<u64>()? * 1024;
                match bytes {
                    // The VMM also maps the pool's whole file.
                    _ if bytes == all_bytes => {}
                    VOLUME_BYTES => dirty.volume_bytes += dirty_bytes,
                    _ => dirty.lent_bytes += dirty_bytes,
                }
            }
        }
        Ok(dirty)
    }
}

/// Returns the bytes written to the device of a file system.
fn written_bytes(mounted: &Path) -> Result<u64> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    let at = mounted.to_str().context("The path is not UTF-8")?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mount = fields
        .find(|fields| fields.get(1) == Some(&at))
        .context("The path is not a mount point")?;
    let device = mount[0].trim_start_matches("/dev/");
    let stat = fs::read_to_string(format!("/sys/block/{device}/stat"))?;
    // The seventh field is the number of sectors written, in units of 512 bytes (Linux
    // Documentation/block/stat.rst).
    let sectors = stat.split_whitespace().nth(6).context("stat has no seventh number")?;
    Ok(sectors.parse::<u64>()? * 512)
}

fn a_flush_leaves_lent_memory_alone() -> Result<()> {
    let _held = HeldWriteback::hold()?;
    let (disk, pool) = pool_on_disk(1024)?;
    let guest = guest_with(&pool, "interface=nvdimm")
        .pm_memory(&format!("pool={},size=128M", pool.name()))
        .pressure("fixed,size=128M")
        // The kernel's own memory cannot be in PM. The kernel needs swap to make room for it.
        .cmdline("foreshore.zram=256M")
        .boot()?;
    guest.wait_until("the guest's kernel has the lent memory", IO_LIMIT, || {
        Ok(mem_total_mib(&guest)? > BOOT_MIB)
    })?;
    let log = guest.vmm_log()?;
    ensure!(
        log.contains("use a pool on tmpfs or DAX"),
        "The log has no warning about the pool's place:\n{log}"
    );
    wait_for_disk(&guest)?;
    ensure!(has_hints(&guest)?, "The guest has no flush hints, which a page cache needs");
    let hog = guest.hog(HOG_MIB, IO_LIMIT)?;

    // 1. The guest flushes a volume with few dirty pages while much of its memory is dirty.
    let (before, written_before) = (Dirty::of(&guest, &pool)?, written_bytes(disk.dir())?);
    ensure!(before.lent_bytes >= 32 * MIB, "Too little of the lent memory is dirty: {before:?}");
    let flushes_before = flushes(&guest, "ok")?;
    write_blocks(&guest, 100)?;
    let more_flushes = flushes(&guest, "ok")? - flushes_before;
    // Linux flushes after writing the data, after each half of the flog entry, and after the map
    // entry.
    ensure!(more_flushes >= 400.0, "{more_flushes} flushes for 100 blocks");
    ensure!(flushes(&guest, "error")? == 0.0, "Flushes have failed");
    let (after, written) = (Dirty::of(&guest, &pool)?, written_bytes(disk.dir())? - written_before);
    ensure!(after.volume_bytes == 0, "A part of the volume was not written: {after:?}");
    ensure!(
        after.lent_bytes >= before.lent_bytes,
        "Lent memory was written: {before:?}, {after:?}"
    );
    ensure!(
        written < before.lent_bytes / 2,
        "{written} bytes were written for 100 blocks; {before:?}"
    );

    // 2. Shows that this check can fail: it should detect a flush of the whole file.
    File::open(pool.path())?.sync_data()?;
    let (at_end, written_at_end) =
        (Dirty::of(&guest, &pool)?, written_bytes(disk.dir())? - written_before);
    ensure!(
        at_end.lent_bytes < after.lent_bytes / 2,
        "fdatasync wrote no lent memory: {after:?}, {at_end:?}"
    );
    ensure!(
        written_at_end > written + after.lent_bytes / 2,
        "fdatasync wrote {written_at_end} bytes"
    );
    println!(
        "400 flushes: {} KiB written, {} KiB of lent memory still dirty; fdatasync: {} KiB written",
        written >> 10,
        after.lent_bytes >> 10,
        (written_at_end - written) >> 10
    );
    drop(hog);
    guest.no_kernel_complaints()
}
