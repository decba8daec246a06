//! gnuplot script that plots memory, swap and stalls over time, with a line for each configuration.

use std::fmt::Write as _;

use super::report::Row;

/// Maximum of the time axis. Guests that swap take much longer. On a longer axis, all other guests
/// would be a single line at the left edge.
const MAX_AXIS_S: f64 = 150.0;

const PANELS: [(&str, &str, &str); 4] = [
    ("held_mib", "memory of the VM", "MiB"),
    ("used_mib", "memory in use in the guest", "MiB"),
    ("swapped_in_mib", "swapped in so far", "MiB"),
    ("stall_some_s", "time in which a task waited for memory", "s"),
];

/// Returns a script that draws NAME.svg. gnuplot runs it in the directory with the time series.
pub(super) fn script(name: &str, rows: &[&Row]) -> String {
    let last_s = |row: &&Row| row.outcome.points.last().map_or(0.0, |point| point.at_s);
    let axis_s = rows.iter().map(last_s).fold(1.0, f64::max).min(MAX_AXIS_S);
    let mut text = format!(
        "set datafile separator comma\nset datafile columnheaders\n\
         set terminal svg size 1200, 1200 fixed font 'DejaVu Sans,12' background rgb 'white'\n\
         set output '{name}.svg'\nset multiplot layout {},1 title '{name}'\n\
         set xrange [0:{axis_s:.0}]\nset yrange [0:*]\nset grid ytics lc rgb '#dddddd'\nset border 3 lc rgb '#555555'\n\
         set tics nomirror\nset key outside right top vertical\nset lmargin 10\nset rmargin 24\n",
        PANELS.len()
    );
    for (column, title, unit) in PANELS {
        let lines: Vec<String> = rows
            .iter()
            .map(|row| {
                let Row { csv, config, .. } = row;
                format!("'{csv}' using 'elapsed_s':'{column}' with lines lw 2 title '{config}'")
            })
            .collect();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "set title '{title}' noenhanced\nset ylabel '{unit}'\nplot {}",
            lines.join(", \\\n     ")
        );
    }
    text + "unset multiplot\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pressure::run::Outcome;

    #[test]
    fn every_configuration_has_a_line_in_every_panel() {
        let row = |config: &str| {
            let (config, csv) = (config.to_owned(), format!("bfs-50-{config}-1.csv"));
            Row { workload: "bfs", share: 50, config, csv, outcome: Outcome::default() }
        };
        let (one, other) = (row("psi"), row("zram"));
        let script = script("bfs-50-1", &[&one, &other]);
        for title in ["psi", "zram"] {
            assert_eq!(
                script.matches(&format!("title '{title}'")).count(),
                PANELS.len(),
                "{script}"
            );
        }
        assert!(script.contains("set output 'bfs-50-1.svg'"), "{script}");
    }
}
