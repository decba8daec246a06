//! Paths in a checkout of the repository.

use std::env;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Variable with the folder in which the user called `ci/xtask/run`.
pub(crate) const CALLER_FOLDER: &str = "FORESHORE_CALLER_FOLDER";
/// Variable with the folder of this package. `cargo run` sets it.
pub(crate) const PACKAGE_FOLDER: &str = "CARGO_MANIFEST_DIR";

/// Profile in which this repository's programs are built (Cargo.toml).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// The release profile without LTO.
    GuestTests,
    Release,
}

impl Profile {
    /// Name in Cargo.toml, and of the folder with the programs.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::GuestTests => "guest-tests",
            Self::Release => "release",
        }
    }
}

pub(crate) struct Checkout {
    root: PathBuf,
    debs: PathBuf,
    profile: Profile,
}

impl Checkout {
    /// Returns the checkout that this program was built from.
    pub(crate) fn new() -> Result<Self> {
        let package =
            env::var_os(PACKAGE_FOLDER).unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root =
            Path::new(&package).ancestors().nth(2).context("xtask is not in ci/xtask")?.to_owned();
        let debs = match env::var_os("FORESHORE_DEB_CACHE") {
            Some(folder) if !folder.is_empty() => std::path::absolute(folder)?,
            _ => root.join("target/ci/debs"),
        };
        Ok(Self { root, debs, profile: Profile::GuestTests })
    }

    pub(crate) fn with_profile(self, profile: Profile) -> Self {
        Self { profile, ..self }
    }

    /// Returns the profile in which this repository's programs are built.
    pub(crate) fn profile(&self) -> Profile {
        self.profile
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of a file in the checkout.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Returns a path in the folder for generated files.
    pub(crate) fn ci(&self, path: &str) -> PathBuf {
        self.root.join("target/ci").join(path)
    }

    /// Returns the folder for downloaded packages, which checkouts may share.
    pub(crate) fn debs(&self) -> &Path {
        &self.debs
    }

    /// Returns the folder with this repository's programs.
    pub(crate) fn programs(&self) -> PathBuf {
        self.built(self.profile.name())
    }

    /// Returns the folder with programs that are built in the profile of unit tests.
    pub(crate) fn test_programs(&self) -> PathBuf {
        self.built("debug")
    }

    fn built(&self, profile: &str) -> PathBuf {
        self.root.join("target/x86_64-unknown-linux-gnu").join(profile)
    }
}

/// Changes to the folder in which the user called `ci/xtask/run`. The script has changed to the
/// checkout before it ran cargo.
pub(crate) fn enter_caller_folder() -> Result<()> {
    let Some(folder) = env::var_os(CALLER_FOLDER) else { return Ok(()) };
    env::set_current_dir(&folder).with_context(|| format!("Cannot enter {}", folder.display()))
}

/// Locks the file at `path`, and waits until the lock is free. Dropping the file releases the lock.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("Cannot create {}", path.display()))?;
    file.lock().with_context(|| format!("Cannot lock {}", path.display()))?;
    Ok(file)
}

pub(crate) fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("Cannot create {}", path.display()))
}

pub(crate) fn remove_folder(path: &Path) -> Result<()> {
    check_removed(fs::remove_dir_all(path), path)
}

/// Returns the sorted paths of the entries in a folder.
pub(crate) fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<_> = entries.with_context(|| format!("Cannot list {}", folder.display()))?;
    paths.sort();
    Ok(paths)
}

/// Copies a file with its mode.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("Cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("Cannot read {}", path.display()))
}

pub(crate) fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    fs::write(path, content).with_context(|| format!("Cannot write {}", path.display()))
}

/// Renames a finished temporary file to its final name.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to)
        .with_context(|| format!("Cannot rename {} to {}", from.display(), to.display()))
}

/// Creates a symbolic link and atomically replaces an existing file. At any time, other processes
/// find either the old file or the link.
pub(crate) fn link(target: &Path, path: &Path) -> Result<()> {
    let mut name = path.file_name().context("path without a file name")?.to_owned();
    name.push(format!(".{}", std::process::id()));
    let new = path.with_file_name(name);
    remove_file(&new)?;
    symlink(target, &new).with_context(|| format!("Cannot link {}", new.display()))?;
    rename(&new, path)
}

/// Removes a file if it exists.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    check_removed(fs::remove_file(path), path)
}

fn check_removed(removed: io::Result<()>, path: &Path) -> Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.with_context(|| format!("Cannot remove {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn link_that_is_replaced_is_never_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("link");
        let targets = [Path::new("one"), Path::new("two")];
        link(targets[0], &path).unwrap();
        let is_over = AtomicBool::new(false);
        let found = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    fs::read_link(&path)?;
                }
                fs::read_link(&path)
            });
            (1..=2000).for_each(|number| link(targets[number % 2], &path).unwrap());
            is_over.store(true, Ordering::Release);
            reader.join().unwrap()
        });
        assert_eq!(found.unwrap(), targets[0]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
