//! Boots emulated hosts and keeps their output. Boots run one after another or concurrently in
//! lanes.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};

use crate::checkout::{Checkout, create_folder};
use crate::host::reruns::{self, End};
use crate::jobs;
use crate::messages::{self, Lines, write_output};
use crate::programs;

/// File in a boot's folder that contains the output of the host and of its command.
const OUTPUT: &str = "said";
/// Prefixes of lines about acknowledged flushes. There are thousands of them, so they are only
/// written to the file.
const FLUSHES: [&str; 2] = ["disk flushed ", "dax flushed "];

pub(super) struct Boots<'run> {
    pub checkout: &'run Checkout,
    pub folder: PathBuf,
    pub memory_mib: u32,
    /// Prefix of each printed line, so that the output of parallel boots can be distinguished.
    pub prefix: String,
}

impl Boots<'_> {
    /// Boots the host and returns the exit code of the command after `--`.
    pub(super) fn boot(&self, arguments: &[String]) -> Result<u8> {
        create_folder(&self.folder)?;
        let path = self.folder.join(OUTPUT);
        let mut file =
            File::create(&path).with_context(|| format!("Cannot create {}", path.display()))?;
        let mut command = programs::task(self.checkout, "host")?;
        command
            .args(["--no-build", "--mem", &self.memory_mib.to_string(), "--out"])
            .arg(&self.folder);
        command.args(arguments).current_dir(self.checkout.root());
        let mut lines = Lines::default();
        let receive = |bytes: &[u8]| {
            file.write_all(bytes)?;
            self.show(lines.feed(bytes));
            Ok(())
        };
        let status = jobs::stream(&mut command, receive)?;
        self.show(lines.finish());
        Ok(jobs::exit_code(status))
    }

    /// Runs a command that boots the host. Runs it again if the emulation broke a kernel.
    pub(super) fn run(&self, command: impl FnMut() -> Result<u8>) -> Result<End> {
        reruns::run(self.checkout, &self.folder, |note| self.note(note), command)
    }

    fn note(&self, text: &str) {
        write_output(format!("{}soak: {text}\n", self.prefix).as_bytes());
    }

    fn show(&self, lines: Vec<Vec<u8>>) {
        let is_flush =
            |line: &Vec<u8>| FLUSHES.iter().any(|flush| line.starts_with(flush.as_bytes()));
        for line in lines.iter().filter(|line| !is_flush(line)) {
            write_output(&[self.prefix.as_bytes(), line].concat());
        }
    }

    pub(super) fn output(&self) -> Result<String> {
        output_in(&self.folder)
    }
}

/// Returns the output of the last boot whose logs are in this folder.
pub(super) fn output_in(folder: &Path) -> Result<String> {
    let path = folder.join(OUTPUT);
    let output = fs::read(&path).with_context(|| format!("Cannot read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Returns the complete lines about acknowledged flushes. A power cut may cut off the last line. A
/// line from the host then follows on the same line.
pub(super) fn flushes(output: &str) -> String {
    let is_flush = |line: &&str| {
        let numbers = FLUSHES.iter().find_map(|flush| line.strip_prefix(flush));
        let is_number = |word: &str| word.parse::<u64>().is_ok();
        line.ends_with('\n') && numbers.is_some_and(|rest| rest.split_whitespace().all(is_number))
    };
    output.split_inclusive('\n').filter(is_flush).collect()
}

/// Runs `work` for all items, several at a time, and returns the results in item order. After a
/// result that `is_last` accepts, no other item starts.
pub(crate) fn in_lanes<T: Send, R: Send>(
    lanes: usize,
    items: Vec<T>,
    work: impl Fn(&T) -> Result<R> + Sync,
    is_last: impl Fn(Option<&R>) -> bool + Sync,
) -> Vec<(T, Option<R>)> {
    let queue = Mutex::new(items.into_iter().enumerate().collect::<VecDeque<_>>());
    let results = Mutex::new(Vec::new());
    let lock = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let lane = || {
        loop {
            let Some((index, item)) = lock().pop_front() else { return };
            let result = work(&item).map_err(|error| messages::print(&format!("{error:#}"))).ok();
            if is_last(result.as_ref()) {
                lock().clear();
            }
            results.lock().unwrap_or_else(PoisonError::into_inner).push((index, item, result));
        }
    };
    thread::scope(|scope| (0..lanes).for_each(|_| drop(scope.spawn(lane))));
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(index, _, _)| *index);
    results.into_iter().map(|(_, item, result)| (item, result)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use anyhow::bail;

    use super::*;

    #[test]
    fn flushes_are_complete_lines() {
        let output = "disk: page-cache by nvdimm\ndisk flushed 1 2\nall guests write\ndax flushed 3\ndisk flushed 4";
        for end in ["", "host: the power was cut\n", " host: the power was cut\n"] {
            assert_eq!(flushes(&format!("{output}{end}")), "disk flushed 1 2\ndax flushed 3\n");
        }
    }

    #[test]
    fn items_run_at_the_same_time_and_results_keep_their_order() {
        // Each of the two items waits for the other one.
        let both = Barrier::new(2);
        let work = |item: &u32| {
            both.wait();
            Ok(item * 2)
        };
        let results = in_lanes(2, (0..20).collect(), work, |_| false);
        assert_eq!(results, (0..20).map(|item| (item, Some(item * 2))).collect::<Vec<_>>());
    }

    #[test]
    fn nothing_begins_after_a_failure() {
        let work = |item: &u32| if *item == 3 { bail!("three") } else { Ok(()) };
        let results = in_lanes(1, (0..20).collect(), work, |result| result.is_none());
        assert_eq!(results.len(), 4);
        assert_eq!(results[3], (3, None));
    }
}
