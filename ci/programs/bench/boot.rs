//! Measures the time from exec to the guest's init, and the VMM's own memory when the guest is at
//! rest.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::samples::{Row, Samples};
use crate::usage::{vmm_memory, wait_until_idle};
use crate::vmm::{BOOT_MIB, Extras, MIB, Vm, Vmm};
use guest_tests::{BOOT_LIMIT, host_memory};

/// First line that guest/image/init prints.
const INIT_LINE: &str = "foreshore-guest: init";
/// Resolution of the measured times.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

pub(crate) fn measure(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    host_memory::even_out()?;
    let started = Instant::now();
    let vm = vmm.start(&Extras::default())?;
    let booted = wait_for_init(&vm, started)?;
    samples.add(Row::Boot, vmm.name(), booted.as_secs_f64());
    vm.wait_for_shell(BOOT_LIMIT)?;
    wait_until_idle(vm.pid())?;
    let memory = vmm_memory(vm.pid(), BOOT_MIB * MIB)?;
    samples.add(Row::VmmMemory, vmm.name(), memory.pss as f64 / MIB as f64);
    eprintln!("bench:     of it anonymous: {} KiB", memory.anonymous / 1024);
    Ok(())
}

pub(crate) fn wait_for_init(vm: &Vm, started: Instant) -> Result<Duration> {
    loop {
        if vm.console_log()?.contains(INIT_LINE) {
            return Ok(started.elapsed());
        }
        vm.still_running()?;
        ensure!(
            started.elapsed() < BOOT_LIMIT,
            "The guest did not start its init within {BOOT_LIMIT:?}"
        );
        thread::sleep(POLL_INTERVAL);
    }
}
