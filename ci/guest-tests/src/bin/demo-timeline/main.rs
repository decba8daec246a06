//! Asks Prometheus what it saw and writes it down for a plot: `demo-timeline ADDRESS:PORT END EVENTS DIR`.
//!
//! END is in seconds since 1970, EVENTS a file of lines `seconds,what`. In DIR it leaves `timeline.csv`, and
//! `timeline.gnuplot`, which draws it. Fails if Prometheus did not see the whole of what the demo has shown.

mod plot;
mod prometheus;
mod table;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::plot::Event;
use crate::prometheus::{Prometheus, Range};
use crate::table::Table;

/// Of the time before the first event.
const LEAD_IN_S: f64 = 2.0;

const USAGE: &str = "usage: demo-timeline ADDRESS:PORT END EVENTS DIR";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, end, events, dir] = arguments.as_slice() else { bail!("{USAGE}") };
    let seconds = |text: &str| text.parse::<f64>().with_context(|| format!("Not a time: {text:?}\n{USAGE}"));
    let events = read_events(Path::new(events))?;
    let (first, _) = events.first().context("No events")?;
    // What came before is set-up: the timeline begins a moment before the first event.
    let range = Range::new(first - LEAD_IN_S, seconds(end)?)?;
    let events: Vec<Event> = events
        .into_iter()
        .map(|(time_s, what)| Event { elapsed_s: time_s - range.start_s(), what })
        .collect();

    let table = Table::ask(&Prometheus::new(address), &range)?;
    table.check()?;
    let dir = Path::new(dir);
    write(&dir.join("timeline.csv"), &table.to_csv())?;
    write(&dir.join("timeline.gnuplot"), &plot::script(&range, &events))?;
    println!("{}", table.summary());
    Ok(())
}

/// Times and names.
fn read_events(path: &Path) -> Result<Vec<(f64, String)>> {
    let text = fs::read_to_string(path).with_context(|| format!("Cannot read {}", path.display()))?;
    let event = |line: &str| {
        let (time, what) = line.split_once(',').with_context(|| format!("Not an event: {line:?}"))?;
        Ok((time.parse().with_context(|| format!("Not a time: {line:?}"))?, what.to_owned()))
    };
    text.lines().map(event).collect()
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("Cannot write {}", path.display()))
}
