//! Tests the modes of files and sockets that the VMM creates with a umask that would permit access
//! by all users. KVM is not needed.

mod support;
#[path = "../../pmem-volume/pmvol/tests/shell/umask.rs"]
mod umask;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use foreshore::config::{ConsoleConfig, PmemConfig};
use foreshore::governor::record;
use foreshore_devices::host_console::{ConsoleFiles, FileStart, HostConsole, Lines, Port};
use foreshore_devices::unix_socket::{self, SocketAccess};
use foreshore_devices::volume::file::PmemFile;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::{FORESHORE, FORESHORE_REMOTE, Process, foreshore, wait_for_answer};
use tempfile::TempDir;

fn start(umask: libc::mode_t, folder: &Path) -> Process {
    start_with(umask, folder, ["", ""])
}

/// Starts a VMM without a VM. `keys` are appended to the values of `--api-socket` and `--metrics`.
fn start_with(umask: libc::mode_t, folder: &Path, [api_keys, metrics_keys]: [&str; 2]) -> Process {
    let path = |name| folder.join(name).display().to_string();
    let mut command = foreshore();
    command.args(["--api-socket", &format!("path={}{api_keys}", path("api"))]);
    command.args(["--log-file", &path("log"), "-v"]);
    command.args(["--event-monitor", &format!("path={}", path("events"))]);
    command.args(["--metrics", &format!("unix:{}{metrics_keys}", path("metrics"))]);
    let vmm = Process::spawn(umask::set(&mut command, umask));
    wait_for_answer(&folder.join("api"));
    vmm
}

/// Names and modes of the files in `folder`.
fn modes(folder: &Path) -> Vec<(String, u32)> {
    let of = |entry: fs::DirEntry| {
        let mode = fs::symlink_metadata(entry.path()).unwrap().permissions().mode();
        (entry.file_name().into_string().unwrap(), mode & 0o777)
    };
    let mut modes: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| of(entry.unwrap())).collect();
    modes.sort();
    modes
}

#[test]
fn files_and_sockets_of_the_vmm_are_private_at_every_umask() {
    for umask in [0o000, 0o022, 0o002] {
        let folder = TempDir::new().unwrap();
        let _vmm = start(umask, folder.path());
        let modes = modes(folder.path());
        let names: Vec<_> = modes.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["api", "api.lock", "events", "log", "metrics", "metrics.lock"]);
        assert!(modes.iter().all(|(_, mode)| *mode == 0o600), "umask {umask:03o}: {modes:?}");
    }
}

#[test]
fn programs_deny_others_access_before_anything_else() {
    for program in [FORESHORE, FORESHORE_REMOTE] {
        umask::check(program);
    }
}

