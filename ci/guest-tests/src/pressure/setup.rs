//! Configurations to compare: workloads, and how a guest with too little DRAM gets more memory.

use std::fmt;
use std::fs::File;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use balloon::policy::Policy;

use crate::runner::this_tests_dir;
use crate::{Guest, Image, Pool};

pub const MIB: u64 = 1 << 20;
/// Time limit for the guest's drivers to find a disk.
const DEVICE_LIMIT: Duration = Duration::from_secs(60);
/// Amount of additional memory. The amount is more than any guest lacks.
const MORE_MIB: u64 = 768;
/// Size of swap for the case that a policy reacts too late. Using it violates a condition.
const FALLBACK_ZRAM_MIB: u64 = 256;
/// Granularity of PM, which is a memory block.
const BLOCK_MIB: u64 = 128;
/// Linux disables huge pages in a guest that boots with less than 512 MiB (mm/huge_memory.c,
/// hugepage_init). Without this option, the guest with all DRAM would have huge pages but the
/// smaller guest would not. This difference would dominate the result.
const CMDLINE: &str = "transparent_hugepage=always";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    pub name: &'static str,
    /// Approximate working set.
    pub mib: u64,
}

/// Standard workloads, and `touch`, which was used to measure the cost for guests.
pub const WORKLOADS: [Workload; 5] = [
    Workload { name: "touch", mib: 520 },
    Workload { name: "bfs", mib: 256 },
    Workload { name: "redis", mib: 420 },
    Workload { name: "sqlite", mib: 420 },
    Workload { name: "compile", mib: 420 },
];

impl FromStr for Workload {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = WORKLOADS.into_iter().find(|workload| workload.name == text);
        found.with_context(|| {
            format!(
                "No such workload: {text:?}; existing workloads: {}",
                WORKLOADS.map(|workload| workload.name).join(", ")
            )
        })
    }
}

/// Source of additional memory when DRAM is full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Config {
    AllDram,
    SwapVirtioBlk,
    /// Swap on a raw volume with virtio-pmem.
    SwapPmem,
    Zram,
    Policy(&'static str),
}

impl Config {
    /// Returns all configurations. Policies are in the order in which the program lists them, with
    /// the default first.
    pub fn all() -> Vec<Self> {
        let policies = Policy::NAMES.into_iter().filter(|name| *name != "off").map(Self::Policy);
        [Self::AllDram]
            .into_iter()
            .chain(policies)
            .chain([Self::SwapVirtioBlk, Self::SwapPmem, Self::Zram])
            .collect()
    }

    /// Returns true if a policy provides the additional memory.
    pub fn is_policy(&self) -> bool {
        matches!(self, Self::Policy(_))
    }
}

impl fmt::Display for Config {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::AllDram => "all-dram",
            Self::SwapVirtioBlk => "swap-virtio-blk",
            Self::SwapPmem => "swap-pmem",
            Self::Zram => "zram",
            Self::Policy(name) => name,
        })
    }
}

impl FromStr for Config {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match Self::all().into_iter().find(|config| config.to_string() == text) {
            Some(config) => Ok(config),
            None => {
                let names: Vec<String> = Self::all().iter().map(Self::to_string).collect();
                bail!(
                    "No such configuration: {text:?}; existing configurations: {}",
                    names.join(", ")
                )
            }
        }
    }
}

pub(super) struct Testbed {
    pub guest: Guest,
    pub boot_bytes: u64,
    pool: Option<Pool>,
}

impl Testbed {
    /// Removes the files on tmpfs, because the next guest needs their memory. Returns the trace of
    /// a guest with a policy.
    pub(super) fn tear_down(self) -> Result<Option<Vec<u8>>> {
        drop(self.guest);
        let trace = match std::fs::read(trace_file()) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            read => Some(read.with_context(|| format!("Cannot read {}", trace_file().display()))?),
        };
        for file in
            self.pool.iter().map(|pool| pool.path().to_owned()).chain([swap_image(), trace_file()])
        {
            match std::fs::remove_file(&file) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("Cannot remove {}", file.display()));
                }
                _ => {}
            }
        }
        Ok(trace)
    }
}

fn trace_file() -> std::path::PathBuf {
    this_tests_dir().join("trace")
}

fn swap_image() -> std::path::PathBuf {
    this_tests_dir().join("swap")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestSize {
    pub cpus: u32,
    pub dram_mib: u64,
}

pub(super) fn boot(config: &Config, name: &str, size: GuestSize) -> Result<Testbed> {
    let GuestSize { cpus, dram_mib } = size;
    std::fs::create_dir_all(this_tests_dir())?;
    let guest = Guest::builder()
        .name(name)
        .cpus(cpus)
        .image(Image::Workloads)
        .cmdline(CMDLINE)
        .memory(&format!("size={dram_mib}M"));
    let mut pool = None;
    let (guest, swap) = match config {
        Config::AllDram => (guest.pressure("off"), None),
        Config::Zram => {
            (guest.pressure("off").cmdline(&format!("foreshore.zram={MORE_MIB}M")), None)
        }
        Config::SwapVirtioBlk => {
            File::create(swap_image())?.set_len(MORE_MIB * MIB)?;
            let disk = format!("path={}", swap_image().display());
            (guest.pressure("off").argument("--disk", &disk), Some("/dev/vda"))
        }
        Config::SwapPmem => {
            let pool = pool.insert(Pool::create(&format!("{}M", MORE_MIB + 64))?);
            let volume = format!(
                "pool={},name=swap,size={MORE_MIB}M,create=on,format=raw,interface=virtio-pmem",
                pool.name()
            );
            (guest.pressure("off").pm_volume(&volume), Some("/dev/pmem0"))
        }
        Config::Policy(policy) => {
            let pool = pool.insert(Pool::create(&format!("{}M", MORE_MIB + 64))?);
            // `fixed` has no default size, so it gets the size that any policy could provide at
            // most.
            let size =
                if *policy == "fixed" { format!(",size={MORE_MIB}M") } else { String::new() };
            let policy = format!("{policy}{size},record={}", trace_file().display());
            let cmdline = format!("foreshore.zram={FALLBACK_ZRAM_MIB}M");
            let memory =
                format!("pool={},size={}M", pool.name(), MORE_MIB.next_multiple_of(BLOCK_MIB));
            (guest.pm_memory(&memory).pressure(&policy).cmdline(&cmdline), None)
        }
    };
    let guest = guest.boot()?;
    if let Some(device) = swap {
        guest.wait_until_run(
            "the swap device exists",
            DEVICE_LIMIT,
            &format!("test -b {device}"),
        )?;
        guest.run(&format!("mkswap {device} && swapon {device}"))?;
    }
    Ok(Testbed { guest, boot_bytes: dram_mib * MIB, pool })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_configuration_is_found_by_its_name() {
        for config in Config::all() {
            assert_eq!(config.to_string().parse::<Config>().unwrap(), config);
        }
        assert!(Config::all().contains(&Config::Policy("psi")));
        assert!("off".parse::<Config>().is_err() && "zswap".parse::<Config>().is_err());
    }
}
