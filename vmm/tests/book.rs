//! Checks that the commands in the book are valid command lines.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use foreshore::config::parse_command_line;
use foreshore_cli::WRONG_COMMAND_LINE;
use foreshore_cli::book::commands;

#[test]
fn vmm_accepts_the_flags_of_each_command() {
    let commands = commands("foreshore");
    assert!(commands.len() > 10, "{commands:?}");
    for command in commands {
        let mut words: Vec<OsString> = vec!["foreshore".into()];
        words.extend(command.arguments.iter().map(OsString::from));
        // Pages leave out what is beside the point.
        let has = |flag: &str| command.arguments.iter().any(|word| word == flag);
        if !["--kernel", "--firmware", "--api-socket", "--version"].into_iter().any(has) {
            words.extend(["--kernel", "vmlinuz"].map(OsString::from));
        }
        if has("--pressure") && !has("--pm-memory") && !has("--memory") {
            words.extend(["--pm-memory", "pool=/pm/pool,size=1G"].map(OsString::from));
        }
        if let Err(error) = parse_command_line(words) {
            panic!("{command:?}: {error}");
        }
    }
}

/// No VMM answers on this socket, so every valid command fails.
const NO_SOCKET: &str = "/nonexistent/api.sock";

/// Replaces the socket of a command, on which a VM of the user may run, and leaves out `--wait`,
/// which would wait for a VMM.
fn without_vmm(arguments: &[String]) -> Vec<&str> {
    let mut words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let Some(at) = words.iter().position(|word| *word == "--api-socket") {
        words[at + 1] = NO_SOCKET;
    }
    words.retain(|word| *word != "--wait");
    assert!(!words.iter().any(|word| word.contains("/run/")), "{words:?}");
    words
}

#[test]
fn remote_client_accepts_each_command() {
    let commands = commands("foreshore-remote");
    assert!(commands.len() > 20, "{commands:?}");
    for command in commands {
        let output = Command::new(env!("CARGO_BIN_EXE_foreshore-remote"))
            .args(without_vmm(&command.arguments))
            .env("FORESHORE_API_SOCKET", NO_SOCKET)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let code = output.status.code();
        assert!(
            code.is_some() && code != Some(i32::from(WRONG_COMMAND_LINE)),
            "{command:?}: {error}"
        );
    }
}
