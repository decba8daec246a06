//! Errors in command lines.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};

/// Exit code for a refused command line. The exit code is the same in clap and Cloud Hypervisor.
pub const WRONG_COMMAND_LINE: u8 = 2;

/// Prefix of an error that clap renders.
const CLAP_PREFIX: &str = "error: ";

/// Prints the help, the version, or an error that is prefixed with the name of the program. Returns
/// the exit code.
pub fn report(program: &str, error: &clap::Error) -> ExitCode {
    // If the output cannot be printed, there is nothing left to do.
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let _ = io::stderr().write_all(message(program, error).as_bytes());
    ExitCode::from(WRONG_COMMAND_LINE)
}

fn message(program: &str, error: &clap::Error) -> String {
    let text = error.render().to_string();
    format!("{program}: {}", text.strip_prefix(CLAP_PREFIX).unwrap_or(&text))
}

/// Returns a one-line description of why clap refuses a command line, with clap's suggestion.
pub fn usage_line(error: &clap::Error) -> String {
    let rendered = error.render().to_string();
    // Joins the lines of the first paragraph: the reason, and a list of missing arguments if there
    // is one.
    let lines = rendered.lines().map(str::trim).take_while(|line| !line.is_empty());
    let text = lines.collect::<Vec<_>>().join(" ");
    let text = text.strip_prefix(CLAP_PREFIX).unwrap_or(&text);
    let suggested =
        [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue]
            .into_iter()
            .find_map(|kind| match error.get(kind)? {
                ContextValue::String(name) => Some(name.clone()),
                ContextValue::Strings(names) => names.first().cloned(),
                _ => None,
            });
    let suggested = suggested.map_or_else(String::new, |name| format!(" (did you mean '{name}'?)"));
    format!("{text}{suggested}; see --help")
}

#[cfg(test)]
mod tests {
    use clap::{Arg, Command};

    use super::*;

    #[test]
    fn errors_start_with_the_program_and_keep_the_suggestion() {
        let command = Command::new("tide").arg(Arg::new("level").long("level"));
        let error = command.try_get_matches_from(["tide", "--levle", "3"]).unwrap_err();
        let text = message("tide", &error);
        assert!(text.starts_with("tide: unexpected argument '--levle' found\n"), "{text}");
        assert!(text.contains("tip: a similar argument exists: '--level'"), "{text}");
        let line = usage_line(&error);
        assert_eq!(
            line,
            "unexpected argument '--levle' found (did you mean '--level'?); see --help"
        );
    }
}
