//! Measures the cost of confinement: Foreshore with and without system call filters and Landlock,
//! in turn.

use std::time::Instant;

use anyhow::Result;
use guest_tests::runner::this_tests_dir;
use guest_tests::{BOOT_LIMIT, host_memory};

use crate::boot::wait_for_init;
use crate::plug;
use crate::samples::{Row, Samples};
use crate::usage::{vmm_memory, wait_until_idle};
use crate::vmm::{BOOT_MIB, Disk, Extras, MIB, Vmm};
use crate::volume::{EXITING, UNFLUSHED, make_image, make_pool, time};

/// Reads of PCI configuration space in a run. Each is an exit to the VMM.
const EXITS: u32 = 5_000;
const EXIT_RUNS: usize = 3;
const PLUG_MIB: u64 = 1024;
/// Plugs per value. A single plug takes a few hundred milliseconds, and its end is polled.
const PLUGS: usize = 5;

pub(crate) fn measure(samples: &mut Samples) -> Result<()> {
    for vmm in [Vmm::Foreshore, Vmm::Unconfined] {
        boot_and_exit(&vmm, samples)?;
        plug(&vmm, samples)?;
        transfer(&vmm, samples)?;
    }
    Ok(())
}

fn boot_and_exit(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    host_memory::even_out()?;
    let started = Instant::now();
    let vm = vmm.start(&Extras::default())?;
    let booted = wait_for_init(&vm, started)?;
    samples.add(Row::ConfinedBoot, vmm.name(), booted.as_secs_f64());
    vm.wait_for_shell(BOOT_LIMIT)?;
    wait_until_idle(vm.pid())?;
    let memory = vmm_memory(vm.pid(), BOOT_MIB * MIB)?;
    samples.add(Row::ConfinedMemory, vmm.name(), memory.anonymous as f64 / MIB as f64);
    samples.add_medians([Row::ConfinedExit], vmm.name(), EXIT_RUNS, || {
        let total_us = vm.number(&format!("guest-tool time-exits {EXITS}"))?;
        Ok([total_us / f64::from(EXITS)])
    })
}

fn plug(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    let vm = vmm.boot(&Extras { hotplug_mib: PLUG_MIB, ..Extras::default() })?;
    let mut total_s = 0.0;
    for _ in 0..PLUGS {
        wait_until_idle(vm.pid())?;
        total_s += plug::resize(&vm, PLUG_MIB * MIB)?.as_secs_f64();
        plug::wait_until_online(&vm, PLUG_MIB)?;
        plug::resize(&vm, 0)?;
    }
    samples.add(Row::ConfinedPlug, vmm.name(), total_s / PLUGS as f64);
    Ok(())
}

fn transfer(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    let rows = [Row::ConfinedImageWrite, Row::ConfinedImageRead];
    time(vmm, Disk::Image(make_image()?), EXITING, rows, samples)?;
    let pool = make_pool(&this_tests_dir())?;
    for (interface, effort, rows) in [
        ("virtio-blk", EXITING, [Row::ConfinedEngineWrite, Row::ConfinedEngineRead]),
        ("virtio-pmem", EXITING, [Row::ConfinedPmemWrite, Row::ConfinedPmemRead]),
        ("nvdimm", UNFLUSHED, [Row::ConfinedNvdimmWrite, Row::ConfinedNvdimmRead]),
    ] {
        let volume = format!("pool={},name=data,interface={interface}", pool.display());
        time(vmm, Disk::Volume(volume), effort, rows, samples)?;
    }
    Ok(())
}
