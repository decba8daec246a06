//! Tests that take hours: kills of writing guests, power cuts of their host, and workloads with too
//! little DRAM.
//!
//! The pass conditions are described in docs/design/testing.md (Torn sectors in a guest) and
//! docs/design/benchmarks.md (Guests that are too small).

mod boots;
mod kills;
mod power;
mod pressure;
mod table;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

use crate::cargo;
use crate::checkout::{Checkout, create_folder};
use crate::host;
use crate::images;
use crate::messages::{report, with_task_name};
use crate::random;
use crate::setup;
pub(crate) use boots::in_lanes;
use table::Table;

/// Folder for all files of this task.
const FOLDER: &str = "target/soak";
const INTERFACES: [&str; 3] = ["nvdimm", "virtio-pmem", "virtio-blk"];
/// Cloud flavors only, because the generic flavor uses the same drivers.
const KERNELS: [&str; 2] = ["6.12", "6.1"];
/// Kinds of volumes, and loads that make the VMM move or release chunks of a thin one.
const VOLUMES: [&str; 8] =
    ["thick", "thin", "discard", "trim", "compaction", "spill", "spill-file", "redis"];
const WORKLOADS: [&str; 5] = ["touch", "bfs", "redis", "sqlite", "compile"];
const CONFIGS: &str = "psi,amf,dapper,pmb,memorage,fixed,swap-virtio-blk,swap-pmem,zram";
/// Upper limit of `--rounds`. Time limits of this many rounds fit into 32 bits.
const MAX_ROUNDS: u32 = 100_000;
/// Upper bound of a random seed. Smaller numbers are short enough to type.
const SEEDS: u32 = 1_000_000;

#[derive(Args, Clone, Debug)]
#[command(args_override_self = true)]
pub(crate) struct Arguments {
    /// Run only this part; may be repeated
    #[arg(
        long = "only", value_name = "PART", value_enum, hide_default_value = true,
        default_values_t = [Part::Raw, Part::Lies, Part::Power, Part::Pressure, Part::Kills]
    )]
    parts: Vec<Part>,
    /// Kill only guests with this interface
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(INTERFACES))]
    interface: Option<String>,
    /// Kill only guests with this kernel
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(KERNELS))]
    kernel: Option<String>,
    /// Kill guests, and cut the power of hosts, with volumes of this kind, or with thin volumes
    /// under this load: discard, compaction (kills with virtio-blk), trim (kills with nvdimm,
    /// virtio-pmem), spill, spill-file, redis
    #[arg(
        long, value_name = "KIND", default_value = "thin",
        value_parser = PossibleValuesParser::new(VOLUMES)
    )]
    volume: String,
    /// Run only these workloads under pressure
    #[arg(
        long = "workload",
        value_name = "NAMES",
        value_delimiter = ',',
        default_values = WORKLOADS,
        hide_default_value = true,
        value_parser = PossibleValuesParser::new(WORKLOADS)
    )]
    workloads: Vec<String>,
    /// Run these configurations under pressure in addition to all-dram: psi and the other policies,
    /// swap-virtio-blk, swap-pmem, zram
    #[arg(long = "config", value_name = "NAMES", value_delimiter = ',', default_value = CONFIGS)]
    configs: Vec<String>,
    /// DRAM under pressure in percent of the size that the workload needs
    #[arg(long, value_name = "SHARES", value_delimiter = ',', default_value = "75,50")]
    dram: Vec<String>,
    /// Number of workloads at the same time under pressure; counted times do not depend on it
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    lanes: u16,
    /// Clock of the emulated host under pressure; with counted, each instruction takes one
    /// nanosecond
    #[arg(long, value_name = "NAME", default_value = "counted")]
    clock: Clock,
    /// Number of kills for each interface and kernel (200), of power cuts (20), and of runs of each
    /// workload (1)
    #[arg(
        long, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_ROUNDS))
    )]
    rounds: Option<u32>,
    /// Seed of an earlier run, for the same schedule
    #[arg(long, value_name = "N")]
    seed: Option<u32>,
    /// Do not build programs and images
    #[arg(long)]
    no_build: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Kills: no sector is torn or lost
    Kills,
    /// Kills on a raw volume: a sector should be torn, otherwise kills prove nothing
    Raw,
    /// Power cuts: nothing that was flushed is lost
    Power,
    /// Power cuts with flushes that do nothing: data should be lost, otherwise cuts prove nothing
    Lies,
    /// Workloads in too little DRAM, with swap and under each policy
    Pressure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Clock {
    Counted,
    Real,
}

