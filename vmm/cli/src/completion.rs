//! Shell completion.
//!
//! On each completion request, the shell's completion script calls the program and passes the words
//! of the command line after `--`. The program completes them with the same clap description that
//! parses the command line. Values can therefore depend on the state of the host.

mod options;

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, Shell};

use self::options::paths;
pub use self::options::{FlagOption, GivenOptions, Values, complete_options};

/// Environment variable that the script sets to the name of the shell. With clap's default name,
/// `COMPLETE`, programs would react to a variable that the user has set for another purpose.
const VARIABLE: &str = "FORESHORE_COMPLETE";

/// Bash function that wraps the completion function of clap_complete.
const JOINED_WORDS: &str = include_str!("completion/joined_words.bash");

/// Returns a script for `shell` that completes the command line of `program` by calling
/// `completer`.
pub fn completion_script(shell: Shell, program: &str, completer: &str) -> io::Result<Vec<u8>> {
    let (name, shells) = (shell.to_string(), Shells::builtins());
    let missing = || io::Error::other(format!("no completion for {name}"));
    let mut script = Vec::new();
    let registration = shells.completer(&name).ok_or_else(missing)?;
    registration.write_registration(VARIABLE, program, program, completer, &mut script)?;
    if shell != Shell::Bash {
        return Ok(script);
    }
    let script = String::from_utf8(script).map_err(io::Error::other)?;
    let name = program.replace('-', "_");
    let function = JOINED_WORDS.replace("NAME", &name);
    let registered =
        script.replace(&format!("-F _clap_complete_{name}"), &format!("-F _joined_words_{name}"));
    Ok([function, registered].concat().into_bytes())
}

/// Answers a completion request and exits. Returns if the program was started normally. `describe`
/// returns the clap description of the program with the given name.
pub fn answer_completion(describe: impl Fn(&str) -> Command) {
    let words = words();
    let program = words.first().and_then(|program| Path::new(program).file_name());
    let name = program.unwrap_or_default().to_string_lossy();
    CompleteEnv::with_factory(|| describe(&name)).var(VARIABLE).complete();
}

/// Words of the command line that the script has passed. The first is the program's name.
fn words() -> Vec<OsString> {
    std::env::args_os().skip_while(|word| word != "--").skip(1).collect()
}

/// Creates a completer for values that may depend on the words of the command line.
pub fn complete_values(
    values: impl Fn(&[OsString]) -> Vec<String> + Send + Sync + 'static,
) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| {
        let current = current.to_string_lossy();
        let values = values(&words()).into_iter();
        values.filter(|value| value.starts_with(&*current)).map(CompletionCandidate::new).collect()
    })
}

/// Creates a completer for paths of the files for which `is_wanted` returns true, and of
/// directories.
pub fn complete_paths(is_wanted: fn(&Path) -> bool) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| paths(current, is_wanted))
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ValueEnum};

    use super::*;

    #[test]
    fn every_shell_has_a_script_that_names_program_and_completer() {
        for shell in Shell::value_variants() {
            let script = completion_script(*shell, "tide", "moon").unwrap();
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("tide") && script.contains("moon"), "{shell}");
            assert!(script.contains(VARIABLE), "{shell}");
        }
    }

    #[test]
    fn engine_passes_the_text_at_the_cursor() {
        let completer = complete_values(|_| vec!["high".to_owned(), "low".to_owned()]);
        let level = Arg::new("level").long("level").add(completer);
        let mut command = Command::new("tide").arg(level);
        let words = ["tide", "--level", "h"].map(OsString::from).to_vec();
        let found = clap_complete::engine::complete(&mut command, words, 2, None).unwrap();
        let values: Vec<_> = found.iter().map(|found| found.get_value()).collect();
        assert_eq!(values, ["high"]);
    }
}
