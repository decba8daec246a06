//! The command line.

use foreshore_proto::VSOCK_PORT;
use thiserror::Error;

/// What `--help` prints.
pub const HELP: &str = "\
Reports the guest's memory pressure to the VMM.

Usage: foreshore-agent [OPTIONS]

Options:
  --cid CID    The VMM's vsock context [default: 2, the host]
  --port PORT  The VMM's vsock port [default: 9746]
  --once       Print one report to standard output and exit
  --version    Print the version and exit
  --help       Print this and exit
";

/// VMADDR_CID_HOST.
const HOST_CID: u32 = 2;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Report to this address until killed.
    Run {
        /// The VMM's context.
        cid: u32,
        /// The VMM's port.
        port: u32,
    },
    /// Print one report.
    Once,
    /// Print the version.
    Version,
    /// Print the help.
    Help,
}

/// What is wrong with the command line.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ArgsError {
    /// No such option.
    #[error("Unknown option {0}")]
    Unknown(String),
    /// An option without its value.
    #[error("{0} needs a value")]
    NoValue(&'static str),
    /// A value that is no number in range.
    #[error("{option} is {value}, must be a number from 0 to {}", u32::MAX)]
    NotANumber {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
    },
}

/// Understands the arguments, without the program's name.
pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Command, ArgsError> {
    let (mut cid, mut port, mut once) = (HOST_CID, VSOCK_PORT, false);
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let (name, inline) = match arg.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (arg.as_str(), None),
        };
        let mut value = |option| number(option, inline.clone().or_else(|| args.next()));
        match name {
            "--cid" => cid = value("--cid")?,
            "--port" => port = value("--port")?,
            "--once" if inline.is_none() => once = true,
            "--version" if inline.is_none() => return Ok(Command::Version),
            "--help" | "-h" if inline.is_none() => return Ok(Command::Help),
            _ => return Err(ArgsError::Unknown(arg)),
        }
    }
    Ok(if once { Command::Once } else { Command::Run { cid, port } })
}

fn number(option: &'static str, value: Option<String>) -> Result<u32, ArgsError> {
    let value = value.ok_or(ArgsError::NoValue(option))?;
    value.parse().map_err(|_| ArgsError::NotANumber { option, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, ArgsError> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_and_their_defaults() {
        assert_eq!(parsed(""), Ok(Command::Run { cid: 2, port: 9746 }));
        assert_eq!(parsed("--cid 5 --port=7"), Ok(Command::Run { cid: 5, port: 7 }));
        assert_eq!(parsed("--once"), Ok(Command::Once));
        assert_eq!(parsed("--version"), Ok(Command::Version));
        assert_eq!(parsed("-h"), Ok(Command::Help));
    }

    #[test]
    fn errors_name_the_option_the_value_and_the_bound() {
        assert_eq!(parsed("--prot 5").expect_err("unknown").to_string(), "Unknown option --prot");
        assert_eq!(parsed("--once=yes").expect_err("unknown").to_string(), "Unknown option --once=yes");
        assert_eq!(parsed("--port").expect_err("no value").to_string(), "--port needs a value");
        let wrong = parsed("--port 4294967296").expect_err("too large");
        assert_eq!(wrong.to_string(), "--port is 4294967296, must be a number from 0 to 4294967295");
    }
}
