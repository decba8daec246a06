//! Writes files and acknowledges each one, for tests that kill the VMM in the meantime.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use guest_tools::content::{Bytes, hash};

/// Writes files until killed. Prints a file's line when its content and its name are durable. From
/// then on, the file should exist after any crash.
pub(crate) fn write(dir: &Path, bytes: u64) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("Cannot create {}", dir.display()))?;
    let parent = File::open(dir)?;
    let first = next_number(dir)?;
    let mut content = vec![0u8; usize::try_from(bytes)?.next_multiple_of(8)];
    let mut stdout = io::stdout().lock();
    for number in first.. {
        let name = format!("file-{number:06}");
        Bytes::new(number).fill(&mut content);
        let mut file =
            File::create(dir.join(&name)).with_context(|| format!("Cannot create {name}"))?;
        file.write_all(&content).with_context(|| format!("Cannot write {name}"))?;
        file.sync_all().with_context(|| format!("Cannot sync {name}"))?;
        parent.sync_all().context("Cannot sync the directory")?;
        writeln!(stdout, "{name} {:016x}", hash(&content))?;
        stdout.flush()?;
    }
    Ok(())
}

/// Returns the highest number in `dir` plus one, so that a second run does not overwrite files of
/// the first run.
fn next_number(dir: &Path) -> Result<u64> {
    let mut next = 0;
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("file-")?.parse::<u64>().ok());
        next = next.max(number.map_or(0, |number| number + 1));
    }
    Ok(next)
}

/// Compares each listed file with its hash.
pub(crate) fn check(dir: &Path, list: &Path) -> Result<()> {
    let list =
        fs::read_to_string(list).with_context(|| format!("Cannot read {}", list.display()))?;
    let mut checked = 0;
    for line in list.lines() {
        let (name, expected) = line
            .split_once(' ')
            .with_context(|| format!("Not a file name and a hash: {line:?}"))?;
        let content = fs::read(dir.join(name))
            .with_context(|| format!("Cannot read the acknowledged file {name}"))?;
        let found = format!("{:016x}", hash(&content));
        ensure!(found == expected, "{name} has hash {found}, but {expected} was acknowledged");
        checked += 1;
    }
    println!("checked {checked}");
    Ok(())
}
