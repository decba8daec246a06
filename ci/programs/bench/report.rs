//! Writes the results as a table for readers and as JSON for programs.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::samples::{Row, Samples, Target, median, p99, smallest};
use crate::vmm::{FORESHORE, QEMU, UNCONFINED};

/// Returns the description of the machine that ci/nested/host has set.
fn measured_on() -> String {
    std::env::var("FORESHORE_MEASURED_ON").unwrap_or_else(|_| "an unnamed machine".to_owned())
}

pub(crate) fn write(samples: &Samples, rounds: usize, dir: &Path) -> Result<()> {
    let files = [
        ("bench.md", markdown(samples, rounds)),
        ("bench.json", format!("{:#}\n", as_json(samples, rounds))),
    ];
    for (name, text) in files {
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("Cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns a table of medians. The smallest value and the 99th percentile are in parentheses.
pub(crate) fn markdown(samples: &Samples, rounds: usize) -> String {
    let vmms = samples.vmms();
    let mut text = format!(
        "Medians of {rounds} rounds (smallest to 99th percentile, which is the largest of fewer than 100 values), the VMMs \
         taking turns in one boot of the host.\n\n"
    );
    let rule = "|---".repeat(vmms.len() + 4);
    let _ = writeln!(text, "| | {} | ratio | target | met |\n{rule}|", vmms.join(" | "));
    for row in Row::ALL.iter().copied().filter(|row| !samples.of(*row, FORESHORE).is_empty()) {
        let cells: Vec<String> = vmms.iter().map(|vmm| cell(samples, row, vmm)).collect();
        let ratio = ratio(samples, row).map_or(String::new(), |ratio| format!("{ratio:.2}"));
        let (target, met) = verdict(samples, row);
        let _ = writeln!(
            text,
            "| {} | {} | {ratio} | {target} | {met} |",
            row.title(),
            cells.join(" | ")
        );
    }
    let _ = writeln!(text, "\nMeasured on: {}.", measured_on());
    text
}

fn cell(samples: &Samples, row: Row, vmm: &str) -> String {
    let values = values(samples, row, vmm);
    let all = (median(values), smallest(values), p99(values));
    let (Some(median), Some(smallest), Some(p99)) = all else { return String::new() };
    let unit = row.unit();
    format!("{} ({} to {})", unit.show(median), unit.show(smallest), unit.show(p99))
}

/// Returns the values of a row. The values of a peer may be in a different row.
fn values<'a>(samples: &'a Samples, row: Row, vmm: &str) -> &'a [f64] {
    samples.of(if vmm == FORESHORE { row } else { row.peer_row() }, vmm)
}

/// Returns Foreshore's median divided by that of the VMM to which the row is compared.
fn ratio(samples: &Samples, row: Row) -> Option<f64> {
    let other = match row.target() {
        Target::TimesUnconfined(_) => UNCONFINED,
        Target::TimesQemu(_) | Target::AtMost(_) | Target::Open => QEMU,
    };
    Some(median(values(samples, row, FORESHORE))? / median(values(samples, row, other))?)
}

/// Returns the text of the target, and whether the target was met.
fn verdict(samples: &Samples, row: Row) -> (String, &'static str) {
    let yes_or_no = |met: Option<bool>| met.map_or("", |met| if met { "yes" } else { "no" });
    match row.target() {
        Target::Open => (String::new(), ""),
        Target::TimesQemu(limit) => (
            format!("{limit:.2} x QEMU"),
            yes_or_no(ratio(samples, row).map(|ratio| ratio <= limit)),
        ),
        Target::TimesUnconfined(limit) => (
            format!("{limit:.2} x {UNCONFINED}"),
            yes_or_no(ratio(samples, row).map(|ratio| ratio <= limit)),
        ),
        Target::AtMost(limit) => {
            let foreshore = median(samples.of(row, FORESHORE));
            (row.unit().show(limit), yes_or_no(foreshore.map(|foreshore| foreshore <= limit)))
        }
    }
}

fn as_json(samples: &Samples, rounds: usize) -> Value {
    let rows: Map<String, Value> = Row::ALL
        .iter()
        .map(|&row| {
            let vmms: Map<String, Value> = samples
                .vmms()
                .into_iter()
                .map(|vmm| {
                    let values = samples.of(row, &vmm);
                    (
                        vmm,
                        json!({ "median": median(values), "p99": p99(values), "samples": values }),
                    )
                })
                .collect();
            let (target, met) = verdict(samples, row);
            let value =
                json!({ "vmms": vmms, "ratio": ratio(samples, row), "target": target, "met": met });
            (row.key().to_owned(), value)
        })
        .collect();
    json!({ "rounds": rounds, "measured_on": measured_on(), "rows": rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_compared_with_qemu_and_judged() {
        let mut samples = Samples::default();
        for value in [2.0, 2.2, 2.1] {
            samples.add(Row::Boot, FORESHORE, value);
            samples.add(Row::Boot, QEMU, value * 2.0);
        }
        samples.add(Row::VmmMemory, FORESHORE, 7.5);
        let text = markdown(&samples, 3);
        assert!(
            text.contains("| 2.10 s (2.00 s to 2.20 s) | 4.20 s (4.00 s to 4.40 s) | 0.50 |"),
            "{text}"
        );
        assert!(text.contains("| 0.55 x QEMU | yes |"), "{text}");
        assert!(text.contains("| 7.0 MiB | no |"), "{text}");
        assert_eq!(as_json(&samples, 3)["rows"]["boot_seconds"]["vmms"]["qemu"]["median"], 4.2);
    }

    #[test]
    fn row_without_a_peer_value_is_compared_with_its_peer_row() {
        let mut samples = Samples::default();
        samples.add(Row::NvdimmWrite, QEMU, 100.0);
        samples.add(Row::HintsWrite, FORESHORE, 150.0);
        assert_eq!(ratio(&samples, Row::HintsWrite), Some(1.5));
        assert_eq!(verdict(&samples, Row::HintsWrite), (String::new(), ""));
    }
}
