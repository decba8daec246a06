//! Foreshore, the virtual machine monitor.

use std::io::{self, Write};
use std::os::fd::RawFd;
use std::process::ExitCode;

use foreshore::config::{Command, Launch, parse_command_line};
use foreshore::governor::task::NICE;
use foreshore::inherited::InheritedError;
use foreshore::opened::{OpenError, Opened};
use foreshore::run::RunError;
use foreshore_cli::WRONG_COMMAND_LINE;
use foreshore_confinement::seccomp::{self, ReportTarget};
use foreshore_confinement::{capabilities, process};
use foreshore_devices::log::LogFormat;
use foreshore_types::chain;

fn main() -> ExitCode {
    pmem_volume::file_mode::make_files_private();
    let args: Vec<_> = std::env::args_os().collect();
    let mut launch = match parse_command_line(args.iter().cloned()) {
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
    // 1. Opens files and sockets that the process may be unable to open without its privileges.
    // SAFETY: nothing has been opened yet, and no thread was started.
    let opened = match unsafe { Opened::open(&mut launch, &args) } {
        Ok(opened) => opened,
        Err(error @ OpenError::Inherited(InheritedError::Close(_))) => return fail(&error),
        Err(error) => {
            fail(&error);
            return ExitCode::from(WRONG_COMMAND_LINE);
        }
    };
    // 2. Drops privileges. The log belongs to the user that the process becomes.
    if let Err(error) = opened.ids.assume() {
        fail(&error);
        return ExitCode::from(WRONG_COMMAND_LINE);
    }
    let log_fd = match foreshore_devices::log::start(&launch.log) {
        Ok(fd) => fd,
        Err(error) => return fail(&error),
    };
    foreshore_devices::log::log_panics(&launch.log);
    let (has_file, format) = (launch.log.file.is_some(), launch.log.format);
    let confined = drop_privileges(&launch, log_fd);
    // 3. Runs.
    let result = confined.and_then(|()| foreshore::run::run(launch, opened));
    let Err(error) = result else { return ExitCode::SUCCESS };
    let is_json = format == LogFormat::Json;
    if has_file || is_json {
        tracing::error!(error = chain(&error), "The VMM ends because of an error");
    }
    // A program that parses standard error as JSON can parse every line.
    if is_json && !has_file { ExitCode::FAILURE } else { fail(&error) }
}

fn drop_privileges(launch: &Launch, log_fd: RawFd) -> Result<(), RunError> {
    for warning in &launch.warnings {
        tracing::warn!("{warning}");
    }
    process::harden().map_err(RunError::Harden)?;
    capabilities::start(NICE).map_err(|error| RunError::Harden(error.into()))?;
    if let Err(error) = foreshore_devices::open_files::raise_limit() {
        tracing::warn!(%error, "Cannot raise the limit of open files");
    }
    let target = ReportTarget { fd: log_fd, is_json: launch.log.format == LogFormat::Json };
    // The filter is installed before the VM is built, because the kernel file may come from the
    // guest's owner. If the file exploits an error in a decoder or in the ELF loader, the filter
    // already applies.
    Ok(seccomp::start(launch.seccomp, target)?)
}

/// Prints an error and its causes in one line.
fn fail(error: &dyn std::error::Error) -> ExitCode {
    let _ = writeln!(io::stderr(), "foreshore: {}", chain(error).replace('\n', " "));
    ExitCode::FAILURE
}
