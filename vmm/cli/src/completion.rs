//! Shell completion.
//!
//! On each completion request, the shell's completion script calls the program and passes the words
//! of the command line after `--`. The program completes them with the same clap description that
//! parses the command line. Values can therefore depend on the state of the host.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::engine::{
    ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, Shell};

/// Environment variable that the script sets to the name of the shell. With clap's default name,
/// `COMPLETE`, programs would react to a variable that the user has set for another purpose.
const VARIABLE: &str = "FORESHORE_COMPLETE";

/// Returns a script for `shell` that completes the command line of `program` by calling
/// `completer`.
pub fn completion_script(shell: Shell, program: &str, completer: &str) -> io::Result<Vec<u8>> {
    let (name, shells) = (shell.to_string(), Shells::builtins());
    let missing = || io::Error::other(format!("no completion for {name}"));
    let mut script = Vec::new();
    let shell = shells.completer(&name).ok_or_else(missing)?;
    shell.write_registration(VARIABLE, program, program, completer, &mut script)?;
    Ok(script)
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

/// Creates a completer for options that are separated by commas. `options` returns each option with
/// its `=`, or once for each of its values. A value that contains a slash is completed as a path.
pub fn complete_options(
    options: impl Fn() -> Vec<String> + Send + Sync + 'static,
) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| {
        let current = current.to_string_lossy();
        let start = current.rfind(',').map_or(0, |comma| comma + 1);
        let (before, option) = current.split_at(start);
        let (key, value) = option.split_at(option.find('=').map_or(0, |sign| sign + 1));
        if value.contains('/') {
            let paths = PathCompleter::any().complete(OsStr::new(value)).into_iter();
            return paths.map(|path| path.add_prefix(format!("{before}{key}"))).collect();
        }
        let options = options().into_iter().filter(|name| name.starts_with(option));
        options.map(|name| CompletionCandidate::new(format!("{before}{name}"))).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::{Arg, ValueEnum};
    use tempfile::TempDir;

    use super::*;

    fn completed(completer: &ArgValueCompleter, current: &str) -> Vec<String> {
        let candidates = completer.complete(OsStr::new(current));
        candidates.iter().map(|found| found.get_value().to_string_lossy().into_owned()).collect()
    }

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
    fn options_are_completed_behind_commas_and_paths_behind_slashes() {
        let keys = || ["size=", "policy=psi", "policy=pmb", "path="].map(str::to_owned).to_vec();
        let completer = complete_options(keys);
        assert_eq!(completed(&completer, "si"), ["size="]);
        assert_eq!(
            completed(&completer, "size=1G,policy=p"),
            ["size=1G,policy=psi", "size=1G,policy=pmb"]
        );
        assert_eq!(completed(&completer, "size=1G,").len(), 4);
        assert_eq!(completed(&completer, "size=1"), Vec::<String>::new());
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("disk.raw");
        fs::write(&file, "").unwrap();
        let path = format!("size=1G,path={}", file.display());
        assert_eq!(completed(&completer, path.strip_suffix("sk.raw").unwrap()), [path]);
        let bare = file.display().to_string();
        assert_eq!(completed(&completer, bare.strip_suffix("sk.raw").unwrap()), [bare]);
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
