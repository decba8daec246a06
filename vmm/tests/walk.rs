//! Walk through the features of a VMM, the calls of its API and its error paths. The guest only
//! halts, so it runs wherever KVM can create a VM. No thread may make a system call that its filter
//! lacks. `cargo xtask calls` runs this test to find filters that allow more than the VMM needs.

mod support;

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::panic::catch_unwind;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use pmem_volume::Pool;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use support::{FORESHORE, LIMIT, Process, Vmm, is_root, output, output_within, wait_for};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// Physical address of the guest's kernel.
const KERNEL_ADDRESS: u64 = 16 * MIB;
/// Part of each log line about a call that a filter does not allow.
const REFUSED: &str = "is not allowed by its filter";
/// Shell command that starts a VMM as if the processor had hardware virtualization, which the VMM
/// requires for stock guests.
const START: &str = "mount --bind \"$0\" /proc/cpuinfo && exec \"$@\"";

/// Flags of a VM with all kinds of devices. `DIR` is the folder of its files, and `TAP` begins the
/// names of its interfaces.
const FLAGS: &[&str] = &[
    "--kernel DIR/kernel --cpus boot=1,max=2,affinity=[0@[0]] --memory size=128M,hotplug_method=virtio-mem,hotplug_size=128M",
    "--pm-memory pool=DIR/pool,size=64M --pm-volume pool=DIR/pool,name=data,size=64M,create=on",
    "--disk path=DIR/disk path=DIR/direct,direct=on,num_queues=2 path=DIR/read,readonly=on",
    "--pmem file=DIR/pmem --net tap=TAP0 --balloon size=0 --rng --watchdog --pvpanic",
    "--serial file=DIR/serial --console socket=DIR/console --vsock cid=3,socket=DIR/vsock",
    "--pressure policy=psi,record=DIR/record --event-monitor path=DIR/events --landlock on",
    "--api-socket DIR/api --metrics 0 -v --seccomp log",
];

/// Commands of `foreshore-remote`. A command after `!` fails, and one after `?` may fail.
const COMMANDS: &str = "ping; info; memory; pool; volumes; counters; pressure; pressure --params;
    pressure --log 5; pressure pause; pressure resume; pressure dry-run on;
    ! pressure set policy=fixed; pressure set policy=psi; pressure set policy=off;
    resize --memory 192M; resize --balloon 16M; resize --cpus 2; resize --cpus 1;
    ! resize --memory 1T; resize-zone --id dram --size 160M; resize-zone --id pm --size 32M;
    add-disk path=DIR/more,id=more; resize-disk --disk more --size 128M;
    add-disk path=DIR/read,readonly=on,id=again; ! add-disk path=/nonexistent;
    ! add-disk path=/etc/passwd; add-net tap=TAP1,id=net1; add-pmem file=DIR/more-pmem,id=pmem1;
    ! add-vsock cid=4,socket=DIR/vsock4; remove-device more; remove-device net1;
    remove-device pmem1; ! remove-device none; ! add-pm-volume pool=/etc/passwd,name=none;
    add-pm-volume pool=DIR/other,name=added,size=20M,create=on,thin=on; volumes; pool;
    resize-disk --disk added --size 40M; ! resize-disk --disk added --size 20M;
    add-pm-volume pool=DIR/pool,name=raw,size=16M,create=on,format=raw; remove-device added;
    ! add-pm-volume pool=DIR/other,name=added; pause; info; resize --balloon 0; resume;
    power-button; reboot; add-pm-volume pool=DIR/other,name=added; remove-device pmem-raw;
    shutdown; info; boot; pause; reboot; nmi; ? reboot; shutdown; delete; ! info;
    create DIR/vm.json; boot; add-vsock cid=4,socket=DIR/vsock4; shutdown; delete";

