//! Short version of `ci/soak --only pressure`: the guest has half of the DRAM that its workload
//! needs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::Guest;
use guest_tests::guest::Image;
use guest_tests::pressure::run::run;
use guest_tests::pressure::{ConditionKind, Config, GuestSize, MIB, Outcome, WatchEnd, Workload};

use crate::zones::vmstat;

guest_tests::tests![
    a_guest_with_half_of_its_dram_runs_as_with_all_of_it: 240 (long) x 2,
    oom_killer_selects_the_load: 400 (long) x 2,
];

const WORKLOAD: Workload = Workload { name: "touch", mib: 320 };
/// DRAM for the guest's kernel and programs, in addition to the workload.
const SPARE_MIB: u64 = 384;
const SHARE_PERCENT: u64 = 50;
/// DRAM of the swapping guest, as a percentage. With 50 %, it would swap for a minute.
const SWAPPING_SHARE_PERCENT: u64 = 75;

/// Prints the result, and returns the conditions that do not hold.
fn unmet(name: &str, outcome: &Outcome, alone: &Outcome) -> Vec<(ConditionKind, String)> {
    let mib = |bytes: u64| bytes / MIB;
    println!(
        "{name}: {:.2} s {:?}, {} MiB needed and {} held at peak, {} swapped in, {} held at last, back after {:?} s",
        outcome.run_s,
        outcome.phases,
        mib(outcome.peak_need_bytes),
        mib(outcome.peak_held_bytes),
        mib(outcome.swapped_in_bytes),
        mib(outcome.last_held_bytes),
        outcome.return_s
    );
    let conditions = outcome.conditions(alone).into_iter().filter(|condition| !condition.met);
    conditions.map(|condition| (condition.kind, condition.description)).collect()
}

fn a_guest_with_half_of_its_dram_runs_as_with_all_of_it() -> Result<()> {
    let run = |name: &str, config: Config, dram_mib: u64| {
        // The agent needs its own vCPU to report in time. A fill occupies an emulated vCPU for
        // hundreds of MiB.
        let size = GuestSize { cpus: 2, dram_mib };
        run(WORKLOAD, &config, size, name, WatchEnd::WithinLimit).with_context(|| name.to_owned())
    };
    let alone = run("all-dram", Config::AllDram, WORKLOAD.mib + SPARE_MIB)?;
    let missed = unmet("DRAM alone", &alone, &alone);
    ensure!(alone.sum.is_some() && missed.is_empty(), "With DRAM alone: {missed:?}");
    let dram_mib = |percent: u64| (alone.peak_need_bytes / MIB * percent / 100).next_multiple_of(8);
    // Short delays before a shrink. Unit tests cover the default delays.
    let soon = Config::Policy("psi,idle=2s,cool_down=1s");
    let psi = run("psi", soon, dram_mib(SHARE_PERCENT))?;
    let missed = unmet("psi", &psi, &alone);
    ensure!(
        missed.is_empty(),
        "With {} MiB of DRAM under psi: {missed:?}",
        dram_mib(SHARE_PERCENT)
    );
    // Shows that these conditions can fail: they should detect a guest that the governor does not
    // grow, even if it has more DRAM.
    let swap = run("swap", Config::SwapVirtioBlk, dram_mib(SWAPPING_SHARE_PERCENT))?;
    let missed = unmet("swap", &swap, &alone);
    let has_swap_ins = missed.iter().any(|(kind, _)| *kind == ConditionKind::SwapIns);
    ensure!(has_swap_ins, "The report has no swap-ins of a swapping guest: {missed:?}");
    Ok(())
}

/// In a guest without free memory and swap, the OOM killer should kill the load's programs instead
/// of the programs that report.
fn oom_killer_selects_the_load() -> Result<()> {
    /// Time until a guest that swaps down to its last page kills a process.
    const LIMIT: Duration = Duration::from_secs(300);
    let guest = Guest::builder()
        .image(Image::Workloads)
        .memory("size=256M")
        .cmdline("foreshore.zram=32M")
        .pressure("off")
        .boot()?;
    let score = |process: &str| guest.run(&format!("cat /proc/{process}/oom_score_adj"));
    ensure!(score("self")? == "0\n", "The OOM score of a script is adjusted");
    ensure!(
        score("$(pidof guest-shell)")? == "-1000\n",
        "The guest's shell is not exempt from the OOM killer"
    );
    guest.wait_until_run(
        "the agent is exempt from the OOM killer",
        LIMIT,
        "test $(cat /proc/$(pidof foreshore-agent)/oom_score_adj) = -1000",
    )?;
    // Compilers need memory in addition to their source files, which are written first.
    for (load, mib, programs) in [
        ("redis", 400, &["redis-server", "guest-tool"][..]),
        ("compile", 180, &["tcc", "guest-tool"]),
    ] {
        let kills = vmstat(&guest, "oom_kill")?;
        guest.run("dmesg -c >/dev/null")?;
        let end = guest.try_run(LIMIT, &format!("guest-tool load {load} {mib}"))?;
        ensure!(end.code != 0, "{load} fit into {mib} MiB: {end:?}");
        let log = guest.run("dmesg")?;
        // Example from mm/oom_kill.c: Out of memory: Killed process 197 (redis-server) total-vm:...
        let killed = log.lines().filter_map(|line| {
            line.split_once("Killed process ")?
                .1
                .split_once('(')?
                .1
                .split_once(')')
                .map(|(name, _)| name)
        });
        let killed: Vec<&str> = killed.collect();
        println!("{load} of {mib} MiB ended with {}, killed: {killed:?}", end.code);
        let counted = vmstat(&guest, "oom_kill")? - kills;
        ensure!(
            counted == killed.len() as u64 && counted > 0,
            "The counter has {counted} kills, the log {killed:?}"
        );
        ensure!(
            killed.iter().all(|name| programs.contains(name)),
            "Other programs than those of {load} were killed: {killed:?}"
        );
        guest.wait_until_run(
            "its programs have ended",
            LIMIT,
            "! pidof redis-server tcc guest-tool",
        )?;
    }
    // The next load removes files left by a killed load.
    guest.run_within(LIMIT, "guest-tool load compile 30")?;
    guest.run("! grep /run/load /proc/mounts")?;
    Ok(())
}
