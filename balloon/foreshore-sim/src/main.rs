//! `foreshore-sim`: how a policy would have done.

#![forbid(unsafe_code)]

mod args;
mod image;
mod manual;
mod plot;
mod run;
mod table;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use rustix::fs::Mode;

/// The command line is wrong.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    make_files_private();
    let arguments = match args::Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // clap also returns help and version as errors. A failure to print is ignored.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let result = match &arguments.command {
        Some(args::Command::Completion { shell }) => manual::completion(*shell),
        Some(args::Command::Man) => manual::page(),
        None => run::run(&arguments.scenario),
    };
    match result.and_then(|text| print(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("foreshore-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Denies other users all access to the files that this process creates, for example the plot.
fn make_files_private() {
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
}

/// Prints the text. A reader that closes the pipe early is not an error.
fn print(text: &[u8]) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
