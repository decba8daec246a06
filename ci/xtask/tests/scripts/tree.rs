//! Copies of the wrapper scripts. A stub of cargo makes them run this build of xtask.

use std::env;
use std::fmt::Display;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

const WRAPPERS: &str =
    "ci/bench ci/demo ci/setup ci/soak ci/test ci/nested/host ci/xtask/run guest/image/build";
const XTASK: &str = env!("CARGO_BIN_EXE_xtask");
/// Path of the built xtask. If it does not exist, `ci/xtask/run` looks for a compiler.
pub(crate) const BUILT: &str = "target/xtask/x86_64-unknown-linux-gnu/debug/xtask";
/// Program of a package that has already been unpacked.
pub(crate) const PROMETHEUS: &str = "target/ci/packages/prometheus/usr/bin/prometheus";
/// Tools that `ci/setup` would install packages for if they are missing. The test must not install
/// anything.
const TOOLS: &str = "busybox cc cpio xz lz4 depmod mke2fs sha256sum tar timeout flock setpriv strip qemu-img \
                     qemu-system-x86_64 debugfs";
const SYSTEM_FOLDERS: [&str; 4] = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"];
const LIBC: &str = "/usr/lib/x86_64-linux-gnu/libc.a";

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs a command and returns its exit code, output and errors.
pub(crate) fn run(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// Returns the folder with packages that `ci/setup` has fetched.
pub(crate) fn debs() -> PathBuf {
    let folder = env::var_os("FORESHORE_DEB_CACHE").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| repository().join("target/ci/debs"));
    std::path::absolute(folder).unwrap()
}

/// Writes a program from a child process.
///
/// If this process wrote the file, a child that another test starts at that moment would inherit
/// the open file until its exec. Until then, the kernel refuses to run the program (ETXTBSY).
fn write_program(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    let mut install = Command::new("install")
        .args(["-m", &format!("{mode:o}"), "/dev/stdin"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()?;
    install.stdin.take().context("no pipe")?.write_all(content)?;
    let status = install.wait()?;
    ensure!(status.success(), "install {}: {status}", path.display());
    Ok(())
}

/// Returns the first tool that `ci/setup` would have to install.
pub(crate) fn missing_tool() -> Option<&'static str> {
    let is_missing =
        |tool: &&str| !SYSTEM_FOLDERS.iter().any(|folder| Path::new(folder).join(tool).exists());
    TOOLS.split(' ').find(is_missing).or_else(|| (!Path::new(LIBC).exists()).then_some(LIBC))
}

/// Returns true if something is missing, and reports it as the reason to skip the test.
pub(crate) fn is_skipped(missing: Option<impl Display>) -> bool {
    missing
        .inspect(|missing| eprintln!("skipped: {missing} is not there (ci/setup does that)"))
        .is_some()
}

/// Directory with copies of the wrapper scripts.
pub(crate) struct Tree {
    folder: TempDir,
    umask: u32,
}

impl Tree {
    /// Copies the wrapper scripts. Files have the modes of a checkout and a build under `umask`.
    /// `cargo` is the stub's code for all commands except `cargo run`.
    pub(crate) fn new(parent: &Path, umask: u32, cargo: &str) -> Result<Self> {
        let tree = Self { folder: TempDir::new_in(parent)?, umask };
        WRAPPERS.split(' ').try_for_each(|wrapper| tree.copy_script(wrapper))?;
        let run = format!(
            "#!/bin/sh\nif [ \"$1\" != run ]; then {cargo}\nexit; fi\nwhile [ \"$1\" != -- ]; do shift; done\nshift\n\
             CARGO_MANIFEST_DIR=$PWD/ci/xtask exec {XTASK} \"$@\"\n"
        );
        tree.write("bin/cargo", run, 0o755)?;
        // Without this file, `ci/demo` would install gnuplot.
        tree.write("bin/gnuplot", "#!/bin/sh\n", 0o755)?;
        // Without this folder, `ci/test` would demand disk space for a first build.
        fs::create_dir_all(tree.path("target/debug"))?;
        fs::create_dir_all(tree.path(BUILT).parent().context("no folder")?)?;
        symlink(XTASK, tree.path(BUILT))?;
        Ok(tree)
    }

    /// Returns a tree in the folder for temporary files, or `None` if a tool is missing.
    pub(crate) fn with_tools(cargo: &str) -> Option<Self> {
        (!is_skipped(missing_tool())).then(|| Self::new(&env::temp_dir(), 0o022, cargo).unwrap())
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    pub(crate) fn copy_script(&self, path: &str) -> Result<()> {
        self.copy(&repository().join(path), path, 0o755 & !self.umask)
    }

    pub(crate) fn write(&self, path: &str, content: impl AsRef<[u8]>, mode: u32) -> Result<()> {
        let path = self.path(path);
        fs::create_dir_all(path.parent().context("no folder")?)?;
        if mode & 0o111 != 0 {
            return write_program(&path, content.as_ref(), mode);
        }
        fs::write(&path, content)?;
        Ok(fs::set_permissions(&path, Permissions::from_mode(mode))?)
    }

    /// Adds a stub for one of our programs, and the files that every task needs to run it. Kernels
    /// and images are not added.
    pub(crate) fn add_program(&self, name: &str, code: &str) -> Result<()> {
        self.add_program_of_profile("guest-tests", name, code)
    }

    pub(crate) fn add_program_of_profile(
        &self,
        profile: &str,
        name: &str,
        code: &str,
    ) -> Result<()> {
        self.write("ci/kernels.lock", "", 0o644)?;
        self.write("ci/xtask/Cargo.toml", "", 0o644)?;
        fs::create_dir_all(self.path("ci/xtask/src"))?;
        self.write(&format!("target/x86_64-unknown-linux-gnu/{profile}/{name}"), code, 0o755)
    }

    pub(crate) fn copy(&self, from: &Path, to: &str, mode: u32) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("Cannot read {}", from.display()))?;
        self.write(to, content, mode)
    }

    /// Returns a command that runs a wrapper script from `folder`. It has no terminal at which sudo
    /// could ask for a password. `host` is the choice of the host.
    pub(crate) fn command_in(&self, folder: &Path, line: &str, host: &str) -> Result<Command> {
        let mut command = Command::new("setsid");
        command.args(line.split(' ')).current_dir(folder).stdin(Stdio::null());
        command.env("PATH", self.user_path()?).env("FORESHORE_HOST", host);
        command.env("FORESHORE_DEB_CACHE", debs());
        Ok(command)
    }

    /// Returns a command that runs a wrapper script on this machine itself.
    pub(crate) fn command(&self, line: &str) -> Result<Command> {
        self.command_in(self.folder(), line, "direct")
    }

    /// Returns a user's PATH with the stubs in front.
    pub(crate) fn user_path(&self) -> Result<String> {
        Ok(format!("{}:{}", self.path("bin").display(), env::var("PATH")?))
    }
}
