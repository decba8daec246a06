//! The table of all results, which is written to a file row by row.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::checkout::{Checkout, read};
use crate::messages::{say, write_output};

pub(super) struct Table {
    path: PathBuf,
    file: File,
    /// Folders are shown relative to it.
    root: PathBuf,
    failures: usize,
}

impl Table {
    pub(super) fn create(checkout: &Checkout, path: &Path, measured_on: &str) -> Result<Self> {
        let mut file =
            File::create(path).with_context(|| format!("Cannot create {}", path.display()))?;
        writeln!(file, "measured on: {measured_on}")?;
        Ok(Self { path: path.to_owned(), file, root: checkout.root().to_owned(), failures: 0 })
    }

    pub(super) fn add(&mut self, name: &str, seed: &str, result: &str) -> Result<()> {
        writeln!(self.file, "{name:<28} {seed:<10} {result}")?;
        say!("{name}, seed {seed}: {result}");
        Ok(())
    }

    /// Adds a row of a failure, whose logs are in these folders.
    pub(super) fn add_failure(
        &mut self,
        name: &str,
        seed: &str,
        folders: &[PathBuf],
    ) -> Result<()> {
        self.failures += 1;
        let folders: Vec<_> = folders.iter().map(|folder| self.shown(folder)).collect();
        self.add(name, seed, &format!("FAILED: see {}", folders.join(" ")))
    }

    fn shown(&self, folder: &Path) -> String {
        folder.strip_prefix(&self.root).unwrap_or(folder).display().to_string()
    }

    pub(super) fn print(&self) -> Result<()> {
        write_output(read(&self.path)?.as_bytes());
        Ok(())
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failures > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_aligned_and_failures_name_their_folders() {
        let checkout = Checkout::new().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let mut table = Table::create(&checkout, &path, "foreshore abc").unwrap();
        table.add("power", "604203", "1 power cuts").unwrap();
        assert!(!table.has_failed());
        table
            .add_failure("nvdimm on 6.12", "7", &[checkout.path("target/soak/a"), "/b".into()])
            .unwrap();
        assert!(table.has_failed());
        let expected = "measured on: foreshore abc\n\
                        power                        604203     1 power cuts\n\
                        nvdimm on 6.12               7          FAILED: see target/soak/a /b\n";
        assert_eq!(read(&path).unwrap(), expected);
    }
}
