//! Tests the command line parser with all flags and their keys.

use std::ffi::OsString;

use foreshore::config::{CliError, Command, Launch, parse_command_line};

use crate::names::{of_kind, samples};
use crate::verdict::{Verdict, of_cli_error};

/// Other flags that a flag requires.
const ALONGSIDE: &[(&str, &[&str])] = &[
    ("--firmware", &[]),
    ("--kernel", &[]),
    ("--memory-zone", &["--memory", "size=0,hotplug_method=virtio-mem"]),
    ("--numa", OTHER_NODE),
    ("--serial tty", &["--console", "off"]),
];
/// Memory for two nodes, and one of these nodes.
const OTHER_NODE: &[&str] = &[
    "--memory",
    "size=0",
    "--memory-zone",
    "id=a,size=512M",
    "id=b,size=512M",
    "--numa",
    "guest_numa_id=1,cpus=1-3,memory_zones=b",
];
/// Keys that every value of a flag requires. A key under test replaces the key with the same name.
const BASES: &[(&str, &str)] = &[
    ("--balloon", "size=0"),
    ("--console", "off"),
    ("--cpus", "boot=2,max=4"),
    ("--disk", "path=/d"),
    ("--memory", "size=512M"),
    ("--memory-zone", "id=z,size=512M"),
    ("--net", "tap=t"),
    ("--net fd", ""),
    ("--numa", "guest_numa_id=0,cpus=0,memory_zones=a"),
    // The flag has an effect even if the key under test has none.
    ("--platform", "num_pci_segments=1"),
    ("--pmem", "file=/p"),
    ("--serial", "off"),
    ("--vsock", "cid=3,socket=/s"),
    ("--landlock-rules", "path=/l,access=rw"),
];
/// Additional keys that a key requires.
const WITH: &[(&str, &str)] = &[
    ("--memory hotplug_size", "hotplug_method=virtio-mem"),
    ("--memory hotplugged_size", "hotplug_method=virtio-mem,hotplug_size=1G"),
    ("--memory hugepage_size", "hugepages=on"),
    ("--memory-zone hotplugged_size", "hotplug_size=1G"),
    ("--memory-zone hugepage_size", "hugepages=on"),
    ("--net host_mac", "ip=10.0.0.1,mask=255.0.0.0"),
    ("--net ip", "mask=255.0.0.0"),
    ("--net mask", "ip=10.0.0.1"),
];
/// Keys of `--console` and `--serial` that select the mode. Only one of them can be given.
const MODES: [&str; 6] = ["off", "pty", "tty", "null", "file", "socket"];

fn look_up<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    table.iter().find(|(key, _)| *key == name).map(|(_, value)| *value)
}

fn launch(args: &[&str]) -> Result<Option<Launch>, CliError> {
    let args = std::iter::once("cloud-hypervisor").chain(args.iter().copied()).map(OsString::from);
    Ok(match parse_command_line(args)? {
        Command::Launch(launch) => Some(*launch),
        Command::Print(_) => None,
    })
}

/// Command line that is valid except possibly for the part under test.
fn command_line<'a>(flag: &'a str, name: &str, value: Option<&'a str>) -> Vec<&'a str> {
    let mut args = Vec::new();
    if !["--kernel", "--firmware"].contains(&flag) {
        args.extend(["--kernel", "/k"]);
    }
    if flag != "--cpus" {
        args.extend(["--cpus", "boot=2,max=4"]);
    }
    let alongside = look_up(ALONGSIDE, name).or_else(|| look_up(ALONGSIDE, flag));
    args.extend(alongside.unwrap_or_default());
    args.push(flag);
    args.extend(value);
    args
}

/// Verdict on a command line, from a comparison with the result without the part under test.
fn compare(flag: &str, without: Result<Option<Launch>, CliError>, with: &[&str]) -> Verdict {
    let tried = match launch(with) {
        Ok(Some(tried)) => tried,
        Ok(None) => return Verdict::Implemented,
        Err(error) => {
            return of_cli_error(&error)
                .unwrap_or_else(|| panic!("{with:?} is not a valid sample: {error}"));
        }
    };
    if let Some(neutral) = Verdict::of_warnings(&tried.warnings, flag) {
        return neutral;
    }
    match without {
        Ok(Some(plain)) if plain == tried => Verdict::without_effect(),
        // Without the part under test, the command line starts another VM or none.
        Ok(_) | Err(_) => Verdict::Implemented,
    }
}

