//! Tests command lines that the program rejects.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output};

#[test]
fn wrong_arguments_are_refused_with_a_line_and_exit_code_2() {
    for (args, message) in [
        (&[&b"--prot"[..]][..], "unknown option --prot (did you mean '--port'?)"),
        (&[b"report"], "unknown option report"),
        (&[b"--port"], "--port needs a value"),
        (&[b"--port", b"65536x"], "--port is 65536x, must be a number from 0 to 4294967294"),
        (&[b"--cid=4294967295"], "--cid is 4294967295, must be a number from 0 to 4294967294"),
        (&[b"--tune", b"maybe"], "--tune is maybe, must be on or off"),
        (&[b"--online=kernel"], "--online is kernel, must be movable, auto or none"),
        (&[b"--onc\xff"], r#"argument "--onc\xFF" is not UTF-8"#),
        (&[b"--once", b"--unix", b"/run/\xc3"], r#"argument "/run/\xC3" is not UTF-8"#),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foreshore-agent"));
        command.args(args.iter().map(|arg| OsStr::from_bytes(arg)));
        let Output { status, stdout, stderr } = command.output().expect("starts");
        assert_eq!(String::from_utf8_lossy(&stderr), format!("foreshore-agent: {message}\n"));
        assert_eq!((status.code(), &stdout[..]), (Some(2), &b""[..]), "{message}");
    }
}

/// Returns the text that the program prints on standard output.
fn printed(flag: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_foreshore-agent")).arg(flag).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn version_has_commit_and_date_in_its_second_line() {
    let version = printed("--version");
    let lines: Vec<_> = version.lines().collect();
    assert_eq!(lines[0], concat!("foreshore-agent ", env!("CARGO_PKG_VERSION")));
    assert!(lines[1].starts_with("commit ") && lines.len() == 2, "{version}");
}

#[test]
fn manual_page_has_the_flags_values_and_defaults_of_the_help() {
    let help = printed("--help");
    let options = help.split("Options:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let page = include_str!("../../systemd/foreshore-agent.8");
    let flags = |text: &str, mark: &str| -> BTreeSet<String> {
        let names = text.lines().filter_map(|line| line.trim_start().strip_prefix(mark));
        let end = |c: char| !c.is_ascii_lowercase() && c != '-';
        names.map(|name| name.split(end).next().unwrap().to_owned()).collect()
    };
    assert_eq!(flags(page, ".It Fl -"), flags(options, "--"));
    // Entries of the list, each with the text up to the next entry.
    let rows: Vec<_> = page.split(".It Fl -").skip(1).collect();
    for option in options.strip_prefix("  --").unwrap().split("\n  --") {
        let name = option.split([' ', '\n']).next().unwrap();
        let row = rows.iter().find(|row| row.split([' ', '\n']).next() == Some(name)).unwrap();
        let Some((_, default)) = option.split_once("[default: ") else { continue };
        let default = default.split([']', ',']).next().unwrap();
        assert!(row.contains(&format!("default is {default}")), "--{name}: {default}");
    }
}
