//! `foreshore-sim`: simulates how policies would size a guest.

#![forbid(unsafe_code)]

mod args;
mod image;
mod manual;
mod plot;
mod run;
mod table;

use std::io::Write;
use std::process::ExitCode;

use rustix::fs::Mode;

fn main() -> ExitCode {
    make_files_private();
    foreshore_cli::answer_completion(|_| manual::description());
    let arguments = match args::Arguments::read() {
        Ok(arguments) => arguments,
        Err(error) => {
            return foreshore_cli::report("foreshore-sim", &error);
        }
    };
    let result = match &arguments.command {
        Some(args::Command::Completion { shell }) => manual::completion(*shell),
        Some(args::Command::Man { folder }) => manual::page(folder.as_deref()),
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

/// Denies other users all access to the files that this process creates, such as the plot.
fn make_files_private() {
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
}

/// Prints the text. It is not an error if the reader of a pipe closes it early.
fn print(text: &[u8]) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
