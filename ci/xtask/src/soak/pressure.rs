//! Runs workloads in guests with too little DRAM.
//!
//! Each host has one CPU. A boot runs one workload. If instructions are counted, a boot runs only
//! one DRAM size and one configuration of it. Counted times are the same in every boot, so runs
//! need not share a boot, and a hung boot affects only one run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::boots::{Boots, in_lanes, output_in};
use super::{Arguments, Clock, FOLDER, Soak};
use crate::apt::Apt;
use crate::checkout::{create_folder, list, read, remove_folder, write};
use crate::host::CUT_OFF;
use crate::host::host_kind::load;
use crate::jobs;
use crate::messages::{report, write_output};
use crate::programs::{self, user_path};

const HOST_MIB: u32 = 4096;
/// Limit of a run in real time, including boots. The run itself is cut off after 4 minutes.
const REAL_RUN_S: u32 = 330;
const MAX_REAL_RUNS: u32 = 30;
/// Limits of a run in counted time, and of the number of boots. An unpatched QEMU may hang
/// (ci/xtask/src/host/qemu_patch.rs).
const COUNTED_RUN_S: u32 = 180;
const MAX_BOOTS: usize = 5;
/// Real-time limit for a guest that swaps. Its CPU never idles until the guest is cut off after 3
/// minutes of counted time, on a machine with other load. A hang cannot be told apart from slow
/// progress, so such a guest runs only once.
const COUNTED_SWAP_S: u32 = 3600;
const SWAPS: [&str; 2] = ["zram", "swap-"];
/// Shell script that runs on the host. The shell script keeps logs of guests and VMMs, because they
/// may show why a run failed.
const SCRIPT: &str =
    r#"soak pressure "$@" && exit; code=$?; cp "$FORESHORE_TEST_DIR"/*.log "$OUT"; exit $code"#;
const TABLE: &str = "table.md";

#[derive(Debug, PartialEq, Eq)]
struct Run {
    workload: String,
    folder: PathBuf,
    configs: String,
    dram: String,
}

/// Returns all boots. Their folders are below `folder`.
fn runs(arguments: &Arguments, folder: &Path) -> Vec<Run> {
    let is_real = arguments.clock == Clock::Real;
    let split =
        |values: &Vec<String>| if is_real { vec![values.join(",")] } else { values.clone() };
    let mut runs = Vec::new();
    for workload in &arguments.workloads {
        for dram in split(&arguments.dram) {
            for configs in split(&arguments.configs) {
                let folder = folder.join(workload);
                let folder =
                    if is_real { folder } else { folder.join(format!("{dram}-{configs}")) };
                runs.push(Run { workload: workload.clone(), folder, configs, dram: dram.clone() });
            }
        }
    }
    runs
}

impl Run {
    /// Returns the time limit in seconds, and the maximum number of boots if the host hangs.
    fn limits(&self, clock: Clock, rounds: u32) -> (u32, usize) {
        let is_swap = SWAPS.iter().any(|swap| self.configs.starts_with(swap));
        match clock {
            Clock::Real => (REAL_RUN_S * MAX_REAL_RUNS * rounds, 1),
            Clock::Counted if is_swap => (COUNTED_SWAP_S * rounds, 1),
            Clock::Counted => (2 * COUNTED_RUN_S * rounds, MAX_BOOTS),
        }
    }

    fn arguments(&self, clock: Clock, rounds: u32) -> Vec<String> {
        let (limit, rounds) = (self.limits(clock, rounds).0.to_string(), rounds.to_string());
        let counted = (clock == Clock::Counted).then_some("--counted");
        let host = ["--cpus", "1", "--prealloc", "--timeout", &limit];
        let command = ["--", "env", "FORESHORE_TEST_DIR=/tmp/soak", "sh", "-c", SCRIPT, "soak"];
        let choice =
            ["--workload", &self.workload, "--config", &self.configs, "--dram", &self.dram];
        let all = host.into_iter().chain(counted).chain(command).chain(choice);
        all.chain(["--rounds", &rounds]).map(str::to_owned).collect()
    }
}

