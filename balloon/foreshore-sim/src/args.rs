//! The command line of `foreshore-sim`.

use std::path::PathBuf;

use balloon::ParamError;
use balloon::controller::Rules;
use balloon::params::{Parameters, Setting, Unit};
use balloon::policy::Policy;
use balloon::sim::{StorageParams, SwapDevice, Workload, WorkloadParams};
use clap::builder::{PathBufValueParser, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use foreshore_types::similar::suggestion;
use foreshore_types::size;

use super::image::PlotFile;
use super::plot;
use super::run;

const EXAMPLES: &str = "\
Examples:
  foreshore-sim                                        every policy, bursts beyond DRAM
  foreshore-sim --workload diurnal --duration 24h      a day
  foreshore-sim --trace trace.jsonl --policy psi --policy off
                                                       a trace that `foreshore --pressure record=trace.jsonl` recorded
  foreshore-sim --workload burst --vms 8 --pool 4G     eight VMs that share a pool that is too small for all
  foreshore-sim --workload sawtooth,rate=500M --policy psi --policy psi,horizon=3s --plot sawtooth.svg
  foreshore-sim --policy psi,cool_down=2s,ceiling=1G --policy psi
                                                       parameters of rules for every policy, as for `--pressure`
  foreshore-sim --workload diurnal --duration 24h --pool 4G --storage size=4G
                                                       memory borrows the space of a volume that grows
  foreshore-sim --workload diurnal --hosts 1000 --vms 10 --duration 24h --format json

Times have the unit ms, s, m or h.";

/// Bursts to three times the DRAM, once in two minutes, so fast that stalls also differ between the
/// policies. A single ramp causes no stalls, except under `off`.
const DEFAULT_WORKLOAD: &str = "burst,high=3000,rate=2G,period=2m";

/// Version, and the commit and date of the build.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\n", env!("FORESHORE_BUILD"));

pub(crate) const EXIT_STATUS: &str =
    "0: success. 1: failure, with the reason on stderr. 2: invalid command line.";

/// Replay a recorded or generated memory demand under several policies, with a model of a guest
///
/// The figures of each policy include waits for memory, swapping, held memory that the guest did
/// not need, resizes, energy and wear. docs/reference/simulator.md describes the model and its
/// limits.
#[derive(Parser)]
#[command(name = "foreshore-sim", version, long_version = VERSION, after_help = format!("{EXAMPLES}\n{}", size::HELP), args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) scenario: Scenario,
}

impl Arguments {
    /// Parses and checks the command line.
    pub(crate) fn read() -> Result<Self, clap::Error> {
        Self::checked(Self::try_parse()?)
    }

    fn checked(arguments: Self) -> Result<Self, clap::Error> {
        let Scenario { plot, policy, .. } = &arguments.scenario;
        if plot.is_some() && policy.len() > plot::MAX_PANELS {
            let (count, most) = (policy.len(), plot::MAX_PANELS);
            let message = format!("--plot for {count} policies, must be at most {most}");
            return Err(Self::command().error(ErrorKind::TooManyValues, message));
        }
        let pool_bytes = run::pool_bytes(&arguments.scenario);
        if let Some(StorageParams { size_bytes, .. }) = &arguments.scenario.storage
            && *size_bytes > pool_bytes
        {
            let [size, pool] = [*size_bytes, pool_bytes].map(|bytes| Unit::Blocks.show(bytes));
            let message =
                format!("--storage size is {size}, must be at most --pool, which is {pool}");
            return Err(Self::command().error(ErrorKind::ValueValidation, message));
        }
        Ok(arguments)
    }
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Print a shell completion script
    Completion {
        /// Shell
        #[arg(value_enum)]
        shell: foreshore_cli::Shell,
    },
    /// Print the manual page, or write the pages of all commands
    Man {
        /// Folder for the pages, created if it is missing
        folder: Option<PathBuf>,
    },
}

