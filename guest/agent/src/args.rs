//! Command line of the agent.

use std::ffi::OsString;
use std::path::PathBuf;

use foreshore_proto::{TRIM_PORT, VSOCK_PORT};
use foreshore_types::similar::{most_similar, suggestion};
use thiserror::Error;

pub(crate) const HELP: &str = "\
Report the memory pressure of the guest to the VMM

Usage: foreshore-agent [OPTIONS]
       foreshore-agent trim [--cid CID] [--port PORT] MOUNTPOINT

trim gives free space of a file system on the BTT disk of a thin volume
(/dev/pmem*s) back to the pool. Its port is 9747 unless --port is given.

Options:
  --cid CID        vsock context of the VMM [default: 2, the host]
  --port PORT      vsock port of the VMM [default: 9746]
  --online POLICY  Zone of plugged memory: movable, so that it can be unplugged
                   again; auto, chosen by the kernel; none, as without the agent
                   [default: movable]
  --reserve on|off Reserve DRAM for the kernel [default: on]
  --kernel-blocks on|off
                   Give blocks of plugged DRAM to the kernel when it runs short; they
                   stay with it until the next boot [default: on]
  --tune on|off    Adapt settings of the kernel to DRAM and PM [default: on]
  --idle on|off    Report idle memory [default: on]
  --once           Print one report to standard output and exit
  --version        Print the version and exit
  --help           Print this help and exit

Settings that the agent changes, only in a guest of Foreshore (the OEM ID of its
ACPI tables is FRSHOR):
  --online         /sys/devices/system/memory/auto_online_blocks
  --online, --kernel-blocks
                   /sys/devices/system/memory/memory*/state
  --reserve        vm.lowmem_reserve_ratio
  --tune           vm.watermark_boost_factor, and in /sys/kernel/mm:
                   numa/demotion_enabled, transparent_hugepage/defrag, enabled,
                   use_zero_page and khugepaged/defrag
  --idle           /sys/kernel/mm/damon or page_idle

On SIGTERM and SIGINT, the agent restores the settings of --reserve and --tune, and
removes its monitors of DAMON. auto_online_blocks stays online_movable, because
memory that is plugged while the agent restarts could not leave again. Blocks that
serve the kernel and huge pages that were enabled stay as well.
";

const HOST_CID: u32 = 2;
/// Largest valid vsock context ID and port. The number above it is `VMADDR_CID_ANY` and
/// `VMADDR_PORT_ANY`, to which no socket can connect (include/uapi/linux/vm_sockets.h).
const LAST_NUMBER: u32 = u32::MAX - 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// vsock address.
    Vsock { cid: u32, port: u32 },
    /// Unix socket, for tests and measurements on a machine that is not a guest. The help text
    /// omits it.
    Unix(PathBuf),
}

/// How plugged memory is brought online.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Online {
    /// As movable memory, so that it can be unplugged again.
    Movable,
    /// In the zone that the kernel chooses.
    Auto,
    /// The agent does not bring it online.
    None,
}

impl Online {
    /// Values of the option, with the policies that they select.
    const WORDS: [(&str, Self); 3] =
        [("movable", Self::Movable), ("auto", Self::Auto), ("none", Self::None)];
}

const SWITCH_WORDS: [(&str, bool); 2] = [("on", true), ("off", false)];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub address: Address,
    pub online: Online,
    pub reserve: bool,
    pub kernel_blocks: bool,
    pub tune: bool,
    pub idle: bool,
}

