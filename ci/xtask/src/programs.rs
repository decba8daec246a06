//! Commands that run other programs in an environment without settings of the user or of cargo.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::checkout::{CALLER_FOLDER, Checkout, PACKAGE_FOLDER};
use crate::root::IS_JOB;

/// Folders with the distribution's programs. Only these programs build images.
pub(crate) const SYSTEM_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// Missing file, with which mke2fs uses its own defaults instead of those in /etc/mke2fs.conf.
const MKE2FS_CONFIG: &str = "/nonexistent/mke2fs.conf";
/// Variables of the user or of cargo that could change images, other cargo runs or output of
/// programs.
const REMOVED: [&str; 8] = [
    "CDPATH",
    // Names a file that bash runs before a script, for example before ldd.
    "BASH_ENV",
    "MODPROBE_OPTIONS",
    "CARGO",
    PACKAGE_FOLDER,
    "CARGO_MANIFEST_PATH",
    // `cargo run` adds the toolchain's libraries to this variable.
    "LD_LIBRARY_PATH",
    CALLER_FOLDER,
];
/// Prefixes of more such variables. Functions that bash exports would replace programs in its
/// scripts.
const REMOVED_PREFIXES: [&str; 2] = ["CARGO_PKG_", "BASH_FUNC_"];

/// Returns the user's PATH and the folders of mke2fs and modprobe. An ordinary user's PATH lacks
/// those folders.
pub(crate) fn user_path() -> OsString {
    let mut path = env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

/// Returns a command that runs a program of the distribution without input.
pub(crate) fn system(name: &str) -> Command {
    with_path(name, SYSTEM_PATH)
}

/// Returns a command that runs a program found in the user's PATH, without input.
pub(crate) fn user(name: impl AsRef<std::ffi::OsStr>) -> Command {
    with_path(name, user_path())
}

/// Returns a command that looks up its program in `path`. The program also receives `path` as its
/// PATH.
pub(crate) fn with_path(
    name: impl AsRef<std::ffi::OsStr>,
    path: impl AsRef<std::ffi::OsStr>,
) -> Command {
    let mut command = Command::new(name);
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if is_removed(&name) {
            command.env_remove(&*name);
        }
    }
    // Tasks parse the output of programs, so it must not be in the user's language.
    command.env("LC_ALL", "C.UTF-8").env("MKE2FS_CONFIG", MKE2FS_CONFIG).env("PATH", path);
    command.stdin(Stdio::null());
    command
}

fn is_removed(name: &str) -> bool {
    REMOVED.contains(&name) || REMOVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Same as `with_path`, but the program receives a signal when the thread that started it ends, for
/// example because this process is killed. `signal` is a name without SIG.
pub(crate) fn ending_with_this_one(
    signal: &str,
    program: &Path,
    path: impl AsRef<std::ffi::OsStr>,
) -> Result<Command> {
    let mut command = with_path(find_system("setpriv")?, path);
    command.arg("--pdeathsig").arg(signal).arg("--").arg(program);
    Ok(command)
}

/// Returns a command that runs another task of this program. If this process is killed, the task
/// ends as well.
pub(crate) fn task(checkout: &Checkout, name: &str) -> Result<Command> {
    // This path still names the same program if cargo has built another one since.
    let program = format!("/proc/{}/exe", std::process::id());
    let mut command = ending_with_this_one("TERM", Path::new(&program), user_path())?;
    command.arg(name).env(PACKAGE_FOLDER, checkout.path("ci/xtask")).env(IS_JOB, "yes");
    Ok(command)
}

/// Finds the program `name` in the folders of `path`.
pub(crate) fn find(name: &str, path: impl AsRef<std::ffi::OsStr>) -> Option<PathBuf> {
    env::split_paths(&path).map(|folder| folder.join(name)).find(|program| is_program(program))
}

/// Finds the distribution's program `name`.
pub(crate) fn find_system(name: &str) -> Result<PathBuf> {
    find(name, SYSTEM_PATH)
        .with_context(|| format!("{name} is not installed (ci/setup installs it)"))
}

pub(crate) fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_bash_and_cargo_reach_no_program() {
        let removed = ["BASH_ENV", "BASH_FUNC_cp%%", "CDPATH", "CARGO_PKG_NAME"];
        assert!(removed.into_iter().all(is_removed));
        assert!(
            !["PATH", "HOME", "BASH", "CARGO_HOME", "CARGO_TARGET_DIR"].into_iter().any(is_removed)
        );
    }
}