#[derive(Args)]
pub(crate) struct Scenario {
    /// Memory demand of the guest: steady, ramp, burst, sawtooth, leak, diurnal or cache-heavy, and
    /// its parameters low, high, rate, period, touches, hot, files, stream and kernel
    #[arg(long, value_name = "NAME[,PARAM=VALUE...]", default_value = DEFAULT_WORKLOAD, value_parser = parse_workload, conflicts_with = "trace")]
    pub(crate) workload: NamedWorkload,
    /// Replay the memory use of a guest that `--pressure record=` has recorded
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dram", "hotplug", "pm", "duration"])]
    pub(crate) trace: Option<PathBuf>,
    /// Policy with its parameters and those of the rules for every policy (floor, ceiling, ...), as
    /// for `--pressure`. Can be repeated. By default, all policies are compared: fixed with the
    /// largest size, amf and dapper with watermark-share=375, the others with their defaults
    #[arg(long, value_name = "NAME[,PARAM=VALUE...]", value_parser = parse_policy)]
    pub(crate) policy: Vec<NamedPolicy>,
    /// Run time of the guest, 1s to 10 years
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = bounded(Unit::Ms, 1_000, 315_360_000_000))]
    pub(crate) duration: u64,
    /// DRAM of the guest at boot
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = bounded(Unit::Blocks, 64 << 20, 1 << 44))]
    pub(crate) dram: u64,
    /// Hotpluggable DRAM [default: a quarter of --dram]
    #[arg(long, value_name = "SIZE", value_parser = bounded(Unit::Blocks, 0, 1 << 44))]
    pub(crate) hotplug: Option<u64>,
    /// Hotpluggable PM [default: four times --dram]
    #[arg(long, value_name = "SIZE", value_parser = bounded(Unit::Blocks, 0, 1 << 44))]
    pub(crate) pm: Option<u64>,
    /// PM in a host's pool, which its VMs share [default: enough for all]
    #[arg(long, value_name = "SIZE", value_parser = bounded(Unit::Blocks, 0, 1 << 45))]
    pub(crate) pool: Option<u64>,
    /// Thin volume in each pool, written in bursts and trimmed once per period. Memory borrows its
    /// space. Parameters: size, low, high, period, bursts, rate, spill, storage_min, storage_low,
    /// storage_high and move
    #[arg(long, value_name = "PARAM=VALUE[,...]", conflicts_with = "trace", value_parser = parse_storage)]
    pub(crate) storage: Option<StorageParams>,
    /// VMs per host
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = bounded(Unit::Count, 1, 1_000))]
    pub(crate) vms: u64,
    /// Number of hosts
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = bounded(Unit::Count, 1, 1_000_000))]
    pub(crate) hosts: u64,
    /// Swap device of the guest
    #[arg(long, default_value = "disk", value_parser = PossibleValuesParser::new(SwapDevice::NAMES))]
    pub(crate) swap: String,
    /// Size of the swap device [default: four times --dram]
    #[arg(long, value_name = "SIZE", value_parser = bounded(Unit::Bytes, 0, 1 << 48))]
    pub(crate) swap_size: Option<u64>,
    /// Time from a request until the first block is plugged
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = bounded(Unit::Ms, 0, 60_000))]
    pub(crate) plug_delay: u64,
    /// Microseconds to plug 2 MiB
    #[arg(long, value_name = "COUNT", default_value = "1000", value_parser = bounded(Unit::Count, 1, 1_000_000))]
    pub(crate) plug_block_us: u64,
    /// Microseconds to unplug 2 MiB
    #[arg(long, value_name = "COUNT", default_value = "1500", value_parser = bounded(Unit::Count, 1, 1_000_000))]
    pub(crate) unplug_block_us: u64,
    /// Part of the plugged memory of a zone that cannot be unplugged, in thousandths
    #[arg(long, value_name = "PERMILLE", default_value = "0", value_parser = bounded(Unit::Permille, 0, 1000))]
    pub(crate) refused: u64,
    /// Do not demote pages to PM, like kernels before 6.7
    #[arg(long)]
    pub(crate) no_demotion: bool,
    /// Daily writes of a VM's volumes to PM, for the wear of PM
    #[arg(long, value_name = "SIZE", default_value = "12G", value_parser = bounded(Unit::Bytes, 1 << 20, 1 << 50))]
    pub(crate) storage_writes: u64,
    /// Write endurance of memory cells as a multiple of that of PM, for the wear of PM
    #[arg(long, value_name = "COUNT", default_value = "10", value_parser = bounded(Unit::Count, 1, 1_000_000))]
    pub(crate) endurance: u64,
    /// Seed of the random numbers
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    pub(crate) seed: u64,
    /// Hand every report to the controller, even one that cannot change anything. Slower; the
    /// figures are the same
    #[arg(long)]
    pub(crate) every_report: bool,
    /// Plot the first VM over time under each policy: DRAM, PM, used and available memory, swap and
    /// stalls. FILE ends in .svg or .png
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(PlotFile::try_from))]
    pub(crate) plot: Option<PlotFile>,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Table for people
    Table,
    /// One object per policy, with all figures
    Json,
    /// One line per policy, with all figures
    Csv,
}

/// Workload from the command line.
#[derive(Clone, Debug)]
pub(crate) struct NamedWorkload {
    /// Text on the command line.
    pub(crate) label: String,
    pub(crate) workload: Workload,
    pub(crate) params: WorkloadParams,
}

/// Policy from the command line.
#[derive(Clone, Debug)]
pub(crate) struct NamedPolicy {
    /// Text on the command line.
    pub(crate) label: String,
    pub(crate) policy: Policy,
    /// Rules that apply to every policy.
    pub(crate) rules: Rules,
}

