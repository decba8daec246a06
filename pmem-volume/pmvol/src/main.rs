//! `pmvol`: command line tool that manages pools of persistent memory and the volumes in them.

#![forbid(unsafe_code)]

mod args;
mod btt;
mod commands;
mod create_from;
mod manual;
mod meter;
mod print;
mod remedy;
mod usage;
mod vm;

use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue};

/// Exit code for a wrong command line, or for a check that could not read the pool.
const EXIT_NO_RESULT: u8 = 2;

fn main() -> ExitCode {
    pmem_volume::file_mode::make_files_private();
    foreshore_cli::answer_completion(|_| manual::description());
    let arguments = match usage::parse() {
        Ok(arguments) => arguments,
        Err(mut error) => {
            suggest_volume(&mut error);
            return foreshore_cli::report("pmvol", &error);
        }
    };
    match commands::run(&arguments) {
        Ok(commands::Outcome::Done) => ExitCode::SUCCESS,
        // The findings are already printed.
        Ok(commands::Outcome::Damaged) => ExitCode::FAILURE,
        Err(error) => {
            let remedy =
                remedy::for_error(&error).map(|remedy| format!("; {remedy}")).unwrap_or_default();
            print::print_stderr(format_args!("{error:#}{remedy}"));
            match commands::failed_without_result(&arguments.command, &error) {
                true => ExitCode::from(EXIT_NO_RESULT),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// Suggests `volume list` for `list`, and likewise for the other commands of volumes.
fn suggest_volume(error: &mut clap::Error) {
    if let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand)
        && let Some(volume) = args::Arguments::command().find_subcommand("volume")
        && volume.find_subcommand(name).is_some()
    {
        let suggested = vec![format!("volume {name}")];
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(suggested));
    }
}
