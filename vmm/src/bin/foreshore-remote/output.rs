//! Output format: tables for people, JSON for programs.

use std::io::{self, IsTerminal};

use anyhow::{Context, Result};
use clap::Args;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Flags of verbs that show something.
#[derive(Debug, Default, Args)]
pub(crate) struct Output {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Origin of a verb, which determines its output format without `--json`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Verb of ch-remote. Scripts read its JSON output from a pipe.
    ChRemote,
    /// Verb that only Foreshore has.
    Foreshore,
}

impl Output {
    /// Formats an answer as JSON or by `table`.
    pub(crate) fn format<T: DeserializeOwned>(
        &self,
        origin: Origin,
        answer: &[u8],
        table: impl FnOnce(&T) -> String,
    ) -> Result<String> {
        self.format_for(io::stdout().is_terminal(), origin, answer, table)
    }

    fn format_for<T: DeserializeOwned>(
        &self,
        is_terminal: bool,
        origin: Origin,
        answer: &[u8],
        table: impl FnOnce(&T) -> String,
    ) -> Result<String> {
        if self.json || origin == Origin::ChRemote && !is_terminal {
            return json(answer, is_terminal);
        }
        let answer = serde_json::from_slice(answer).context("Unexpected answer of the VMM")?;
        Ok(table(&answer))
    }
}

/// Formats an answer as JSON: unchanged for programs, with line breaks on a terminal.
pub(crate) fn text_of(answer: &[u8]) -> Result<String> {
    json(answer, io::stdout().is_terminal())
}

fn json(answer: &[u8], is_terminal: bool) -> Result<String> {
    let text = std::str::from_utf8(answer).context("The answer is not text")?;
    match is_terminal {
        _ if text.is_empty() => Ok(String::new()),
        true => {
            let value: Value = serde_json::from_str(text).context("The answer is not JSON")?;
            Ok(format!("{value:#}\n"))
        }
        false => Ok(format!("{text}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_is_unchanged_for_programs_and_indented_for_a_terminal() {
        assert_eq!(json(br#"{"a":1}"#, false).unwrap(), "{\"a\":1}\n");
        assert_eq!(json(br#"{"a":1}"#, true).unwrap(), "{\n  \"a\": 1\n}\n");
        for is_terminal in [false, true] {
            assert_eq!(json(b"", is_terminal).unwrap(), "");
        }
    }

    #[test]
    fn verbs_of_ch_remote_print_json_to_a_pipe() {
        let (json, table) = ("{\"a\": 1}", "A 1\n");
        for (flag, origin, is_terminal, expected) in [
            (false, Origin::ChRemote, false, json),
            (false, Origin::ChRemote, true, table),
            (false, Origin::Foreshore, false, table),
            (false, Origin::Foreshore, true, table),
            (true, Origin::ChRemote, false, json),
            (true, Origin::Foreshore, false, json),
        ] {
            let output = Output { json: flag };
            let format = |_: &Value| table.to_owned();
            let text = output.format_for(is_terminal, origin, json.as_bytes(), format).unwrap();
            assert_eq!(text.trim_end(), expected.trim_end(), "{flag} {is_terminal}");
        }
    }
}
