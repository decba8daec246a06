//! Tests that the VMM reports a panic of the guest's kernel.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::Guest;
use guest_tests::runner::this_tests_dir;

guest_tests::tests![
    guest_panic_is_an_event on [V6_12, V6_1 long],
];

const LIMIT: Duration = Duration::from_secs(60);

fn guest_panic_is_an_event() -> Result<()> {
    let events = this_tests_dir().join("events");
    let guest = Guest::builder()
        .words(["--pvpanic"])
        .argument("--event-monitor", &format!("path={}", events.display()))
        .boot()?;
    guest.run("modprobe pvpanic-pci")?;
    let driver = guest.run("ls /sys/bus/pci/drivers/pvpanic-pci")?;
    ensure!(driver.contains("0000:00:"), "The driver has no device: {driver}");
    let panics = || guest.metric("foreshore_guest_panics_total", &[("event", "panic")]);
    ensure!(panics()? == 0.0, "The metrics count a panic in advance");
    // The guest does not restart after a panic, and its shell does not respond.
    let _panicking = guest.start_script(LIMIT, "echo c >/proc/sysrq-trigger")?;
    guest.wait_until("the panic is counted", LIMIT, || Ok(panics()? == 1.0))?;
    guest.wait_until("the event is sent", LIMIT, || {
        let events = fs::read_to_string(&events)?;
        Ok(events.contains("\"source\": \"guest\"") && events.contains("\"event\": \"panic\""))
    })?;
    guest.still_running()
}
