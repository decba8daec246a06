//! A stock kernel comes up, sees the machine it was promised, and goes down again.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::{Guest, Kernel};

use crate::zones::mem_total_mib;

guest_tests::tests![
    stock_guest_has_its_devices_and_powers_off_on_6_12 => has_its_devices(Kernel::V6_12),
    stock_guest_has_its_devices_and_powers_off_on_6_1 => has_its_devices(Kernel::V6_1),
    two_cpus_work_and_reboot_on_6_12 => two_cpus_work(Kernel::V6_12),
    two_cpus_work_and_reboot_on_6_1 (long) => two_cpus_work(Kernel::V6_1),
    memory_above_4_gib_is_there,
    a_shutdown_by_the_api_ends_the_vmm_with_0,
    the_power_button_ends_a_guest_on_6_12 => the_power_button_ends_a_guest(Kernel::V6_12),
    the_power_button_ends_a_guest_on_6_1 (extended) => the_power_button_ends_a_guest(Kernel::V6_1),
];

/// Checks what the kernel boots with, and that a power-off ends the VMM with exit code 0.
fn has_its_devices(kernel: Kernel) -> Result<()> {
    let guest = Guest::builder().kernel(kernel).memory("size=768M").boot()?;
    let release = guest.run("uname -r")?;
    ensure!(release.starts_with(&format!("{kernel}.")), "The guest runs {release}");
    let mib = mem_total_mib(&guest)?;
    // The kernel keeps some 30 MiB for itself before it counts.
    ensure!((700..=768).contains(&mib), "MemTotal is {mib} MiB");
    rng_feeds_the_kernel(&guest)?;
    guest.no_kernel_complaints()?;
    guest.power_off()
}

fn rng_feeds_the_kernel(guest: &Guest) -> Result<()> {
    let current = guest.run("cat /sys/class/misc/hw_random/rng_current")?;
    ensure!(current.starts_with("virtio_rng"), "The kernel's source is {current:?}");
    let read = guest
        .run("dd if=/dev/hwrng bs=64 count=1 | sha256sum; dd if=/dev/hwrng bs=64 count=1 | sha256sum")?;
    let mut sums = read.lines();
    ensure!(sums.next() != sums.next(), "Two reads give the same bytes:\n{read}");
    Ok(())
}

/// Checks that two CPUs write memory without complaints, and that a reboot from inside keeps the VMM's
/// process.
fn two_cpus_work(kernel: Kernel) -> Result<()> {
    let guest = Guest::builder().kernel(kernel).cpus(2).boot()?;
    ensure!(guest.run("nproc")?.trim() == "2", "Not two CPUs");
    guest.run("for n in 1 2 3 4; do dd if=/dev/zero of=/tmp/$n bs=1M count=20; done; rm /tmp/*; sync")?;
    guest.no_kernel_complaints()?;
    let boot_id = || guest.run("cat /proc/sys/kernel/random/boot_id");
    let first = boot_id()?;
    guest.reboot_from_inside()?;
    ensure!(boot_id()? != first, "The same boot answers");
    guest.no_kernel_complaints()
}

fn memory_above_4_gib_is_there() -> Result<()> {
    let guest = Guest::builder().memory("size=3584M").boot()?;
    let mib = mem_total_mib(&guest)?;
    ensure!((3350..=3584).contains(&mib), "MemTotal is {mib} MiB");
    ensure!(guest.run("cat /proc/iomem")?.contains("100000000-"), "No memory begins at 4 GiB");
    guest.no_kernel_complaints()
}

fn a_shutdown_by_the_api_ends_the_vmm_with_0() -> Result<()> {
    let guest = Guest::builder().boot()?;
    guest.api("PUT", "vmm.shutdown", None)?;
    let status = guest.wait_for_exit(Duration::from_secs(30))?;
    ensure!(status.success(), "The VMM ended with {status}");
    Ok(())
}

/// The guest's own programs end it: that is all the button asks for. Once while the guest runs, and once on a guest that stands still,
/// which hears of it as it goes on.
fn the_power_button_ends_a_guest(kernel: Kernel) -> Result<()> {
    for paused in [false, true] {
        let guest = Guest::builder().kernel(kernel).boot()?;
        if paused {
            guest.api("PUT", "vm.pause", None)?;
        }
        guest.api("PUT", "vm.power-button", None)?;
        if paused {
            guest.api("PUT", "vm.resume", None)?;
        }
        let status = guest.wait_for_exit(Duration::from_secs(30))?;
        ensure!(status.success(), "The VMM ended with {status}");
    }
    Ok(())
}
