//! Runs guests with less DRAM than their workload needs, under each policy and with each kind of
//! swap.

mod plot;
mod report;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::host_memory;
use guest_tests::pressure::run::{self, Outcome, WatchEnd};
use guest_tests::pressure::{Config, GuestSize, MIB, WORKLOADS, Workload};

use report::Row;

/// DRAM for the guest's kernel and programs, in addition to the workload.
const SPARE_MIB: u64 = 512;
/// Granularity of DRAM sizes. The need varies slightly between boots.
const DRAM_STEP_MIB: u64 = 8;

struct Options {
    workloads: Vec<Workload>,
    configs: Vec<Config>,
    shares: Vec<u64>,
    rounds: usize,
    out: PathBuf,
}

impl Options {
    fn parse(arguments: &[&str]) -> Result<Self> {
        let out = std::env::var_os("OUT").map_or_else(|| PathBuf::from("."), PathBuf::from);
        let (workloads, configs) = (WORKLOADS.to_vec(), Config::all());
        let mut options = Self { workloads, configs, shares: vec![75, 50], rounds: 1, out };
        for pair in arguments.chunks(2) {
            let [flag, value] = pair else { bail!("{} needs a value", pair[0]) };
            match *flag {
                "--workload" => options.workloads = list(value)?,
                "--config" => options.configs = list(value)?,
                "--dram" => options.shares = list(value)?,
                "--rounds" => options.rounds = value.parse()?,
                _ => bail!("unknown flag {flag}"),
            }
        }
        ensure!(options.rounds > 0, "--rounds is 0, must be at least 1");
        let in_range = |share: &u64| (30..=100).contains(share);
        ensure!(options.shares.iter().all(in_range), "--dram must be percentages, 30 to 100");
        Ok(options)
    }
}

fn list<T: std::str::FromStr>(text: &str) -> Result<Vec<T>>
where
    T::Err: Into<anyhow::Error>,
{
    text.split(',').map(|item| item.parse().map_err(Into::into)).collect()
}

/// Runs workloads and configurations in turn during this boot of the host. Fails if a condition
/// does not hold. Times are only reported.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let options = Options::parse(arguments)?;
    let mut rows = Vec::new();
    for workload in &options.workloads {
        for round in 1..=options.rounds {
            rows.extend(measure(&options, *workload, round)?);
            // Results are written after each round, so that an interrupted run also has some.
            fs::write(options.out.join("table.md"), report::markdown(&rows))?;
        }
    }
    println!("{}", report::markdown(&rows));
    let verdicts = report::verdicts(&rows);
    for verdict in &verdicts {
        println!("{verdict}");
    }
    let missed = verdicts.iter().filter(|verdict| verdict.is_condition && !verdict.met).count();
    ensure!(missed == 0, "{missed} conditions were not met");
    Ok(())
}

/// Runs one workload in all configurations. The first run has only DRAM and determines how much the
/// workload needs. Other runs get a share of that.
fn measure(options: &Options, workload: Workload, round: usize) -> Result<Vec<Row>> {
    let store = |config: &Config, share: u64, outcome: Outcome| {
        let name = format!("{}-{share}-{config}-{round}", workload.name);
        fs::write(options.out.join(format!("{name}.csv")), outcome.csv())?;
        if let Some(trace) = &outcome.trace {
            fs::write(options.out.join(format!("{name}.trace")), trace)?;
        }
        let csv = format!("{name}.csv");
        let row = Row { workload: workload.name, share, config: config.to_string(), csv, outcome };
        println!("{}", row.line());
        Ok::<_, anyhow::Error>(row)
    };
    let run = |config: &Config, dram_mib: u64, name: &str| {
        host_memory::even_out()?;
        // Instructions can be counted on a single CPU only, and two vCPUs would wait for each other
        // there.
        run::run(workload, config, GuestSize { cpus: 1, dram_mib }, name, WatchEnd::AllReturned)
    };
    let dram_only = run(&Config::AllDram, workload.mib + SPARE_MIB, "all")
        .with_context(|| format!("{} with DRAM alone", workload.name))?;
    ensure!(
        dram_only.sum.is_some(),
        "{} failed with DRAM alone: {:?}",
        workload.name,
        dram_only.failure
    );
    let need_mib = dram_only.peak_need_bytes / MIB;
    let mut rows = vec![store(&Config::AllDram, 100, dram_only)?];
    for share in &options.shares {
        for config in options.configs.iter().filter(|config| **config != Config::AllDram) {
            let dram_mib = (need_mib * share / 100).next_multiple_of(DRAM_STEP_MIB);
            let outcome = run(config, dram_mib, &config.to_string()).with_context(|| {
                format!("{} with {share} % of DRAM and {config}", workload.name)
            })?;
            rows.push(store(config, *share, outcome)?);
        }
    }
    for share in &options.shares {
        let drawn: Vec<&Row> =
            rows.iter().filter(|row| row.share == *share || row.share == 100).collect();
        let name = format!("{}-{share}-{round}", workload.name);
        fs::write(options.out.join(format!("{name}.gnuplot")), plot::script(&name, &drawn))?;
    }
    Ok(rows)
}
