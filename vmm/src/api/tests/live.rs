//! Tests that replay requests of real clients byte by byte, against a VM task with fake machines.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as BlockingStream;
use std::sync::Arc;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;
use crate::config::AtGuestShutdown;
use crate::vm::vm_task::VmTask;
use crate::vm::vm_task::tests::FakeFactory;

/// Runs a blocking test next to a VMM without a VM.
pub(super) fn with_vmm(test: impl FnOnce(&Path) + Send + 'static) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let (vm, requests) = VmHandle::channel();
        let events = Events::start();
        let owner = VmTask::new(
            FakeFactory::default(),
            AtGuestShutdown::End,
            events.clone(),
            Arc::default(),
        );
        let owner = tokio::task::spawn_local(owner.run(None, requests));
        let socket = Socket::for_api(&ApiSocket::Path(path.clone(), Default::default())).unwrap();
        let server = Server::start(socket, router(vm, events), Limits::API).unwrap();
        tokio::task::spawn_blocking(move || test(&path)).await.unwrap();
        server.stop().await;
        owner.abort();
    });
}

pub(super) struct Raw(BlockingStream);

impl Raw {
    pub(super) fn connect(path: &Path) -> Self {
        let stream = BlockingStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    /// Sends all bytes in one message, together with the descriptors.
    pub(super) fn send(&self, bytes: &str, fds: &[&OwnedFd]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let parts = [IoSlice::new(bytes.as_bytes())];
        assert_eq!(
            sendmsg(&self.0, &parts, &mut control, SendFlags::empty()).unwrap(),
            bytes.len()
        );
    }

    pub(super) fn receive(&mut self) -> Answer {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let (status, len) = as_api_client_reads(&head).unwrap_or_else(|| panic!("{head:?}"));
        let mut body = vec![0; len];
        self.0.read_exact(&mut body).unwrap();
        (status, String::from_utf8(body).unwrap())
    }

    pub(super) fn call(&mut self, method: &str, call: &str, body: &str) -> Answer {
        self.send(&request(method, &format!("/api/v1/{call}"), body), &[]);
        self.receive()
    }
}

/// Write end of a pipe that represents a queue. The read end detects when the write end is closed.
fn queue() -> (std::io::PipeReader, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    (reader, writer.into())
}

fn info(path: &Path) -> Value {
    let (status, body) = Raw::connect(path).call("GET", "vm.info", "");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// libvirt 10 (src/ch/ch_monitor.c and ch_process.c) sends requests by curl, but writes requests
/// with descriptors itself. All use one connection.
#[test]
fn libvirt_adds_its_interfaces_before_the_vm_boots() {
    with_vmm(|path| {
        let by_curl = |call: &str, body: &str| {
            let bytes = format!(
                "PUT /api/v1/{call} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
                 Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            let mut curl = Raw::connect(path);
            curl.send(&bytes, &[]);
            curl.receive()
        };
        let vm = r#"{"console":{"mode":"Null"},"serial":{"mode":"Null"},"cpus":{"boot_vcpus":2,"max_vcpus":2},
                     "memory":{"size":1073741824},"payload":{"kernel":"/vmlinux","cmdline":"console=ttyS0"},
                     "disks":[{"path":"/disk.raw"}]}"#;
        assert_eq!(by_curl("vm.create", vm), (204, String::new()));
        let (mut readers, mut connection) = (Vec::new(), Raw::connect(path));
        for (nth, queues) in [(0, 1), (1, 2), (2, 1)] {
            let (sees, fds): (Vec<_>, Vec<_>) = (0..queues).map(|_| queue()).unzip();
            let body = format!(
                r#"{{"id":"net_{nth}","ip":"192.168.{nth}.2","mask":"255.255.255.0","mac":"52:54:00:aa:bb:0{nth}","num_queues":{},"queue_size":256}}"#,
                2 * queues
            );
            let bytes = format!(
                "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                 Content-Length: {}\r\n\r\n{body}",
                body.len()
            );
            connection.send(&bytes, &fds.iter().collect::<Vec<_>>());
            assert_eq!(connection.receive(), (204, String::new()), "{nth}");
            readers.extend(sees);
        }
        let shown = info(path);
        let net = |key: &str| -> Vec<Value> {
            shown["config"]["net"].as_array().unwrap().iter().map(|net| net[key].clone()).collect()
        };
        assert_eq!(net("id"), ["net_0", "net_1", "net_2"]);
        assert_eq!(net("fds"), [json!([-1]), json!([-1, -1]), json!([-1])]);
        assert_eq!(net("ip")[1], "192.168.1.2");
        assert_eq!(by_curl("vm.boot", ""), (204, String::new()));
        assert_eq!(info(path)["state"], "Running");
        // The VMM accepts the configuration that it has returned. Without descriptors, the
        // configuration describes interfaces that the VMM creates.
        assert_eq!(by_curl("vm.delete", ""), (204, String::new()));
        assert_eq!(by_curl("vm.create", &shown["config"].to_string()), (204, String::new()));
        let nets = info(path)["config"]["net"].clone();
        assert!(nets[1]["id"] == "net_1" && nets[1]["fds"].is_null(), "{nets}");
        // The descriptors are closed by now.
        for mut reader in readers {
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    });
}

/// Kata Containers' driver for Cloud Hypervisor, virtcontainers/clh.go. Go's http.DumpRequest
/// produces the bytes of the request.
#[test]
fn kata_adds_interfaces_to_a_running_vm() {
    with_vmm(|path| {
        let vm = r#"{"payload":{"kernel":"/vmlinux"},"cpus":{"boot_vcpus":1,"max_vcpus":4}}"#;
        assert_eq!(Raw::connect(path).call("PUT", "vm.create", vm).0, 204);
        let body = r#"{"id":"eth0","mac":"02:42:ac:11:00:02","num_queues":2}"#;
        let add = |body: &str, fds: &[&OwnedFd]| {
            let bytes = format!(
                "PUT /api/v1/vm.add-net HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
                 Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            let mut connection = Raw::connect(path);
            connection.send(&bytes, fds);
            connection.receive()
        };
        let (_sees, fd) = queue();
        assert_eq!(add(body, &[&fd]), (204, String::new()));
        assert_eq!(Raw::connect(path).call("PUT", "vm.boot", "").0, 204);
        let (status, answer) = add(&body.replace("eth0", "eth1"), &[&fd]);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, answer), (200, json!({"id": "eth1", "bdf": "0000:00:05.0"})));
        for (body, fds, status, text) in [
            (body, &[&fd][..], 409, "the id eth0 is already in use; choose another id"),
            (r#"{"id":"x"}"#, &[&fd, &fd][..], 400, "fd has 2 descriptors, but num_queues needs 1"),
            (r#"{"id":"x","num_queues":10}"#, &[&fd][..], 400, "num_queues is 10"),
            (r#"{"id":"x","tap":"tap0"}"#, &[&fd][..], 400, "tap and fd exclude each other"),
            (r#"{"id":"__x"}"#, &[&fd][..], 400, "__"),
            (r#"{"id":"x","fds":"3"}"#, &[][..], 400, "JSON cannot carry file descriptors"),
            (r#"{"id":"x","mac":"02"}"#, &[&fd][..], 400, "six hexadecimal bytes"),
        ] {
            let (found, answer) = add(body, fds);
            assert!(found == status && answer.contains(text), "{body}: {found} {answer}");
        }
        assert_eq!(info(path)["config"]["net"].as_array().unwrap().len(), 2);
        // Descriptor numbers are ignored, with and without descriptors.
        for (id, fds) in [("a", &[][..]), ("b", &[&fd][..])] {
            assert_eq!(add(&format!(r#"{{"id":"{id}","fds":[3,-1]}}"#), fds).0, 200);
        }
        let nets = info(path)["config"]["net"].clone();
        assert_eq!((&nets[2]["fds"], &nets[3]["fds"]), (&Value::Null, &json!([-1])));
    });
}

/// Calls that need a running machine.
const OF_A_MACHINE: [&str; 5] =
    ["vm.counters", "vm.memory", "vm.volumes", "pool.info", "vm.pressure"];

#[test]
fn calls_that_need_a_machine_succeed_while_it_exists() {
    with_vmm(|path| {
        let mut client = Raw::connect(path);
        let all_answer = |expected: u16| {
            for call in OF_A_MACHINE {
                let (status, answer) = Raw::connect(path).call("GET", call, "");
                assert_eq!(status, expected, "{call}: {answer}");
            }
        };
        all_answer(404);
        let steps = [
            ("vm.create", r#"{"payload":{"kernel":"/vmlinux"}}"#, 405),
            ("vm.boot", "", 200),
            ("vm.pause", "", 200),
            ("vm.resume", "", 200),
            ("vm.shutdown", "", 405),
            ("vm.delete", "", 404),
        ];
        for (call, body, expected) in steps {
            assert_eq!(client.call("PUT", call, body), (204, String::new()), "{call}");
            all_answer(expected);
        }
    });
}

/// Checks the success statuses in docs/reference/openapi.json. Each call is made in a state in
/// which it succeeds.
#[test]
fn every_call_succeeds_with_its_described_status() {
    with_vmm(|path| {
        let mut client = Raw::connect(path);
        let mut seen = BTreeMap::<_, BTreeSet<u16>>::new();
        let mut say = |method: &'static str, call: &'static str, body: &str| {
            let (status, answer) = client.call(method, call, body);
            assert!((200..300).contains(&status), "{method} {call} {body}: {status} {answer}");
            seen.entry((call.to_owned(), method.to_lowercase())).or_default().insert(status);
        };
        let devices = [
            ("vm.add-disk", r#"{"path":"/d.raw","id":"disk"}"#),
            ("vm.add-net", r#"{"id":"net"}"#),
            ("vm.add-pm-volume", r#"{"pool":"/p","name":"data","interface":"virtio-blk"}"#),
            ("vm.add-pmem", r#"{"file":"/p","id":"pmem"}"#),
            ("vm.add-vsock", r#"{"cid":3,"socket":"/s","id":"vsock"}"#),
        ];
        say("GET", "vmm.ping", "");
        let vm = r#"{"payload":{"kernel":"/vmlinux"},"cpus":{"boot_vcpus":1,"max_vcpus":2},"disks":[{"path":"/d"}],
                     "memory":{"size":536870912,"hotplug_method":"VirtioMem","hotplug_size":268435456}}"#;
        say("PUT", "vm.create", vm);
        // Devices are added and removed first before the VM boots, and then while it runs.
        for runs in [false, true] {
            if runs {
                say("PUT", "vm.boot", "");
            }
            for (call, body) in devices {
                say("PUT", call, body);
            }
            for id in ["disk", "net", "data", "pmem", "vsock"] {
                say("PUT", "vm.remove-device", &format!(r#"{{"id":"{id}"}}"#));
            }
            say("GET", "vm.info", "");
            say("PUT", "vm.resize", r#"{"desired_vcpus":2}"#);
        }
        for call in OF_A_MACHINE {
            say("GET", call, "");
        }
        say("PUT", "vm.pressure", r#"{"pause":true}"#);
        say("PUT", "vm.resize-disk", r#"{"id":"_disk0","desired_size":1048576}"#);
        say("PUT", "vm.resize-zone", r#"{"id":"dram","desired_ram":538968064}"#);
        say("PUT", "pool.grow", r#"{"path":"/p"}"#);
        for call in [
            "vm.pause",
            "vm.resume",
            "vm.power-button",
            "vm.nmi",
            "vmm.nmi",
            "vm.reboot",
            "vm.shutdown",
            "vm.delete",
            "vmm.shutdown",
        ] {
            say("PUT", call, "");
        }
        let document: Value =
            serde_json::from_str(include_str!("../../../../docs/reference/openapi.json"))
                .expect("JSON");
        let mut described = BTreeMap::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let statuses = operation["responses"].as_object().unwrap().keys();
                let success: BTreeSet<u16> = statuses
                    .filter_map(|status| status.parse().ok())
                    .filter(|status| (200..300).contains(status))
                    .collect();
                // Endless answers are tested elsewhere, and refused calls have no success status.
                if !success.is_empty() && path != "/vmm.events" {
                    described
                        .insert((path.trim_start_matches('/').to_owned(), method.clone()), success);
                }
            }
        }
        assert_eq!(seen, described);
    });
}

/// After a reboot, the VMM requests the size in Cloud Hypervisor's `config.memory.hotplugged_size`
/// again.
#[test]
fn resize_is_in_the_configuration_of_the_next_boot() {
    const MIB: u64 = 1 << 20;
    with_vmm(|path| {
        let mut client = Raw::connect(path);
        let mut put = |call: &str, body: Value| {
            let body = if body.is_null() { String::new() } else { body.to_string() };
            assert_eq!(client.call("PUT", call, &body), (204, String::new()), "{call} {body}");
        };
        let method =
            json!({"size": 512 * MIB, "hotplug_method": "VirtioMem", "hotplug_size": 256 * MIB});
        put("vm.create", json!({"payload": {"kernel": "/vmlinux"}, "memory": method}));
        put("vm.boot", Value::Null);
        let asked = || info(path)["config"]["memory"]["hotplugged_size"].clone();
        put("vm.resize", json!({"desired_ram": 640 * MIB}));
        assert_eq!(asked(), 128 * MIB);
        put("vm.reboot", Value::Null);
        assert_eq!(asked(), 128 * MIB);
        put("vm.resize-zone", json!({"id": "dram", "desired_ram": 514 * MIB}));
        assert_eq!(asked(), 2 * MIB);
        put("vm.resize", json!({"desired_ram": 512 * MIB}));
        assert_eq!(asked(), Value::Null);

        // For a stopped VM, the total size is the same, and repeating the request has no effect.
        put("vm.resize", json!({"desired_ram": 640 * MIB}));
        put("vm.shutdown", Value::Null);
        for (desired, boot, hotplugged) in [
            (640, 512, json!(128 * MIB)),
            (768, 512, json!(256 * MIB)),
            (770, 770, Value::Null),
            (512, 512, Value::Null),
        ] {
            put("vm.resize", json!({"desired_ram": desired * MIB}));
            assert_eq!(
                (info(path)["config"]["memory"]["size"].clone(), asked()),
                (json!(boot * MIB), hotplugged)
            );
        }
        put("vm.delete", Value::Null);

        let zones = json!([{"id": "a", "size": 512 * MIB}, {"id": "b", "size": 512 * MIB, "hotplug_size": 256 * MIB}]);
        let zoned = json!({"size": 0, "hotplug_method": "VirtioMem", "zones": zones});
        put("vm.create", json!({"payload": {"kernel": "/vmlinux"}, "memory": zoned}));
        put("vm.boot", Value::Null);
        put("vm.resize-zone", json!({"id": "b", "desired_ram": 768 * MIB}));
        let memory = info(path)["config"]["memory"].clone();
        assert_eq!(memory["zones"][1]["hotplugged_size"], 256 * MIB);
        assert!(
            memory["zones"][0]["hotplugged_size"].is_null() && memory["hotplugged_size"].is_null(),
            "{memory}"
        );
        put("vm.shutdown", Value::Null);
        put("vm.resize-zone", json!({"id": "b", "desired_ram": 640 * MIB}));
        let zone = info(path)["config"]["memory"]["zones"][1].clone();
        assert_eq!(
            (&zone["size"], &zone["hotplugged_size"]),
            (&json!(512 * MIB), &json!(128 * MIB))
        );
        put("vm.delete", Value::Null);

        let alone = json!({"size": 0, "hotplug_method": "VirtioMem",
            "zones": [{"id": "dram", "size": 512 * MIB, "hotplug_size": 256 * MIB}]});
        put("vm.create", json!({"payload": {"kernel": "/vmlinux"}, "memory": alone}));
        put("vm.boot", Value::Null);
        put("vm.resize", json!({"desired_ram": 640 * MIB}));
        let memory = info(path)["config"]["memory"].clone();
        assert_eq!(memory["zones"][0]["hotplugged_size"], 128 * MIB);
        assert!(memory["hotplugged_size"].is_null(), "{memory}");
    });
}
