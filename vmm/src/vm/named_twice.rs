//! Finds files, devices and sockets that are named more than once by the VM's configuration and the
//! VMM's flags.
//!
//! Locks also refuse a second use of a disk or pool. However, their error would name only the
//! process that uses the file, which is the VMM itself. Output files have shared locks, so one flag
//! could truncate the file of another.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::OnceLock;

use foreshore_devices::file_id::{FileId, folder_of, link_target};
use thiserror::Error;

use crate::config::{DeviceConfig, Launch, VmConfig};
use crate::vm::request::VmError;
use crate::vm::uses::{Kind, Use, uses_of_vm, uses_of_vmm};

/// Two flags name the same file or device, and at least one of them writes to it.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{first} and {second} name the same file or device{rule}")]
pub struct NamedTwice {
    first: String,
    second: String,
    rule: &'static str,
}

/// Second part of the error for disks, pmem files and pools.
const STORAGE_RULE: &str = ", and can have it twice only if both only read it (readonly=on of a disk, discard_writes=on of a pmem \
                            file)";
/// Second part of the error for files that the VMM writes.
const OUTPUT_RULE: &str =
    "; each output needs a file of its own, except that --serial and --console can share one";

impl Kind {
    fn goes_with(self, other: Self) -> bool {
        use Kind::{Boot, Console, Output, Pool, Read, Rotated, Stream, Vsock};
        match (self, other) {
            (Read, Read) | (Pool, Pool) | (Console, Console) => true,
            (Rotated, Rotated) | (Stream, Stream) | (Vsock, Vsock) => true,
            (Boot, other) | (other, Boot) => {
                !matches!(other, Console | Rotated | Output | Stream | Vsock)
            }
            _ => false,
        }
    }

    fn is_storage(self) -> bool {
        matches!(self, Self::Written | Self::Read | Self::Pool)
    }
}

/// Identity of the object at a path, or of a file that a flag will create.
#[derive(PartialEq, Eq)]
enum Object {
    Existing(FileId),
    Missing { folder: FileId, name: OsString },
}

impl Object {
    /// Returns the object that `path` refers to. `None` if the parent folder does not exist.
    fn at(path: &Path) -> Option<Self> {
        if let Some(id) = FileId::of(path) {
            return Some(Self::Existing(id));
        }
        // If a link refers to a missing file, opening the link creates that file.
        let path = link_target(path)?;
        let name = path.file_name()?.to_owned();
        Some(Self::Missing { folder: FileId::of(folder_of(&path))?, name })
    }
}

impl Use {
    /// Returns the object if it can be used only once. `None` for a directory, because each use
    /// creates its own file in it. Also `None` for pipes and terminals, which accept output from
    /// several uses.
    fn object(&self) -> Option<Object> {
        if let Ok(metadata) = fs::metadata(&self.path) {
            let kind = metadata.file_type();
            let is_stream = kind.is_fifo() || kind.is_char_device();
            if kind.is_dir() || is_stream && !self.kind.is_storage() {
                return None;
            }
        }
        Object::at(&self.path)
    }
}

/// Uses by the VMM itself. They last until its process exits.
static USES_OF_VMM: OnceLock<Vec<Use>> = OnceLock::new();

/// Checks that no object is named by two flags of a command line. Must be called before the first
/// file is opened, because it stores the files and sockets of the VMM for later checks.
pub fn check_launch(launch: &Launch) -> Result<(), NamedTwice> {
    let uses = USES_OF_VMM.get_or_init(|| uses_of_vmm(launch));
    let of_vm = launch.config.iter().flat_map(uses_of_vm);
    check_uses(uses.iter().cloned().chain(of_vm))
}

/// Objects that the VMM itself uses.
pub(super) fn uses_of_running_vmm() -> Vec<Use> {
    USES_OF_VMM.get().cloned().unwrap_or_default()
}

/// Checks that `config` names no object twice, and none that the VMM itself uses.
pub(crate) fn check(config: &VmConfig) -> Result<(), NamedTwice> {
    check_uses(USES_OF_VMM.get().into_iter().flatten().cloned().chain(uses_of_vm(config)))
}

fn check_uses(uses: impl Iterator<Item = Use>) -> Result<(), NamedTwice> {
    let mut uses: Vec<_> = uses.collect();
    let ports: Vec<_> = uses.iter().flat_map(|vsock| ports_among(vsock, &uses)).collect();
    uses.extend(ports);
    let mut seen: Vec<(Object, Use)> = Vec::new();
    for this in uses {
        let Some(object) = this.object() else { continue };
        // No flag creates a missing disk or pool. It is reported when it is opened.
        let is_missing = matches!(object, Object::Missing { .. });
        for (other, first) in &seen {
            let is_storage = first.kind.is_storage() && this.kind.is_storage();
            if *other == object && !first.kind.goes_with(this.kind) && !(is_storage && is_missing) {
                let rule = if is_storage { STORAGE_RULE } else { OUTPUT_RULE };
                return Err(NamedTwice { first: first.name.clone(), second: this.name, rule });
            }
        }
        seen.push((object, this));
    }
    Ok(())
}

