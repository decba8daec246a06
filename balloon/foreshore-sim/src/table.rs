//! Prints results as a table, as JSON or as CSV.

use balloon::sim::{Outcome, StorageOutcome};
use serde::Serialize;
use serde_json::Value;

use super::run::Row;

/// Unit of a column. The key in JSON and CSV contains the unit, so a figure has the same meaning in
/// every run and format.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Second,
    Gib,
    GibHour,
    Kilojoule,
    Ratio,
    Count,
}

impl Unit {
    fn heading(self) -> &'static str {
        match self {
            Unit::Second => "s",
            Unit::Gib => "GiB",
            Unit::GibHour => "GiB h",
            Unit::Kilojoule => "kJ",
            Unit::Ratio => "x",
            Unit::Count => "",
        }
    }

    /// Number of decimals of each figure, so that the figures of a column can be compared.
    fn decimals(self) -> usize {
        match self {
            Unit::Count => 0,
            Unit::Gib => 1,
            Unit::Second | Unit::Kilojoule | Unit::Ratio => 2,
            Unit::GibHour => 3,
        }
    }

    /// Formats a figure. A positive figure that would be rounded to zero is shown as `<0.01`, for
    /// example.
    fn figure(self, value: f64) -> String {
        let decimals = self.decimals();
        let text = format!("{value:.decimals$}");
        if value > 0.0 && text.parse() == Ok(0.0) {
            let least = 10_f64.powi(-(decimals as i32));
            return format!("<{least:.decimals$}");
        }
        text
    }
}