#[test]
fn vmm_disables_its_core_dumps_and_keeps_the_hard_limit() {
    let folder = TempDir::new().unwrap();
    // The VMM inherits the limit from this process.
    let hard = getrlimit(Resource::Core).maximum;
    setrlimit(Resource::Core, Rlimit { current: hard, maximum: hard }).unwrap();
    let vmm = start(0o022, folder.path());
    let limit = |pid: u32| {
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let (own, of_vmm) = (limit(std::process::id()), limit(vmm.id()));
    assert_eq!((of_vmm[0].as_str(), &of_vmm[1]), ("0", &own[1]));
}

/// Creates every kind of file and socket of a VM in the same way as a VMM, but with the umask of
/// this process.
fn create_files_of_a_vm(folder: &Path) {
    const MAX_BYTES: usize = 64 << 10;
    let path = |name: &str| folder.join(name).display().to_string();
    let mut files = ConsoleFiles::new(FileStart::Empty, Lines::default());
    let serial = format!("file={},max_size={MAX_BYTES}", path("serial"));
    let serial = ConsoleConfig::parse_serial(&serial).unwrap();
    let console = ConsoleConfig::parse_console(&format!("file={}", path("console"))).unwrap();
    let mut serial = HostConsole::open(Port::Serial, &serial, &mut files).unwrap().unwrap();
    let _console = HostConsole::open(Port::Console, &console, &mut files).unwrap();
    files.begin().unwrap();
    // The output exceeds the size limit, so a second file is created.
    serial.output.send(&vec![b'a'; MAX_BYTES]);
    serial.output.send(b"b");
    let mut files = ConsoleFiles::new(FileStart::Empty, Lines::default());
    for (port, name) in [(Port::Serial, "serial-socket"), (Port::Console, "console-socket")] {
        let text = format!("socket={}", path(name));
        let config = match port {
            Port::Serial => ConsoleConfig::parse_serial(&text),
            Port::Console => ConsoleConfig::parse_console(&text),
        };
        // Sockets would be removed when dropped.
        std::mem::forget(HostConsole::open(port, &config.unwrap(), &mut files).unwrap());
    }
    std::mem::forget(files);
    let access = SocketAccess::default();
    std::mem::forget(unix_socket::listen("--vsock", &folder.join("vsock"), &access).unwrap());
    record::open(&folder.join("trace"), 0).unwrap();
    record::open(&folder.join("trace"), 1).unwrap();
    let pmem = PmemConfig::parse(&format!("file={},size=2M", folder.display())).unwrap();
    // An unnamed file.
    let pmem = PmemFile::open(&pmem).unwrap();
    let file = fs::File::from(pmem.file().try_clone_to_owned().unwrap());
    let mode = file.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn files_and_sockets_of_a_vm_are_private_at_every_umask() {
    for umask in [0o000, 0o022] {
        let folder = TempDir::new().unwrap();
        // SAFETY: umask(2) takes a number, accesses no memory and cannot fail. Programs that other
        // tests start set a umask of their own.
        let before = unsafe { libc::umask(umask) };
        create_files_of_a_vm(folder.path());
        // SAFETY: as above.
        unsafe { libc::umask(before) };
        let modes = modes(folder.path());
        let names: Vec<_> = modes.iter().map(|(name, _)| name.as_str()).collect();
        let sockets = ["console-socket", "serial-socket", "vsock"];
        for name in ["serial", "serial.1", "console", "trace", "trace.2"].iter().chain(&sockets) {
            assert!(names.contains(name), "{name} is missing: {names:?}");
        }
        assert!(modes.iter().all(|(_, mode)| *mode == 0o600), "umask {umask:03o}: {modes:?}");
    }
}

/// Waits until the files in `folder` with another mode or another group than usual are `expected`.
fn wait_for_changed(folder: &Path, expected: &[(&str, u32, u32)]) {
    let usual_group = rustix::process::getegid().as_raw();
    let changed = || {
        let of = |(name, mode): (String, u32)| {
            let group = fs::symlink_metadata(folder.join(&name)).unwrap().gid();
            (name, mode, group)
        };
        let files = modes(folder).into_iter().map(of);
        files.filter(|(_, mode, group)| (*mode, *group) != (0o600, usual_group)).collect::<Vec<_>>()
    };
    let expected: Vec<_> =
        expected.iter().map(|(name, mode, group)| (name.to_string(), *mode, *group)).collect();
    let begin = Instant::now();
    // The socket gets its name slightly before its mode is set.
    while changed() != expected {
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", changed());
        std::thread::yield_now();
    }
}

#[test]
fn mode_and_group_open_only_their_socket_to_others() {
    let usual_group = rustix::process::getegid().as_raw();
    let start = |keys| {
        let folder = TempDir::new().unwrap();
        (start_with(0o022, folder.path(), keys), folder)
    };
    let (_vmm, folder) = start(["", ",mode=0666"]);
    wait_for_changed(folder.path(), &[("metrics", 0o666, usual_group)]);
    let (_vmm, folder) = start([",mode=0660", ""]);
    wait_for_changed(folder.path(), &[("api", 0o660, usual_group)]);
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can give a file to any group");
    }
    const GROUP: u32 = 65534;
    let (_vmm, folder) = start(["", ",mode=0620,group=65534"]);
    wait_for_changed(folder.path(), &[("metrics", 0o620, GROUP)]);
    let (_vmm, folder) = start([",mode=0620,group=65534", ""]);
    wait_for_changed(folder.path(), &[("api", 0o620, GROUP)]);
}

#[test]
fn descriptor_that_was_not_inherited_is_refused() {
    let folder = TempDir::new().unwrap();
    let log = folder.path().join("log");
    for flags in [["--api-socket", "fd=77"], ["--event-monitor", "fd=78"]] {
        let mut command = foreshore();
        command.args(["--kernel", "/nonexistent", "--log-file", log.to_str().unwrap()]).args(flags);
        let output = command.output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(&format!("{}: {} is not open", flags[0], flags[1])), "{message}");
        assert!(!log.exists());
    }
}

#[test]
fn no_flag_of_the_vmm_writes_to_a_pool_or_a_file_system() {
    let folder = TempDir::new().unwrap();
    let [pool, disk] = ["pool", "disk"].map(|name| folder.path().join(name));
    drop(pmem_volume::Pool::create(&pool, 16 << 20, 0).unwrap());
    let mut bytes = vec![0; 1 << 20];
    bytes[0x438..0x43a].copy_from_slice(b"\x53\xef");
    fs::write(&disk, bytes).unwrap();
    for (path, content) in [(&pool, "a pool"), (&disk, "an ext2, ext3 or ext4 file system")] {
        let before = fs::read(path).unwrap();
        let path_text = path.display().to_string();
        for flags in [["--log-file", &path_text], ["--event-monitor", &format!("path={path_text}")]]
        {
            let mut command = foreshore();
            let output = command.args(["--kernel", "/nonexistent"]).args(flags).output().unwrap();
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{message}");
            let named = format!("{path:?} holds {content}, which output would destroy");
            assert!(message.contains(flags[0]) && message.contains(&named), "{message}");
            assert!(fs::read(path).unwrap() == before, "{flags:?}");
        }
    }
}
