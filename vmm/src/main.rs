//! Foreshore, the virtual machine monitor.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;

use foreshore::config::{Command, Launch, parse_command_line};
use foreshore_cli::WRONG_COMMAND_LINE;

fn main() -> ExitCode {
    pmem_volume::file_mode::make_files_private();
    let launch = match parse_command_line(std::env::args_os()) {
        Ok(Command::Launch(launch)) => *launch,
        Ok(Command::Print(text)) => {
            // The reader, for example `head`, may have closed the pipe.
            let _ = io::stdout().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            fail(&error);
            return ExitCode::from(WRONG_COMMAND_LINE);
        }
    };
    if let Err(error) = foreshore::inherited::check(&launch) {
        fail(&error);
        return ExitCode::from(WRONG_COMMAND_LINE);
    }
    if let Err(error) = foreshore::vm::check_launch(&launch) {
        fail(&error);
        return ExitCode::from(WRONG_COMMAND_LINE);
    }
    match run(launch) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&*error),
    }
}

fn run(launch: Launch) -> Result<(), Box<dyn std::error::Error>> {
    foreshore_devices::log::start(&launch.log)?;
    if let Some(error) = launch.seccomp_error() {
        tracing::error!("{error}");
    }
    for warning in &launch.warnings {
        tracing::warn!("{warning}");
    }
    if let Err(error) = foreshore::core_dumps::disable() {
        tracing::warn!(%error, "Cannot disable core dumps of the VMM");
    }
    if let Err(error) = foreshore_devices::open_files::raise_limit() {
        tracing::warn!(%error, "Cannot raise the limit of open files");
    }
    Ok(foreshore::run::run(launch)?)
}

/// Prints an error and its causes in one line.
fn fail(error: &dyn std::error::Error) -> ExitCode {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let message = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
    let _ = writeln!(io::stderr(), "foreshore: {}", message.replace('\n', " "));
    ExitCode::FAILURE
}
