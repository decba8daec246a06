//! Random direct transfers of 4 KiB to an image, one at a time and many.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use guest_tests::runner::this_tests_dir;
use guest_tests::{host_memory, wait_until};

use crate::samples::{Row, Samples, median};
use crate::vmm::{Disk, Extras, MIB, Vm, Vmm};

const IMAGE_BYTES: u64 = 64 * MIB;
const TRANSFERS: u32 = 2000;
const REPEATS: usize = 3;
const DEEP: u32 = 32;
const DISK_LIMIT: Duration = Duration::from_secs(60);

/// Each row is the median of some runs of one guest, after a run that touches everything for the
/// first time.
pub fn measure(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    host_memory::even_out()?;
    let image = this_tests_dir().join("disk-image");
    fs::create_dir_all(this_tests_dir())?;
    fs::write(&image, vec![0; IMAGE_BYTES as usize]).context("Cannot write the image")?;
    let vm = vmm.start(&Extras { disk: Disk::Image(image.clone()), ..Extras::default() })?;
    vm.wait_for_shell()?;
    wait_until("the disk is there", DISK_LIMIT, || Ok(vm.try_run("test -b /dev/vda")?.code == 0))?;
    for (row, what, depth) in [
        (Row::DiskWrite, "write", 1),
        (Row::DiskRead, "read", 1),
        (Row::DiskWriteDeep, "write", DEEP),
        (Row::DiskReadDeep, "read", DEEP),
    ] {
        time(&vm, what, depth)?;
        let times_us = (0..REPEATS).map(|_| time(&vm, what, depth)).collect::<Result<Vec<_>>>()?;
        samples.add(row, vmm.name(), median(&times_us).context("No repeats")?);
    }
    drop(vm);
    fs::remove_file(&image).context("Cannot remove the image")
}

fn time(vm: &Vm, what: &str, depth: u32) -> Result<f64> {
    let total = vm.run(&format!("guest-tool time-blocks /dev/vda {what} {TRANSFERS} {depth}"))?;
    let total_us: f64 =
        total.trim().parse().with_context(|| format!("time-blocks says {total:?}"))?;
    Ok(total_us / f64::from(TRANSFERS))
}