impl Soak<'_> {
    pub(super) fn run_pressure(&mut self) -> Result<()> {
        let folder = self.checkout.path(FOLDER).join("pressure");
        remove_folder(&folder)?;
        create_folder(&folder)?;
        if programs::find("gnuplot", user_path()).is_none() {
            Apt::new(self.checkout).install(&["gnuplot-nox"])?;
        }
        let lanes = self.arguments.lanes.into();
        let run = |run: &Run| self.run_on_hosts(run);
        let results = in_lanes(lanes, runs(self.arguments, &folder), run, |_| false);
        for workload in &self.arguments.workloads {
            let of_workload = results.iter().filter(|(run, _)| run.workload == *workload);
            let mut boots: Vec<_> =
                of_workload.map(|(run, held)| (run.folder.clone(), *held == Some(true))).collect();
            boots.sort();
            self.sum_up(workload, &folder.join(workload), &boots)?;
        }
        let load = load()?;
        report!(
            "the tables, time series and plots are in {FOLDER}/pressure; load of this machine: {load}"
        );
        Ok(())
    }

    /// Runs a workload. Runs it again if the emulation hangs. Returns true if its conditions hold.
    fn run_on_hosts(&self, run: &Run) -> Result<bool> {
        let (clock, rounds) = (self.arguments.clock, self.arguments.rounds(1));
        let boots = Boots {
            checkout: self.checkout,
            folder: run.folder.clone(),
            memory_mib: HOST_MIB,
            prefix: String::new(),
        };
        let arguments = run.arguments(clock, rounds);
        let (_, max_boots) = run.limits(clock, rounds);
        let mut boot = 1;
        let code = loop {
            let code = boots.run(|| boots.boot(&arguments))?.code;
            if code != CUT_OFF || boot >= max_boots {
                break code;
            }
            boot += 1;
            let name = format!("{} {} {}", run.workload, run.dram, run.configs);
            report!(
                "THE EMULATION STOOD STILL with {name}: boot {boot} of at most {max_boots} begins"
            );
        };
        plot(&run.folder)?;
        if code == 0 && !has_result(&run.configs, &read(&run.folder.join(TABLE))?, &boots.output()?)
        {
            bail!("{} {} {}: no result", run.workload, run.dram, run.configs);
        }
        Ok(code == 0)
    }

    /// Prints the table and the verdicts of all boots that ran a workload.
    fn sum_up(&mut self, workload: &str, folder: &Path, boots: &[(PathBuf, bool)]) -> Result<()> {
        let is_real = self.arguments.clock == Clock::Real;
        let tables: String = boots
            .iter()
            .filter_map(|(folder, _)| fs::read_to_string(folder.join(TABLE)).ok())
            .collect();
        let table = if is_real { tables } else { join_tables(&tables) };
        let counted = if is_real { "" } else { "; instructions counted" };
        let table = format!("{table}\nMeasured on: {}{counted}.\n", self.measured_on);
        create_folder(folder)?;
        write(&folder.join(TABLE), &table)?;
        let outputs: String =
            boots.iter().filter_map(|(folder, _)| output_in(folder).ok()).collect();
        let verdicts: Vec<_> = outputs.lines().filter(is_verdict).collect();
        let shown: String = verdicts.iter().map(|verdict| format!("{verdict}\n")).collect();
        write_output(format!("{table}{shown}").as_bytes());
        let name = format!("{workload} under pressure");
        let failed = boots.iter().filter(|(_, held)| !held).map(|(folder, _)| folder.clone());
        let failed: Vec<_> = failed.collect();
        if !failed.is_empty() {
            return self.table.add_failure(&name, "-", &failed);
        }
        let met = verdicts.iter().filter(|verdict| verdict.starts_with(MET)).count();
        let result = format!("targets met: {met}, times not met: {}", verdicts.len() - met);
        self.table.add(&name, "-", &result)
    }
}

const MET: &str = "met: ";
const NOT_MET: &str = "NOT MET: ";

fn is_verdict(line: &&str) -> bool {
    line.starts_with(MET) || line.starts_with(NOT_MET)
}

/// Returns true if a boot's table has rows and, with psi, its output has verdicts. Other
/// configurations print a verdict only if a result is wrong.
fn has_result(configs: &str, table: &str, output: &str) -> bool {
    let is_judged = configs.split(',').any(|config| config == "psi");
    table.lines().count() > HEAD_LINES
        && (!is_judged || output.lines().any(|line| is_verdict(&line)))
}

