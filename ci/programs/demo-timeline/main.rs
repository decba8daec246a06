//! Phase 5 of the demo: asks Prometheus what it saw and writes it down for a plot:
//! `demo-timeline ADDRESS:PORT ZERO END EVENTS DIR [unjudged]`.
//!
//! ZERO and END are in seconds since 1970; all other times count from ZERO, a whole second. EVENTS
//! is a table with a head, `time_s,elapsed_s,event`. In DIR it leaves `timeline.csv`, and
//! `timeline.gnuplot`, which draws it. Fails if Prometheus did not see the whole of what the demo
//! has shown. `unjudged` writes the files alone, for a demo that has failed.

mod plot;
mod prometheus;
mod table;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

use crate::plot::Event;
use crate::prometheus::{Prometheus, Range};
use crate::table::Table;

const USAGE: &str = "usage: demo-timeline ADDRESS:PORT ZERO END EVENTS DIR [unjudged]";

fn main() -> ExitCode {
    match timeline() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("  NOT SEEN: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn timeline() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (is_judged, arguments) = match arguments.as_slice() {
        [arguments @ .., last] if last == "unjudged" => (false, arguments),
        arguments => (true, arguments),
    };
    let [address, zero, end, events, dir] = arguments else { bail!("{USAGE}") };
    let seconds =
        |text: &str| text.parse::<f64>().with_context(|| format!("Not a time: {text:?}\n{USAGE}"));
    let events = fs::read_to_string(events).with_context(|| format!("Cannot read {events}"))?;
    let events = parse_events(&events)?;
    let range = Range::new(seconds(zero)?, seconds(end)?)?;

    println!("== {}what Prometheus has seen", if is_judged { "5/5 " } else { "" });
    let table = Table::ask(&Prometheus::new(address), &range)?;
    println!("  {}", table.summary());
    let dir = Path::new(dir);
    write(&dir.join("timeline.csv"), &table.to_csv())?;
    write(&dir.join("timeline.gnuplot"), &plot::script(&range, &events))?;
    for (holds, what) in table.claims().into_iter().filter(|_| is_judged) {
        ensure!(holds, "{what}");
        println!("  ok: {what}");
    }
    Ok(())
}

/// Below the table's head; names may have commas.
fn parse_events(text: &str) -> Result<Vec<Event>> {
    let event = |line: &str| {
        let mut cells = line.splitn(3, ',').skip(1);
        let elapsed_s: Option<f64> = cells.next().and_then(|cell| cell.parse().ok());
        let what = cells.next().map(str::to_owned);
        let (elapsed_s, what) =
            elapsed_s.zip(what).with_context(|| format!("Not an event: {line:?}"))?;
        Ok(Event { elapsed_s, what })
    };
    text.lines().skip(1).map(event).collect()
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("Cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_below_the_head() {
        let events =
            parse_events("time_s,elapsed_s,event\n1000.5,0.5,one\n1012.0,12.0,two, three\n")
                .unwrap();
        let events: Vec<_> =
            events.iter().map(|event| (event.elapsed_s, event.what.as_str())).collect();
        assert_eq!(events, [(0.5, "one"), (12.0, "two, three")]);
        for line in ["1000.5,0.5", "1000.5,soon,one", "one"] {
            assert!(parse_events(&format!("head\n{line}")).is_err(), "{line}");
        }
    }
}
