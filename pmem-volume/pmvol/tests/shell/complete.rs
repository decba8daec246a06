//! Runs bash completion as if Tab had been pressed.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// Completes the last of `words`. The first word is the name of the program. `program` prints the
/// completion script for `script_args`, and bash finds `program` in PATH.
pub(crate) fn completions(
    program: &str,
    script_args: &[&str],
    folder: &Path,
    words: &[&str],
) -> String {
    let script = Command::new(program).args(script_args).output().unwrap();
    assert!(script.status.success(), "{}", String::from_utf8_lossy(&script.stderr));
    let script = String::from_utf8(script.stdout).unwrap();
    let function = format!("_clap_complete_{}", words[0].replace('-', "_"));
    let tab = format!(
        "{script}\nCOMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9; \
         {function} \"$1\" \"${{@: -1}}\"; echo \"${{COMPREPLY[@]}}\""
    );
    let mut path = OsString::from(Path::new(program).parent().unwrap());
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.args(["-c", &tab, "bash"]).args(words).env("PATH", path).current_dir(folder);
    let output = bash.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
