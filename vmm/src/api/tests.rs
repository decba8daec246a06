//! Tests of the API on the level of bytes on a unix socket, with a fake VM task.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use balloon::DriverState;
use foreshore_config::ConfigError;
use foreshore_devices::events::{Event, Events};
use foreshore_devices::volume::kernel_gate::Verdict;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::AsyncBufReadExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::routes::{REFUSED, router_within};
use super::{CallMetrics, ClientError, Limits, Server, Socket, router};
use crate::config::{ApiSocket, DeviceConfig, test_config};
use crate::governor::info::PressureInfo;
use crate::vm::request::{
    PciDeviceInfo, PoolInfo, PoolStatus, Requests, Resize, ResizeDiskRequest, ResizeRequest,
    ResizeStatus, VmError, VmHandle, VmInfo, VmRequest, VmState, VolumeInfo, VolumeStatus,
    ZoneInfo,
};

mod call_metrics;
mod campaign;
mod connections;
mod devices;
mod document;
mod follow_events;
mod live;
mod pressure;
mod refusal_log;
mod values;

/// Longer than any answer takes, so that only a failing test reaches it.
const PATIENCE: Duration = Duration::from_secs(20);

struct Fixture {
    server: Server,
    path: PathBuf,
    events: Events,
    /// Text of each request that the VM task received.
    asked: mpsc::UnboundedReceiver<String>,
    _dir: TempDir,
}

/// VM task with a running VM. The VM task refuses `vm.boot` because of the state, fails
/// `vm.reboot`, and answers `vm.shutdown` as if it had no VM.
async fn own(mut requests: Requests, asked: mpsc::UnboundedSender<String>) {
    while let Some(request) = requests.recv().await {
        asked.send(format!("{request:?}")).unwrap();
        match request {
            VmRequest::Info(reply) => {
                let info = VmInfo {
                    config: test_config(),
                    state: VmState::Paused,
                    memory_actual_size: 512 << 20,
                    pause_reason: Some("flush of data failed".to_owned()),
                    balloon: None,
                    guest_kernel: None,
                    device_tree: None,
                };
                reply.send(Ok(info)).unwrap();
            }
            VmRequest::Create(config, reply) => {
                let created = config.payload.kernel.as_deref() == Some(Path::new("/created"));
                reply.send(if created { Err(VmError::AlreadyCreated) } else { Ok(()) }).unwrap();
            }
            VmRequest::Delete(reply) => reply.send(Ok(())).unwrap(),
            VmRequest::Resize(Resize::Vm(resize), reply) => {
                reply.send(answer_resize(&resize)).unwrap();
            }
            VmRequest::Resize(Resize::Zone(resize), reply) => {
                let known =
                    VmError::BadRequest("The VM has no zone \"x\"; its zones: dram".to_owned());
                reply.send(if resize.id == "x" { Err(known) } else { Ok(()) }).unwrap();
            }
            VmRequest::ResizeDisk(resize, reply) => {
                reply.send(answer_resize_disk(&resize)).unwrap()
            }
            VmRequest::GrowPool(_, reply) => reply.send(Ok(())).unwrap(),
            VmRequest::AddDevice(device, reply) => reply.send(answer_add(&device)).unwrap(),
            VmRequest::RemoveDevice(id, reply) => {
                let known = id == "_disk0";
                reply.send(if known { Ok(()) } else { Err(VmError::NoSuchDevice { id }) }).unwrap();
            }
            VmRequest::Status(_) => unreachable!("no call of the API needs it"),
            VmRequest::Memory(reply) => reply.send(Ok(vec![zone()])).unwrap(),
            VmRequest::Counters(reply) => {
                let disk = [("read_ops", 7), ("write_ops", 0)].into();
                reply.send(Ok([("_disk0".to_owned(), disk)].into())).unwrap();
            }
            VmRequest::Volumes(reply) => reply.send(Ok(vec![volume()])).unwrap(),
            VmRequest::Pools(reply) => reply.send(Ok(vec![pool()])).unwrap(),
            VmRequest::Pause(reply) => reply.send(Ok(())).unwrap(),
            VmRequest::Resume(reply) => {
                let reason = "flush of data failed".to_owned();
                reply.send(Err(VmError::CannotResume { reason })).unwrap();
            }
            VmRequest::Pressure(_, reply) => reply.send(Ok(pressure())).unwrap(),
            VmRequest::ChangePressure(_, reply)
            | VmRequest::PowerButton(reply)
            | VmRequest::Nmi(reply) => {
                reply.send(Ok(())).unwrap();
            }
            VmRequest::Boot(reply) => {
                let refused = VmError::WrongState {
                    call: "vm.boot",
                    state: VmState::Running,
                    needs: "not booted, or paused",
                    remedy: "vm.reboot restarts it",
                };
                reply.send(Err(refused)).unwrap();
            }
            VmRequest::Shutdown(reply) => reply.send(Err(VmError::NotCreated)).unwrap(),
            VmRequest::Reboot(reply) => {
                reply.send(Err(VmError::Failed("no memory".to_owned()))).unwrap()
            }
            VmRequest::ShutdownVmm(reply) => {
                reply.send(Ok(())).unwrap();
                return;
            }
        }
    }
}

