//! Files that the VMM may open after a VM with Landlock has been built for the first time.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use foreshore_confinement::landlock::{Access, LandlockError, Rule, restrict};
use foreshore_devices::file_id::{folder_of, link_target};
use foreshore_devices::metrics::{Expose, Exposition, Family};
use thiserror::Error;
use tracing::{info, warn};

use crate::config::{LandlockAccess, LandlockConfig, VmConfig};
use crate::vm::named_twice::uses_of_running_vmm;
use crate::vm::uses::{Kind, Use, uses_of_vm};

/// Paths that each thread that opens files may read: counters of the process, properties of the
/// host, and random numbers.
pub(crate) const READABLE: [&str; 4] = ["/proc", "/sys", "/dev/random", "/dev/urandom"];
/// Devices that a VMM opens: KVM, network interfaces and pseudo terminals.
const DEVICES: [&str; 5] = ["/dev/kvm", "/dev/net/tun", "/dev/vhost-net", "/dev/ptmx", "/dev/pts"];

#[derive(Debug, Error)]
pub(crate) enum FileLimitsError {
    #[error(
        "the kernel has no Landlock, or it is disabled (lsm= of the kernel's command line); use --landlock off"
    )]
    Unsupported,
    #[error(transparent)]
    Kernel(#[from] LandlockError),
    #[error("--landlock-rules: cannot find {path:?}")]
    Missing {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The object needs a rule, but limits that are in force cannot be extended.
    #[error(
        "{name} is outside the files to which Landlock limits this VMM; restart it with \
         --landlock-rules path={},access={access} or with --landlock off", folder.display()
    )]
    Outside { name: String, folder: PathBuf, access: &'static str },
}

/// Condition under which Landlock limits the VMs of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LandlockPolicy {
    /// True if every VM is limited, and not only those whose configuration requests it.
    pub(crate) is_always: bool,
    /// True if a VM must not run without the limits that it requests.
    pub(crate) is_required: bool,
}

/// 1 if Landlock is in force.
#[derive(Debug, Default)]
pub(crate) struct LandlockMetrics(AtomicBool);

impl Expose for LandlockMetrics {
    fn expose(&self, out: &mut Exposition) {
        let help = "1 if Landlock limits the files that the VMM can open.";
        let is_in_force = self.0.load(Ordering::Relaxed);
        out.flags(Family("landlock_enabled", help, None), [(vec![], is_in_force)]);
    }
}

/// Limits that are in force for the thread that builds VMs, and for its later threads.
pub(crate) struct FileLimits {
    policy: LandlockPolicy,
    metrics: Arc<LandlockMetrics>,
    /// `None` while no limit is in force.
    rules: Option<Vec<Rule>>,
}

impl FileLimits {
    pub(crate) fn new(policy: LandlockPolicy, metrics: Arc<LandlockMetrics>) -> Self {
        Self { policy, metrics, rules: None }
    }

    /// From now on, a VM that requests limits does not run without them, because clients create all
    /// later VMs.
    pub(crate) fn require(&mut self) {
        self.policy.is_required = true;
    }

    /// Checks that the limits in force permit the files of `config`. If no limits are in force and
    /// the configuration requests them, puts limits in force until the process ends.
    pub(crate) fn apply(&mut self, config: &VmConfig) -> Result<(), FileLimitsError> {
        if self.rules.is_some() {
            self.check_given(config)?;
            return uses_of_vm(config).iter().try_for_each(|object| self.check(object));
        }
        if !config.landlock_enable && !self.policy.is_always {
            return Ok(());
        }
        let rules = rules_of(config, &uses_of_running_vmm())?;
        let Some(enforced) = restrict(&rules)? else {
            if self.policy.is_required {
                return Err(FileLimitsError::Unsupported);
            }
            warn!("The kernel has no Landlock, so the files that the VMM can open are not limited");
            return Ok(());
        };
        info!(
            abi = enforced.abi,
            is_full = enforced.is_full,
            "Landlock limits the files that the VMM can open"
        );
        self.metrics.0.store(true, Ordering::Relaxed);
        self.rules = Some(rules);
        Ok(())
    }

    /// Checks that the limits in force permit the object.
    pub(in crate::vm) fn check(&self, object: &Use) -> Result<(), FileLimitsError> {
        let Some(needed) = needed_rule(object) else { return Ok(()) };
        self.check_rule(&object.name, &needed)
    }

    /// Checks that the limits in force include the rules of another VM.
    fn check_given(&self, config: &VmConfig) -> Result<(), FileLimitsError> {
        config.landlock_rules.iter().map(given_rule).try_for_each(|rule| {
            let name = format!("--landlock-rules path={}", rule.path.display());
            self.check_rule(&name, &rule)
        })
    }