/// Parser for a value within a range. clap adds the flag and the value to its errors.
fn bounded(unit: Unit, low: u64, high: u64) -> impl TypedValueParser<Value = u64> {
    clap::builder::StringValueParser::new().try_map(move |text| {
        let value = unit.parse(&text).map_err(|error| error.to_string())?;
        if (low..=high).contains(&value) {
            return Ok(value);
        }
        Err(format!("must be {} to {}", unit.show(low), unit.show(high)))
    })
}

fn parse_storage(text: &str) -> Result<StorageParams, String> {
    let mut params = StorageParams::default();
    for part in text.split(',') {
        let (key, value) = setting(part)?;
        params.set("--storage", key, &value).map_err(|error| error.to_string())?;
    }
    params.validate().map_err(|error| error.to_string())?;
    Ok(params)
}

fn setting(part: &str) -> Result<(&str, Setting), String> {
    let (key, value) =
        part.split_once('=').ok_or_else(|| format!("{part:?} is not PARAM=VALUE"))?;
    Ok((key, Setting::from(value)))
}

/// Splits `name,key=value,key=value` into the name and the settings.
fn split(text: &str) -> (&str, impl Iterator<Item = Result<(&str, Setting), String>>) {
    let mut parts = text.split(',');
    let name = parts.next().unwrap_or_default();
    (name, parts.map(setting))
}

fn parse_workload(text: &str) -> Result<NamedWorkload, String> {
    let (name, settings) = split(text);
    let workload = Workload::from_name(name).ok_or_else(|| {
        let names: Vec<_> = Workload::ALL.into_iter().map(Workload::name).collect();
        let similar = suggestion(name, names.iter().copied());
        format!("unknown workload {name:?}{similar}; existing workloads: {}", names.join(", "))
    })?;
    let mut params = workload.defaults();
    for setting in settings {
        let (key, value) = setting?;
        if workload.ignores().contains(&key) {
            let (name, known) = (key.to_owned(), workload_parameters(workload));
            return Err(ParamError::Unknown { name, of: workload.name(), known }.to_string());
        }
        params.set(workload.name(), key, &value).map_err(|error| match error {
            ParamError::Unknown { name, of, .. } => {
                ParamError::Unknown { name, of, known: workload_parameters(workload) }.to_string()
            }
            error => error.to_string(),
        })?;
    }
    params.validate().map_err(|error| error.to_string())?;
    Ok(NamedWorkload { label: text.to_owned(), workload, params })
}

/// Lists the parameters of a workload for an error.
fn workload_parameters(workload: Workload) -> String {
    let names = WorkloadParams::TABLE.iter().map(|param| param.name);
    names.filter(|name| !workload.ignores().contains(name)).collect::<Vec<_>>().join(", ")
}

fn parse_policy(text: &str) -> Result<NamedPolicy, String> {
    let (name, settings) = split(text);
    let policy = Policy::from_name(name).ok_or_else(|| {
        let similar = suggestion(name, Policy::NAMES);
        format!("unknown policy {name:?}{similar}; existing policies: {}", Policy::NAMES.join(", "))
    })?;
    let settings = settings.collect::<Result<Vec<_>, _>>()?;
    for (index, (key, _)) in settings.iter().enumerate() {
        if settings[..index].iter().any(|(other, _)| other == key) {
            return Err(format!("{key} is specified twice"));
        }
    }
    let settings = settings.iter().map(|(key, value)| (*key, value));
    let is_rule = |name: &str| Rules::TABLE.iter().any(|rule| rule.name == name);
    let (rules, params): (Vec<_>, Vec<_>) = settings.partition(|(name, _)| is_rule(name));
    // As in `--pressure`, a size is required. The default 0 would unplug all memory, which no user
    // of `fixed` intends.
    if matches!(policy, Policy::Fixed(_)) && !params.iter().any(|(name, _)| *name == "size") {
        return Err("size= is missing: the policy fixed needs it".to_owned());
    }
    let policy = policy.with(params).map_err(|error| match error {
        ParamError::Unknown { name, of, known } => {
            let known = format!("{known}; parameters of the rules: {}", rule_names());
            ParamError::Unknown { name, of, known }.to_string()
        }
        error => error.to_string(),
    })?;
    let rules = Rules::default().with(rules).map_err(|error| error.to_string())?;
    Ok(NamedPolicy { label: text.to_owned(), policy, rules })
}

fn rule_names() -> String {
    Rules::TABLE.iter().map(|rule| rule.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_about_a_misspelled_word_suggests_the_right_one() {
        assert!(foreshore_cli::misspelled::check_suggestions(&Arguments::command()) > 0);
    }

    #[test]
    fn commands_in_the_book_are_valid() {
        let commands = foreshore_cli::book::commands("foreshore-sim");
        assert!(commands.len() >= 4, "{commands:?}");
        for command in commands {
            let program = std::iter::once("foreshore-sim");
            let words = program.chain(command.arguments.iter().map(String::as_str));
            if let Err(error) = Arguments::try_parse_from(words).and_then(Arguments::checked) {
                panic!("{command:?}: {error}");
            }
        }
    }
}