fn answer_resize(resize: &ResizeRequest) -> Result<(), VmError> {
    match resize.desired_vcpus {
        Some(7) => Err(VmError::BadRequest("desired_vcpus 7: there are 2".to_owned())),
        _ => Ok(()),
    }
}

/// Answers as a running VM when a disk is added, and as a stopped VM for other devices.
fn answer_add(device: &DeviceConfig) -> Result<Option<PciDeviceInfo>, VmError> {
    match device {
        DeviceConfig::Disk(disk) if disk.id.as_deref() == Some("taken") => {
            Err(ConfigError::IdTaken { flag: "--disk", id: "taken".to_owned() }.into())
        }
        DeviceConfig::Disk(disk) if disk.num_queues > 1 => {
            let (flag, key, value) = ("--disk", "num_queues", disk.num_queues.into());
            Err(ConfigError::OutOfRange { flag, key, value, least: 1, most: 1 }.into())
        }
        DeviceConfig::Disk(_) => {
            Ok(Some(PciDeviceInfo { id: "_disk0".to_owned(), bdf: "0000:00:06.0".to_owned() }))
        }
        DeviceConfig::Net(_)
        | DeviceConfig::Pmem(_)
        | DeviceConfig::Volume(_)
        | DeviceConfig::Vsock(_) => Ok(None),
    }
}

fn answer_resize_disk(resize: &ResizeDiskRequest) -> Result<(), VmError> {
    match resize.id.as_str() {
        "_disk0" => Ok(()),
        id => Err(VmError::NoSuchDisk { id: id.to_owned(), known: "_disk0".to_owned() }),
    }
}

fn zone() -> ZoneInfo {
    ZoneInfo {
        id: "pm".to_owned(),
        tier: "pm".to_owned(),
        guest_numa_node: 1,
        hotplug_bytes: 4 << 30,
        requested_bytes: 2 << 20,
        saved_descriptor_bytes: 64 << 20,
        driver: Some(DriverState::Ready),
        status: ResizeStatus::Stuck("busy pages".to_owned()),
        ..ZoneInfo::default()
    }
}

fn volume() -> VolumeInfo {
    VolumeInfo {
        pool: "/pm/pool".to_owned(),
        name: "data".to_owned(),
        size_bytes: 96 << 20,
        reserve_bytes: 50 << 20,
        allocated_bytes: Some(98 << 20),
        live_bytes: None,
        interface: "nvdimm".to_owned(),
        unmapped_reason: Some("its reserve is 2 MiB".to_owned()),
        readonly: false,
        durability: "page-cache".to_owned(),
        extents: 1,
        guest_btt: Some(Verdict::Suspect("preempts fully".to_owned())),
        status: VolumeStatus::Failed("no room".to_owned()),
    }
}

