//! Compares direct transfers of 4 KiB to thin and to thick volumes.
//!
//! With a counted clock, a ratio is that of all instructions of the guest, of KVM and of the VMM.

use anyhow::{Context, Result};
use guest_tests::runner::this_tests_dir;

use crate::samples::{Row, Samples, median};
use crate::vmm::{Disk, FORESHORE, Vmm};
use crate::volume::{EXITING, Effort, UNFLUSHED, make_pool_with, time};

pub(crate) fn measure(samples: &mut Samples) -> Result<()> {
    for (interface, effort, rows) in [
        ("virtio-blk", EXITING, [Row::ThinEngineWrite, Row::ThinEngineRead]),
        ("virtio-pmem", EXITING, [Row::ThinPmemWrite, Row::ThinPmemRead]),
        ("nvdimm", UNFLUSHED, [Row::ThinNvdimmWrite, Row::ThinNvdimmRead]),
    ] {
        let thick = medians(interface, effort, &[])?;
        let thin = medians(interface, effort, &["--thin"])?;
        for (row, (thin, thick)) in rows.into_iter().zip(thin.into_iter().zip(thick)) {
            samples.add(row, FORESHORE, thin / thick);
        }
    }
    Ok(())
}

/// Returns the times of a write and of a read when all chunks that the writes use exist.
fn medians(interface: &str, effort: Effort, options: &[&str]) -> Result<[f64; 2]> {
    let pool = make_pool_with(&this_tests_dir(), options)?;
    let volume = format!("pool={},name=data,interface={interface}", pool.display());
    let (rows, mut samples) = ([Row::EngineWrite, Row::EngineRead], Samples::default());
    time(&Vmm::Foreshore, Disk::Volume(volume), effort, rows, &mut samples)?;
    let of = |row| median(samples.of(row, FORESHORE)).context("A transfer has no time");
    Ok([of(Row::EngineWrite)?, of(Row::EngineRead)?])
}
