//! Draws the metrics that Prometheus has collected.

use std::fmt::Write;

use anyhow::{Context, Result};

use super::Demo;
use super::narrator::{Event, now};
use super::plot;
use super::prometheus::{Prometheus, Range};
use super::table::Table;
use crate::checkout::{read, write};
use crate::jobs;
use crate::programs;

const FORMATS: [&str; 2] = ["svg", "png"];
/// Title that gnuplot writes into every picture.
const GNUPLOT_TITLE: &str = "<title>Gnuplot</title>";
const TITLE: &str = "<title>Foreshore: a guest's memory grows into PM and back</title>";

/// Writes the data to the demo's folder and draws the picture there. Times are relative to the
/// second `zero_s`. If the demo is judged and the data contradict a claim, draws nothing and
/// returns the first such claim.
pub(super) fn draw(
    demo: &Demo<'_>,
    prometheus: &Prometheus,
    zero_s: Option<u64>,
    events: &[Event],
    is_judged: bool,
    mut show: impl FnMut(&[u8]) -> Result<()>,
) -> Result<Option<String>> {
    let start_s = zero_s.context("the demo printed nothing")?;
    let range = Range { start_s, end_s: now()?.as_secs() + 1 };
    let phase = if is_judged { "6/6 " } else { "" };
    show(format!("== {phase}data of Prometheus\n").as_bytes())?;
    let path = |name: &str| demo.folder.join(name);
    write(&path("events.csv"), events_csv(events))?;
    let table = Table::query(prometheus, &range)?;
    show(format!("  {}\n", table.summary()).as_bytes())?;
    write(&path("timeline.csv"), table.to_csv())?;
    write(&path("timeline.gnuplot"), plot::script(&range, events))?;
    for (holds, claim) in table.claims().into_iter().filter(|_| is_judged) {
        if !holds {
            return Ok(Some(claim));
        }
        show(format!("  ok: {claim}\n").as_bytes())?;
    }
    for format in FORMATS {
        let mut gnuplot = programs::user("gnuplot");
        gnuplot.arg("-e").arg(format!("format='{format}'")).arg("timeline.gnuplot");
        let status = jobs::stream(gnuplot.current_dir(&demo.folder), &mut show)?;
        jobs::check(&gnuplot, status)?;
    }
    let svg = path("timeline.svg");
    write(&svg, read(&svg)?.replace(GNUPLOT_TITLE, TITLE))?;
    Ok(None)
}

fn events_csv(events: &[Event]) -> String {
    let mut csv = "time_s,elapsed_s,event\n".to_owned();
    for event in events {
        // Writing to a String cannot fail.
        let _ =
            writeln!(csv, "{:.6},{:.1},{}", event.time.as_secs_f64(), event.elapsed_s, event.text);
    }
    csv
}
