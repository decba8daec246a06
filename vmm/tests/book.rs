//! Checks that the commands in the book are valid command lines.

use std::ffi::OsString;
use std::process::Command;

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

#[test]
fn remote_client_accepts_each_command() {
    let commands = commands("foreshore-remote");
    assert!(commands.len() > 20, "{commands:?}");
    for command in commands {
        // No VMM answers on this socket, so every valid command fails later. `ping --wait` would
        // wait for one.
        let words = command.arguments.iter().filter(|word| *word != "--wait");
        let output = Command::new(env!("CARGO_BIN_EXE_foreshore-remote"))
            .args(words)
            .env("FORESHORE_API_SOCKET", "/nonexistent/api.sock")
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
