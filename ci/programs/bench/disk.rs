//! Measures random direct transfers of 4 KiB to an image, at queue depths of 1 and 32.

use std::fs;

use anyhow::{Context, Result};
use guest_tests::runner::this_tests_dir;

use crate::samples::{Row, Samples};
use crate::vmm::{Disk, Extras, MIB, Vmm};

const IMAGE_BYTES: u64 = 64 * MIB;
const TRANSFERS: u32 = 2000;
const REPEATS: usize = 3;
const QUEUE_DEPTH: u32 = 32;

/// Adds a value for each row: the median of several runs in one guest. The first run is discarded,
/// because it touches all memory for the first time.
pub(crate) fn measure(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    let image = this_tests_dir().join("disk-image");
    fs::create_dir_all(this_tests_dir())?;
    fs::write(&image, vec![0; IMAGE_BYTES as usize]).context("Cannot write the image")?;
    let vm = vmm.boot(&Extras { disk: Disk::Image(image.clone()), ..Extras::default() })?;
    vm.wait_for_path("/dev/vda")?;
    for (row, operation, depth) in [
        (Row::DiskWrite, "write", 1),
        (Row::DiskRead, "read", 1),
        (Row::DiskWriteDeep, "write", QUEUE_DEPTH),
        (Row::DiskReadDeep, "read", QUEUE_DEPTH),
    ] {
        let command = format!("guest-tool time-blocks /dev/vda {operation} {TRANSFERS} {depth}");
        samples.add_medians([row], vmm.name(), REPEATS, || {
            Ok([vm.number(&command)? / f64::from(TRANSFERS)])
        })?;
    }
    drop(vm);
    fs::remove_file(&image).context("Cannot remove the image")
}