/// Number of lines above a table's rows.
const HEAD_LINES: usize = 2;

/// Joins the tables of several boots. Keeps only the first head and the first row of all-dram,
/// which is nearly the same in all tables.
fn join_tables(tables: &str) -> String {
    let repeats = |line: &str| {
        line.starts_with("| workload ") || line.starts_with("|---") || line.contains("| all-dram |")
    };
    let lines =
        tables.lines().enumerate().filter(|(index, line)| *index <= HEAD_LINES || !repeats(line));
    lines.map(|(_, line)| format!("{line}\n")).collect()
}

fn plot(folder: &Path) -> Result<()> {
    let mut plots = list(folder).unwrap_or_default();
    plots.retain(|path| path.extension().is_some_and(|extension| extension == "gnuplot"));
    for plot in plots {
        let mut gnuplot = programs::user("gnuplot");
        if !jobs::status(gnuplot.arg(&plot).current_dir(folder))?.success() {
            report!("cannot draw {}", plot.display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::MAX_ROUNDS;
    use super::super::tests::parse;
    use super::*;

    #[test]
    fn counted_boots_run_one_configuration_each() {
        let arguments = parse("--workload bfs,redis --config psi,zram --dram 75,50").unwrap();
        let runs = runs(&arguments, Path::new("/p"));
        assert_eq!(runs.len(), 8);
        assert_eq!(runs[1].folder, Path::new("/p/bfs/75-zram"));
        assert_eq!(runs[0].limits(Clock::Counted, 2), (720, MAX_BOOTS));
        assert_eq!(runs[1].limits(Clock::Counted, 2), (7200, 1));
        let arguments = runs[6].arguments(Clock::Counted, 1);
        crate::host::tests::parse(&arguments.join(" ")).unwrap();
        let line = arguments.join("|");
        let expected = "--cpus|1|--prealloc|--timeout|360|--counted|--|env|FORESHORE_TEST_DIR=/tmp/soak|sh|-c|";
        assert!(line.starts_with(expected), "{line}");
        assert!(
            line.ends_with("|soak|--workload|redis|--config|psi|--dram|50|--rounds|1"),
            "{line}"
        );
    }

    #[test]
    fn boots_in_real_time_run_a_workload_each() {
        let arguments = parse("--workload bfs --clock real --config psi,zram").unwrap();
        let runs = runs(&arguments, Path::new("/p"));
        let expected = Run {
            workload: "bfs".to_owned(),
            folder: "/p/bfs".into(),
            configs: "psi,zram".to_owned(),
            dram: "75,50".to_owned(),
        };
        assert_eq!(runs, [expected]);
        assert_eq!(runs[0].limits(Clock::Real, 1), (9900, 1));
        assert!(!runs[0].arguments(Clock::Real, 1).contains(&"--counted".to_owned()));
    }

    #[test]
    fn limits_of_the_most_rounds_do_not_overflow() {
        let limits = |clock, config: &str| {
            let line = format!("--workload bfs --dram 75 --config {config}");
            runs(&parse(&line).unwrap(), Path::new("/p"))[0].limits(clock, MAX_ROUNDS).0
        };
        assert_eq!(limits(Clock::Real, "psi"), 990_000_000);
        assert_eq!(limits(Clock::Counted, "zram"), 360_000_000);
        assert_eq!(limits(Clock::Counted, "psi"), 36_000_000);
    }

    #[test]
    fn result_has_rows_and_verdicts_of_psi() {
        let head = "| workload | config |\n|---|---|\n";
        let table = format!("{head}| bfs | psi |\n");
        assert!(has_result("psi,zram", &table, "met: bfs at 75 % with psi: no swap\n"));
        assert!(has_result("zram", &table, ""));
        assert!(!has_result("psi", &table, "psi\n"));
        assert!(!has_result("zram", head, ""));
    }

    #[test]
    fn joined_table_has_one_head() {
        let table = |config: &str| {
            format!("| workload | config |\n|---|---|\n| bfs | all-dram |\n| bfs | {config} |\n")
        };
        let joined = join_tables(&(table("psi") + &table("zram")));
        assert_eq!(joined, table("psi") + "| bfs | zram |\n");
    }
}
