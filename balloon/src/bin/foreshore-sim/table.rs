//! What has come of it, as a table, as JSON and as CSV.

use balloon::sim::Outcome;
use serde::Serialize;
use serde_json::Value;

use super::run::Row;

/// The columns of the table: heading, unit, figure.
type Column = (&'static str, &'static str, fn(&Row) -> String);

const COLUMNS: [Column; 15] = [
    ("stall", "s", |row| figure(row.outcome.stall_s)),
    ("slower", "s", |row| figure(row.outcome.pm_slower_s)),
    ("swap in", "GiB", |row| figure(row.outcome.swap_in_gib)),
    ("swap out", "GiB", |row| figure(row.outcome.swap_out_gib)),
    ("held", "GiB h", |row| figure(row.outcome.held_gib_h)),
    ("over", "GiB h", |row| figure(row.outcome.over_gib_h)),
    ("short", "GiB h", |row| figure(row.outcome.short_gib_h)),
    ("grows", "", |row| row.outcome.grows.to_string()),
    ("shrinks", "", |row| row.outcome.shrinks.to_string()),
    ("OOM", "", |row| row.outcome.oom_kills.to_string()),
    ("energy", "kJ", |row| figure(row.outcome.energy_kj)),
    ("PM writes", "GiB", |row| figure(row.outcome.pm_written_gib)),
    ("pooled", "x", |row| figure(row.outcome.pooled_lifetime)),
    ("lent", "x", |row| figure(row.outcome.memory_lifetime)),
    ("PM wear", "x", |row| figure(row.outcome.storage_wear)),
];

/// Three digits that count, and no more than two behind the point.
fn figure(value: f64) -> String {
    match value {
        _ if value >= 100.0 => format!("{value:.0}"),
        _ if value >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A line for each policy, the figures under each other.
pub(crate) fn text(rows: &[Row]) -> String {
    let mut lines = vec![vec!["policy".to_owned()], vec![String::new()]];
    for (heading, unit, _) in COLUMNS {
        lines[0].push(heading.to_owned());
        lines[1].push(unit.to_owned());
    }
    for row in rows {
        let figures = COLUMNS.iter().map(|(_, _, figure)| figure(row));
        lines.push(std::iter::once(row.label.clone()).chain(figures).collect());
    }
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..=COLUMNS.len()).map(width).collect();
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

/// An array with an object for each policy.
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

/// RFC 4180: what has a comma or quotes is in quotes. The policy, and the figures by their names.
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
