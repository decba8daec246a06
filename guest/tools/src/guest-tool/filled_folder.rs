//! Fills a file system with files derived from a seed, and checks them later.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use guest_tools::content::Bytes;

/// Maximum file size.
const MAX_BYTES: u64 = 1 << 20;

/// Returns the content of a file. Sizes are distributed logarithmically: the maximum is
/// `MAX_BYTES`, halved a random number of times between 0 and 11.
fn content(seed: u64, number: u64) -> Vec<u8> {
    let mut bytes = Bytes::new(seed.rotate_left(32) ^ number);
    let longest = MAX_BYTES >> bytes.below(12);
    let len = bytes.below(longest) as usize;
    let mut content = vec![0; len.next_multiple_of(8)];
    bytes.fill(&mut content);
    content.truncate(len);
    content
}

/// Path of a file. Each directory contains a few hundred files.
fn name(number: u64) -> String {
    format!("d{:03}/f{number:06}", number / 256)
}

/// Writes files until no space is left. Removes the file that did not fit.
pub(crate) fn fill(dir: &Path, seed: u64) -> Result<()> {
    let mut number = 0;
    loop {
        let path = dir.join(name(number));
        match write(&path, &content(seed, number)) {
            Ok(()) => number += 1,
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                // The file does not exist if there was no space for its name.
                let _ = fs::remove_file(&path);
                break;
            }
            Err(error) => {
                return Err(error).with_context(|| format!("Cannot write {}", path.display()));
            }
        }
    }
    ensure!(number > 0, "The file system has no room for a single file");
    println!("{number}");
    Ok(())
}

/// File systems with delayed allocation report a lack of space only when the file is flushed.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    fs::create_dir_all(path.parent().expect("files are in directories"))?;
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_data()
}

/// Checks the content of the first `count` files, and that there are no other files.
pub(crate) fn check(dir: &Path, seed: u64, count: u64) -> Result<()> {
    for number in 0..count {
        let path = dir.join(name(number));
        let found = fs::read(&path).with_context(|| format!("Cannot read {}", path.display()))?;
        ensure!(found == content(seed, number), "{} has wrong content", path.display());
    }
    let expected: BTreeSet<String> = (0..count).map(name).collect();
    for directory in (0..=count / 256).map(|number| format!("d{number:03}")) {
        let Ok(entries) = fs::read_dir(dir.join(&directory)) else { continue };
        for entry in entries {
            let found = format!("{directory}/{}", entry?.file_name().to_string_lossy());
            ensure!(expected.contains(&found), "Unexpected file: {found}");
        }
    }
    println!("checked {count}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_changed_or_additional_file_is_found() {
        let dir = std::env::temp_dir().join(format!("guest-tool-filled-{}", std::process::id()));
        let write_all = || {
            (0..300).for_each(|number| write(&dir.join(name(number)), &content(7, number)).unwrap())
        };
        write_all();
        check(&dir, 7, 300).unwrap();
        assert!(check(&dir, 8, 300).is_err(), "another seed's files passed");
        assert!(check(&dir, 7, 299).is_err(), "a file too many passed");
        assert!(check(&dir, 7, 301).is_err(), "a missing file passed");
        let longest = (0..300).max_by_key(|number| content(7, *number).len()).unwrap();
        let mut changed = content(7, longest);
        *changed.last_mut().unwrap() ^= 1;
        fs::write(dir.join(name(longest)), changed).unwrap();
        assert!(check(&dir, 7, 300).is_err(), "a changed byte passed");
        fs::remove_dir_all(dir).unwrap();
    }
}