/// Flags of a VM with shared memory, memory in a file, and terminals.
const FILE_FLAGS: &[&str] = &[
    "--kernel DIR/writer --cpus boot=1 --memory size=0,hotplug_method=virtio-mem",
    "--memory-zone id=shared,size=128M,shared=on,hotplug_size=128M",
    "id=file,size=64M,file=DIR/zone,shared=on --serial pty --console pty",
    "--landlock on --landlock-rules path=DIR,access=rw",
    "--api-socket DIR/api --metrics 0 -v --seccomp log",
];

/// Commands that resize and reboot a VM whose memory is shared.
const MEMORY_COMMANDS: &str = "resize-zone --id shared --size 160M; memory; pause; resume; reboot;
    resize-zone --id shared --size 128M; shutdown; boot";

/// Commands for a network interface with vhost-net.
const VHOST_COMMANDS: &str = "add-net tap=TAP1,vhost=on,id=net1; counters; pause; resume; reboot;
    remove-device net1; add-net tap=TAP2,vhost=on,id=net2; shutdown; boot; pause; resume";

/// Commands that replace the VM by one whose console file is soon full.
const WRITER_COMMANDS: &str = "! resume; ! reboot; info; delete; create DIR/writer.json; boot";

/// VMM of a VM whose guest runs no drivers.
struct Walk {
    vmm: Vmm,
    metrics: SocketAddr,
}

impl Walk {
    /// Boots a VM. Returns `None` if that is not possible here.
    fn boot(flags: &[&str]) -> Option<Self> {
        if !is_root("replace /proc/cpuinfo") {
            return None;
        }
        for device in ["/dev/kvm", "/dev/net/tun"] {
            if let Err(error) = File::options().read(true).write(true).open(device) {
                eprintln!("skipped: {device}: {error}");
                return None;
            }
        }
        let folder = TempDir::new().unwrap();
        create_files(&folder);
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", START]).arg(folder.path().join("cpuinfo"));
        command.arg(FORESHORE).args(words(&folder, &flags.join(" ")));
        let mut vmm = Vmm::spawn(folder, &mut command);
        wait_until(&mut vmm, "Running");
        let metrics = vmm.metrics_address();
        Some(Self { vmm, metrics })
    }

    fn command(&self, arguments: &str) -> Command {
        let mut remote = self.vmm.remote();
        remote.args(words(&self.vmm.folder, arguments));
        remote
    }

    fn remote(&self, arguments: &str) -> Output {
        output(&mut self.command(arguments))
    }

    fn run_all(&self, commands: &str) {
        for command in commands.split(';').map(str::trim) {
            let output = self.remote(command.trim_start_matches(['!', '?']));
            let must_succeed = !command.starts_with('!');
            let is_expected = command.starts_with('?') || output.status.success() == must_succeed;
            assert!(is_expected, "{command}: {output:?}");
        }
    }

    fn scrape(&self) {
        let scrape = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        for request in [scrape, "no HTTP\r\n\r\n"] {
            let mut metrics = TcpStream::connect(self.metrics).unwrap();
            metrics.set_read_timeout(Some(LIMIT)).unwrap();
            metrics.write_all(request.as_bytes()).unwrap();
            // The server may reset the connection.
            let end = metrics.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
            assert_ne!(end, Err(ErrorKind::WouldBlock), "timeout: end of {request:?}");
        }
    }

    /// Connects to all sockets, and sends valid and invalid requests.
    fn use_sockets(&self) {
        self.scrape();
        for (socket, request) in [
            ("api", "no HTTP\r\n\r\n"),
            ("vsock", "CONNECT 1\n"),
            ("vsock", "?\n"),
            ("console", "a\n"),
        ] {
            let mut stream = UnixStream::connect(self.vmm.file(socket)).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
        }
    }