impl Options {
    /// Returns options with the same address, but with every feature off that changes the machine.
    pub(crate) fn reporting_only(&self) -> Self {
        Self {
            address: self.address.clone(),
            online: Online::None,
            reserve: false,
            kernel_blocks: false,
            tune: false,
            idle: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Run(Options),
    Once,
    Trim { folder: PathBuf, address: Address },
    Version,
    Help,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum ArgsError {
    #[error("argument {0:?} is not UTF-8")]
    NotUtf8(OsString),
    #[error("unknown option {option}{}", similar_option(option))]
    Unknown { option: String },
    #[error("{0} needs a value")]
    NoValue(String),
    #[error("trim needs one MOUNTPOINT, but got {count}")]
    Mountpoints { count: usize },
    #[error("trim does not use {0}")]
    NotOfTrim(String),
    #[error("{option} is {value}, must be {expected}")]
    WrongValue { option: String, value: String, expected: String },
}

/// Returns a suggestion for an error about `option`: the most similar option in the help text.
fn similar_option(option: &str) -> String {
    // The dashes are not compared, because all options begin with them.
    let words = HELP.split([' ', ',', '\n']).filter_map(|word| word.strip_prefix("--"));
    let name = option.split('=').next().and_then(|option| option.strip_prefix("--"));
    match name.and_then(|name| most_similar(name, words)) {
        Some(name) => format!(" (did you mean '--{name}'?)"),
        None => String::new(),
    }
}

/// Parses the arguments, which do not include the program's name.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, ArgsError> {
    let mut args = args.into_iter().peekable();
    if args.next_if(|arg| arg == "trim").is_some() {
        return parse_trim(args);
    }
    let args = args.map(|arg| arg.into_string().map_err(ArgsError::NotUtf8));
    let args: Vec<String> = args.collect::<Result<_, _>>()?;
    let (mut cid, mut port, mut unix, mut once) = (HOST_CID, VSOCK_PORT, None, false);
    let (mut online, mut reserve, mut tune, mut idle) = (Online::Movable, true, true, true);
    let mut kernel_blocks = true;
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let (option, inline) = match arg.split_once('=') {
            Some((option, value)) => (option, Some(value.to_owned())),
            None => (arg.as_str(), None),
        };
        let mut value = || {
            let value = inline.clone().or_else(|| args.next());
            value.ok_or_else(|| ArgsError::NoValue(option.to_owned()))
        };
        match option {
            "--cid" => cid = number(option, value()?)?,
            "--port" => port = number(option, value()?)?,
            "--unix" => unix = Some(PathBuf::from(value()?)),
            "--online" => online = word(option, value()?, Online::WORDS)?,
            "--reserve" => reserve = word(option, value()?, SWITCH_WORDS)?,
            "--kernel-blocks" => kernel_blocks = word(option, value()?, SWITCH_WORDS)?,
            "--tune" => tune = word(option, value()?, SWITCH_WORDS)?,
            "--idle" => idle = word(option, value()?, SWITCH_WORDS)?,
            "--once" if inline.is_none() => once = true,
            "--version" if inline.is_none() => return Ok(Command::Version),
            "--help" | "-h" if inline.is_none() => return Ok(Command::Help),
            _ => return Err(ArgsError::Unknown { option: arg }),
        }
    }
    if once {
        return Ok(Command::Once);
    }
    let address = unix.map_or(Address::Vsock { cid, port }, Address::Unix);
    Ok(Command::Run(Options { address, online, reserve, kernel_blocks, tune, idle }))
}

/// Parses the arguments after `trim`.
fn parse_trim(args: impl Iterator<Item = OsString>) -> Result<Command, ArgsError> {
    let (mut options, mut folders) = (Vec::new(), Vec::new());
    let mut args = args.peekable();
    while let Some(arg) = args.next() {
        if !arg.as_encoded_bytes().starts_with(b"-") {
            folders.push(PathBuf::from(arg));
            continue;
        }
        let name = arg.to_string_lossy().into_owned();
        let option = name.split('=').next().unwrap_or_default();
        match option {
            "--help" | "-h" => return Ok(Command::Help),
            "--cid" | "--port" | "--unix" => options.push(arg),
            _ => return Err(ArgsError::NotOfTrim(name)),
        }
        if !name.contains('=') {
            options.extend(args.next());
        }
    }
    // A later option overrides the default.
    options.insert(0, format!("--port={TRIM_PORT}").into());
    let Command::Run(Options { address, .. }) = parse(options)? else {
        unreachable!("options of an address");
    };
    match <[PathBuf; 1]>::try_from(folders) {
        Ok([folder]) => Ok(Command::Trim { folder, address }),
        Err(folders) => Err(ArgsError::Mountpoints { count: folders.len() }),
    }
}

fn wrong_value(option: &str, value: String, expected: impl Into<String>) -> ArgsError {
    ArgsError::WrongValue { option: option.to_owned(), value, expected: expected.into() }
}

fn number(option: &str, value: String) -> Result<u32, ArgsError> {
    match value.parse() {
        Ok(number) if number <= LAST_NUMBER => Ok(number),
        _ => Err(wrong_value(option, value, format!("a number from 0 to {LAST_NUMBER}"))),
    }
}

/// Parses one of `words`. The error lists them and suggests a similar one.
fn word<T: Copy, const N: usize>(
    option: &str,
    value: String,
    words: [(&str, T); N],
) -> Result<T, ArgsError> {
    if let Some((_, meaning)) = words.into_iter().find(|(word, _)| *word == value) {
        return Ok(meaning);
    }
    let names = words.map(|(word, _)| word);
    let (last, others) = names.split_last().expect("a value has words");
    let expected = format!("{} or {last}{}", others.join(", "), suggestion(&value, names));
    Err(wrong_value(option, value, expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, ArgsError> {
        parse(line.split_whitespace().map(OsString::from))
    }

    fn options(line: &str) -> Options {
        match parsed(line) {
            Ok(Command::Run(options)) => options,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn trim_needs_a_mountpoint_and_uses_only_the_address() {
        let trim = |line: &str| parsed(&format!("trim {line}"));
        let of = |cid, port| {
            let address = Address::Vsock { cid, port };
            Ok(Command::Trim { folder: "/srv".into(), address })
        };
        assert_eq!(trim("/srv"), of(2, 9747));
        assert_eq!(trim("--cid 5 /srv --port=7"), of(5, 7));
        assert_eq!(trim("/srv --help"), Ok(Command::Help));
        assert_eq!(trim(""), Err(ArgsError::Mountpoints { count: 0 }));
        assert_eq!(trim("/srv /mnt"), Err(ArgsError::Mountpoints { count: 2 }));
        assert_eq!(trim("--tune on /srv"), Err(ArgsError::NotOfTrim("--tune".to_owned())));
        assert_eq!(trim("/srv --cid"), Err(ArgsError::NoValue("--cid".to_owned())));
        assert!(matches!(trim("--port x /srv"), Err(ArgsError::WrongValue { .. })));
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

    /// Takes the values of an option from the help text: `on|off` after the option's name, or
    /// [`Online::WORDS`] for `POLICY`.
    #[test]
    fn error_about_a_misspelled_word_lists_and_suggests_words() {
        let forms = HELP.lines().filter_map(|line| line.trim().split_once(' '));
        let mut count = 0;
        for (option, form) in forms.filter(|(option, _)| option.starts_with("--")) {
            let form = form.split_whitespace().next().unwrap();
            let words: Vec<&str> = match form {
                "POLICY" => Online::WORDS.iter().map(|(word, _)| *word).collect(),
                form => form.split('|').filter(|_| form.contains('|')).collect(),
            };
            for word in &words {
                let error = parsed(&format!("{option} {word}{}", &word[word.len() - 1..]));
                let error = error.unwrap_err().to_string();
                let suggested = error.contains(&format!("(did you mean '{word}'?)"));
                assert!(suggested && words.iter().all(|word| error.contains(word)), "{error}");
            }
            count += words.len();
        }
        assert_eq!(count, 3 + 2 * HELP.matches("on|off").count());
    }

    #[test]
    fn errors_name_the_option_the_value_and_the_bound() {
        for (line, error) in [
            ("--prot 5", "unknown option --prot (did you mean '--port'?)"),
            ("--prot=5", "unknown option --prot=5 (did you mean '--port'?)"),
            ("--moon 5", "unknown option --moon"),
            ("--once=yes", "unknown option --once=yes"),
            ("--version=x", "unknown option --version=x"),
            ("--help=", "unknown option --help="),
            ("-h=x", "unknown option -h=x"),
            ("--port", "--port needs a value"),
            ("--port 4294967295", "--port is 4294967295, must be a number from 0 to 4294967294"),
            ("--cid 4294967295", "--cid is 4294967295, must be a number from 0 to 4294967294"),
            ("--port 4294967296", "--port is 4294967296, must be a number from 0 to 4294967294"),
            ("--online kernel", "--online is kernel, must be movable, auto or none"),
            ("--reserve=yes", "--reserve is yes, must be on or off"),
        ] {
            assert_eq!(parsed(line).expect_err(line).to_string(), error);
        }
    }
}
