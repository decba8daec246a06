//! What has come of it, as a table, as JSON and as CSV.

use balloon::sim::Outcome;
use serde::Serialize;
use serde_json::Value;

use super::run::Row;

/// What a column counts. The figures of all columns that count the same are in one unit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quantity {
    Time,
    Size,
    SizeTime,
    Energy,
    Ratio,
    Count,
}

impl Quantity {
    /// Units, largest first, and how many of them make the first.
    fn units(self) -> &'static [(&'static str, f64)] {
        match self {
            Quantity::Time => &[("s", 1.0)],
            Quantity::Size => &[("GiB", 1.0), ("MiB", 1024.0), ("KiB", 1024.0 * 1024.0)],
            Quantity::SizeTime => {
                &[("GiB h", 1.0), ("GiB min", 60.0), ("GiB s", 3600.0), ("MiB s", 3600.0 * 1024.0)]
            }
            Quantity::Energy => &[("kJ", 1.0), ("J", 1000.0)],
            Quantity::Ratio => &[("x", 1.0)],
            Quantity::Count => &[("", 1.0)],
        }
    }

    /// The largest unit in which the largest figure is 1 at least: the least of a short run is not
    /// nothing then.
    fn unit(self, rows: &[Row]) -> (&'static str, f64) {
        let columns = COLUMNS.iter().filter(|(_, quantity, _)| *quantity == self);
        let figures =
            columns.flat_map(|(_, _, figure)| rows.iter().map(|row| figure(&row.outcome)));
        let most = figures.fold(0.0, f64::max);
        let units = self.units();
        let fits = units.iter().find(|(_, per_first)| most * per_first >= 1.0 || most == 0.0);
        *fits.unwrap_or(&units[units.len() - 1])
    }
}

/// The columns of the table: heading, what it counts, figure in the first unit of that.
type Column = (&'static str, Quantity, fn(&Outcome) -> f64);

const COLUMNS: [Column; 15] = [
    ("stall", Quantity::Time, |outcome| outcome.stall_s),
    ("slower", Quantity::Time, |outcome| outcome.pm_slower_s),
    ("swap in", Quantity::Size, |outcome| outcome.swap_in_gib),
    ("swap out", Quantity::Size, |outcome| outcome.swap_out_gib),
    ("held", Quantity::SizeTime, |outcome| outcome.held_gib_h),
    ("over", Quantity::SizeTime, |outcome| outcome.over_gib_h),
    ("short", Quantity::SizeTime, |outcome| outcome.short_gib_h),
    ("grows", Quantity::Count, |outcome| outcome.grows as f64),
    ("shrinks", Quantity::Count, |outcome| outcome.shrinks as f64),
    ("OOM", Quantity::Count, |outcome| outcome.oom_kills as f64),
    ("energy", Quantity::Energy, |outcome| outcome.energy_kj),
    ("PM writes", Quantity::Size, |outcome| outcome.pm_written_gib),
    ("pooled", Quantity::Ratio, |outcome| outcome.pooled_lifetime),
    ("lent", Quantity::Ratio, |outcome| outcome.memory_lifetime),
    ("PM wear", Quantity::Ratio, |outcome| outcome.storage_wear),
];

/// Three digits that count, and no more than two behind the point. What is not nothing does not
/// look like it.
fn figure(value: f64) -> String {
    match value {
        _ if value >= 99.95 => format!("{value:.0}"),
        _ if value >= 9.995 => format!("{value:.1}"),
        _ if value > 0.0 && value < 0.005 => "<0.01".to_owned(),
        _ => format!("{value:.2}"),
    }
}

/// A line for each policy, the figures under each other.
pub(crate) fn text(rows: &[Row]) -> String {
    let mut lines = vec![vec!["policy".to_owned()], vec![String::new()]];
    lines.extend(rows.iter().map(|row| vec![row.label.clone()]));
    for (heading, quantity, value) in COLUMNS {
        let (unit, per_first) = quantity.unit(rows);
        let figures = rows.iter().map(|row| match quantity {
            Quantity::Count => value(&row.outcome).to_string(),
            _ => figure(value(&row.outcome) * per_first),
        });
        let cells = [heading.to_owned(), unit.to_owned()].into_iter().chain(figures);
        lines.iter_mut().zip(cells).for_each(|(line, cell)| line.push(cell));
    }
    let width =
        |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn row(held_gib_h: f64, over_gib_h: f64, swap_out_gib: f64) -> Row {
        let outcome = Outcome { held_gib_h, over_gib_h, swap_out_gib, ..Outcome::default() };
        Row { label: "psi".to_owned(), outcome }
    }

    #[test]
    fn a_table_has_units_that_show_its_largest_figures() {
        let units =
            |rows: &[Row]| [Quantity::SizeTime, Quantity::Size].map(|what| what.unit(rows).0);
        let cases = [
            (row(6.5, 0.0, 2.0), ["GiB h", "GiB"]),
            (row(0.02, 0.0, 0.9), ["GiB min", "MiB"]),
            (row(0.0004, 0.0, 0.0), ["GiB s", "GiB"]),
            (row(0.0, 1e-6, 1e-4), ["MiB s", "KiB"]),
            (row(1e-12, 0.0, 1e-12), ["MiB s", "KiB"]),
            (row(0.0, 0.0, 0.0), ["GiB h", "GiB"]),
        ];
        for (row, expected) in cases {
            assert_eq!(units(&[row]), expected);
        }
        // One unit for all that are compared.
        let rows = [row(0.0004, 0.0004, 0.0), row(6.5, 0.0, 0.0)];
        let text = text(&rows);
        let cells =
            |line| text.lines().nth(line).expect("a line").split_whitespace().skip(5).take(2);
        assert!(cells(2).eq(["<0.01", "<0.01"]) && cells(3).eq(["6.50", "0.00"]), "{text}");
    }

    #[test]
    fn figures_have_three_digits_and_nothing_is_nothing() {
        let cases =
            [(0.0, "0.00"), (1e-9, "<0.01"), (0.005, "0.01"), (0.25, "0.25"), (9.994, "9.99")];
        let more = [(9.996, "10.0"), (31.26, "31.3"), (99.96, "100"), (31_679.4, "31679")];
        for (value, expected) in cases.into_iter().chain(more) {
            assert_eq!(figure(value), expected);
        }
    }
}
