//! Tests of kernel memory loads in guests without an agent. The kernel command line reserves DRAM
//! for the kernel, and the governor plugs PM according to the statistics of the virtio balloon.

use anyhow::{Result, bail, ensure};
use guest_tests::guest::Script;
use guest_tests::{Guest, Pool};

use crate::kernel_memory::{LOAD_LIMIT, Load, has_killed, kernel_mib, nothing_died, run_to_goal};

guest_tests::tests![
    tmpfs_beyond_dram_is_held_without_an_agent: 300 (long),
    loads_of_kernel_memory_are_held_without_an_agent: 600 (extended),
    full_dram_leaves_the_kernel_its_reserve_without_an_agent: 400 (extended),
    kernel_has_no_reserve_without_the_command_line: 400 (extended),
];

fn boot(pool: &Pool, cmdline: &str) -> Result<Guest> {
    Guest::builder()
        .memory("size=384M")
        .pm_memory(&format!("pool={},size=512M", pool.name()))
        .argument("--balloon", "size=0,deflate_on_oom=on")
        .pressure("psi")
        .cmdline(&format!("foreshore.agent=off {cmdline}"))
        .boot()
}

/// Fills a tmpfs beyond all DRAM. The load grows slowly, because statistics are received once per
/// second.
fn fill_tmpfs(guest: &Guest) -> Result<()> {
    let load = "mkdir /m && mount -t tmpfs -o size=2G t /m && i=0 && while [ $i -lt 56 ]; do \
                dd if=/dev/zero of=/m/$i bs=1M count=8 2>/dev/null || exit 1; \
                i=$((i+1)); sleep 0.35; done; du -sm /m";
    let written = guest.run_within(LOAD_LIMIT, load)?;
    ensure!(written.starts_with("448"), "Not all was written: {written}");
    Ok(())
}

fn tmpfs_beyond_dram_is_held_without_an_agent() -> Result<()> {
    let pool = Pool::create("640M")?;
    let guest = boot(&pool, "")?;
    fill_tmpfs(&guest)?;
    nothing_died(&guest)
}

const SOCKETS: Load =
    Load { command: "exec guest-tool fill-sockets 150", goal: "held 150", kernel_mib: 170 };
const FILES: Load = Load {
    command: "mkdir -p /files && mount -t tmpfs -o size=4G,nr_inodes=0 files /files && \
              guest-tool make-files /files 150000 && exec echo all",
    goal: "all",
    kernel_mib: 150,
};
const MISSING_FILES: Load = Load {
    command: "guest-tool miss-files /sys 1000000 && exec echo all",
    goal: "all",
    kernel_mib: 50,
};
const PROCESSES: Load = Load {
    command: "dd if=/dev/zero of=/run/mapped bs=1M count=8 2>/dev/null && \
              echo 8192 >/proc/sys/kernel/pid_max && exec guest-tool map-by-processes /run/mapped 1500",
    goal: "held 1500",
    kernel_mib: 130,
};

/// Runs `load`, and checks that the kernel has allocated the memory for it.
fn hold(guest: &Guest, load: &Load) -> Result<Script> {
    let idle_mib = kernel_mib(guest)?;
    let Some(script) = run_to_goal(guest, load)? else {
        bail!("{} ended early: {}", load.command, guest.run("dmesg | grep -v 'KB$' | tail -n 60")?);
    };
    let used_mib = kernel_mib(guest)?.saturating_sub(idle_mib);
    println!("{} takes {used_mib} MiB of kernel memory", load.command);
    ensure!(used_mib >= load.kernel_mib, "{} takes only {used_mib} MiB", load.command);
    Ok(script)
}

fn loads_of_kernel_memory_are_held_without_an_agent() -> Result<()> {
    for load in [SOCKETS, FILES, MISSING_FILES, PROCESSES] {
        let pool = Pool::create("640M")?;
        let guest = boot(&pool, "")?;
        let script = hold(&guest, &load)?;
        // Programs then get PM, because the kernel uses most of DRAM.
        fill_tmpfs(&guest)?;
        nothing_died(&guest)?;
        drop((script, guest));
        std::fs::remove_file(pool.path())?;
    }
    Ok(())
}

/// Kernel memory that fits into the reserve: a sixteenth of 384 MiB, plus 8 MiB for the page
/// descriptors of 512 MiB.
const WITHIN_RESERVE: Load =
    Load { command: "exec guest-tool fill-sockets 20", goal: "held 20", kernel_mib: 20 };

fn full_dram_leaves_the_kernel_its_reserve_without_an_agent() -> Result<()> {
    let pool = Pool::create("640M")?;
    let guest = boot(&pool, "")?;
    fill_tmpfs(&guest)?;
    let _script = hold(&guest, &WITHIN_RESERVE)?;
    nothing_died(&guest)
}

/// Shows that [`full_dram_leaves_the_kernel_its_reserve_without_an_agent`] can fail.
fn kernel_has_no_reserve_without_the_command_line() -> Result<()> {
    let pool = Pool::create("640M")?;
    let guest = boot(&pool, "movablecore=0")?;
    let result = fill_tmpfs(&guest).and_then(|()| hold(&guest, &WITHIN_RESERVE));
    ensure!(has_killed(&guest)?, "No process was killed without a reserve: {:?}", result.err());
    Ok(())
}
