//! Kills guests while they write.

use std::str::FromStr;

use anyhow::{Error, Result, ensure};
use guest_tests::runner::this_tests_dir;
use guest_tests::torn::{Format, Interface, Load, Setup, Until, Victim, run_rounds};
use guest_tests::{Kernel, Pool};

const LANES: u64 = 2;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Volume {
    Thick,
    Thin,
    Raw,
    /// Thin volume. The VMM moves or releases its chunks.
    Loaded(Load),
}

impl FromStr for Volume {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "thick" => Self::Thick,
            "thin" => Self::Thin,
            "raw" => Self::Raw,
            load => Self::Loaded(load.parse()?),
        })
    }
}

impl Volume {
    pub(crate) fn setup(self, interface: Interface, kernel: Kernel) -> Result<Setup> {
        let plain = Setup { kernel, checks: 10, ..Setup::new(interface) };
        Ok(match self {
            Self::Thick => plain,
            Self::Thin => Setup { is_thin: true, ..plain },
            Self::Raw => Setup { format: Format::Raw, checks: 60, ..plain },
            Self::Loaded(load) => {
                ensure!(load.works_with(interface), "No {load} on {interface}");
                Setup::with_load(load, kernel, interface)
            }
        })
    }
}

/// Kills `rounds` guests. Prints a line for each result, and a line with the totals.
pub(crate) fn run(setup: Setup, rounds: u32, seed: u64) -> Result<()> {
    let is_raw = setup.format == Format::Raw;
    let until = if is_raw { Until::Torn } else { Until::Done };
    let dir = this_tests_dir();
    std::fs::create_dir_all(&dir)?;
    let victim =
        |lane| Victim::create(Pool::by_path(&dir.join(format!("pool{lane}"))), setup, seed + lane);
    let tally = run_rounds((0..LANES).map(victim).collect::<Result<_>>()?, rounds, until)?;
    println!("{setup}, seed {seed}: {tally}");
    // Pools and logs are needed only as evidence of a fault.
    std::fs::remove_dir_all(&dir)?;
    ensure!(tally.flushes > 0, "No flush was acknowledged, so the test proves nothing");
    ensure!(!is_raw || tally.torn > 0, "No sector was torn, so the test proves nothing");
    ensure!(
        setup.load.is_none() || tally.moved_bytes > 0,
        "The VMM moved and released no chunks, so the test proves nothing"
    );
    Ok(())
}
