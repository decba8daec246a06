//! Repeats commands on an emulated host if the emulation has broken a kernel.
//!
//! If such a command fails, its failure proves nothing (docs/design/testing.md).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::ends;
use crate::checkout::{Checkout, create_folder, list, rename};
use crate::messages::report;

const MAX_RUNS: usize = 3;
/// Signs of the emulation bug in a guest's console: a breakpoint or debug exception that no
/// debugger has set (`has_the_mark` in ci/guest-tests/src/runner.rs).
const MARKS: [&str; 2] = ["Oops: int3", " exc_debug_kernel+"];
const CONSOLE_SUFFIX: &str = ".console.log";

/// Result of a command after its reruns.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub code: u8,
    /// Number of runs in which the emulation broke a kernel.
    pub broken: usize,
}

impl End {
    /// Reports the number of repeated runs, at the end of a task so that it is noticed.
    pub(crate) fn note(&self) {
        if self.broken > 0 {
            report!(
                "runs without a result, because the emulation broke a kernel (docs/design/testing.md): {}",
                self.broken
            );
        }
    }
}

/// Runs a command that boots the host and leaves its logs in `folder`. Repeats it if the emulation
/// broke a kernel, and moves the logs of the broken run to `folder/broken-N`.
pub(crate) fn run(
    checkout: &Checkout,
    folder: &Path,
    note: impl Fn(&str),
    mut command: impl FnMut() -> Result<u8>,
) -> Result<End> {
    let mut broken = 0;
    loop {
        let code = command()?;
        let kernel = if code == 0 { None } else { broken_kernel(code, folder)? };
        let Some(kernel) = kernel else { return Ok(End { code, broken }) };
        broken += 1;
        note(&format!(
            "THE EMULATION BROKE {kernel}: this run proves nothing (docs/design/testing.md)"
        ));
        if broken >= MAX_RUNS {
            note(&format!("that was run {broken} of at most {MAX_RUNS}"));
            return Ok(End { code, broken });
        }
        let stored = folder.join(format!("broken-{broken}"));
        move_files(folder, &stored)?;
        let shown = stored.strip_prefix(checkout.root()).unwrap_or(&stored).display();
        note(&format!("its logs are in {shown}; run {} of at most {MAX_RUNS} begins", broken + 1));
    }
}

/// Returns which kernel the emulation broke, if a failed run shows signs of that.
fn broken_kernel(code: u8, folder: &Path) -> Result<Option<String>> {
    if ends::has_host_died(code, folder) {
        return Ok(Some("the host's kernel".to_owned()));
    }
    if !folder.join(ends::CONSOLE).exists() {
        return Ok(None);
    }
    for path in list(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.ends_with(CONSOLE_SUFFIX) {
            continue;
        }
        let console = fs::read(&path).with_context(|| format!("Cannot read {name}"))?;
        let console = String::from_utf8_lossy(&console);
        if MARKS.iter().any(|mark| console.contains(mark)) {
            return Ok(Some(format!("a guest's kernel ({name})")));
        }
    }
    Ok(None)
}

fn move_files(from: &Path, to: &Path) -> Result<()> {
    create_folder(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            rename(&entry.path(), &to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;

    use super::*;
    use crate::host::HOST_FAILED;

    const PANIC: &str = "Kernel panic - not syncing: Fatal exception";

    /// Runs a command once per entry. Each run leaves these consoles of the host and of a guest,
    /// and exits with this code.
    fn run_all(runs: &[(u8, &str, &str)]) -> (End, Vec<String>, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let mut runs = VecDeque::from(runs.to_owned());
        let notes = RefCell::new(Vec::new());
        let note = |text: &str| notes.borrow_mut().push(text.to_owned());
        let end = run(&Checkout::new().unwrap(), folder.path(), note, || {
            let (code, host, guest) = runs.pop_front().context("no such run")?;
            fs::write(folder.path().join(ends::CONSOLE), host)?;
            fs::write(folder.path().join("vm0.console.log"), guest)?;
            Ok(code)
        });
        assert!(runs.is_empty());
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        (end.unwrap(), notes.into_inner(), names)
    }

    #[test]
    fn failure_runs_again_only_with_a_sign_of_the_emulation() {
        for (code, guest) in [(0, MARKS[0]), (1, "Oops: general protection fault")] {
            let (end, notes, names) = run_all(&[(code, "", guest)]);
            assert_eq!(end, End { code, broken: 0 });
            assert!(notes.is_empty());
            assert_eq!(names, [ends::CONSOLE, "vm0.console.log"]);
        }
    }

    #[test]
    fn broken_run_is_followed_by_another_and_its_logs_stay() {
        let (end, notes, names) =
            run_all(&[(HOST_FAILED, PANIC, ""), (1, "", MARKS[1]), (0, "", "")]);
        assert_eq!(end, End { code: 0, broken: 2 });
        assert!(notes[0].starts_with("THE EMULATION BROKE the host's kernel: "), "{notes:?}");
        assert!(
            notes[2].starts_with("THE EMULATION BROKE a guest's kernel (vm0.console.log): "),
            "{notes:?}"
        );
        assert_eq!(names, ["broken-1", "broken-2", ends::CONSOLE, "vm0.console.log"]);
    }

    #[test]
    fn runs_have_a_limit() {
        let (end, notes, _) = run_all(&[(HOST_FAILED, PANIC, ""); MAX_RUNS]);
        assert_eq!(end, End { code: HOST_FAILED, broken: MAX_RUNS });
        assert_eq!(notes.last().unwrap(), "that was run 3 of at most 3");
    }
}
