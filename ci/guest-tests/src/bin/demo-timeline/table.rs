//! The timeline as a table: a row per VM and second, a column per size.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};

use crate::prometheus::{Prometheus, Range, Series};

/// Name and expression of every column.
const COLUMNS: [(&str, &str); 14] = [
    ("dram_boot_bytes", r#"foreshore_memory_boot_bytes{zone="dram"}"#),
    ("dram_requested_bytes", r#"foreshore_memory_requested_bytes{zone="dram"}"#),
    ("dram_plugged_bytes", r#"foreshore_memory_plugged_bytes{zone="dram"}"#),
    ("dram_resident_bytes", r#"foreshore_memory_resident_bytes{zone="dram"}"#),
    ("pm_requested_bytes", r#"foreshore_memory_requested_bytes{zone="pm"}"#),
    ("pm_plugged_bytes", r#"foreshore_memory_plugged_bytes{zone="pm"}"#),
    ("pm_resident_bytes", r#"foreshore_memory_resident_bytes{zone="pm"}"#),
    ("stall_some_seconds", r#"foreshore_pressure_stall_seconds_total{kind="some"}"#),
    ("stall_full_seconds", r#"foreshore_pressure_stall_seconds_total{kind="full"}"#),
    ("pool_free_bytes", r#"sum by (vm) (foreshore_pool_bytes{state="free"})"#),
    ("pool_memory_bytes", r#"sum by (vm) (foreshore_pool_bytes{state="memory"})"#),
    ("pool_volume_bytes", r#"sum by (vm) (foreshore_pool_bytes{state="volume"})"#),
    ("swapped_out_pages", r#"foreshore_guest_swapped_pages_total{direction="out"}"#),
    ("oom_kills", "foreshore_guest_oom_kills_total"),
];

/// The VM that the demo is about, and the one beside it: ci/demo's names.
pub const VM: &str = "demo";
pub const OTHER_VM: &str = "without-governor";

const LEAST_PM_BYTES: f64 = (400u64 << 20) as f64;

/// Of the seconds between a VM's first and last sample, how many may lack one: it is restarted on the way.
const LEAST_COVERED_PERCENT: usize = 60;

/// What Prometheus saw.
pub struct Table {
    range: Range,
    columns: Vec<(&'static str, BTreeMap<String, Series>)>,
}

impl Table {
    /// Asks for every column.
    pub fn ask(prometheus: &Prometheus, range: &Range) -> Result<Self> {
        let column = |(name, expression): (&'static str, &str)| {
            let seen = prometheus.ask(expression, range)?;
            ensure!(seen.contains_key(VM), "Prometheus has no {expression} of VM {VM}");
            Ok((name, seen))
        };
        Ok(Self { range: *range, columns: COLUMNS.into_iter().map(column).collect::<Result<_>>()? })
    }

    fn series(&self, column: &str, vm: &str) -> Option<&Series> {
        self.columns.iter().find(|(name, _)| *name == column)?.1.get(vm)
    }

    fn top(&self, column: &str, vm: &str) -> f64 {
        self.series(column, vm).map_or(0.0, |series| series.values().copied().fold(0.0, f64::max))
    }

    fn covered_percent(&self, vm: &str) -> usize {
        let Some(series) = self.series("pm_plugged_bytes", vm) else { return 0 };
        let (Some((first, _)), Some((last, _))) = (series.first_key_value(), series.last_key_value()) else {
            return 0;
        };
        series.len() * 100 / ((last - first) as usize + 1)
    }

    /// Whether Prometheus saw what the demo has shown.
    pub fn check(&self) -> Result<()> {
        for vm in [VM, OTHER_VM] {
            let percent = self.covered_percent(vm);
            ensure!(
                percent >= LEAST_COVERED_PERCENT,
                "Prometheus saw VM {vm} for {percent} % of its time only"
            );
        }
        for column in ["pm_requested_bytes", "pm_plugged_bytes", "pm_resident_bytes", "pool_memory_bytes"] {
            let top = self.top(column, VM);
            ensure!(top >= LEAST_PM_BYTES, "Prometheus saw {column} at {top} at most");
        }
        let last = self.series("pm_plugged_bytes", VM).and_then(|series| series.last_key_value());
        ensure!(
            last.is_some_and(|(_, bytes)| *bytes == 0.0),
            "Prometheus saw {last:?} as the last PM plugged"
        );
        ensure!(self.top("swapped_out_pages", VM) == 0.0, "Prometheus saw VM {VM} swap");
        ensure!(
            self.top("swapped_out_pages", OTHER_VM) + self.top("oom_kills", OTHER_VM) > 0.0,
            "Prometheus saw VM {OTHER_VM} neither swap nor kill"
        );
        Ok(())
    }

    /// Rows by VM, then by time; a cell is empty when there was no sample.
    pub fn to_csv(&self) -> String {
        let names: Vec<&str> = self.columns.iter().map(|(name, _)| *name).collect();
        let mut csv = format!("time_s,elapsed_s,vm,{}\n", names.join(","));
        let vms: BTreeSet<&String> = self.columns.iter().flat_map(|(_, series)| series.keys()).collect();
        for vm in vms {
            for (elapsed_s, time_s) in self.range.steps().enumerate() {
                let cell = |(_, by_vm): &(&str, BTreeMap<String, Series>)| {
                    let value = by_vm.get(vm).and_then(|series| series.get(&time_s));
                    value.map_or_else(String::new, f64::to_string)
                };
                let cells: Vec<String> = self.columns.iter().map(cell).collect();
                csv += &format!("{time_s},{elapsed_s},{vm},{}\n", cells.join(","));
            }
        }
        csv
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        let samples: usize = self.columns.iter().flat_map(|(_, by_vm)| by_vm.values()).map(Series::len).sum();
        let mib = |column| self.top(column, VM) / f64::from(1 << 20);
        format!(
            "Prometheus has {samples} samples over {} s; of PM it saw at most {:.0} MiB requested, {:.0} plugged, \
             {:.0} resident",
            self.range.len_s(),
            mib("pm_requested_bytes"),
            mib("pm_plugged_bytes"),
            mib("pm_resident_bytes")
        )
    }
}