/// Ports of `vsock` whose socket has the same name as another use. If a program in the guest
/// connects to port N of the host, it reaches the socket PATH_N (virtio/vsock/host.rs). PATH_N must
/// not be a socket of the VMM.
fn ports_among(vsock: &Use, uses: &[Use]) -> Vec<Use> {
    let of_port = |name: &OsStr| -> Option<Use> {
        let prefix = vsock.path.file_name().filter(|_| vsock.kind == Kind::Vsock)?;
        let digits = name.as_bytes().strip_prefix(prefix.as_bytes())?.strip_prefix(b"_")?;
        let port: u32 = str::from_utf8(digits).ok()?.parse().ok()?;
        let mut path = vsock.path.clone().into_os_string();
        path.push(format!("_{port}"));
        let name = format!("{} (port {port} of the host)", vsock.name);
        Some(Use { name, path: path.into(), kind: Kind::Vsock })
    };
    let outputs = || uses.iter().filter(|other| other.kind == Kind::Output);
    let named = outputs().filter_map(|other| of_port(other.path.file_name()?));
    let linked =
        outputs().filter_map(|other| of_port(fs::canonicalize(&other.path).ok()?.file_name()?));
    named.chain(linked).collect()
}

/// Adds a device to `config`, unless its file is already in use. Returns the device's ID.
pub(crate) fn add_device(
    config: &mut VmConfig,
    device: DeviceConfig,
    in_use: &[String],
) -> Result<String, VmError> {
    let id = config.add_device(device, in_use)?;
    check(config).map_err(|error| VmError::BadRequest(error.to_string()))?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;
    use crate::config::{
        Command, ConsoleConfig, DiskConfig, MemoryZoneConfig, PmMemoryConfig, PmVolumeConfig,
        PmemConfig, PressureConfig, VsockConfig, parse_command_line, test_config,
    };

    type Add = fn(&mut VmConfig, &Path);

    const DISK: Add = |config, path| {
        config.disks.push(DiskConfig::parse(&format!("path={}", path.display())).unwrap());
    };
    const READONLY_DISK: Add = |config, path| {
        config
            .disks
            .push(DiskConfig::parse(&format!("path={},readonly=on", path.display())).unwrap());
    };
    const PMEM: Add = |config, path| {
        config.pmem.push(PmemConfig::parse(&format!("file={},size=2M", path.display())).unwrap());
    };
    const PRIVATE_PMEM: Add = |config, path| {
        let text = format!("file={},size=2M,discard_writes=on", path.display());
        config.pmem.push(PmemConfig::parse(&text).unwrap());
    };
    const ZONE: Add = |config, path| {
        let text = format!("id=z,size=2M,file={},shared=on", path.display());
        config.memory.zones.push(MemoryZoneConfig::parse(&text).unwrap());
    };
    const PM_MEMORY: Add = |config, path| {
        config
            .pm_memory
            .push(PmMemoryConfig::parse(&format!("pool={},size=2M", path.display())).unwrap());
    };
    const PM_VOLUME: Add = |config, path| {
        config
            .pm_volumes
            .push(PmVolumeConfig::parse(&format!("pool={},name=a", path.display())).unwrap());
    };

    fn checked(uses: &[(Add, &Path)]) -> Result<(), NamedTwice> {
        let mut config = test_config();
        uses.iter().for_each(|(add, path)| add(&mut config, path));
        check(&config)
    }

    /// Creates a file. Returns its folder, its path, and other paths that refer to it.
    fn one_file() -> (tempfile::TempDir, PathBuf, [PathBuf; 3]) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        File::create(&file).unwrap();
        let [soft, hard] = ["soft", "hard"].map(|name| folder.path().join(name));
        symlink("file", &soft).unwrap();
        fs::hard_link(&file, &hard).unwrap();
        let dotted = PathBuf::from(format!("{}/./file", folder.path().display()));
        (folder, file, [soft, hard, dotted])
    }

    #[test]
    fn second_writer_of_a_file_is_refused_under_any_path() {
        let (_folder, file, others) = one_file();
        for other in others.iter().chain([&file]) {
            for first in [DISK, PMEM, ZONE, PM_MEMORY, PM_VOLUME] {
                for second in [DISK, PMEM, READONLY_DISK, PRIVATE_PMEM, ZONE] {
                    let error = checked(&[(first, &file), (second, other)]).unwrap_err();
                    let text = error.to_string();
                    for path in [&file, other] {
                        assert!(text.contains(&path.display().to_string()), "{text}");
                    }
                    assert!(text.contains("--") && text.contains("readonly=on"), "{text}");
                }
            }
        }
    }

    const SERIAL: Add = |config, path| {
        config.serial = ConsoleConfig::parse_serial(&format!("file={}", path.display())).unwrap();
    };
    const CONSOLE: Add = |config, path| {
        config.console = ConsoleConfig::parse_console(&format!("file={}", path.display())).unwrap();
    };
    const SERIAL_SOCKET: Add = |config, path| {
        config.serial = ConsoleConfig::parse_serial(&format!("socket={}", path.display())).unwrap();
    };
    const CONSOLE_SOCKET: Add = |config, path| {
        config.console =
            ConsoleConfig::parse_console(&format!("socket={}", path.display())).unwrap();
    };
    const VSOCK: Add = |config, path| {
        config.vsock =
            Some(VsockConfig::parse(&format!("cid=3,socket={}", path.display())).unwrap());
    };
    const RECORD: Add = |config, path| {
        config.pressure =
            Some(PressureConfig::parse(&format!("record={}", path.display())).unwrap());
    };
    const KERNEL: Add = |config, path| config.payload.kernel = Some(path.to_owned());
    const INITRAMFS: Add = |config, path| config.payload.initramfs = Some(path.to_owned());
    const RNG: Add = |config, path| config.rng.src = path.to_owned();

    fn launch(flags: &[&str]) -> Launch {
        let flags = ["foreshore", "--kernel", "/k"].iter().chain(flags).map(Into::into);
        let Ok(Command::Launch(launch)) = parse_command_line(flags) else { panic!("not a launch") };
        *launch
    }

    #[test]
    fn output_to_a_used_file_is_refused_under_any_path() {
        let (folder, file, [soft, hard, dotted]) = one_file();
        let [missing, dangling] = ["missing", "dangling"].map(|name| folder.path().join(name));
        symlink("missing", &dangling).unwrap();
        let dotted_missing = PathBuf::from(format!("{}/./missing", folder.path().display()));
        let pairs = [&soft, &hard, &dotted, &file].map(|other| (&file, other));
        let pairs = pairs
            .into_iter()
            .chain([&dangling, &dotted_missing, &missing].map(|other| (&missing, other)));
        let outputs = [SERIAL, CONSOLE_SOCKET, VSOCK, RECORD];
        for (one, other) in pairs {
            for output in outputs {
                for second in
                    [DISK, READONLY_DISK, PRIVATE_PMEM, ZONE, PM_VOLUME, KERNEL, INITRAMFS, RNG]
                {
                    let text = checked(&[(output, one), (second, other)]).unwrap_err().to_string();
                    assert!(text.contains("--serial and --console can share"), "{text}");
                }
            }
            for (nth, first) in outputs.into_iter().enumerate() {
                for second in &outputs[nth + 1..] {
                    let text = checked(&[(first, one), (*second, other)]).unwrap_err().to_string();
                    assert_eq!(
                        text.matches(" --").count() + usize::from(text.starts_with("--")),
                        4,
                        "{text}"
                    );
                }
            }
            checked(&[(SERIAL_SOCKET, one), (CONSOLE, other)]).unwrap_err();
            checked(&[(SERIAL_SOCKET, one), (CONSOLE_SOCKET, other)]).unwrap_err();
            checked(&[(SERIAL, one), (CONSOLE, other)]).unwrap();
            checked(&[(KERNEL, one), (DISK, other), (INITRAMFS, other)]).unwrap();
        }
    }

    #[test]
    fn use_of_name_of_rotated_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [file, older] = ["log", "log.1"].map(|name| folder.path().join(name));
        let text = checked(&[(SERIAL, &file), (CONSOLE, &older)]).unwrap_err().to_string();
        assert!(text.contains("--serial") && text.contains("max_size"), "{text}");
        checked(&[(SERIAL, &file), (RECORD, &older)]).unwrap_err();
        // The name of the rotated file is derived from the link's target, which does not exist yet.
        let link = folder.path().join("link");
        symlink("log", &link).unwrap();
        checked(&[(SERIAL, &link), (RECORD, &older)]).unwrap_err();
        checked(&[(SERIAL, &link), (RECORD, &folder.path().join("link.1"))]).unwrap();
        let mut config = test_config();
        let text = format!("file={},max_size=0", file.display());
        config.serial = ConsoleConfig::parse_serial(&text).unwrap();
        CONSOLE(&mut config, &older);
        check(&config).unwrap();
    }

    /// Otherwise, a guest could send requests to the VMM's API.
    #[test]
    fn vsock_port_with_socket_of_the_vmm_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let other_folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let text = checked(&[(VSOCK, &path("vm")), (SERIAL_SOCKET, &path("vm_5000"))])
            .unwrap_err()
            .to_string();
        assert!(text.contains("--serial") && text.contains("vm (port 5000 of the host)"), "{text}");
        symlink(path("vm_1"), path("link")).unwrap();
        File::create(path("vm_1")).unwrap();
        for name in ["./vm_5000", "link", "vm_4294967295"] {
            checked(&[(VSOCK, &path("vm")), (CONSOLE_SOCKET, &path(name))]).unwrap_err();
        }
        let api = path("vm_5000").display().to_string();
        let mut config = test_config();
        VSOCK(&mut config, &path("vm"));
        let uses = uses_of_vmm(&launch(&["--api-socket", &api])).into_iter();
        check_uses(uses.chain(uses_of_vm(&config))).unwrap_err();
        let elsewhere = other_folder.path().join("vm_5000");
        fs::write(&elsewhere, "").unwrap();
        for path in
            [path("vm_x"), path("vm_4294967296"), path("vm_05000"), path("vm5000"), elsewhere]
        {
            checked(&[(VSOCK, &folder.path().join("vm")), (SERIAL_SOCKET, &path)]).unwrap();
        }
        checked(&[(VSOCK, &path("vm")), (DISK, &path("vm_5000"))]).unwrap();
    }

    #[test]
    fn several_outputs_share_pipe_or_terminal() {
        let null = Path::new("/dev/null");
        checked(&[(SERIAL, null), (RECORD, null), (RNG, null)]).unwrap();
        checked(&[(SERIAL, null), (DISK, null)]).unwrap();
        checked(&[(DISK, null), (DISK, null)]).unwrap_err();
    }

    #[test]
    fn file_in_two_flags_of_the_vmm_is_refused() {
        let (folder, file, others) = one_file();
        let path = |path: &Path| path.display().to_string();
        let missing = folder.path().join("missing");
        for (one, other) in others.iter().map(|other| (&file, other)).chain([(&missing, &missing)])
        {
            let [log, events] =
                [["--log-file", &path(one)], ["--event-monitor", &format!("path={}", path(other))]];
            let [api, metrics] =
                [["--api-socket", &path(other)], ["--metrics", &format!("unix:{}", path(one))]];
            for flags in [[log, events], [log, api], [metrics, events], [metrics, api]] {
                let error =
                    check_uses(uses_of_vmm(&launch(flags.as_flattened())).into_iter()).unwrap_err();
                let text = error.to_string();
                assert!(flags.iter().all(|[flag, _]| text.contains(flag)), "{text}");
            }
            let of_vmm = uses_of_vmm(&launch(&log));
            for add in [SERIAL, DISK, READONLY_DISK, KERNEL] {
                let mut config = test_config();
                add(&mut config, other);
                let uses = of_vmm.iter().cloned().chain(uses_of_vm(&config));
                assert!(check_uses(uses).unwrap_err().to_string().starts_with("--log-file"));
            }
        }
        let log = File::options().append(true).open(&file).unwrap();
        let fd = format!("fd={}", log.as_raw_fd());
        let flags = ["--event-monitor", &fd, "--log-file", &path(&file)];
        check_uses(uses_of_vmm(&launch(&flags)).into_iter()).unwrap_err();
    }

    #[test]
    fn readers_share_a_file_and_zones_and_volumes_share_a_pool() {
        let (_folder, file, [soft, hard, _]) = one_file();
        checked(&[(READONLY_DISK, &file), (READONLY_DISK, &soft), (PRIVATE_PMEM, &hard)]).unwrap();
        checked(&[(PM_MEMORY, &file), (PM_VOLUME, &soft), (PM_MEMORY, &hard)]).unwrap();
    }

    #[test]
    fn distinct_files_missing_files_and_directories_do_not_conflict() {
        let (folder, file, _) = one_file();
        let [copy, missing] = ["copy", "missing"].map(|name| folder.path().join(name));
        fs::copy(&file, &copy).unwrap();
        checked(&[(DISK, &file), (DISK, &copy), (DISK, &missing), (PMEM, &missing)]).unwrap();
        checked(&[(PMEM, folder.path()), (PMEM, folder.path()), (ZONE, folder.path())]).unwrap();
    }

    #[test]
    fn device_with_used_file_is_not_added() {
        let (_folder, file, [soft, ..]) = one_file();
        let mut config = test_config();
        DISK(&mut config, &file);
        let disk = DiskConfig::parse(&format!("path={}", soft.display())).unwrap();
        let error = add_device(&mut config, DeviceConfig::Disk(disk), &[]).unwrap_err();
        let VmError::BadRequest(text) = error else { panic!("{error}") };
        for path in [file, soft] {
            assert!(text.contains(&path.display().to_string()), "{text}");
        }
    }
}
