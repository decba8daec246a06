//! Measures plugging and unplugging with virtio-mem in an idle guest.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use guest_tests::wait_until;

use crate::samples::{Row, Samples};
use crate::usage::wait_until_idle;
use crate::vmm::{BOOT_MIB, Extras, MIB, Vm, Vmm};

const PLUG_MIB: u64 = 1024;
/// Size of files in the guest. Linux allocates them from movable memory first, and so from plugged
/// memory.
const USED_MIB: u64 = 700;
/// Lower limit of the boot memory that the guest can use.
const USABLE_MIB: u64 = BOOT_MIB * 3 / 4;
/// Resolution of the measured times. Each check is a request to the VMM.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const LIMIT: Duration = Duration::from_secs(120);

/// Plugs 1 GiB into a fresh guest, and unplugs it unused. Then repeats this, with most of the
/// memory used in between.
pub(crate) fn measure(vmm: &Vmm, samples: &mut Samples) -> Result<()> {
    let vm = vmm.boot(&Extras { hotplug_mib: PLUG_MIB, ..Extras::default() })?;
    wait_until_idle(vm.pid())?;
    samples.add(Row::Plug, vmm.name(), resize(&vm, PLUG_MIB * MIB)?.as_secs_f64());
    wait_until_online(&vm, PLUG_MIB)?;
    wait_until_idle(vm.pid())?;
    samples.add(Row::Unplug, vmm.name(), resize(&vm, 0)?.as_secs_f64());
    resize(&vm, PLUG_MIB * MIB)?;
    wait_until_online(&vm, PLUG_MIB)?;
    vm.run(&format!(
        "mount -o remount,size=100% /dev/shm; dd if=/dev/zero of=/dev/shm/used bs=1M count={USED_MIB}; rm /dev/shm/used"
    ))?;
    wait_until_idle(vm.pid())?;
    samples.add(Row::UnplugUsed, vmm.name(), resize(&vm, 0)?.as_secs_f64());
    Ok(())
}

/// Returns the time from the request until the guest's driver has completed it.
pub(crate) fn resize(vm: &Vm, bytes: u64) -> Result<Duration> {
    let started = Instant::now();
    vm.request_bytes(bytes)?;
    while vm.plugged_bytes()? != bytes {
        ensure!(
            started.elapsed() < LIMIT,
            "{} bytes are plugged instead of {bytes}",
            vm.plugged_bytes()?
        );
        thread::sleep(POLL_INTERVAL);
    }
    Ok(started.elapsed())
}

/// Waits until the guest has added the last plugged block and brought it online.
pub(crate) fn wait_until_online(vm: &Vm, plugged_mib: u64) -> Result<()> {
    wait_until("all memory is online", LIMIT, || Ok(mem_total_mib(vm)? >= plugged_mib + USABLE_MIB))
}

fn mem_total_mib(vm: &Vm) -> Result<u64> {
    Ok(vm.number("awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo")? as u64)
}
