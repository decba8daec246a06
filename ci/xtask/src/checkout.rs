//! Paths in a checkout of the repository.

use std::env;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Variable with the folder that `ci/xtask/run` was called from.
pub const CALLER_FOLDER: &str = "FORESHORE_CALLER_FOLDER";
/// Variable with the folder of this package, which `cargo run` sets.
const PACKAGE_FOLDER: &str = "CARGO_MANIFEST_DIR";

/// A checkout of the repository.
pub struct Checkout {
    root: PathBuf,
    debs: PathBuf,
}

impl Checkout {
    /// The checkout that this program was built from.
    pub fn new() -> Result<Self> {
        let package = env::var_os(PACKAGE_FOLDER).unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&package).ancestors().nth(2).context("xtask is not in ci/xtask")?.to_owned();
        let debs = match env::var_os("FORESHORE_DEB_CACHE") {
            Some(folder) if !folder.is_empty() => std::path::absolute(folder)?,
            _ => root.join("target/ci/debs"),
        };
        Ok(Self { root, debs })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A path in the checkout.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// A path in the folder of all files that tasks make.
    pub fn ci(&self, path: &str) -> PathBuf {
        self.root.join("target/ci").join(path)
    }

    /// The folder of downloaded packages. Several checkouts may share one.
    pub fn debs(&self) -> &Path {
        &self.debs
    }

    /// The folder of our release programs.
    pub fn programs(&self) -> PathBuf {
        self.root.join("target/x86_64-unknown-linux-gnu/release")
    }
}

/// Changes to the folder that the user called `ci/xtask/run` from, which itself runs cargo in the
/// checkout.
pub fn enter_caller_folder() -> Result<()> {
    let Some(folder) = env::var_os(CALLER_FOLDER) else { return Ok(()) };
    env::set_current_dir(&folder).with_context(|| format!("Cannot enter {}", folder.display()))
}

/// Waits for the lock file at `path` and holds the lock until the file is dropped.
pub fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("Cannot create {}", path.display()))?;
    file.lock().with_context(|| format!("Cannot lock {}", path.display()))?;
    Ok(file)
}

/// Creates the folder unless it exists.
pub fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("Cannot create {}", path.display()))
}

/// Removes the folder and all below, if it exists.
pub fn remove_folder(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("Cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Copies a file and its mode.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("Cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Reads a file of text.
pub fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("Cannot read {}", path.display()))
}

/// Writes a file.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    fs::write(path, content).with_context(|| format!("Cannot write {}", path.display()))
}

/// Gives a finished file its name.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).with_context(|| format!("Cannot rename {} to {}", from.display(), to.display()))
}

/// Removes a file if it exists.
pub fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("Cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
