//! Table of all results. Each row is also written to a file immediately.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::checkout::{Checkout, rename, write};
use crate::messages::{report, write_output};

pub(super) struct Table {
    path: PathBuf,
    text: String,
    /// Printed folder names are relative to this folder.
    root: PathBuf,
    pub has_failed: bool,
}

impl Table {
    pub(super) fn create(checkout: &Checkout, path: &Path, measured_on: &str) -> Result<Self> {
        let text = format!("measured on: {measured_on}\n");
        write(path, &text)?;
        let (path, root) = (path.to_owned(), checkout.root().to_owned());
        Ok(Self { path, text, root, has_failed: false })
    }

    pub(super) fn add(&mut self, name: &str, seed: &str, result: &str) -> Result<()> {
        self.text += &format!("{name:<28} {seed:<10} {result}\n");
        report!("{name}, seed {seed}: {result}");
        let new = self.path.with_extension("new");
        write(&new, &self.text)?;
        rename(&new, &self.path)
    }

    /// Adds a row for a failure. Its logs are in the given folders.
    pub(super) fn add_failure(
        &mut self,
        name: &str,
        seed: &str,
        folders: &[PathBuf],
    ) -> Result<()> {
        self.has_failed = true;
        let shown = |folder: &PathBuf| {
            folder.strip_prefix(&self.root).unwrap_or(folder).display().to_string()
        };
        let folders: Vec<_> = folders.iter().map(shown).collect();
        self.add(name, seed, &format!("FAILED: see {}", folders.join(" ")))
    }

    pub(super) fn print(&self) {
        write_output(self.text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkout::read;

    #[test]
    fn rows_are_aligned_and_failures_name_their_folders() {
        let checkout = Checkout::new().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let mut table = Table::create(&checkout, &path, "foreshore abc").unwrap();
        table.add("power", "604203", "1 power cuts").unwrap();
        assert!(!table.has_failed);
        table
            .add_failure("nvdimm on 6.12", "7", &[checkout.path("target/soak/a"), "/b".into()])
            .unwrap();
        assert!(table.has_failed);
        let expected = "measured on: foreshore abc\n\
                        power                        604203     1 power cuts\n\
                        nvdimm on 6.12               7          FAILED: see target/soak/a /b\n";
        assert_eq!(read(&path).unwrap(), expected);
    }
}
