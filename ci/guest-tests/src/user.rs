//! User as which tests run: root, or an ordinary user in the group of `/dev/kvm`.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::runner::{skip, tests_dir, this_tests_dir};
use crate::table::is_test;

/// Number of the ordinary user, and of its primary group. The host has no names for them.
pub const ORDINARY: u32 = 59_999;

const KVM: &str = "/dev/kvm";

/// Skips the test if it does not run as root. `purpose` is a verb with its object.
pub fn need_root(purpose: &str) -> Result<()> {
    if geteuid().is_root() { Ok(()) } else { skip(format!("needs root to {purpose}")) }
}

/// Returns the path of a private file in /proc/PID. Skips the test if its user cannot open the
/// file. Files of a process that is not dumpable, such as a VMM, belong to root (proc(5)).
pub fn need_proc(pid: u32, name: &str) -> Result<PathBuf> {
    let path = PathBuf::from(format!("/proc/{pid}/{name}"));
    let metadata = fs::metadata(&path).with_context(|| format!("No {}", path.display()))?;
    if metadata.uid() != geteuid().as_raw() {
        need_root(&format!("open /proc/PID/{name} of a VMM"))?;
    }
    Ok(path)
}

/// Changes the user of this process, which must have one thread, for good. The folders and files
/// of tests become the user's. Without `has_kvm`, the user is not in the group of `/dev/kvm`.
pub fn become_ordinary(has_kvm: bool) -> Result<()> {
    need_root("become an ordinary user")?;
    let out = std::env::var_os("OUT").map(PathBuf::from);
    let own = is_test().then(this_tests_dir);
    for folder in [Some(tests_dir()), own, out].iter().flatten() {
        fs::create_dir_all(folder)
            .and_then(|()| chown(folder, Some(ORDINARY), Some(ORDINARY)))
            .with_context(|| format!("Cannot give {} to a user", folder.display()))?;
    }
    let groups = if has_kvm { vec![kvm_group()?] } else { Vec::new() };
    let (uid, gid) = (Uid::from_raw(ORDINARY), Gid::from_raw(ORDINARY));
    set_thread_groups(&groups)
        .and_then(|()| set_thread_res_gid(gid, gid, gid))
        .and_then(|()| set_thread_res_uid(uid, uid, uid))
        .context("Cannot become an ordinary user")
}

/// Returns the group of `/dev/kvm`, which must give access to its members.
fn kvm_group() -> Result<Gid> {
    let metadata = fs::metadata(KVM).with_context(|| format!("No {KVM}"))?;
    let (gid, mode) = (metadata.gid(), metadata.mode() & 0o777);
    ensure!(
        gid != 0 && mode & 0o060 == 0o060,
        "{KVM} has group {gid} and mode {mode:o}; run `chgrp kvm {KVM} && chmod 660 {KVM}`"
    );
    Ok(Gid::from_raw(gid))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn step_of_root_skips_the_test_of_another_user() {
        if !geteuid().is_root() {
            return eprintln!("skipped: only root can become another user");
        }
        need_root("mount").unwrap();
        assert_eq!(need_proc(1, "smaps").unwrap(), PathBuf::from("/proc/1/smaps"));
        // In Linux, each thread has its own user ID, so only this thread changes its user.
        let errors = thread::spawn(|| {
            let uid = Uid::from_raw(ORDINARY);
            set_thread_res_uid(uid, uid, uid).unwrap();
            // Process 1 belongs to root.
            [need_root("mount").unwrap_err(), need_proc(1, "smaps").unwrap_err()]
        });
        let errors = errors.join().unwrap().map(|error| error.to_string());
        assert_eq!(errors, ["needs root to mount", "needs root to open /proc/PID/smaps of a VMM"]);
    }
}