fn pool() -> PoolInfo {
    PoolInfo {
        path: "/pm/pool".to_owned(),
        uuid: "3d3b7c0e-8a6c-4d1b-9a57-0c1f2e9b6a44".to_owned(),
        durability: "page-cache".to_owned(),
        total_bytes: 1 << 30,
        free_bytes: 668 << 20,
        memory_bytes: 256 << 20,
        volume_bytes: 96 << 20,
        scrubbing_bytes: 0,
        retired_bytes: 0,
        metadata_bytes: 4 << 20,
        reserve_bytes: 256 << 20,
        reserved_bytes: 256 << 20,
        promised_bytes: 96 << 20,
        provisioned_bytes: 99 << 20,
        lendable_bytes: 508 << 20,
        borrowable_bytes: 0,
        volumes: 1,
        status: PoolStatus::ReadOnly("no room".to_owned()),
    }
}

fn pressure() -> PressureInfo {
    PressureInfo {
        policy: "psi".to_owned(),
        agent_connected: true,
        report_age_ms: Some(20),
        ..PressureInfo::default()
    }
}

/// Runs a test on a runtime with one thread, as in the VMM.
fn run<F: Future<Output = ()>>(test: impl FnOnce(Fixture) -> F) {
    run_within(Limits::API, test);
}

fn run_within<F: Future<Output = ()>>(limits: Limits, test: impl FnOnce(Fixture) -> F) {
    run_serving(limits, router, test);
}

fn run_serving<F: Future<Output = ()>>(
    limits: Limits,
    router: impl FnOnce(VmHandle, Events) -> Router,
    test: impl FnOnce(Fixture) -> F,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let (vm, requests) = VmHandle::channel();
        let events = Events::start();
        let (sender, asked) = mpsc::unbounded_channel();
        tokio::spawn(own(requests, sender));
        let socket = Socket::for_api(&ApiSocket::Path(path.clone(), Default::default())).unwrap();
        let server = Server::start(socket, router(vm, events.clone()), limits).unwrap();
        timeout(PATIENCE, test(Fixture { server, path, events, asked, _dir: dir }))
            .await
            .expect("an answer");
    });
}

struct Client(BufReader<UnixStream>);

/// Status code and body of an answer.
type Answer = (u16, String);

impl Client {
    async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.get_mut().write_all(bytes.as_ref()).await.unwrap();
    }

    /// Reads one answer. Returns `None` if the server has closed the connection.
    async fn receive(&mut self) -> Option<Answer> {
        let (mut head, mut len) = (Vec::new(), 0);
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).await.ok()? == 0 {
                return None;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                len = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
            head.push(line);
        }
        let status = head[0].split(' ').nth(1).unwrap().parse().unwrap();
        let mut body = vec![0; len];
        self.0.read_exact(&mut body).await.unwrap();
        Some((status, String::from_utf8(body).unwrap()))
    }

    async fn call(&mut self, method: &str, call: &str, body: &str) -> Answer {
        self.send(request(method, &format!("/api/v1/{call}"), body)).await;
        self.receive().await.expect("an answer")
    }
}

