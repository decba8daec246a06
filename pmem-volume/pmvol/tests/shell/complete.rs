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
    let parts: Vec<_> = words.iter().flat_map(|word| parts_of(word)).collect();
    let last = parts.last().copied().unwrap_or_default();
    // The third argument of bash, the preceding word, is not used.
    let tab = format!(
        "{script}\nCOMP_LINE=$1; shift; at_cursor=$1; shift; COMP_WORDS=(\"$@\"); \
         COMP_CWORD=$(($# - 1)); COMP_TYPE=9; registered=$(complete -p \"$1\") || exit; \
         registered=${{registered#* -F }}; ${{registered%% *}} \"$1\" \"$at_cursor\" ''; \
         echo \"${{COMPREPLY[@]}}\""
    );
    let mut path = OsString::from(Path::new(program).parent().unwrap());
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.args(["-c", &tab, "bash", &words.join(" ")]);
    bash.arg(last.trim_matches(is_word_break)).args(parts);
    let output = bash.env("PATH", path).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn is_word_break(letter: char) -> bool {
    "=:".contains(letter)
}

/// Splits a word as readline does: runs of `=` and `:` are parts of their own.
fn parts_of(word: &str) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), word);
    while let Some(first) = rest.chars().next() {
        let is_same = |letter: char| is_word_break(letter) == is_word_break(first);
        let end = rest.find(|letter| !is_same(letter)).unwrap_or(rest.len());
        parts.push(&rest[..end]);
        rest = &rest[end..];
    }
    if parts.is_empty() { vec![""] } else { parts }
}