impl Arguments {
    fn rounds(&self, default_rounds: u32) -> u32 {
        self.rounds.unwrap_or(default_rounds)
    }
}

fn chosen<'a>(choice: Option<&'a String>, all: &[&'a str]) -> Vec<&'a str> {
    choice.map_or_else(|| all.to_vec(), |name| vec![name.as_str()])
}

struct Soak<'run> {
    checkout: &'run Checkout,
    arguments: &'run Arguments,
    seed: u32,
    measured_on: String,
    table: Table,
}

pub(crate) fn run(checkout: &Checkout, arguments: &Arguments) -> Result<u8> {
    with_task_name("soak", || {
        create_folder(&checkout.path(FOLDER))?;
        setup::ensure_set_up(checkout)?;
        if !arguments.no_build {
            cargo::build_programs(checkout)?;
            cargo::build_clients(checkout)?;
            images::guests::build_all(checkout)?;
        }
        let seed = arguments.seed.unwrap_or_else(|| random::below(SEEDS));
        report!("seed {seed}");
        let measured_on = host::measured_here(checkout)?;
        let table = Table::create(checkout, &checkout.path(FOLDER).join("table"), &measured_on)?;
        let mut soak = Soak { checkout, arguments, seed, measured_on, table };
        arguments.parts.iter().try_for_each(|part| soak.run_part(*part))?;
        soak.table.print();
        Ok(u8::from(soak.table.has_failed))
    })
}

impl Soak<'_> {
    fn run_part(&mut self, part: Part) -> Result<()> {
        let arguments = self.arguments;
        let kernels = chosen(arguments.kernel.as_ref(), &KERNELS);
        match part {
            Part::Raw => kernels.iter().try_for_each(|kernel| self.kill_raw(kernel)),
            Part::Lies => self.cut_power(&power::NOOP_FLUSHES, 1),
            Part::Power => self.cut_power(&power::POWER, arguments.rounds(20)),
            Part::Pressure => self.run_pressure(),
            Part::Kills => kernels.iter().try_for_each(|kernel| {
                let interfaces = chosen(arguments.interface.as_ref(), &INTERFACES);
                interfaces.iter().try_for_each(|interface| self.kill(interface, kernel))
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn parse(line: &str) -> Result<Arguments, clap::Error> {
        crate::tests::parse(line)
    }

    #[test]
    fn unknown_names_and_numbers_are_refused() {
        for line in [
            "--only cuts",
            "--interface nvme",
            "--kernel 6.11",
            "--workload touch,tuch",
            "--clock fast",
            "--rounds x",
            "--rounds 0",
            "--rounds 100001",
            "--seed",
            "--lanes 0",
            "kills",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert_eq!(parse("--rounds 100000").unwrap().rounds(1), MAX_ROUNDS);
    }

    #[test]
    fn parts_run_in_the_order_of_the_command_line_or_all_of_them() {
        let arguments =
            parse("--only power --only kills --kernel 6.1 --workload bfs,redis").unwrap();
        assert_eq!(arguments.parts, [Part::Power, Part::Kills]);
        assert_eq!(arguments.workloads, ["bfs", "redis"]);
        assert_eq!(chosen(arguments.kernel.as_ref(), &KERNELS), ["6.1"]);
        assert_eq!(chosen(arguments.interface.as_ref(), &INTERFACES), INTERFACES);
        let all = parse("").unwrap();
        assert_eq!(all.parts.len(), Part::value_variants().len());
        assert_eq!((all.workloads.len(), all.configs.len(), all.dram.len()), (5, 9, 2));
    }
}