    fn check_rule(&self, name: &str, needed: &Rule) -> Result<(), FileLimitsError> {
        let Some(rules) = &self.rules else { return Ok(()) };
        // A missing path is reported when it is opened.
        if fs::metadata(&needed.path).is_err() || covers(rules, needed) {
            return Ok(());
        }
        let folder = if needed.path.is_dir() { &*needed.path } else { folder_of(&needed.path) };
        let access = if needed.access == Access::Read { "r" } else { "rw" };
        Err(FileLimitsError::Outside { name: name.to_owned(), folder: folder.to_owned(), access })
    }
}

fn rules_of(config: &VmConfig, vmm: &[Use]) -> Result<Vec<Rule>, FileLimitsError> {
    let rule = |path: &str, access| Rule { path: path.into(), access };
    let mut rules: Vec<_> = READABLE.map(|path| rule(path, Access::Read)).into();
    rules.extend(DEVICES.map(|path| rule(path, Access::ReadWrite)));
    rules.extend(uses_of_vm(config).iter().filter_map(needed_rule));
    // The VMM's own files and sockets are already open. Only the removal of the sockets at exit
    // needs rules.
    let sockets = vmm.iter().filter(|object| object.kind == Kind::Output);
    let folders = sockets.filter(|object| is_socket(&object.path)).map(|object| &object.path);
    rules.extend(
        folders.map(|path| Rule { path: folder_of(path).to_owned(), access: Access::Remove }),
    );
    for given in config.landlock_rules.iter().map(given_rule) {
        let missing = |source| FileLimitsError::Missing { path: given.path.clone(), source };
        fs::metadata(&given.path).map_err(missing)?;
        rules.push(given);
    }
    Ok(rules)
}

