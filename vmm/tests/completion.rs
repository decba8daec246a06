//! Completes command lines of the VMM and of its client, in bash and in the protocols of other
//! shells. KVM is not needed.

#[path = "../../pmem-volume/pmvol/tests/shell/complete.rs"]
mod complete;
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::thread;

use pmem_volume::{OpenMode, Pool, VolumeFormat, VolumeSize};
use support::{FORESHORE_REMOTE, Process, foreshore, remote};
use tempfile::TempDir;

/// Folder with an image, a kernel and a socket.
struct Folder {
    folder: TempDir,
    /// Accepts no connection.
    _socket: UnixListener,
}

impl Folder {
    fn new() -> Self {
        let folder = TempDir::new_in("/dev/shm").unwrap();
        for name in ["vmlinuz", "vm.raw", "vm,old.raw"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let socket = UnixListener::bind(folder.path().join("vm.sock")).unwrap();
        Self { folder, _socket: socket }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Completes the last word in bash. The first word is the name of the program.
    fn completed(&self, words: &[&str]) -> String {
        complete::completions(
            FORESHORE_REMOTE,
            &["completion", "bash", words[0]],
            self.path(),
            words,
        )
    }
}

#[test]
fn flags_verbs_and_policies_are_completed() {
    let folder = Folder::new();
    for (words, expected) in [
        (&["foreshore-remote", "pre"][..], "pressure"),
        (&["foreshore-remote", "pressure", "set", "policy=da"], "dapper"),
        (&["foreshore-remote", "pressure", "set", "policy=dapper,dr"], "dapper,dry_run="),
        (&["foreshore-remote", "pressure", "set", "--policy", "da"], "dapper"),
        (&["foreshore-remote", "pressure", "dry-run", "of"], "off"),
        (&["foreshore-remote", "create", "vm.r"], "vm.raw"),
        (&["foreshore-remote", "add-disk", "rea"], "readonly="),
        (&["foreshore-remote", "add-net", "vhost=a"], "auto"),
        (&["foreshore-remote", "add-pmem", "file=vml"], "vmlinuz"),
        (&["foreshore-remote", "add-pm-volume", "interface=virtio-b"], "virtio-blk"),
        (&["foreshore", "--kernel", "vml"], "vmlinuz"),
        (&["foreshore", "--pressure", "policy=ps"], "psi"),
        (&["foreshore", "--pressure", "policy=amf,recl"], "amf,reclaim="),
        (&["foreshore", "--pm-m"], "--pm-memory"),
    ] {
        assert_eq!(folder.completed(words), expected, "{words:?}");
    }
}

/// Bash replaces only the part behind the last `=` or `:` of a word.
#[test]
fn options_of_a_flag_are_completed_in_bash() {
    let folder = Folder::new();
    for (option, expected) in [
        ("rea", "readonly="),
        ("path=vm.", "vm.raw vm.sock"),
        ("path=", "vm,old.raw vm.raw vm.sock vmlinuz"),
        ("path=vm.raw,rea", "vm.raw,readonly="),
        ("path=vm.raw,readonly=", "on off"),
        ("path=vm.raw,readonly=on,re", ""),
        ("image_type=", "raw"),
        ("guest_block_size=4", "4096"),
        ("queue_size=1", ""),
    ] {
        assert_eq!(folder.completed(&["foreshore", "--disk", option]), expected, "{option}");
        let flag = format!("--disk={option}");
        let joined = folder.completed(&["foreshore", &flag]);
        assert_eq!(joined, expected, "{flag}");
        let words = ["foreshore", "--memory", "size=1G,shared=on", "--disk", "path=a", option];
        assert_eq!(folder.completed(&words), expected, "{words:?}");
    }
    assert_eq!(folder.completed(&["foreshore", "--serial", "t"]), "tty");
    assert_eq!(folder.completed(&["foreshore", "--serial", "file=vml"]), "vmlinuz");
    assert_eq!(
        folder.completed(&["foreshore", "--net", "mac=12:34:56,offload_t"]),
        "56,offload_tso="
    );
    assert_eq!(
        folder.completed(&["foreshore", "--cpus", "affinity=[0@[1,2],1@[3]],ne"]),
        "[0@[1,2],1@[3]],nested="
    );
}

#[test]
fn api_socket_is_completed_with_sockets_and_folders() {
    let folder = Folder::new();
    fs::create_dir(folder.path().join("vms")).unwrap();
    for words in [
        &["foreshore-remote", "--api-socket", "vm"][..],
        &["foreshore", "--api-socket", "vm"],
        &["foreshore", "--api-socket", "path=vm"],
    ] {
        assert_eq!(folder.completed(words), "vm.sock vms/", "{words:?}");
    }
}

/// Other shells pass and replace whole words.
#[test]
fn options_are_completed_as_whole_words_in_zsh_and_fish() {
    let folder = Folder::new();
    let completed = |shell: &str, words: &[&str]| {
        let mut command = Command::new(FORESHORE_REMOTE);
        command.arg("--").args(words).current_dir(folder.path());
        command.env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
        let output = command.env("FORESHORE_COMPLETE", shell).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for shell in ["zsh", "fish", "elvish"] {
        let disk = |option| completed(shell, &["foreshore", "--disk", option]);
        assert_eq!(disk("path=vml"), ["path=vmlinuz"], "{shell}");
        assert_eq!(disk("path=a,direct="), ["path=a,direct=on", "path=a,direct=off"], "{shell}");
        assert_eq!(disk("path=a,dir"), ["path=a,direct="], "{shell}");
    }
}

#[test]
fn volumes_of_a_pool_in_use_are_completed() {
    let folder = Folder::new();
    let path = folder.path().join("pool");
    let pool = Pool::create(&path, 64 << 20, 0).unwrap();
    for name in ["data", "logs"] {
        pool.create_volume(name, VolumeSize::Bytes(2 << 20), VolumeFormat::Raw).unwrap();
    }
    drop(pool);
    let before = fs::read(&path).unwrap();
    let owner = Pool::open(&path, OpenMode::ReadWrite).unwrap();
    let of_pool = |pool: &str, start: &str| {
        folder.completed(&["foreshore", "--pm-volume", &format!("pool={pool},name={start}")])
    };
    assert_eq!(of_pool("pool", ""), "data logs");
    assert_eq!(of_pool("pool", "l"), "logs");
    drop(owner);
    assert_eq!(of_pool("pool", "l"), "logs");
    assert!(fs::read(&path).unwrap() == before, "completion changes nothing");
    // None of these is a pool. A blocking open of a FIFO would wait for a writer.
    rustix::fs::mknodat(
        rustix::fs::CWD,
        folder.path().join("fifo"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    for other in ["vmlinuz", "nothing", "fifo", "."] {
        assert_eq!(of_pool(other, ""), "", "{other}");
    }
    assert_eq!(folder.completed(&["foreshore", "--pm-volume", "name="]), "");
}

#[test]
fn devices_of_a_vm_are_completed() {
    let folder = Folder::new();
    let mut vmm = foreshore();
    let _vmm = Process::spawn(vmm.args(["--api-socket", "api"]).current_dir(folder.path()));
    let succeed = |args: &[&str]| {
        let mut command = remote(Path::new("api"));
        command.args(args).current_dir(folder.path());
        assert!(command.status().unwrap().success(), "{args:?}");
    };
    succeed(&["ping", "--wait"]);
    let config = r#"{
        "payload": {"kernel": "vmlinuz"},
        "disks": [{"path": "vm.raw", "id": "root"}, {"path": "vm.raw", "id": "swap"}],
        "net": [{"id": "lan"}],
        "vsock": {"cid": 3, "socket": "vsock", "id": "agent"}
    }"#;
    fs::write(folder.path().join("vm.json"), config).unwrap();
    succeed(&["create", "vm.json"]);
    let completed = |words: &[&str]| {
        folder.completed(&[&["foreshore-remote", "--api-socket", "api"], words].concat())
    };
    // Other candidates are flags.
    assert!(completed(&["remove-device", ""]).starts_with("root swap lan agent --"));
    assert_eq!(completed(&["remove-device", "l"]), "lan");
    assert_eq!(completed(&["resize-disk", "--disk", ""]), "root swap");
    let words = ["foreshore-remote", "--api-socket=api", "remove-device", "s"];
    assert_eq!(folder.completed(&words), "swap");
}

#[test]
fn zones_of_a_vm_are_completed() {
    let folder = Folder::new();
    let api = UnixListener::bind(folder.path().join("api")).unwrap();
    let zone = |id: &str| {
        serde_json::json!({
            "id": id, "tier": "dram", "guest_numa_node": 0, "boot_bytes": 0, "hotplug_bytes": 0,
            "requested_bytes": 0, "plugged_bytes": 0, "held_bytes": 0, "descriptor_bytes": 0,
            "saved_descriptor_bytes": 0, "recallable_bytes": 0, "spilled_bytes": 0,
            "spilled_file_bytes": 0, "spill_file_failures": 0, "resident_bytes": 0,
            "status": {"state": "reached"},
        })
    };
    let body = serde_json::json!({"zones": [zone("dram"), zone("pm")]}).to_string();
    thread::spawn(move || {
        for stream in api.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let call = lines.next().unwrap().unwrap();
            assert_eq!(call, "GET /api/v1/vm.memory HTTP/1.1");
            lines.find(|line| line.as_ref().is_ok_and(String::is_empty));
            let length = body.len();
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        }
    });
    let completed = |socket: &str, words: &[&str]| {
        folder.completed(&[&["foreshore-remote", "--api-socket", socket], words].concat())
    };
    assert_eq!(completed("api", &["resize-zone", "--id", ""]), "dram pm");
    assert_eq!(completed("api", &["pressure", "resume", "p"]), "pm");
    // The first socket does not answer, and the second does not exist.
    assert_eq!(completed("vm.sock", &["resize-zone", "--id", ""]), "");
    assert_eq!(completed("nowhere", &["resize-zone", "--id", ""]), "");
}
