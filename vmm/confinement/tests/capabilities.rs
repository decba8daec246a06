//! Capabilities of each kind of thread. The only test of this process, because a thread cannot get
//! capabilities back.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;

use foreshore_confinement::capabilities;
use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capability_is_in_bounding_set};

/// Number of a user who owns nothing else.
const NOBODY: u32 = 65_534;

/// Returns the capabilities of a new thread of this kind. Also returns true if it can open `path`.
fn attempt(kind: ThreadKind, path: PathBuf) -> (CapabilitySets, bool) {
    let attempt = move || (rustix::thread::capabilities(None).unwrap(), File::open(path).is_ok());
    spawn_confined(kind, "attempt", attempt).unwrap().join().unwrap()
}

#[test]
fn thread_keeps_only_the_capabilities_of_its_kind() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root has capabilities");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("private");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    // Without limits, every thread of root has capabilities.
    let (held, opens) = attempt(ThreadKind::Vcpu, path.clone());
    assert!(held.effective.contains(CapabilitySet::DAC_OVERRIDE) && opens);
    // The limit permits no priority, so the capability is needed.
    let none = Rlimit { current: Some(0), ..getrlimit(Resource::Nice) };
    setrlimit(Resource::Nice, none).unwrap();
    capabilities::start(-10).unwrap();
    assert!(!capability_is_in_bounding_set(CapabilitySet::DAC_OVERRIDE).unwrap());
    let files = CapabilitySet::DAC_OVERRIDE;
    let owners = CapabilitySet::CHOWN | CapabilitySet::FOWNER;
    let nice = CapabilitySet::SYS_NICE;
    for kind in ThreadKind::ALL {
        let expected = match kind {
            ThreadKind::SetUp => {
                files | owners | nice | CapabilitySet::NET_ADMIN | CapabilitySet::IPC_LOCK
            }
            ThreadKind::ConsoleFile => files | owners,
            ThreadKind::Vsock => files,
            ThreadKind::Governor => nice,
            _ => CapabilitySet::empty(),
        };
        let (held, opens) = attempt(kind, path.clone());
        assert_eq!((held.effective, held.permitted), (expected, expected), "{kind:?}");
        assert!(held.inheritable.is_empty(), "{kind:?}");
        assert_eq!(opens, expected.contains(files), "{kind:?}");
    }
}