fn given_rule(config: &LandlockConfig) -> Rule {
    let access = match config.access {
        LandlockAccess::Read => Access::Read,
        LandlockAccess::Write => Access::Write,
        LandlockAccess::ReadWrite => Access::ReadWrite,
    };
    Rule { path: config.path.clone(), access }
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// Returns true if the object at the path has no place in a file system. The kernel accepts no
/// rules for such pipes and sockets, and does not restrict them (security/landlock/fs.c,
/// `is_nouser_or_private`).
fn is_nameless(path: &Path) -> bool {
    let is_stream = fs::metadata(path)
        .is_ok_and(|metadata| metadata.file_type().is_fifo() || metadata.file_type().is_socket());
    // The link of such an object in /proc leads to no file, for example to pipe:[7].
    is_stream && fs::canonicalize(path).is_err()
}

/// Rule that an object needs. `None` if the object is open, or is not restricted.
fn needed_rule(object: &Use) -> Option<Rule> {
    let path = object.path.clone();
    if is_nameless(&path) {
        return None;
    }
    Some(match object.kind {
        Kind::Stream => return None,
        // A memory zone in a folder is a new file.
        Kind::Read if path.is_dir() => Rule { path, access: Access::ReadWrite },
        Kind::Read | Kind::Boot => Rule { path, access: Access::Read },
        Kind::Written | Kind::Pool => Rule { path, access: Access::ReadWrite },
        Kind::Console | Kind::Rotated | Kind::Output | Kind::Vsock => {
            // The file is created, renamed or removed. A terminal or a pipe is only opened.
            let kind = fs::metadata(&path).map(|metadata| metadata.file_type());
            let is_opened = kind.is_ok_and(|kind| kind.is_char_device() || kind.is_fifo());
            let target = link_target(&path).unwrap_or_else(|| path.clone());
            let path = if is_opened { path } else { folder_of(&target).to_owned() };
            Rule { path, access: Access::ReadWrite }
        }
    })
}

/// Returns true if one of `rules` includes `needed`, whose path exists.
fn covers(rules: &[Rule], needed: &Rule) -> bool {
    let Ok(path) = fs::canonicalize(&needed.path) else { return false };
    rules.iter().any(|rule| {
        rule.access.includes(needed.access)
            && fs::canonicalize(&rule.path).is_ok_and(|folder| path.starts_with(folder))
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::config::{
        DeviceConfig, DiskConfig, MemoryZoneConfig, PmMemoryConfig, PmVolumeConfig, test_config,
    };
    use crate::vm::uses::use_of_device;
    use tempfile::TempDir;

    fn rule(path: &Path, access: Access) -> Rule {
        Rule { path: path.to_owned(), access }
    }

    #[test]
    fn file_is_permitted_by_its_own_rule_or_by_that_of_a_folder_above_it() {
        let folder = TempDir::new().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("a")).unwrap();
        for name in ["a/image", "other"] {
            fs::write(path(name), "").unwrap();
        }
        symlink(path("other"), path("a/link")).unwrap();
        use Access::{Read, ReadWrite, Remove, Write};
        let rules = [rule(&path("a"), ReadWrite), rule(&path("other"), Read)];
        let is_covered = |name: &str, access| covers(&rules, &rule(&path(name), access));
        for access in [Read, Write, ReadWrite, Remove] {
            assert!(is_covered("a/image", access), "{access:?}");
        }
        assert!(is_covered("other", Read) && !is_covered("other", ReadWrite));
        // The kernel follows links before it checks a rule.
        assert!(is_covered("a/link", Read) && !is_covered("a/link", ReadWrite));
        assert!(is_covered("a/../other", Read) && !is_covered("a/../other", Remove));
        assert!(!covers(&[rule(&path("a"), Write)], &rule(&path("a/image"), ReadWrite)));
    }

    #[test]
    fn rules_permit_the_files_of_the_configuration() {
        let folder = TempDir::new().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["disk", "cdrom"] {
            fs::write(path(name), "").unwrap();
        }
        let mut config = test_config();
        let disk =
            |text: &str| DiskConfig::parse(&text.replace("DIR", &path("").to_string_lossy()));
        config.disks =
            vec![disk("path=DIRdisk").unwrap(), disk("path=DIRcdrom,readonly=on").unwrap()];
        let rules = rules_of(&config, &[]).unwrap();
        assert!(rules.contains(&rule(&path("disk"), Access::ReadWrite)));
        assert!(rules.contains(&rule(&path("cdrom"), Access::Read)));
        assert!(!rules.iter().any(|rule| rule.path == Path::new("/") || rule.path == path("")));
        let zone = format!("id=a,size=2M,file={}", folder.path().display());
        config.memory.zones = vec![MemoryZoneConfig::parse(&zone).unwrap()];
        assert!(rules_of(&config, &[]).unwrap().contains(&rule(folder.path(), Access::ReadWrite)));
        config.memory.zones.clear();
        let spill = format!("pool=/p,size=2M,spill=2M,spill_file={}", folder.path().display());
        config.pm_memory = vec![PmMemoryConfig::parse(&spill).unwrap()];
        assert!(rules_of(&config, &[]).unwrap().contains(&rule(folder.path(), Access::ReadWrite)));
        config.landlock_rules = vec![LandlockConfig::parse("path=/nonexistent,access=rw").unwrap()];
        let error = rules_of(&config, &[]).unwrap_err().to_string();
        assert_eq!(error, "--landlock-rules: cannot find \"/nonexistent\"");
    }

    #[test]
    fn object_outside_the_limits_is_refused_with_the_missing_rule() {
        let folder = TempDir::new().unwrap();
        let policy = LandlockPolicy { is_always: false, is_required: false };
        let mut limits = FileLimits::new(policy, Arc::default());
        let image = folder.path().join("image");
        let outside = Use::new("--disk path", &image, Kind::Written);
        assert!(limits.check(&outside).is_ok(), "no limits are in force");
        limits.rules = Some(vec![rule(Path::new("/sys"), Access::ReadWrite)]);
        assert!(limits.check(&outside).is_ok(), "the file is missing");
        fs::write(image, "").unwrap();
        let error = limits.check(&outside).unwrap_err().to_string();
        let missing = format!("--landlock-rules path={},access=rw", folder.path().display());
        assert!(error.starts_with("--disk path=") && error.contains(&missing), "{error}");
        // The pool of an added volume needs a rule as well.
        let volume = format!("pool={}/image,name=a", folder.path().display());
        let volume = DeviceConfig::Volume(PmVolumeConfig::parse(&volume).unwrap());
        let pool = use_of_device(&volume).unwrap();
        let error = limits.check(&pool).unwrap_err().to_string();
        assert!(error.starts_with("--pm-volume pool=") && error.contains(&missing), "{error}");
        limits.rules = Some(vec![rule(folder.path(), Access::ReadWrite)]);
        assert!(limits.check(&outside).is_ok() && limits.check(&pool).is_ok());
    }

    #[test]
    fn pipes_and_open_files_of_the_vmm_need_no_rules() {
        let folder = TempDir::new().unwrap();
        let (_reader, writer) = std::io::pipe().unwrap();
        let pipe = format!("/proc/self/fd/{}", writer.as_raw_fd());
        assert!(needed_rule(&Use::new("--serial file", Path::new(&pipe), Kind::Console)).is_none());
        let socket = folder.path().join("api");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let vmm = [
            Use::new("--api-socket path", &socket, Kind::Output),
            Use::new("--log-file", &folder.path().join("log"), Kind::Output),
            Use::new("--event-monitor fd", Path::new(&pipe), Kind::Output),
        ];
        let given = rules_of(&test_config(), &[]).unwrap();
        let rules = rules_of(&test_config(), &vmm).unwrap();
        let added: Vec<_> = rules.iter().filter(|rule| !given.contains(rule)).collect();
        let removal = Rule { path: folder.path().to_owned(), access: Access::Remove };
        assert_eq!(added, [&removal]);
        // The kernel accepts the rules of a VM whose console is a pipe.
        std::thread::spawn(move || restrict(&rules).unwrap()).join().unwrap();
    }
}