fn flag_verdict(flag: &str, sample: Option<&'static str>) -> Verdict {
    let with = command_line(flag, flag, sample);
    let without = with[..with.len() - 1 - usize::from(sample.is_some())].to_vec();
    compare(flag, launch(&without), &with)
}

/// Other keys that a flag's value needs in addition to `key`.
fn beside(flag: &str, key: &str) -> Vec<&'static str> {
    let name = format!("{flag} {key}");
    // A key that selects the mode is the whole value.
    let base = if is_mode(flag, key) {
        None
    } else {
        look_up(BASES, &name).or_else(|| look_up(BASES, flag))
    };
    let with = look_up(WITH, &name);
    let parts = [base, with].into_iter().flatten().flat_map(|text| text.split(','));
    parts.filter(|part| !part.is_empty() && part.split('=').next() != Some(key)).collect()
}

fn is_mode(flag: &str, key: &str) -> bool {
    ["--console", "--serial"].contains(&flag) && MODES.contains(&key)
}

fn try_key(flag: &str, key: &str, value: &str) -> Verdict {
    let name = format!("{flag} {key}");
    let (mut parts, tried) = (beside(flag, key), format!("{key}={value}"));
    let without = match parts.join(",") {
        _ if is_mode(flag, key) && key != "off" => launch(&command_line(flag, &name, Some("off"))),
        none if none.is_empty() => {
            let args = command_line(flag, &name, None);
            launch(&args[..args.len() - 1])
        }
        plain => launch(&command_line(flag, &name, Some(&plain))),
    };
    parts.push(if is_mode(flag, key) && key == value { key } else { &tried });
    compare(flag, without, &command_line(flag, &name, Some(&parts.join(","))))
}

fn key_verdict(flag: &str, key: &str, text: &'static str) -> Verdict {
    let samples = samples(text);
    let verdict = try_key(flag, key, samples.other);
    if let (Verdict::Refused(_), Some(default)) = (&verdict, samples.default)
        && !matches!(try_key(flag, key, default), Verdict::Refused(_) | Verdict::NotThere(_))
    {
        return verdict.and(&format!("`{default}` is accepted"));
    }
    verdict
}

/// Verdicts on all flags and their keys.
pub(crate) fn rows() -> Vec<(String, Verdict)> {
    let flags: Vec<_> =
        of_kind("flag").map(|(flag, sample)| (flag, flag_verdict(flag, sample))).collect();
    let keys = of_kind("key").map(|(name, text)| {
        let (flag, key) = name.split_once(' ').expect("a flag and a key");
        let (_, of_flag) =
            flags.iter().find(|(name, _)| *name == flag).expect("every key has a flag");
        let verdict = match (of_flag, text) {
            (Verdict::Refused(_) | Verdict::NotThere(_), _) => of_flag.clone(),
            (_, Some(text)) => key_verdict(flag, key, text),
            (_, None) => panic!("{name} needs a value to try it with: {flag} is there now"),
        };
        (format!("{flag} {key}"), verdict)
    });
    let keys: Vec<_> = keys.collect();
    flags.into_iter().map(|(flag, verdict)| (flag.to_owned(), verdict)).chain(keys).collect()
}

/// Clients write out default values.
#[test]
fn defaults_of_keys_are_accepted() {
    for (name, text) in of_kind("key") {
        let (flag, key) = name.split_once(' ').unwrap();
        let Some(default) = text.and_then(|text| samples(text).default) else { continue };
        if let refused @ (Verdict::Refused(_) | Verdict::NotThere(_)) = try_key(flag, key, default)
        {
            panic!("{flag} {key}={default}: {refused:?}");
        }
    }
}
