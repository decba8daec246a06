//! Job disk: a tar archive with the command, its environment and its files. `root-init` reads it.

use std::env;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::Arguments;
use super::host_kind::{HOST_VARIABLE, HostKind, measured_on};
use crate::checkout::{Checkout, copy, create_folder, write};
use crate::jobs;
use crate::programs;

/// Variable with a description of the machine on which measurements are made.
pub(super) const MEASURED_ON: &str = "FORESHORE_MEASURED_ON";
/// Variables that are passed to the command, and the prefix of others.
const PASSED_ON: [&str; 2] = ["RUST_LOG", "RUST_BACKTRACE"];
const PASSED_ON_PREFIX: &str = "FORESHORE_TEST_";

/// Copies the files given with `--put` to a folder.
pub(super) fn copy_puts(host: &Arguments, folder: &Path) -> Result<()> {
    host.puts.iter().try_for_each(|put| {
        copy(put, &folder.join(put.file_name().context("path without a file name")?))
    })
}

/// Creates the archive `job.tar` in the run's folder.
pub(super) fn make(checkout: &Checkout, host: &Arguments, run: &Path) -> Result<()> {
    let job = run.join("job");
    create_folder(&job.join("put"))?;
    copy_puts(host, &job.join("put"))?;
    write(&job.join("command"), command_line(host))?;
    let counted = if host.counted { "; instructions counted" } else { "" };
    let measured_on = measured_on(checkout, HostKind::Nested)? + counted;
    write(&job.join("environment"), environment(&measured_on))?;
    for flag in flags(host) {
        write(&job.join(flag), "")?;
    }
    jobs::run(
        programs::system("tar").arg("-cf").arg(run.join("job.tar")).arg("-C").arg(&job).arg("."),
    )
}

/// Returns names of marker files from which the host recognizes its disks and memories.
fn flags(host: &Arguments) -> impl Iterator<Item = &'static str> {
    let flags = [
        ("nvdimm", host.nvdimm_mib.is_some()),
        ("pmem-devices", host.pmem_mib.is_some()),
        ("nvdimm-file", host.nvdimm_file.is_some()),
        ("peers", host.peers),
        ("disk", host.disk.is_some()),
    ];
    flags.into_iter().filter_map(|(name, is_set)| is_set.then_some(name))
}

fn command_line(host: &Arguments) -> Vec<u8> {
    host.command.iter().map(|argument| quoted(argument)).collect::<Vec<_>>().join(&b' ')
}

/// Returns shell lines that set the command's environment.
fn environment(measured_on: &str) -> Vec<u8> {
    let fixed = [
        ("GUESTS", "/guests"),
        ("OUT", "/out"),
        (HOST_VARIABLE, &HostKind::Nested.to_string()),
        (MEASURED_ON, measured_on),
    ];
    let mut lines: Vec<_> =
        fixed.iter().map(|(name, value)| export(name, value.as_ref())).collect();
    for (name, value) in env::vars_os() {
        if let Some(name) = name.to_str().filter(|name| is_passed_on(name)) {
            lines.push(export(name, &value));
        }
    }
    lines.concat()
}

fn is_passed_on(name: &str) -> bool {
    let is_capital = |byte: u8| byte.is_ascii_uppercase() || byte == b'_';
    PASSED_ON.contains(&name)
        || name.strip_prefix(PASSED_ON_PREFIX).is_some_and(|rest| rest.bytes().all(is_capital))
}

fn export(name: &str, value: &OsStr) -> Vec<u8> {
    [format!("export {name}=").as_bytes(), &quoted(value), b"\n"].concat()
}

/// Quotes a word for the shell.
fn quoted(word: &OsStr) -> Vec<u8> {
    let parts: Vec<_> = word.as_bytes().split(|byte| *byte == b'\'').collect();
    [b"'", &parts.join(&b"'\\''"[..])[..], b"'"].concat()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::host::tests::parse;

    #[test]
    fn shell_reads_quoted_words_as_they_were() {
        let words = ["", "a b", "it's", "$HOME `x` \\ \"", "'", "two\nlines", "ä\u{1}"];
        let mut host = parse("-- printf %s|").unwrap();
        host.command.extend(words.map(Into::into));
        let line = String::from_utf8(command_line(&host)).unwrap();
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        let expected: String = words.map(|word| format!("{word}|")).concat();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }

    #[test]
    fn variables_of_tests_alone_are_passed_on() {
        let passed =
            ["FORESHORE_TEST_DIR", "FORESHORE_TEST_BENCH_VMM", "RUST_LOG", "RUST_BACKTRACE"];
        assert!(passed.into_iter().all(is_passed_on));
        assert!(
            !["FORESHORE_PEERS", "FORESHORE_TEST_dir", "PATH", "RUST_LOGS"]
                .into_iter()
                .any(is_passed_on)
        );
    }

    #[test]
    fn host_finds_a_flag_for_each_memory_and_disk() {
        let host = parse("--nvdimm 1 --pmem-devices 1 --peers -- a").unwrap();
        assert_eq!(flags(&host).collect::<Vec<_>>(), ["nvdimm", "pmem-devices", "peers"]);
    }
}
