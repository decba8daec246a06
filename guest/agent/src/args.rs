//! The command line.

use std::path::PathBuf;

use foreshore_proto::VSOCK_PORT;
use thiserror::Error;

/// What `--help` prints.
pub const HELP: &str = "\
Reports the guest's memory pressure to the VMM.

Usage: foreshore-agent [OPTIONS]

Options:
  --cid CID        The VMM's vsock context [default: 2, the host]
  --port PORT      The VMM's vsock port [default: 9746]
  --online POLICY  How plugged memory comes online: movable, so that it can leave
                   again; auto, as the kernel sees fit; none, as it does without
                   the agent [default: movable]
  --reserve on|off Keep some DRAM for the kernel's own needs [default: on]
  --kernel-blocks on|off
                   Give blocks of plugged DRAM to the kernel when it runs short; they
                   stay with it until the next boot [default: on]
  --tune on|off    Adapt settings of the kernel to memory of two kinds
                   [default: on]
  --idle on|off    Report what memory is idle [default: on]
  --once           Print one report to standard output and exit
  --version        Print the version and exit
  --help           Print this and exit
";

const HOST_CID: u32 = 2;

/// Where the VMM is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// On the other side of a virtual socket.
    Vsock { cid: u32, port: u32 },
    /// Behind a socket's file. For tests and measurements on a machine that is no guest; not in the
    /// help.
    Unix(PathBuf),
}

/// How plugged memory comes online.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Online {
    /// Movable, so that it can leave again.
    Movable,
    /// In the zone that the kernel chooses.
    Auto,
    /// The agent does nothing about it.
    None,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub address: Address,
    /// How plugged memory comes online.
    pub online: Online,
    /// Whether DRAM is kept for the kernel.
    pub reserve: bool,
    /// Gives blocks of plugged DRAM to the kernel when the kernel runs short.
    pub kernel_blocks: bool,
    /// Whether settings of the kernel are adapted to memory of two kinds.
    pub tune: bool,
    /// Whether idle memory is looked for.
    pub idle: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Report until killed.
    Run(Options),
    Once,
    Version,
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
    NotANumber { option: &'static str, value: String },
    /// A value that is not among those that an option can have.
    #[error("{option} is {value}, must be {expected}")]
    NotAmong { option: &'static str, value: String, expected: &'static str },
}

/// Understands the arguments, without the program's name.
pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Command, ArgsError> {
    let (mut cid, mut port, mut unix, mut once) = (HOST_CID, VSOCK_PORT, None, false);
    let (mut online, mut reserve, mut tune, mut idle) = (Online::Movable, true, true, true);
    let mut kernel_blocks = true;
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let (name, inline) = match arg.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (arg.as_str(), None),
        };
        let mut value =
            |option| inline.clone().or_else(|| args.next()).ok_or(ArgsError::NoValue(option));
        match name {
            "--cid" => cid = number("--cid", value("--cid")?)?,
            "--port" => port = number("--port", value("--port")?)?,
            "--unix" => unix = Some(PathBuf::from(value("--unix")?)),
            "--online" => online = policy(value("--online")?)?,
            "--reserve" => reserve = switch("--reserve", value("--reserve")?)?,
            "--kernel-blocks" => {
                kernel_blocks = switch("--kernel-blocks", value("--kernel-blocks")?)?
            }
            "--tune" => tune = switch("--tune", value("--tune")?)?,
            "--idle" => idle = switch("--idle", value("--idle")?)?,
            "--once" if inline.is_none() => once = true,
            "--version" if inline.is_none() => return Ok(Command::Version),
            "--help" | "-h" if inline.is_none() => return Ok(Command::Help),
            _ => return Err(ArgsError::Unknown(arg)),
        }
    }
    if once {
        return Ok(Command::Once);
    }
    let address = unix.map_or(Address::Vsock { cid, port }, Address::Unix);
    Ok(Command::Run(Options { address, online, reserve, kernel_blocks, tune, idle }))
}

fn number(option: &'static str, value: String) -> Result<u32, ArgsError> {
    value.parse().map_err(|_| ArgsError::NotANumber { option, value })
}

fn policy(value: String) -> Result<Online, ArgsError> {
    Ok(match value.as_str() {
        "movable" => Online::Movable,
        "auto" => Online::Auto,
        "none" => Online::None,
        _ => {
            return Err(ArgsError::NotAmong {
                option: "--online",
                value,
                expected: "movable, auto or none",
            });
        }
    })
}

fn switch(option: &'static str, value: String) -> Result<bool, ArgsError> {
    match value.as_str() {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(ArgsError::NotAmong { option, value, expected: "on or off" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, ArgsError> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    fn options(line: &str) -> Options {
        match parsed(line) {
            Ok(Command::Run(options)) => options,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn options_and_their_defaults() {
        let defaults = Options {
            address: Address::Vsock { cid: 2, port: 9746 },
            online: Online::Movable,
            reserve: true,
            kernel_blocks: true,
            tune: true,
            idle: true,
        };
        assert_eq!(options(""), defaults);
        assert_eq!(options("--cid 5 --port=7").address, Address::Vsock { cid: 5, port: 7 });
        assert_eq!(options("--unix /run/vmm").address, Address::Unix("/run/vmm".into()));
        assert_eq!(options("--online movable"), defaults);
        assert_eq!(options("--online=auto").online, Online::Auto);
        assert_eq!(options("--online none --reserve off").online, Online::None);
        assert!(!options("--idle=off").idle && options("--idle off --idle on").idle);
        assert!(!options("--tune=off").tune && options("--tune on").tune);
        assert!(!options("--kernel-blocks=off").kernel_blocks);
        assert!(!options("--reserve=off").reserve && options("--reserve on").reserve);
        assert_eq!(parsed("--once"), Ok(Command::Once));
        assert_eq!(parsed("--version"), Ok(Command::Version));
        assert_eq!(parsed("-h"), Ok(Command::Help));
    }

    #[test]
    fn errors_name_the_option_the_value_and_the_bound() {
        assert_eq!(parsed("--prot 5").expect_err("unknown").to_string(), "Unknown option --prot");
        assert_eq!(
            parsed("--once=yes").expect_err("unknown").to_string(),
            "Unknown option --once=yes"
        );
        assert_eq!(parsed("--port").expect_err("no value").to_string(), "--port needs a value");
        let wrong = parsed("--port 4294967296").expect_err("too large");
        assert_eq!(
            wrong.to_string(),
            "--port is 4294967296, must be a number from 0 to 4294967295"
        );
        let wrong = parsed("--online kernel").expect_err("no such policy");
        assert_eq!(wrong.to_string(), "--online is kernel, must be movable, auto or none");
        let wrong = parsed("--reserve=yes").expect_err("no switch");
        assert_eq!(wrong.to_string(), "--reserve is yes, must be on or off");
    }
}
