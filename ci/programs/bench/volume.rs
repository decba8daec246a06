//! Measures direct transfers of 4 KiB to volumes and disks, one at a time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use guest_tests::host;
use guest_tests::pool::pmvol;
use guest_tests::runner::this_tests_dir;
use guest_tests::wait_until;
use pmem_volume::btt::{Layout, SECTOR_BYTES};
use pmem_volume::media::MemoryMedia;
use uuid::Uuid;

use crate::forget;
use crate::samples::{Row, Samples, medians};
use crate::vmm::{Disk, Extras, MIB, Vmm};

/// Size of the volumes in this benchmark.
pub(crate) const VOLUME_BYTES: u64 = 128 * MIB;

/// Effort for a row, which is the median of `repeats` runs with `transfers` transfers each. The
/// first run is discarded, because it touches all memory for the first time.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    transfers: u32,
    repeats: usize,
}

/// Effort without flushes. A run takes about 10 ms, so a single interrupt on the host would be
/// significant.
pub(crate) const UNFLUSHED: Effort = Effort { transfers: 1000, repeats: 25 };
/// Effort with flushes to a disk. A BTT write flushes four times (data, both halves of the log
/// entry, map), and each flush takes as long as the disk needs.
const FLUSHED: Effort = Effort { transfers: 100, repeats: 3 };
/// Effort if each flush is an exit.
pub(crate) const EXITING: Effort = Effort { transfers: 1000, repeats: 3 };
const DISK_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn measure(vmms: &[&Vmm], samples: &mut Samples) -> Result<()> {
    let image = make_image()?;
    for vmm in vmms {
        time(vmm, Disk::Image(image.clone()), EXITING, [Row::BlockWrite, Row::BlockRead], samples)?;
        match vmm {
            Vmm::Foreshore => foreshore(samples)?,
            Vmm::Qemu => {
                let file = this_tests_dir().join("nvdimm");
                write_btt_file(&file)?;
                let disk = Disk::NvdimmFile(file, VOLUME_BYTES);
                time(vmm, disk, UNFLUSHED, [Row::NvdimmWrite, Row::NvdimmRead], samples)?;
            }
            // Only Foreshore supports these interfaces of a volume.
            Vmm::Unconfined | Vmm::Other { .. } => {}
        }
    }
    Ok(())
}

fn foreshore(samples: &mut Samples) -> Result<()> {
    let on_tmpfs = make_pool(&this_tests_dir())?;
    let disk_dir = disk_dir()?;
    let on_disk = make_pool(&disk_dir)?;
    for (pool, interface, effort, rows) in [
        (&on_tmpfs, "nvdimm", UNFLUSHED, [Row::NvdimmWrite, Row::NvdimmRead]),
        (&on_disk, "nvdimm", FLUSHED, [Row::HintsWrite, Row::HintsRead]),
        (&on_tmpfs, "virtio-pmem", EXITING, [Row::VirtioPmemWrite, Row::VirtioPmemRead]),
        (&on_tmpfs, "virtio-blk", EXITING, [Row::EngineWrite, Row::EngineRead]),
    ] {
        let volume = format!("pool={},name=data,interface={interface}", pool.display());
        time(&Vmm::Foreshore, Disk::Volume(volume), effort, rows, samples)?;
    }
    forget(&on_disk)
}

/// Adds the [`times`] of a transfer.
pub(crate) fn time(
    vmm: &Vmm,
    disk: Disk,
    effort: Effort,
    rows: [Row; 2],
    samples: &mut Samples,
) -> Result<()> {
    for (row, time_us) in rows.into_iter().zip(times(vmm, disk, effort)?) {
        samples.add(row, vmm.name(), time_us);
    }
    Ok(())
}

/// Returns the times of a write and of a read, in microseconds: medians of several runs in one
/// guest.
pub(crate) fn times(vmm: &Vmm, disk: Disk, effort: Effort) -> Result<[f64; 2]> {
    let Effort { transfers, repeats } = effort;
    let vm = vmm.boot(&Extras { disk, ..Extras::default() })?;
    // The disk has one of these names, depending on its interface.
    let found = || vm.run("ls /dev/vda /dev/pmem0s 2>/dev/null || true");
    wait_until("the disk exists", DISK_LIMIT, || Ok(!found()?.trim().is_empty()))?;
    let device = found()?.trim().to_owned();
    let time_us = |operation| {
        vm.number(&format!("guest-tool time-blocks {device} {operation} {transfers}"))
            .map(|total| total / f64::from(transfers))
    };
    medians(repeats, || Ok([time_us("write")?, time_us("read")?]))
}

pub(crate) fn make_pool(dir: &Path) -> Result<PathBuf> {
    make_pool_with(dir, &["--thick"])
}

/// Creates a pool with a volume. `options` are those of `pmvol volume create`.
pub(crate) fn make_pool_with(dir: &Path, options: &[&str]) -> Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let path = dir.join("bench-pool");
    forget(&path)?;
    let name = path.display().to_string();
    pmvol(&["create", &name, "--size", &(2 * VOLUME_BYTES).to_string()])?;
    let size = VOLUME_BYTES.to_string();
    pmvol(&[&["volume", "create", &name, "data", "--size", &size], options].concat())?;
    Ok(path)
}

/// Creates an image of zeros that is fully allocated.
pub(crate) fn make_image() -> Result<PathBuf> {
    let path = this_tests_dir().join("image");
    forget(&path)?;
    fs::create_dir_all(this_tests_dir())?;
    fs::write(&path, vec![0; VOLUME_BYTES as usize])
        .with_context(|| format!("Cannot write {}", path.display()))?;
    Ok(path)
}

/// Writes a BTT to a plain file, the same BTT as in a volume.
pub(crate) fn write_btt_file(path: &Path) -> Result<()> {
    let media = MemoryMedia::new(VOLUME_BYTES);
    Layout::new(VOLUME_BYTES, SECTOR_BYTES, Uuid::new_v4())?.format(&media)?;
    fs::write(path, media.to_bytes()).with_context(|| format!("Cannot write {}", path.display()))
}

/// Returns a directory on a disk file system, where writes must be flushed. The emulated host does
/// not have a writable one, so it uses a loop device on tmpfs as the disk.
fn disk_dir() -> Result<PathBuf> {
    if std::env::var("FORESHORE_HOST").is_ok_and(|host| host == "direct") {
        return Ok(std::env::current_dir()?);
    }
    let dir = PathBuf::from("/mnt/bench");
    if dir.is_dir() {
        return Ok(dir);
    }
    fs::create_dir_all(&dir)?;
    let image = this_tests_dir().join("disk");
    File::create(&image)?.set_len(4 * VOLUME_BYTES)?;
    let image = image.display().to_string();
    host::run(&format!("mkfs.ext4 -q -F {image} && mount -o loop {image} {}", dir.display()))?;
    Ok(dir)
}
