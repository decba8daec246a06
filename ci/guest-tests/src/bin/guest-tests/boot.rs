//! A stock kernel comes up, sees the machine it was promised, and goes down again.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::{Guest, Kernel};

use crate::zones::mem_total_mib;

guest_tests::tests![
    debian_6_12_boots_from_its_bzimage => boots(Kernel::V6_12),
    debian_6_1_boots_from_its_bzimage => boots(Kernel::V6_1),
    two_cpus_come_up,
    the_guest_has_the_memory_it_was_given,
    memory_above_4_gib_is_there,
    nothing_in_the_guest_complains,
    the_rng_device_feeds_the_kernel,
    a_power_off_ends_the_vmm_with_0,
    a_reboot_from_inside_boots_again_in_the_same_process,
    a_shutdown_by_the_api_ends_the_vmm_with_0,
    the_power_button_ends_a_guest_on_6_12 => the_power_button_ends_a_guest(Kernel::V6_12),
    the_power_button_ends_a_guest_on_6_1 (extended) => the_power_button_ends_a_guest(Kernel::V6_1),
];

fn boots(kernel: Kernel) -> Result<()> {
    let guest = Guest::builder().kernel(kernel).boot()?;
    let release = guest.run("uname -r")?;
    ensure!(release.starts_with(&format!("{kernel}.")), "The guest runs {release}");
    guest.no_kernel_complaints()
}

fn two_cpus_come_up() -> Result<()> {
    for kernel in [Kernel::V6_12, Kernel::V6_1] {
        let guest = Guest::builder().kernel(kernel).cpus(2).boot()?;
        ensure!(guest.run("nproc")?.trim() == "2", "{kernel}: not two CPUs");
        guest.no_kernel_complaints()?;
    }
    Ok(())
}

fn the_guest_has_the_memory_it_was_given() -> Result<()> {
    let guest = Guest::builder().memory("size=768M").boot()?;
    let mib = mem_total_mib(&guest)?;
    // The kernel keeps some 30 MiB for itself before it counts.
    ensure!((700..=768).contains(&mib), "MemTotal is {mib} MiB");
    Ok(())
}

fn memory_above_4_gib_is_there() -> Result<()> {
    let guest = Guest::builder().memory("size=3584M").boot()?;
    let mib = mem_total_mib(&guest)?;
    ensure!((3350..=3584).contains(&mib), "MemTotal is {mib} MiB");
    ensure!(guest.run("cat /proc/iomem")?.contains("100000000-"), "No memory begins at 4 GiB");
    guest.no_kernel_complaints()
}

fn nothing_in_the_guest_complains() -> Result<()> {
    let guest = Guest::builder().cpus(2).boot()?;
    guest.run("for n in 1 2 3 4; do dd if=/dev/zero of=/tmp/$n bs=1M count=20; done; rm /tmp/*; sync")?;
    guest.no_kernel_complaints()
}

fn the_rng_device_feeds_the_kernel() -> Result<()> {
    let guest = Guest::builder().boot()?;
    let current = guest.run("cat /sys/class/misc/hw_random/rng_current")?;
    ensure!(current.starts_with("virtio_rng"), "The kernel's source is {current:?}");
    let read = guest
        .run("dd if=/dev/hwrng bs=64 count=1 | sha256sum; dd if=/dev/hwrng bs=64 count=1 | sha256sum")?;
    let mut sums = read.lines();
    ensure!(sums.next() != sums.next(), "Two reads give the same bytes:\n{read}");
    Ok(())
}

fn a_power_off_ends_the_vmm_with_0() -> Result<()> {
    let guest = Guest::builder().boot()?;
    guest.power_off()
}

fn a_reboot_from_inside_boots_again_in_the_same_process() -> Result<()> {
    let guest = Guest::builder().cpus(2).boot()?;
    let boot_id = || guest.run("cat /proc/sys/kernel/random/boot_id");
    let first = boot_id()?;
    guest.reboot_from_inside()?;
    ensure!(boot_id()? != first, "The same boot answers");
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
