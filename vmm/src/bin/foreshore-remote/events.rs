//! Subcommand `events`: follows the events of a VMM.

use std::io::{self, Write};

use anyhow::Result;
use clap::Args;
use foreshore::api::Client;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::output::Output;

#[derive(Debug, Args)]
pub(crate) struct Events {
    /// No effect; events are always followed
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    output: Output,
}

impl Events {
    /// Prints each event as a line until the VMM exits.
    pub(crate) async fn execute(self, vmm: &Client) -> Result<String> {
        let mut out = io::stdout();
        let mut lines = Lines::default();
        vmm.follow("vmm.events", |piece| {
            if self.output.json {
                out.write_all(piece)?;
            } else {
                out.write_all(lines.take(piece).as_bytes())?;
            }
            out.flush()
        })
        .await?;
        Ok(String::new())
    }
}

/// Splits the received answer into lines.
#[derive(Default)]
struct Lines {
    /// Beginning of a line that has not arrived completely.
    rest: Vec<u8>,
}

impl Lines {
    /// Adds a piece of the answer, and returns the text of the lines completed by it.
    fn take(&mut self, piece: &[u8]) -> String {
        self.rest.extend_from_slice(piece);
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else {
            return String::new();
        };
        let rest = self.rest.split_off(end + 1);
        let lines = std::mem::replace(&mut self.rest, rest);
        lines.split(|byte| *byte == b'\n').filter_map(line).collect()
    }
}

/// Line in the stream of events.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Event {
        timestamp: Timestamp,
        source: String,
        event: String,
        properties: Option<Properties>,
        /// Time of the host's clock. Older VMMs do not send it.
        time: Option<String>,
    },
    /// Number of events that were dropped because this client was too slow.
    Lost { lost: u64 },
    /// Line sent in the absence of events, which shows that the VMM is still running.
    Quiet {
        #[serde(rename = "quiet_s")]
        _seconds: Value,
    },
}

type Properties = Map<String, Value>;

/// Time since the start of the VMM.
#[derive(Deserialize)]
struct Timestamp {
    secs: u64,
    nanos: u32,
}

/// Formats a line, or returns `None` if there is nothing to print. A line that this version does
/// not know is printed unchanged.
fn line(json: &[u8]) -> Option<String> {
    let text = match serde_json::from_slice(json) {
        Ok(Line::Event { timestamp, source, event, properties, time }) => {
            let Timestamp { secs, nanos } = timestamp;
            let time = time.map_or_else(String::new, |time| time + "  ");
            let mut text = format!("{time}{secs:>6}.{:03} s  {source} {event}", nanos / 1_000_000);
            for (name, value) in properties.unwrap_or_default() {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                text.push_str(&format!(" {name}={}", value.escape_debug()));
            }
            text
        }
        Ok(Line::Lost { lost }) => format!("{lost} events lost, because this client was too slow"),
        Ok(Line::Quiet { .. }) => return None,
        Err(_) if json.is_empty() => return None,
        Err(_) => String::from_utf8_lossy(json).escape_debug().to_string(),
    };
    Some(text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_shown_as_lines() {
        let answer = "\
{\"timestamp\":{\"secs\":3,\"nanos\":29228206},\"source\":\"vm\",\"event\":\"booted\",\"properties\":null}
{\"timestamp\":{\"secs\":71,\"nanos\":0},\"source\":\"foreshore\",\"event\":\"memory-reached\",\"properties\":{\"zone\":\"pm\",\"plugged_bytes\":\"2097152\"},\"time\":\"2026-01-31T12:00:00.000001Z\"}
{\"lost\":3}
{\"quiet_s\":60}
{\"tide\":\"high\"}
no JSON\x1b
";
        let expected = "     3.029 s  vm booted
2026-01-31T12:00:00.000001Z      71.000 s  foreshore memory-reached plugged_bytes=2097152 zone=pm
3 events lost, because this client was too slow
{\\\"tide\\\":\\\"high\\\"}
no JSON\\u{1b}
";
        assert_eq!(Lines::default().take(answer.as_bytes()), expected);
        // A piece of the answer may end anywhere.
        let mut lines = Lines::default();
        let pieces: String = answer.as_bytes().chunks(7).map(|piece| lines.take(piece)).collect();
        assert_eq!(pieces, expected);
    }
}