fn request(method: &str, path: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

impl Fixture {
    async fn connect(&self) -> Client {
        Client(BufReader::new(UnixStream::connect(&self.path).await.unwrap()))
    }

    async fn call(&self, method: &str, call: &str, body: &str) -> Answer {
        self.connect().await.call(method, call, body).await
    }
}

fn messages(body: &str) -> Vec<String> {
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{body:?}: {error}"))
}

/// Parses the head of an answer in the same way as Cloud Hypervisor's client, which Kata Containers
/// uses. It takes everything between the version and the end of the line as the status. It expects
/// the name of the length header in title case.
fn as_api_client_reads(head: &str) -> Option<(u16, usize)> {
    let (status, headers) = head.strip_prefix("HTTP/1.1 ")?.split_once("\r\n")?;
    let length = match headers.split_once("Content-Length: ") {
        Some((_, rest)) => rest.split("\r\n").next()?.trim().parse().ok()?,
        None => 0,
    };
    Some((status.trim().parse().ok()?, length))
}

#[test]
fn calls_are_counted_by_name_and_status() {
    let calls = Arc::<CallMetrics>::default();
    let counted = |vm, events| calls.count_calls(router(vm, events));
    run_serving(Limits::API, counted, async |fixture| {
        let requests = [
            ("GET", "vmm.ping"),
            ("GET", "vmm.ping"),
            ("PUT", "vm.boot"),
            ("PUT", "vmm.ping"),
            ("PUT", "vm.add-fs"),
            ("PUT", "vm.fly"),
            ("GET", "other"),
        ];
        for (method, call) in requests {
            fixture.call(method, call, "").await;
        }
    });
    let answers = |call, status| calls.answers(call, status);
    assert_eq!((answers("vmm.ping", 200), answers("vmm.ping", 405)), (2, 1));
    assert_eq!((answers("vm.boot", 405), answers("vm.add-fs", 501)), (1, 1));
    // The names of unknown calls are chosen by the client.
    assert_eq!((answers("unknown", 404), answers("vm.fly", 404)), (2, 0));
}

#[test]
fn answers_can_be_parsed_by_cloud_hypervisors_client() {
    run(async |fixture| {
        for (method, call, body, expected) in [
            ("GET", "vmm.ping", "", 200),
            ("GET", "vm.info", "", 200),
            ("PUT", "vm.pause", "", 204),
            ("PUT", "vm.boot", "", 405),
            ("PUT", "vm.reboot", "", 500),
            ("PUT", "vm.create", "{", 400),
            ("GET", "vm.nonsense", "", 404),
            ("GET", "vm.pause", "", 405),
        ] {
            let mut client = fixture.connect().await;
            client.send(request(method, &format!("/api/v1/{call}"), body)).await;
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert_ne!(client.0.read_line(&mut head).await.unwrap(), 0, "{head:?}");
            }
            let (status, length) = as_api_client_reads(&head).unwrap_or_else(|| panic!("{head:?}"));
            assert_eq!(status, expected, "{call}");
            let mut body = vec![0; length];
            client.0.read_exact(&mut body).await.unwrap();
            assert_eq!(status == 204, body.is_empty(), "{call}: {body:?}");
        }
    });
}

#[test]
fn ping_returns_version_and_process() {
    run(async |fixture| {
        let (status, body) = fixture.call("GET", "vmm.ping", "").await;
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &answer["version"]), (200, &json!(env!("CARGO_PKG_VERSION"))));
        assert_eq!(answer["pid"], json!(std::process::id()));
        assert!(answer["build_version"].is_string() && answer["features"].is_array());
    });
}

#[test]
fn info_has_the_fields_of_cloud_hypervisor() {
    run(async |fixture| {
        let (status, body) = fixture.call("GET", "vm.info", "").await;
        let info: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &info["state"]), (200, &json!("Paused")));
        assert_eq!(info["pause_reason"], json!("flush of data failed"));
        assert_eq!(info["memory_actual_size"], json!(512 << 20));
        assert_eq!(info["config"]["memory"]["size"], json!(512 << 20));
        assert_eq!(info["config"]["memory"]["hotplug_method"], json!("VirtioMem"));
        let cpus = json!({"boot_vcpus": 1, "max_vcpus": 1, "max_phys_bits": 46, "features": {"amx": false},
                          "nested": true, "core_scheduling": "Vm"});
        assert_eq!(info["config"]["cpus"], cpus);
    });
}

