//! Kills guests while they write.

use anyhow::{Result, ensure};
use guest_tests::runner::this_tests_dir;
use guest_tests::torn::{Format, Interface, Setup, Until, Victim, run_rounds};
use guest_tests::{Kernel, Pool};

const LANES: u64 = 2;

/// Kills `rounds` guests. Prints a line for each result, and a line with the totals.
pub(crate) fn run(
    interface: Interface,
    kernel: Kernel,
    rounds: u32,
    seed: u64,
    raw: bool,
) -> Result<()> {
    let (format, until) = if raw { (Format::Raw, Until::Torn) } else { (Format::Btt, Until::Done) };
    let checks = if raw { 60 } else { 10 };
    let setup = Setup { kernel, format, checks, ..Setup::new(interface) };
    let dir = this_tests_dir();
    std::fs::create_dir_all(&dir)?;
    let victim =
        |lane| Victim::create(Pool::by_path(&dir.join(format!("pool{lane}"))), setup, seed + lane);
    let tally = run_rounds((0..LANES).map(victim).collect::<Result<_>>()?, rounds, until)?;
    println!("{setup}, seed {seed}: {tally}");
    // Pools and logs are needed only as evidence of a fault.
    std::fs::remove_dir_all(&dir)?;
    ensure!(tally.flushes > 0, "No flush was acknowledged, so the test proves nothing");
    ensure!(!raw || tally.torn > 0, "No sector was torn, so the test proves nothing");
    Ok(())
}
