//! `install_packages` of ci/lib.sh says why it cannot install packages.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use tempfile::TempDir;

/// Errors of `install_packages` in a job of a user who is not root, on a machine that has
/// `programs` of these names and texts.
fn errors(programs: &[(&str, &str)]) -> Result<String> {
    let folder = TempDir::new()?;
    for (name, text) in [("id", "#!/bin/sh\necho 1000\n")].iter().chain(programs) {
        let path = folder.path().join(name);
        fs::write(&path, text)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lib.sh");
    let output = Command::new("/bin/bash")
        .args(["-euo", "pipefail", "-c", "SAY_AS=test; source \"$0\"; install_packages package"])
        .arg(lib)
        .env("PATH", folder.path())
        .env("FORESHORE_IS_JOB", "yes")
        .output()?;
    ensure!(output.status.code() == Some(1), "{}", output.status);
    Ok(String::from_utf8(output.stderr)?)
}

#[test]
fn missing_sudo_is_reported_as_a_need_for_root() -> Result<()> {
    let errors = errors(&[])?;
    ensure!(errors.contains("needs root for: apt-get install (neither root nor sudo here)"), "{errors}");
    Ok(())
}

#[test]
fn expired_sudo_is_reported_with_the_remedy() -> Result<()> {
    // As sudo does with -n once it has forgotten the password.
    let expired = "#!/bin/sh\n[ \"$1\" = -n ] || exit 0\necho 'sudo: a password is required' >&2\nexit 1\n";
    let errors = errors(&[("sudo", expired)])?;
    ensure!(errors.contains("sudo asks for a password") && errors.contains("`sudo -v`"), "{errors}");
    Ok(())
}
