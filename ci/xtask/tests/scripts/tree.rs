//! Copies of the wrappers, for which a stub of cargo runs this build of xtask.

use std::env;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

const WRAPPERS: [&str; 8] = [
    "ci/bench",
    "ci/demo",
    "ci/setup",
    "ci/soak",
    "ci/test",
    "ci/nested/host",
    "ci/xtask/run",
    "guest/image/build",
];
const XTASK: &str = env!("CARGO_BIN_EXE_xtask");
/// A built xtask. `ci/xtask/run` looks for a compiler unless it exists.
pub const BUILT: &str = "target/xtask/x86_64-unknown-linux-gnu/debug/xtask";
/// A program of a package that is unpacked already.
pub const PROMETHEUS: &str = "target/ci/packages/prometheus/usr/bin/prometheus";
/// Tools without which `ci/setup` would install packages. The test must install nothing.
const TOOLS: [&str; 16] = [
    "busybox",
    "cc",
    "cpio",
    "xz",
    "lz4",
    "depmod",
    "mke2fs",
    "sha256sum",
    "tar",
    "timeout",
    "flock",
    "setpriv",
    "strip",
    "qemu-img",
    "qemu-system-x86_64",
    "debugfs",
];
const SYSTEM_FOLDERS: [&str; 4] = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
const LIBC: &str = "/usr/lib/x86_64-linux-gnu/libc.a";

/// The checkout that this test is built from.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The first tool that `ci/setup` would have to install.
pub fn missing_tool() -> Option<&'static str> {
    let is_missing = |tool: &&str| !SYSTEM_FOLDERS.iter().any(|folder| Path::new(folder).join(tool).exists());
    TOOLS.into_iter().find(is_missing).or_else(|| (!Path::new(LIBC).exists()).then_some(LIBC))
}

/// A directory with copies of the wrappers.
pub struct Tree {
    folder: TempDir,
    umask: u32,
}

impl Tree {
    /// Copies the wrappers. Files have the modes of a checkout and a build under `umask`. `cargo`
    /// is the stub's code for all but `cargo run`.
    pub fn new(parent: &Path, umask: u32, cargo: &str) -> Result<Self> {
        let tree = Self { folder: TempDir::new_in(parent)?, umask };
        WRAPPERS.iter().try_for_each(|wrapper| tree.copy_script(wrapper))?;
        let run = format!(
            "#!/bin/sh\nif [ \"$1\" != run ]; then {cargo}\nexit; fi\nwhile [ \"$1\" != -- ]; do shift; done\nshift\n\
             CARGO_MANIFEST_DIR=$PWD/ci/xtask exec {XTASK} \"$@\"\n"
        );
        tree.write("bin/cargo", run, 0o755)?;
        // `ci/demo` would install it.
        tree.write("bin/gnuplot", "#!/bin/sh\n", 0o755)?;
        fs::create_dir_all(tree.path(BUILT).parent().context("no folder")?)?;
        symlink(XTASK, tree.path(BUILT))?;
        Ok(tree)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// Copies a script of the checkout.
    pub fn copy_script(&self, path: &str) -> Result<()> {
        self.copy(&repository().join(path), path, 0o755 & !self.umask)
    }

    pub fn write(&self, path: &str, content: impl AsRef<[u8]>, mode: u32) -> Result<()> {
        let path = self.path(path);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        fs::write(&path, content)?;
        Ok(fs::set_permissions(&path, Permissions::from_mode(mode))?)
    }

    /// Makes a stand-in for one of our programs, and the files without which no task can run it.
    /// There are no kernels and images.
    pub fn add_program(&self, name: &str, code: &str) -> Result<()> {
        self.write("ci/kernels.lock", "", 0o644)?;
        self.write("ci/xtask/Cargo.toml", "", 0o644)?;
        fs::create_dir_all(self.path("ci/xtask/src"))?;
        self.write(&format!("target/x86_64-unknown-linux-gnu/release/{name}"), code, 0o755)
    }

    pub fn copy(&self, from: &Path, to: &str, mode: u32) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("Cannot read {}", from.display()))?;
        self.write(to, content, mode)
    }

    /// PATH of a user, with the stubs in front.
    pub fn user_path(&self) -> Result<String> {
        Ok(format!("{}:{}", self.path("bin").display(), env::var("PATH")?))
    }
}
