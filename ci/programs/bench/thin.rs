//! Compares direct transfers of 4 KiB to thin and to thick volumes.
//!
//! With a counted clock, a ratio is that of all instructions of the guest, of KVM and of the VMM.

use anyhow::Result;
use guest_tests::runner::this_tests_dir;

use crate::samples::{Row, Samples};
use crate::vmm::{Disk, FORESHORE, Vmm};
use crate::volume::{EXITING, UNFLUSHED, make_pool_with, times};

pub(crate) fn measure(samples: &mut Samples) -> Result<()> {
    for (interface, effort, rows) in [
        ("virtio-blk", EXITING, [Row::ThinEngineWrite, Row::ThinEngineRead]),
        ("virtio-pmem", EXITING, [Row::ThinPmemWrite, Row::ThinPmemRead]),
        ("nvdimm", UNFLUSHED, [Row::ThinNvdimmWrite, Row::ThinNvdimmRead]),
    ] {
        let times_with = |options| {
            let pool = make_pool_with(&this_tests_dir(), options)?;
            let volume = format!("pool={},name=data,interface={interface}", pool.display());
            times(&Vmm::Foreshore, Disk::Volume(volume), effort)
        };
        // The first run is discarded, so all chunks that later writes use exist.
        let (thick, thin) = (times_with(&["--thick"])?, times_with(&["--thin"])?);
        for (row, (thin, thick)) in rows.into_iter().zip(thin.into_iter().zip(thick)) {
            samples.add(row, FORESHORE, thin / thick);
        }
    }
    Ok(())
}