/// A column of the table: its heading, its unit, and the figure in that unit.
type Column = (&'static str, Unit, fn(&Outcome) -> f64);

const COLUMNS: [Column; 15] = [
    ("stall", Unit::Second, |outcome| outcome.stall_s),
    ("slower", Unit::Second, |outcome| outcome.pm_slower_s),
    ("swap in", Unit::Gib, |outcome| outcome.swap_in_gib),
    ("swap out", Unit::Gib, |outcome| outcome.swap_out_gib),
    ("held", Unit::GibHour, |outcome| outcome.held_gib_h),
    ("over", Unit::GibHour, |outcome| outcome.over_gib_h),
    ("short", Unit::GibHour, |outcome| outcome.short_gib_h),
    ("grows", Unit::Count, |outcome| outcome.grows as f64),
    ("shrinks", Unit::Count, |outcome| outcome.shrinks as f64),
    ("OOM", Unit::Count, |outcome| outcome.oom_kills as f64),
    ("energy", Unit::Kilojoule, |outcome| outcome.energy_kj),
    ("PM writes", Unit::Gib, |outcome| outcome.pm_written_gib),
    ("pooled", Unit::Ratio, |outcome| outcome.pooled_lifetime),
    ("lent", Unit::Ratio, |outcome| outcome.memory_lifetime),
    ("PM wear", Unit::Ratio, |outcome| outcome.storage_wear),
];

const STORAGE_COLUMNS: [Column; 8] = [
    ("won", Unit::GibHour, |outcome| storage(outcome).won_gib_h),
    ("transfers", Unit::Count, |outcome| storage(outcome).transfers as f64),
    ("transferred", Unit::Gib, |outcome| storage(outcome).transferred_gib),
    ("spilled", Unit::Gib, |outcome| storage(outcome).spilled_gib),
    ("waits", Unit::Count, |outcome| storage(outcome).write_stalls as f64),
    ("waited", Unit::Second, |outcome| storage(outcome).write_stall_s),
    ("erased", Unit::Gib, |outcome| storage(outcome).erased_gib),
    ("erases", Unit::Ratio, |outcome| storage(outcome).erases),
];

fn storage(outcome: &Outcome) -> StorageOutcome {
    outcome.storage.unwrap_or_default()
}

/// Returns a table with one line for each policy, and another one if the hosts have storage.
pub(crate) fn text(rows: &[Row]) -> String {
    let mut text = table(rows, &COLUMNS);
    if rows.iter().any(|row| row.outcome.storage.is_some()) {
        text.push('\n');
        text += &table(rows, &STORAGE_COLUMNS);
    }
    text
}

fn table(rows: &[Row], columns: &[Column]) -> String {
    let mut lines = vec![vec!["policy".to_owned()], vec![String::new()]];
    lines.extend(rows.iter().map(|row| vec![row.label.clone()]));
    for &(heading, unit, value) in columns {
        let figures = rows.iter().map(|row| unit.figure(value(&row.outcome)));
        let cells = [heading.to_owned(), unit.heading().to_owned()].into_iter().chain(figures);
        lines.iter_mut().zip(cells).for_each(|(line, cell)| line.push(cell));
    }
    let width =
        |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..=columns.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let mut cells = line.iter().zip(&widths);
        if let Some((label, width)) = cells.next() {
            text += &format!("{label:<width$}");
        }
        for (cell, width) in cells {
            text += &format!("  {cell:>width$}");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// Returns an array with one object for each policy.
pub(crate) fn json(rows: &[Row]) -> anyhow::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Named<'a> {
        policy: &'a str,
        #[serde(flatten)]
        outcome: &'a Outcome,
    }
    let named = rows.iter().map(|row| Named { policy: &row.label, outcome: &row.outcome });
    let mut text = serde_json::to_vec_pretty(&named.collect::<Vec<_>>())?;
    text.push(b'\n');
    Ok(text)
}

/// Returns the policies and their figures in the format of RFC 4180, in which values with a comma
/// or quotes are quoted. The columns are named like the figures.
pub(crate) fn csv(rows: &[Row]) -> anyhow::Result<Vec<u8>> {
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let Value::Object(figures) = serde_json::to_value(&row.outcome)? else { continue };
        if index == 0 {
            let names = std::iter::once("policy").chain(figures.keys().map(String::as_str));
            text += &names.collect::<Vec<_>>().join(",");
            text += "\r\n";
        }
        let label = match row.label.contains([',', '"']) {
            true => format!("\"{}\"", row.label.replace('"', "\"\"")),
            false => row.label.clone(),
        };
        let cells = std::iter::once(label).chain(figures.values().map(Value::to_string));
        text += &cells.collect::<Vec<_>>().join(",");
        text += "\r\n";
    }
    Ok(text.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(label: &str, outcome: Outcome) -> Row {
        Row { label: label.to_owned(), outcome }
    }

    #[test]
    fn units_of_the_table_do_not_depend_on_its_figures() {
        let short = Outcome { held_gib_h: 0.0004, swap_out_gib: 1e-6, ..Outcome::default() };
        let long = Outcome {
            stall_s: 35_658.2,
            held_gib_h: 8.601,
            swap_out_gib: 555.4,
            energy_kj: 0.0512,
            grows: 1_234_567,
            ..Outcome::default()
        };
        let expected = include_str!("../tests/golden/table.txt");
        assert_eq!(text(&[row("psi", short), row("off", long)]), expected);
    }

    /// In JSON, the key contains the unit.
    #[test]
    fn columns_have_the_figures_and_units_of_the_json_keys() {
        let outcome = Outcome {
            stall_s: 1.0,
            pm_slower_s: 2.0,
            swap_in_gib: 3.0,
            swap_out_gib: 4.0,
            held_gib_h: 5.0,
            over_gib_h: 6.0,
            short_gib_h: 7.0,
            energy_kj: 8.0,
            pm_written_gib: 9.0,
            ..Outcome::default()
        };
        let json = serde_json::to_value(&outcome).expect("figures");
        let keys = [
            "stall_s",
            "pm_slower_s",
            "swap_in_gib",
            "swap_out_gib",
            "held_gib_h",
            "over_gib_h",
            "short_gib_h",
            "energy_kj",
            "pm_written_gib",
        ];
        let columns: Vec<_> = COLUMNS
            .iter()
            .filter(|(_, unit, _)| !matches!(unit, Unit::Ratio | Unit::Count))
            .map(|(_, unit, value)| {
                (unit.heading().to_lowercase().replace(' ', "_"), value(&outcome))
            })
            .collect();
        assert_eq!(columns.len(), keys.len());
        for ((unit, value), key) in columns.into_iter().zip(keys) {
            assert!(key.ends_with(&format!("_{unit}")), "{key} is not in {unit}");
            assert_eq!(json[key], value, "{key}");
        }
    }

    #[test]
    fn figures_of_a_unit_have_the_same_decimals_and_only_zero_is_shown_as_zero() {
        for (unit, figures) in [
            (Unit::Count, ["0", "<1", "1", "32", "31679"]),
            (Unit::Gib, ["0.0", "<0.1", "0.7", "31.7", "31679.5"]),
            (Unit::Second, ["0.00", "<0.01", "0.71", "31.68", "31679.46"]),
            (Unit::GibHour, ["0.000", "<0.001", "0.712", "31.679", "31679.458"]),
        ] {
            let values = [0.0, 1e-9, 0.712_3, 31.679_2, 31_679.458_1];
            assert_eq!(values.map(|value| unit.figure(value)), figures);
        }
    }
}
