//! Tests that a stock kernel boots, finds the expected machine, and shuts down.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::{Guest, this_tests_kernel};

use crate::zones::mem_total_mib;

guest_tests::tests![
    stock_guest_has_its_devices_and_powers_off on [V6_12, V6_1],
    two_cpus_work_reboot_and_end_by_the_power_button_on_6_12 x 2 =>
        press_the_power_button(two_cpus_work()?),
    two_cpus_work_reboot_and_end_by_the_power_button_in_a_pause_on_6_1 (long) on [V6_1] x 2 =>
        press_the_power_button_in_a_pause(two_cpus_work()?),
];

/// Checks the devices that the kernel finds, and that a power-off ends the VMM with exit code 0.
fn stock_guest_has_its_devices_and_powers_off() -> Result<()> {
    let guest = Guest::builder().packed_kernel().memory("size=768M").boot()?;
    let release = guest.run("uname -r")?;
    ensure!(release.starts_with(&format!("{}.", this_tests_kernel())), "The guest runs {release}");
    let mib = mem_total_mib(&guest)?;
    // MemTotal excludes about 30 MiB that the kernel has reserved.
    ensure!((700..=768).contains(&mib), "MemTotal is {mib} MiB");
    rng_feeds_the_kernel(&guest)?;
    has_nested_virtualization_and_kvm_clock(&guest)?;
    guest.no_kernel_complaints()?;
    guest.power_off()
}

fn rng_feeds_the_kernel(guest: &Guest) -> Result<()> {
    let current = guest.run("cat /sys/class/misc/hw_random/rng_current")?;
    ensure!(current.starts_with("virtio_rng"), "The kernel's entropy source is {current:?}");
    let read = guest.run(
        "dd if=/dev/hwrng bs=64 count=1 | sha256sum; dd if=/dev/hwrng bs=64 count=1 | sha256sum",
    )?;
    let mut sums = read.lines();
    ensure!(sums.next() != sums.next(), "Two reads returned the same bytes:\n{read}");
    Ok(())
}

/// Checks the CPU features and the clock that a guest has by default, without options of `--cpus`.
fn has_nested_virtualization_and_kvm_clock(guest: &Guest) -> Result<()> {
    let flags = guest.run("grep -m1 ^flags /proc/cpuinfo")?;
    ensure!(
        flags.split_whitespace().any(|flag| flag == "svm" || flag == "vmx"),
        "The guest cannot run guests: {flags}"
    );
    let clocks =
        guest.run("cat /sys/devices/system/clocksource/clocksource0/available_clocksource")?;
    ensure!(
        clocks.split_whitespace().any(|clock| clock == "kvm-clock"),
        "kvm-clock is not among {clocks}"
    );
    Ok(())
}

fn two_cpus_work() -> Result<Guest> {
    let guest = Guest::builder().boot()?;
    ensure!(guest.run("nproc")?.trim() == "2", "Not two CPUs");
    guest.run(
        "for n in 1 2 3 4; do dd if=/dev/zero of=/tmp/$n bs=1M count=20; done; rm /tmp/*; sync",
    )?;
    guest.no_kernel_complaints()?;
    let boot_id = || guest.run("cat /proc/sys/kernel/random/boot_id");
    let first = boot_id()?;
    guest.reboot_from_inside()?;
    ensure!(boot_id()? != first, "The guest did not reboot");
    guest.no_kernel_complaints()?;
    Ok(guest)
}

/// Checks that the guest's own programs shut it down after a single press of the button.
fn press_the_power_button(guest: Guest) -> Result<()> {
    guest.command("vm.power-button")?;
    ends_with_0(guest)
}

/// Checks that a paused guest receives the button press on resume.
fn press_the_power_button_in_a_pause(guest: Guest) -> Result<()> {
    guest.command("vm.pause")?;
    guest.command("vm.power-button")?;
    guest.command("vm.resume")?;
    ends_with_0(guest)
}

fn ends_with_0(guest: Guest) -> Result<()> {
    let status = guest.wait_for_exit(Duration::from_secs(30))?;
    ensure!(status.success(), "The VMM ended with {status}");
    Ok(())
}