    /// Opens and closes both terminals twice, and exchanges bytes with the serial port.
    fn use_terminals(&self) {
        let info = self.remote("info --json").stdout;
        let info: serde_json::Value = serde_json::from_slice(&info).unwrap();
        let open = |port: &str| {
            let path = info["config"][port]["file"].as_str().unwrap();
            let mut options = File::options();
            options.read(true).write(true).custom_flags(libc::O_NOCTTY).open(path).unwrap()
        };
        for _ in 0..2 {
            open("console").write_all(b"a").unwrap();
            let mut serial = open("serial");
            serial.write_all(b"a").unwrap();
            let limit = Timespec::try_from(LIMIT).unwrap();
            let ready = poll(&mut [PollFd::new(&serial, PollFlags::IN)], Some(&limit)).unwrap();
            assert_eq!(ready, 1, "no output");
            serial.read_exact(&mut [0]).unwrap();
        }
    }

    /// Waits until the console file has been replaced twice.
    fn wait_for_rotation(&self) {
        let older = || fs::metadata(self.vmm.file("serial.1")).map(|file| file.ino()).ok();
        let first = wait_for("first rotation", older);
        wait_for("second rotation", || older().filter(|inode| *inode != first));
    }

    /// Waits for the end of the VMM, and checks that it has made no calls that its filters lack.
    fn end(mut self) -> ExitStatus {
        let status = self.vmm.process.wait();
        let refused: Vec<_> = self
            .vmm
            .log()
            .lines()
            .filter(|line| line.contains(REFUSED))
            .map(str::to_owned)
            .collect();
        assert!(refused.is_empty(), "{refused:#?}");
        status
    }
}

/// Waits until the VM has this state.
fn wait_until(vmm: &mut Vmm, state: &str) {
    let info = |vmm: &Vmm| output(vmm.remote().args(["info", "--json"])).stdout;
    wait_for(state, || {
        assert!(vmm.process.is_running(), "the VMM has ended");
        String::from_utf8_lossy(&info(vmm)).contains(&format!("\"{state}\"")).then_some(())
    });
}

fn words(folder: &TempDir, text: &str) -> Vec<String> {
    let folder = folder.path().to_str().unwrap();
    // Names of interfaces are unique, because tests run at the same time.
    let tap = format!("w{}", &folder[folder.len() - 6..]);
    let word = |word: &str| word.replace("DIR", folder).replace("TAP", &tap);
    text.split_ascii_whitespace().map(word).collect()
}

fn create_files(folder: &TempDir) {
    let file = |name: &str| folder.path().join(name);
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap();
    fs::write(file("cpuinfo"), format!("flags\t\t: svm\n{cpuinfo}")).unwrap();
    fs::write(file("kernel"), kernel(HALT)).unwrap();
    fs::write(file("writer"), kernel(WRITE)).unwrap();
    for name in ["disk", "direct", "read", "more", "pmem", "more-pmem", "zone"] {
        File::create(file(name)).unwrap().set_len(64 * MIB).unwrap();
    }
    drop(Pool::create(&file("pool"), 256 * MIB, 0).unwrap());
    drop(Pool::create(&file("other"), 64 * MIB, 0).unwrap());
    let config = serde_json::json!({
        "payload": {"kernel": file("kernel")},
        "memory": {"size": 128 * MIB},
        "console": {"mode": "Pty"},
        "serial": {"mode": "Pty"},
    });
    fs::write(file("vm.json"), config.to_string()).unwrap();
    let serial = serde_json::json!({"mode": "File", "file": file("serial"), "max_size": 64 << 10});
    let config = serde_json::json!({"payload": {"kernel": file("writer")}, "serial": serial});
    fs::write(file("writer.json"), config.to_string()).unwrap();
}

/// Code that writes one byte to the serial port and halts.
const HALT: &[u8; 12] = b"\x66\xba\xf8\x03\xb0\x78\xee\xf4\xeb\xfd\x90\x90";
/// Code that writes the 4 KiB at address 16 MiB to the serial port in an endless loop.
const WRITE: &[u8; 20] = b"\x66\xba\xf8\x03\xbe\0\0\0\x01\xb9\0\x10\0\0\xf3\x6e\xeb\xf2\x90\x90";

