//! Phase 1: a stock guest boots with DRAM only.

use anyhow::Result;
use guest_tests::Guest;
use guest_tests::guest::GuestBuilder;

use crate::sizes::Sizes;
use crate::{claim, event, phase};

/// Boots the guest, and checks its memory from inside the guest.
pub(crate) fn show(builder: &GuestBuilder) -> Result<Guest> {
    phase(1, "a stock Debian guest boots on DRAM alone");
    event("VM governed boots");
    let guest = builder.boot()?;
    event("its guest is up");
    print!("{}", indented(&guest.run("uname -sr; free -m; cat /proc/swaps")?));

    let total_mib: u64 =
        number(&guest, "awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo")?;
    claim(
        total_mib < 384,
        &format!("free shows {total_mib} MiB in total, less than the 384 MiB of DRAM at boot"),
    )?;
    let pm_blocks =
        number(&guest, "ls -d /sys/devices/system/node/node1/memory* 2>/dev/null | wc -l")?;
    claim(pm_blocks == 0, "the guest has no memory block of PM")?;
    let sizes = Sizes::of(&guest)?;
    claim(
        sizes.pm.plugged_bytes == 0 && sizes.dram.plugged_bytes == 0,
        "nothing is plugged in the DRAM and PM zones",
    )?;
    let swap_mib = number(&guest, "awk '/^SwapTotal/ { print int($2 / 1024) }' /proc/meminfo")?;
    claim(swap_mib > 0, &format!("the guest has {swap_mib} MiB of swap (zram)"))?;
    Ok(guest)
}

fn number(guest: &Guest, command: &str) -> Result<u64> {
    Ok(guest.run(command)?.trim().parse()?)
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    | {line}\n")).collect()
}
