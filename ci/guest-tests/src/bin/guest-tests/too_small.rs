//! The short form of `ci/soak --only pressure`: a guest with half of the DRAM that its workload needs.

use anyhow::{Context, Result, ensure};
use guest_tests::pressure::run::run;
use guest_tests::pressure::{About, Config, GuestSize, MIB, Outcome, Watched, Workload};

guest_tests::tests![a_guest_with_half_of_its_dram_runs_as_with_all_of_it: 240];

const WORKLOAD: Workload = Workload { name: "touch", mib: 320 };
/// More than the workload, for the guest's kernel and programs.
const ROOM_MIB: u64 = 384;
const SHARE_PERCENT: u64 = 50;
/// With half of it a guest would swap for a minute.
const SWAPPING_SHARE_PERCENT: u64 = 75;

/// What became of it, for whoever reads the log, and what it did not meet.
fn unmet(name: &str, outcome: &Outcome, alone: &Outcome) -> Vec<(About, String)> {
    let mib = |bytes: u64| bytes / MIB;
    println!(
        "{name}: {:.2} s {:?}, {} MiB needed and {} held at peak, {} swapped in, {} held at last, back after {:?} s",
        outcome.run_s,
        outcome.phases,
        mib(outcome.peak_need_bytes),
        mib(outcome.peak_held_bytes),
        mib(outcome.swapped_in_bytes),
        mib(outcome.last_held_bytes),
        outcome.back_s
    );
    let conditions = outcome.conditions(alone).into_iter().filter(|condition| !condition.met);
    conditions.map(|condition| (condition.about, condition.what)).collect()
}

fn a_guest_with_half_of_its_dram_runs_as_with_all_of_it() -> Result<()> {
    let run = |config: Config, dram_mib: u64| {
        let name = config.to_string();
        // In real time the agent needs a vCPU of its own: emulated, a fill takes one for hundreds of MiB at a time.
        let size = GuestSize { cpus: 2, dram_mib };
        run(WORKLOAD, &config, size, &name, Watched::UntilEnoughIsBack).with_context(|| name)
    };
    let alone = run(Config::AllDram, WORKLOAD.mib + ROOM_MIB)?;
    let missed = unmet("DRAM alone", &alone, &alone);
    ensure!(alone.sum.is_some() && missed.is_empty(), "With DRAM alone: {missed:?}");
    let dram_mib = |percent: u64| (alone.peak_need_bytes / MIB * percent / 100).next_multiple_of(8);
    let psi = run(Config::Policy("psi"), dram_mib(SHARE_PERCENT))?;
    let missed = unmet("psi", &psi, &alone);
    ensure!(missed.is_empty(), "With {} MiB of DRAM under psi: {missed:?}", dram_mib(SHARE_PERCENT));
    // The same conditions see it where nobody grows the guest, and it lacks less.
    let swap = run(Config::SwapVirtioBlk, dram_mib(SWAPPING_SHARE_PERCENT))?;
    let missed = unmet("swap", &swap, &alone);
    let seen = missed.iter().any(|(about, _)| *about == About::SwapIns);
    ensure!(seen, "A guest that swaps has swapped nothing in, or nobody saw it: {missed:?}");
    Ok(())
}