/// ELF file with a PVH note (Linux arch/x86/platform/pvh/head.S).
fn kernel(code: &[u8]) -> Vec<u8> {
    const HEADERS: u64 = 64 + 2 * 56;
    let entry = KERNEL_ADDRESS + HEADERS;
    let note_at = HEADERS + code.len() as u64;
    // Type 18 is XEN_ELFNOTE_PHYS32_ENTRY.
    let mut note = [4_u32, 4, 18].map(u32::to_le_bytes).concat();
    note.extend(b"Xen\0");
    note.extend((entry as u32).to_le_bytes());
    let file_len = note_at + note.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    elf.extend([entry, 64, 0].map(u64::to_le_bytes).concat());
    elf.extend([0_u8; 4]);
    elf.extend([64_u16, 56, 2, 64, 0, 0].map(u16::to_le_bytes).concat());
    for (kind, offset, len) in [(1_u32, 0, file_len), (4, note_at, note.len() as u64)] {
        let address = KERNEL_ADDRESS + offset;
        elf.extend([kind, 5].map(u32::to_le_bytes).concat());
        elf.extend([offset, address, address, len, len, 4].map(u64::to_le_bytes).concat());
    }
    elf.extend(code);
    elf.extend(note);
    elf
}

#[test]
fn client_that_hangs_fails_its_test() {
    let client =
        || output_within(Duration::from_millis(100), Command::new("sleep").arg("infinity"));
    let message = catch_unwind(client).unwrap_err();
    let message = message.downcast_ref::<String>().unwrap();
    assert!(message.starts_with("timeout: end of \"sleep\""), "{message}");
    // The client was ended when the panic dropped its process.
}

#[test]
fn no_thread_makes_a_call_that_its_filter_lacks() {
    let Some(walk) = Walk::boot(FLAGS) else { return };
    let mut events = Process::spawn(walk.command("events").stdout(Stdio::null()));
    walk.use_sockets();
    walk.run_all(COMMANDS);
    assert!(walk.remote("shutdown-vmm").status.success());
    events.wait();
    assert!(walk.end().success());
}

#[test]
fn lost_memory_and_terminals_cause_no_forbidden_call() {
    let Some(mut walk) = Walk::boot(FILE_FLAGS) else { return };
    walk.use_terminals();
    walk.run_all(MEMORY_COMMANDS);
    walk.use_terminals();
    File::options().write(true).open(walk.vmm.file("zone")).unwrap().set_len(0).unwrap();
    wait_until(&mut walk.vmm, "Paused");
    walk.scrape();
    walk.run_all(WRITER_COMMANDS);
    walk.wait_for_rotation();
    assert!(walk.remote("shutdown-vmm").status.success());
    assert!(walk.end().success());
}

#[test]
fn vhost_net_interface_causes_no_forbidden_call() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/vhost-net") {
        return eprintln!("skipped: /dev/vhost-net: {error}");
    }
    let Some(walk) = Walk::boot(FLAGS) else { return };
    walk.run_all(VHOST_COMMANDS);
    walk.scrape();
    assert!(walk.remote("shutdown-vmm").status.success());
    assert!(walk.end().success());
}

#[test]
fn signals_end_the_vmm_within_its_filters() {
    for (signal, is_fault) in
        [(Signal::TERM, false), (Signal::INT, false), (Signal::SEGV, true), (Signal::ABORT, true)]
    {
        let Some(mut walk) = Walk::boot(FLAGS) else { return };
        walk.vmm.process.signal(signal);
        // The handler of a fault restores the default action and returns, because a real fault
        // recurs. A signal of another process must be sent again.
        wait_for("end by a fault", || {
            let is_over = !is_fault || !walk.vmm.process.is_running();
            if !is_over {
                walk.vmm.process.signal(signal);
            }
            is_over.then_some(())
        });
        let status = walk.end();
        let expected =
            if is_fault { status.signal() == Some(signal.as_raw()) } else { status.success() };
        assert!(expected, "{signal:?}: {status}");
    }
}
