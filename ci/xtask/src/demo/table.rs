//! Timeline as a table, with a row per VM and second and a column per size.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::prometheus::{Prometheus, Range, Series};

/// Name and Prometheus expression of each column.
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
    ("pool_free_bytes", r#"sum by (vm) (foreshore_pool_bytes{state=~"free|scrubbing"})"#),
    ("pool_memory_bytes", r#"sum by (vm) (foreshore_pool_bytes{state="memory"})"#),
    ("pool_volume_bytes", r#"sum by (vm) (foreshore_pool_bytes{state="volume"})"#),
    ("swapped_out_pages", r#"foreshore_guest_swapped_pages_total{direction="out"}"#),
    ("oom_kills", "foreshore_guest_oom_kills_total"),
];

/// Names that the `demo` program gives to the main VM, to the VM without a governor, and to the VM
/// with a thin volume, which uses the pool of the main VM.
pub(super) const VM: &str = "governed";
pub(super) const OTHER_VM: &str = "policy-off";
pub(super) const THIN_VM: &str = "boundary";

const MIB: f64 = (1u64 << 20) as f64;
const MIN_PM_BYTES: f64 = (400u64 << 20) as f64;

/// Minimum share of seconds with a sample, between a VM's first and last sample. It is below 100
/// because a VM is restarted in between.
const MIN_COVERED_PERCENT: usize = 60;

pub(super) struct Table {
    range: Range,
    columns: Vec<(&'static str, BTreeMap<String, Series>)>,
}

impl Table {
    pub(super) fn query(prometheus: &Prometheus, range: &Range) -> Result<Self> {
        let column = |(name, expression): (&'static str, &str)| {
            Ok((name, prometheus.query(expression, range)?))
        };
        Ok(Self { range: *range, columns: COLUMNS.into_iter().map(column).collect::<Result<_>>()? })
    }

    fn series(&self, column: &str, vm: &str) -> Option<&Series> {
        self.columns.iter().find(|(name, _)| *name == column)?.1.get(vm)
    }

    fn peak(&self, column: &str, vm: &str) -> f64 {
        self.series(column, vm).map_or(0.0, |series| series.values().copied().fold(0.0, f64::max))
    }

    fn covered_percent(&self, vm: &str) -> usize {
        let Some(series) = self.series("pm_plugged_bytes", vm) else { return 0 };
        let (Some((first, _)), Some((last, _))) =
            (series.first_key_value(), series.last_key_value())
        else {
            return 0;
        };
        series.len() * 100 / ((last - first) as usize + 1)
    }

    /// Returns the demo's claims with values from Prometheus. The flag of each claim is true if the
    /// claim holds.
    pub(super) fn claims(&self) -> [(bool, String); 7] {
        let empty =
            self.columns.iter().filter(|(_, by_vm)| !by_vm.contains_key(VM)).map(|(name, _)| *name);
        let empty: Vec<&str> = empty.collect();
        let all = COLUMNS.len();
        let missing = if empty.is_empty() {
            String::new()
        } else {
            format!(" (missing: {})", empty.join(", "))
        };
        let covered = |vm| {
            let percent = self.covered_percent(vm);
            let claim = format!(
                "VM {vm} was scraped in {percent} % of the seconds from its start to its end"
            );
            (percent >= MIN_COVERED_PERCENT, claim)
        };
        let peaks =
            ["pm_requested_bytes", "pm_plugged_bytes", "pm_resident_bytes", "pool_memory_bytes"]
                .map(|column| self.peak(column, VM));
        let [requested, plugged, resident, lent] = peaks.map(|bytes| bytes / MIB);
        let last = self.series("pm_plugged_bytes", VM).and_then(|series| series.last_key_value());
        let last = last.map_or(f64::NAN, |(_, bytes)| bytes / MIB);
        let swapped = self.peak("swapped_out_pages", VM);
        let [pages, kills] =
            ["swapped_out_pages", "oom_kills"].map(|column| self.peak(column, OTHER_VM));
        [
            (empty.is_empty(), format!("all {all} series of VM {VM} have samples{missing}")),
            covered(VM),
            covered(OTHER_VM),
            (
                peaks.iter().all(|bytes| *bytes >= MIN_PM_BYTES),
                format!(
                    "peak PM of VM {VM}: {requested:.0} MiB requested, {plugged:.0} plugged, {resident:.0} \
                     resident, {lent:.0} lent by the pool"
                ),
            ),
            (last == 0.0, format!("PM of VM {VM} at the end: {last:.0} MiB plugged")),
            (swapped == 0.0, format!("VM {VM} swapped out {swapped} pages")),
            (
                pages + kills > 0.0,
                format!("VM {OTHER_VM} swapped out {pages} pages and killed {kills} processes"),
            ),
        ]
    }

    /// Returns rows sorted by VM, then by time. A cell without a sample is empty.
    pub(super) fn to_csv(&self) -> String {
        let names: Vec<&str> = self.columns.iter().map(|(name, _)| *name).collect();
        let mut csv = format!("time_s,elapsed_s,vm,{}\n", names.join(","));
        let vms: BTreeSet<&String> =
            self.columns.iter().flat_map(|(_, series)| series.keys()).collect();
        for vm in vms {
            for time_s in self.range.start_s..=self.range.end_s {
                let elapsed_s = time_s - self.range.start_s;
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

    pub(super) fn summary(&self) -> String {
        let samples: usize =
            self.columns.iter().flat_map(|(_, by_vm)| by_vm.values()).map(Series::len).sum();
        format!(
            "{samples} samples of {} series per VM over {} s",
            self.columns.len(),
            self.range.len_s()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three samples of a good run.
    fn table() -> Table {
        let series =
            |values: [f64; 3]| Series::from([(1, values[0]), (2, values[1]), (3, values[2])]);
        let column = |(name, _): (&'static str, &str)| {
            let [governed, other] = match name {
                "swapped_out_pages" | "oom_kills" => [[0.0; 3], [0.0, 3.0, 7.0]],
                _ => [[0.0, MIN_PM_BYTES, 0.0], [0.0; 3]],
            };
            let by_vm = [(VM, governed), (OTHER_VM, other)];
            (name, by_vm.map(|(vm, values)| (vm.to_owned(), series(values))).into())
        };
        Table { range: Range { start_s: 1, end_s: 11 }, columns: COLUMNS.map(column).into() }
    }

    /// Returns the claims that fail after a value of `vm` is replaced.
    fn broken_by(column: &str, vm: &str, time_s: u64, value: Option<f64>) -> Vec<String> {
        let mut table = table();
        let (_, by_vm) = table.columns.iter_mut().find(|(name, _)| *name == column).unwrap();
        let series = by_vm.get_mut(vm).unwrap();
        match value {
            Some(value) => series.insert(time_s, value),
            None => series.remove(&time_s),
        };
        table.claims().into_iter().filter(|(holds, _)| !holds).map(|(_, claim)| claim).collect()
    }

    #[test]
    fn good_run_meets_all_claims() {
        assert!(table().claims().iter().all(|(holds, _)| *holds));
    }

    #[test]
    fn each_claim_can_fail() {
        let broken = |column, vm, time_s, value, part: &str| {
            let claims = broken_by(column, vm, time_s, value);
            assert!(claims.len() == 1 && claims[0].contains(part), "{column}: {claims:?}");
        };
        broken("pm_plugged_bytes", VM, 30, Some(0.0), "VM governed was scraped in 13 %");
        broken("pm_plugged_bytes", OTHER_VM, 30, Some(0.0), "VM policy-off was scraped in 13 %");
        broken("pm_resident_bytes", VM, 2, Some(1.0), "400 plugged, 0 resident, 400 lent");
        broken("pool_memory_bytes", VM, 2, None, "400 resident, 0 lent");
        broken("pm_plugged_bytes", VM, 3, Some(MIB), "at the end: 1 MiB");
        broken("swapped_out_pages", VM, 2, Some(5.0), "VM governed swapped out 5 pages");
    }

    #[test]
    fn a_series_without_samples_is_named() {
        let mut table = table();
        let (_, by_vm) =
            table.columns.iter_mut().find(|(name, _)| *name == "stall_full_seconds").unwrap();
        by_vm.remove(VM);
        let broken: Vec<_> = table.claims().into_iter().filter(|(holds, _)| !holds).collect();
        assert!(broken.len() == 1 && broken[0].1.contains("(missing: stall_full_seconds)"));
    }

    #[test]
    fn the_other_vm_swaps_or_kills() {
        let holds_without = |columns: &[&str]| {
            let mut table = table();
            for (name, by_vm) in &mut table.columns {
                if columns.contains(name) {
                    by_vm.get_mut(OTHER_VM).unwrap().values_mut().for_each(|value| *value = 0.0);
                }
            }
            table.claims().iter().all(|(holds, _)| *holds)
        };
        assert!(holds_without(&["oom_kills"]));
        assert!(holds_without(&["swapped_out_pages"]));
        assert!(!holds_without(&["oom_kills", "swapped_out_pages"]));
    }

    #[test]
    fn a_second_without_samples_has_empty_cells() {
        let csv = table().to_csv();
        assert!(csv.starts_with("time_s,elapsed_s,vm,dram_boot_bytes,"), "{csv}");
        assert!(csv.contains("\n3,2,policy-off,0,"), "{csv}");
        assert!(csv.contains("\n4,3,policy-off,,,"), "{csv}");
    }
}
