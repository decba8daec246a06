//! Reads files and history of the repository with git.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Files with comments or prose.
const TEXTS: [&str; 2] = ["*.rs", "*.md"];

pub(crate) struct Repository {
    root: PathBuf,
}

/// Paths of a changed file in the old commit and in the work tree. The first is `None` for a new
/// file, and the second is `None` for a removed file.
pub(crate) type Change = (Option<String>, Option<String>);

impl Repository {
    pub(crate) fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn git(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new("git").arg("-C").arg(&self.root).args(arguments).output();
        let output = output.context("Cannot run git")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "git {}: {}", arguments.join(" "), errors.trim_end());
        String::from_utf8(output.stdout).context("git printed no UTF-8")
    }

    /// Returns the paths of tracked files, and of untracked files that git does not ignore.
    pub(crate) fn files(&self) -> Result<Vec<String>> {
        let listed = self.git(&["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
        let paths =
            listed.split('\0').filter(|path| !path.is_empty() && self.root.join(path).is_file());
        Ok(paths.map(str::to_owned).collect())
    }

    /// Reads a file in the work tree. Returns `None` if the file is not text.
    pub(crate) fn read(&self, path: &str) -> Result<Option<String>> {
        let bytes =
            fs::read(self.root.join(path)).with_context(|| format!("Cannot read {path}"))?;
        Ok(String::from_utf8(bytes).ok())
    }

    pub(crate) fn read_at(&self, commit: &str, path: &str) -> Result<String> {
        self.git(&["show", &format!("{commit}:{path}")])
    }

    /// Returns the Rust files that differ between `base` and the work tree. A renamed file is one
    /// entry.
    pub(crate) fn changed_rust_files(&self, base: &str) -> Result<Vec<Change>> {
        let listed =
            self.git(&["diff", "--name-status", "-z", "--find-renames", base, "--", "*.rs"])?;
        let mut changed = parse_name_status(&listed)?;
        let untracked = self.untracked()?.into_iter().filter(|path| path.ends_with(".rs"));
        changed.extend(untracked.map(|path| (None, Some(path))));
        Ok(changed)
    }

    /// Returns Rust files and documents that git does not track yet.
    pub(crate) fn untracked(&self) -> Result<Vec<String>> {
        let listed = ["ls-files", "-z", "--others", "--exclude-standard", "--"];
        let listed = self.git(&[&listed[..], &TEXTS].concat())?;
        Ok(listed.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect())
    }

    /// Returns the changed lines of Rust files and documents between `base` and the work tree,
    /// without context lines.
    pub(crate) fn text_diff(&self, base: &str) -> Result<String> {
        let options = ["diff", "--no-ext-diff", "--no-color", "--unified=0", "--find-renames"];
        self.git(&[&options[..], &[base, "--"], &TEXTS].concat())
    }

    /// Returns the messages of all commits since `base`.
    pub(crate) fn messages_since(&self, base: &str) -> Result<String> {
        self.git(&["log", "--format=%B", &format!("{base}..HEAD")])
    }
}

/// Parses `git diff --name-status -z`. An entry is a status and a path. After `R` there are two
/// paths.
fn parse_name_status(listed: &str) -> Result<Vec<Change>> {
    let mut fields = listed.split('\0').filter(|field| !field.is_empty()).map(str::to_owned);
    let mut changed = Vec::new();
    while let Some(status) = fields.next() {
        let mut path =
            || fields.next().with_context(|| format!("git printed no path after {status}"));
        let first = path()?;
        changed.push(match status.as_bytes()[0] {
            b'A' => (None, Some(first)),
            b'D' => (Some(first), None),
            b'R' => (Some(first), Some(path()?)),
            _ => (Some(first.clone()), Some(first)),
        });
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renamed_file_is_one_entry() {
        let changed = parse_name_status("M\0a.rs\0R095\0b.rs\0c.rs\0A\0d.rs\0D\0e.rs\0").unwrap();
        let changed: Vec<_> =
            changed.iter().map(|(old, new)| (old.as_deref(), new.as_deref())).collect();
        let expected = [
            (Some("a.rs"), Some("a.rs")),
            (Some("b.rs"), Some("c.rs")),
            (None, Some("d.rs")),
            (Some("e.rs"), None),
        ];
        assert_eq!(changed, expected);
        parse_name_status("R100\0b.rs\0").unwrap_err();
    }
}