#[test]
fn memory_returns_every_size_and_the_reason_of_a_stuck_resize() {
    run(async |fixture| {
        let (status, body) = fixture.call("GET", "vm.memory", "").await;
        let answer: Value = serde_json::from_str(&body).unwrap();
        let zone = &answer["zones"][0];
        assert_eq!((status, &zone["requested_bytes"]), (200, &json!(2 << 20)));
        assert_eq!(zone["online_bytes"], Value::Null);
        assert_eq!(zone["status"], json!({"state": "stuck", "reason": "busy pages"}));
    });
}

#[test]
fn counters_are_by_device_and_name() {
    run(async |fixture| {
        let (status, body) = fixture.call("GET", "vm.counters", "").await;
        assert_eq!((status, &*body), (200, r#"{"_disk0":{"read_ops":7,"write_ops":0}}"#));
    });
}

#[test]
fn volumes_have_interface_and_reason_of_failure() {
    run(async |fixture| {
        let (status, body) = fixture.call("GET", "vm.volumes", "").await;
        let answer: Value = serde_json::from_str(&body).unwrap();
        let volume = &answer["volumes"][0];
        assert_eq!((status, &volume["name"]), (200, &json!("data")));
        assert_eq!(
            (&volume["interface"], &volume["durability"]),
            (&json!("nvdimm"), &json!("page-cache"))
        );
        assert_eq!(volume["unmapped_reason"], "its reserve is 2 MiB");
        assert_eq!(volume["status"], json!({"state": "failed", "reason": "no room"}));
        assert_eq!(volume["guest_btt"], json!({"verdict": "suspect", "reason": "preempts fully"}));
    });
}

#[test]
fn pools_have_use_of_bytes_and_reason_of_read_only() {
    run(async |fixture| {
        let (status, body) = fixture.call("GET", "pool.info", "").await;
        let answer: Value = serde_json::from_str(&body).unwrap();
        let pool = &answer["pools"][0];
        assert_eq!((status, &pool["path"]), (200, &json!("/pm/pool")));
        assert_eq!((&pool["memory_bytes"], &pool["volumes"]), (&json!(256 << 20), &json!(1)));
        assert_eq!(pool["status"], json!({"state": "read-only", "reason": "no room"}));
    });
}

#[test]
fn repeated_resizes_reach_the_owner() {
    run(async |mut fixture| {
        for _ in 0..2 {
            let (status, body) =
                fixture.call("PUT", "vm.resize", r#"{"desired_ram": 1073741824}"#).await;
            assert_eq!((status, body.as_str()), (204, ""));
            assert!(fixture.asked.recv().await.unwrap().contains("desired_ram: Some(1073741824)"));
        }
    });
}

#[test]
fn pressure_is_shown_and_changed() {
    run(async |mut fixture| {
        let (status, body) = fixture.call("GET", "vm.pressure", "").await;
        assert_eq!(status, 200);
        assert_eq!(serde_json::from_str::<Value>(&body).unwrap()["policy"], json!("psi"));
        fixture.asked.recv().await.unwrap();
        let change = r#"{"policy": "fixed", "size": 2097152, "dry_run": true, "resume": true}"#;
        assert_eq!(fixture.call("PUT", "vm.pressure", change).await.0, 204);
        let asked = fixture.asked.recv().await.unwrap();
        assert!(
            asked.contains(
                r#"policy: Some("fixed"), size: Some(2097152), dry_run: Some(true), pause: None, resume: Some(true)"#
            ),
            "{asked}"
        );
        let change = r#"{"pause": true, "resume": true, "zone": "pm"}"#;
        assert_eq!(fixture.call("PUT", "vm.pressure", change).await.0, 204);
        let asked = fixture.asked.recv().await.unwrap();
        assert!(
            asked.contains(r#"pause: Some(true), resume: Some(true), zone: Some("pm")"#),
            "{asked}"
        );
        let change = r#"{"policy": "pmb", "params": {"unit": "8M"}, "rules": {"cool_down": 2000, "floor": "64M"}}"#;
        assert_eq!(fixture.call("PUT", "vm.pressure", change).await.0, 204);
        let asked = fixture.asked.recv().await.unwrap();
        let params = r#"params: Some(ParamSettings({"unit": Text("8M")})), "#;
        let rules =
            r#"rules: Some(ParamSettings({"cool_down": Number(2000), "floor": Text("64M")}))"#;
        assert!(asked.contains(&format!("{params}{rules}")), "{asked}");
        // A null value counts as an omitted field.
        assert_eq!(
            fixture
                .call("PUT", "vm.pressure", r#"{"policy": null, "size": null, "params": null}"#)
                .await
                .0,
            204
        );
    });
}

#[test]
fn unsupported_calls_are_refused_by_name_for_any_body() {
    run(async |mut fixture| {
        for (call, why) in REFUSED {
            for body in ["", "{}", "nonsense"] {
                let (status, answer) = fixture.call("PUT", call, body).await;
                let expected = format!("{call} is not supported by foreshore: {why}");
                assert_eq!((status, messages(&answer)), (501, vec![expected]));
            }
            assert_eq!(fixture.call("GET", call, "").await.0, 405);
        }
        // The server keeps a connection whose refused calls have long bodies.
        let mut client = fixture.connect().await;
        for body in ["[".repeat(60_000), "{}".to_owned(), "[".repeat(60_000)] {
            assert_eq!(client.call("PUT", "vm.add-fs", &body).await.0, 501);
        }
        assert!(fixture.asked.try_recv().is_err());
    });
}

#[test]
fn vm_is_created_from_valid_configuration_and_deleted() {
    run(async |mut fixture| {
        let created =
            fixture.call("PUT", "vm.create", r#"{"payload": {"kernel": "/vmlinux"}}"#).await;
        assert_eq!(created, (204, String::new()));
        assert!(fixture.asked.recv().await.unwrap().contains(r#"kernel: Some("/vmlinux")"#));
        for (body, text) in [
            ("", "it is empty"),
            ("[]", "it is not a JSON object"),
            ("{", "EOF"),
            ("{}", "payload is missing"),
            (
                r#"{"payload": {"kernel": "/k"}, "disks": [{"path": "/d"}, {}]}"#,
                "disks[1].path is missing",
            ),
            (r#"{"payload": {"kernel": "/k"}, "memory": {"size": 1}}"#, "--memory: size is 1"),
            (r#"{"payload": {"kernel": "/k"}, "fs": [{}]}"#, "--fs is not supported by foreshore"),
        ] {
            let (status, answer) = fixture.call("PUT", "vm.create", body).await;
            assert_eq!(status, 400, "{body}");
            assert!(messages(&answer)[0].contains(text), "{body}: {answer}");
        }
        assert!(fixture.asked.try_recv().is_err(), "an invalid request has reached the VM task");
        let (status, answer) =
            fixture.call("PUT", "vm.create", r#"{"payload": {"kernel": "/created"}}"#).await;
        assert_eq!(status, 405);
        assert_eq!(messages(&answer), ["the VM exists already; vm.delete deletes it"]);
        assert_eq!(fixture.call("PUT", "vm.delete", "").await, (204, String::new()));
    });
}

#[test]
fn errors_of_the_owner_have_the_codes_of_cloud_hypervisor() {
    run(async |fixture| {
        for (call, body, expected, text) in [
            (
                "vm.boot",
                "",
                405,
                "vm.boot needs a VM that is not booted, or paused, but the VM is running; vm.reboot restarts it",
            ),
            ("vm.shutdown", "", 404, "the VM is not created; vm.create creates it"),
            ("vm.reboot", "", 500, "no memory"),
            (
                "vm.resume",
                "",
                409,
                "the VM cannot be resumed: flush of data failed; reboot it or shut it down; unflushed data is lost",
            ),
            (
                "vm.resize-disk",
                r#"{"id": "x", "desired_size": 1}"#,
                404,
                "no such disk: \"x\"; existing disks: _disk0",
            ),
            (
                "vm.resize-zone",
                r#"{"id": "x", "desired_ram": 2097152}"#,
                400,
                "The VM has no zone \"x\"; its zones: dram",
            ),
            ("vm.resize", r#"{"desired_vcpus": 7}"#, 400, "desired_vcpus 7: there are 2"),
        ] {
            let (status, answer) = fixture.call("PUT", call, body).await;
            assert_eq!((status, messages(&answer)), (expected, vec![text.to_owned()]), "{call}");
        }
    });
}

#[test]
fn zone_is_resized_by_its_name() {
    run(async |mut fixture| {
        for bytes in [0u64, 2 << 20] {
            let body = format!(r#"{{"id": "pm", "desired_ram": {bytes}}}"#);
            assert_eq!(fixture.call("PUT", "vm.resize-zone", &body).await.0, 204);
            let asked = fixture.asked.recv().await.unwrap();
            assert!(asked.contains(&format!(r#"id: "pm", desired_ram: {bytes}"#)), "{asked}");
        }
        for (body, text) in [
            (
                r#"{"id": "pm", "desired_ram": 3145729}"#,
                "vm.resize-zone: desired_ram is 3145729 bytes, which is not a multiple of 4 KiB",
            ),
            (
                r#"{"id": "pm", "desired_ram": 9007199254740992}"#,
                "vm.resize-zone: desired_ram is 8192 TiB, and must be at most 4096 TiB",
            ),
        ] {
            let (status, answer) = fixture.call("PUT", "vm.resize-zone", body).await;
            assert_eq!((status, messages(&answer)), (400, vec![text.to_owned()]));
        }
        for body in [r#"{"id": "pm"}"#, r#"{"desired_ram": 2097152}"#, "{}"] {
            assert_eq!(fixture.call("PUT", "vm.resize-zone", body).await.0, 400, "{body}");
        }
        assert!(fixture.asked.try_recv().is_err());
    });
}

#[test]
fn sizes_out_of_bounds_never_reach_the_owner() {
    run(async |mut fixture| {
        for (body, text) in [
            (r#"{"desired_ram": 0}"#, "vm.resize: desired_ram is 0, and must be at least 4 KiB"),
            (
                r#"{"desired_ram": 3145729}"#,
                "vm.resize: desired_ram is 3145729 bytes, which is not a multiple of 4 KiB",
            ),
            (
                r#"{"desired_ram": 9007199254740992}"#,
                "vm.resize: desired_ram is 8192 TiB, and must be at most 4096 TiB",
            ),
        ] {
            let (status, answer) = fixture.call("PUT", "vm.resize", body).await;
            assert_eq!((status, messages(&answer)), (400, vec![text.to_owned()]));
        }
        for body in
            ["", "null", "[1, 2, 3]", "{", r#"{"desired_vcpus": 256}"#, r#"{"desired_ram": "1G"}"#]
        {
            assert_eq!(fixture.call("PUT", "vm.resize", body).await.0, 400, "{body}");
        }
        assert!(fixture.asked.try_recv().is_err());
    });
}

#[test]
fn unknown_calls_and_wrong_methods_have_different_errors() {
    run(async |fixture| {
        let (status, body) = fixture.call("PUT", "vm.fly", "").await;
        assert_eq!(
            (status, messages(&body)),
            (404, vec!["no such call: /api/v1/vm.fly".to_owned()])
        );
        let (status, body) = fixture.call("GET", "vm.resize", "").await;
        assert_eq!(status, 405);
        assert_eq!(messages(&body), ["/api/v1/vm.resize does not support GET"]);
        let mut client = fixture.connect().await;
        client.send(request("GET", "/", "")).await;
        assert_eq!(client.receive().await.unwrap().0, 404);
    });
}

#[test]
fn body_over_the_limit_is_refused() {
    run(async |mut fixture| {
        let huge = format!(r#"{{"desired_ram": 2097152, "x": "{}"}}"#, "x".repeat(64 << 10));
        let (status, body) = fixture.call("PUT", "vm.resize", &huge).await;
        assert_eq!((status, messages(&body).len()), (413, 1));
        // A body is also refused by its announced length alone, and if it is sent in chunks.
        let mut client = fixture.connect().await;
        client
            .send(
                "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n",
            )
            .await;
        assert_eq!(client.receive().await.unwrap().0, 413);
        let mut client = fixture.connect().await;
        let chunk = format!("{:x}\r\n{huge}\r\n0\r\n\r\n", huge.len());
        client
            .send(format!(
                "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}"
            ))
            .await;
        assert_eq!(client.receive().await.unwrap().0, 413);
        assert!(fixture.asked.try_recv().is_err());
    });
}

#[test]
fn invalid_http_gets_400_and_is_closed() {
    run(async |fixture| {
        for bytes in [
            "\0\0\0\0\r\n\r\n",
            "GET\r\n\r\n",
            "GET / HTTP/9.9\r\n\r\n",
            "PUT / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        ] {
            let mut client = fixture.connect().await;
            client.send(bytes).await;
            assert_eq!(client.receive().await.expect("an answer").0, 400, "{bytes:?}");
            assert_eq!(client.receive().await, None, "{bytes:?}");
        }
        // If the head of a request is not completed in time, the connection is closed.
        let mut client = fixture.connect().await;
        let _ = client.0.get_mut().write_all(&vec![b'a'; 1 << 20]).await;
        assert!(client.receive().await.is_none_or(|(status, _)| (400..500).contains(&status)));
        assert_eq!(fixture.call("GET", "vmm.ping", "").await.0, 200);
    });
}

#[test]
fn vmm_shutdown_is_answered_before_the_server_stops() {
    run(async |fixture| {
        let (mut idle, mut half) = (fixture.connect().await, fixture.connect().await);
        assert_eq!(idle.call("GET", "vmm.ping", "").await.0, 200);
        half.send("GET /").await;
        let mut client = fixture.connect().await;
        client.send(request("PUT", "/api/v1/vmm.shutdown", "")).await;
        let Fixture { server, path, mut asked, _dir, .. } = fixture;
        assert!(asked.recv().await.unwrap().contains("ShutdownVmm"));
        server.stop().await;
        assert_eq!(client.receive().await.unwrap().0, 204);
        assert_eq!(client.receive().await, None);
        assert_eq!(idle.receive().await, None);
        assert!(!path.exists());
    });
}

#[test]
fn requests_are_refused_after_the_owner_ends() {
    run(async |fixture| {
        assert_eq!(fixture.call("PUT", "vmm.shutdown", "").await.0, 204);
        let (status, body) = fixture.call("GET", "vm.info", "").await;
        assert_eq!((status, messages(&body)), (503, vec!["the VMM is ending".to_owned()]));
    });
}

#[test]
fn client_returns_answers_and_reasons() {
    run(async |fixture| {
        let client = super::Client::new(&fixture.path);
        let ping: Value = serde_json::from_slice(&client.get("vmm.ping").await.unwrap()).unwrap();
        assert_eq!(ping["pid"], json!(std::process::id()));
        let body = r#"{"desired_ram": 2097152}"#.to_owned();
        assert!(client.put("vm.resize", Some(body)).await.unwrap().is_empty());
        let error = client.put("vm.reboot", None).await.unwrap_err();
        assert!(
            matches!(&error, ClientError::Refused { status, .. } if status.as_u16() == 500),
            "{error}"
        );
        assert_eq!(error.to_string(), "500 Internal Server Error: no memory");
    });
}
