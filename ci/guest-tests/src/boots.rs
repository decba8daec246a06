//! Number and duration of the boots of guests in a test.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::runner::this_tests_dir;
use crate::table::is_test;

/// Boots until the guest accepts commands. Boots that failed are not included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Boots {
    count: u32,
    took: Duration,
}

impl fmt::Display for Boots {
    /// Writes `; boots: 2, 6.1 s`, or nothing if there are no boots.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            0 => Ok(()),
            count => write!(formatter, "; boots: {count}, {:.1} s", self.took.as_secs_f64()),
        }
    }
}

/// Returns the file with the duration of each boot in milliseconds. It is beside the test's
/// directory, because tests check the files there.
fn file_of(test_dir: &Path) -> PathBuf {
    test_dir.with_extension("boots")
}

/// Adds a boot to those of the test that this process runs.
pub(crate) fn add_to_this_test(took: Duration) -> Result<()> {
    if is_test() { add(&this_tests_dir(), took) } else { Ok(()) }
}

fn add(test_dir: &Path, took: Duration) -> Result<()> {
    let path = file_of(test_dir);
    // One write for the line, because several threads of a test boot guests at the same time.
    let line = format!("{}\n", took.as_millis());
    let file = File::options().create(true).append(true).open(&path);
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .with_context(|| format!("Cannot write {}", path.display()))
}

impl Boots {
    /// Adds the boots of a test that has ended, and removes its file.
    pub(crate) fn take_from(&mut self, test_dir: &Path) -> Result<()> {
        let path = file_of(test_dir);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            text => text.with_context(|| format!("Cannot read {}", path.display()))?,
        };
        // A test that was cut off may have left an incomplete line.
        for took_ms in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            self.count += 1;
            self.took += Duration::from_millis(took_ms.parse()?);
        }
        fs::remove_file(&path).with_context(|| format!("Cannot remove {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn boots_of_all_runs_of_a_test_are_added() {
        let folder = tempfile::tempdir().unwrap();
        let test_dir = folder.path().join("boot-boots");
        let mut boots = Boots::default();
        boots.take_from(&test_dir).unwrap();
        assert_eq!(boots.to_string(), "");
        for took_ms in [3000, 2150] {
            add(&test_dir, Duration::from_millis(took_ms)).unwrap();
        }
        boots.take_from(&test_dir).unwrap();
        assert_eq!(boots.to_string(), "; boots: 2, 5.2 s");
        fs::write(file_of(&test_dir), "1000\n20").unwrap();
        boots.take_from(&test_dir).unwrap();
        assert_eq!(boots.to_string(), "; boots: 3, 6.2 s");
        boots.take_from(&test_dir).unwrap();
        assert_eq!(boots.to_string(), "; boots: 3, 6.2 s");
    }

    #[test]
    fn boots_of_parallel_threads_are_all_counted() {
        const THREADS: u32 = 4;
        const BOOTS: u32 = 500;
        let folder = tempfile::tempdir().unwrap();
        let test_dir = folder.path().join("boot-boots");
        let add_all = || (0..BOOTS).try_for_each(|_| add(&test_dir, Duration::from_millis(12_130)));
        thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(add_all)).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        });
        let mut boots = Boots::default();
        boots.take_from(&test_dir).unwrap();
        let count = THREADS * BOOTS;
        assert_eq!(boots, Boots { count, took: Duration::from_millis(12_130) * count });
    }
}
