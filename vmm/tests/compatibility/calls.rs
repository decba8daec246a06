//! Tests calls on a server whose owner grants every request.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use foreshore::api::{Limits, Server, Socket, router};
use foreshore::config::ApiSocket;
use foreshore::governor::info::PressureInfo;
use foreshore::vm::request::{PciDeviceInfo, Requests, VmHandle, VmInfo, VmRequest};
use foreshore_devices::events::Events;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use crate::names::{of_kind, samples};
use crate::verdict::Verdict;

/// Server, and the text of each request that its owner received.
pub(crate) struct Api {
    path: PathBuf,
    asked: Arc<Mutex<Vec<String>>>,
    /// True if the VM is running.
    runs: Arc<AtomicBool>,
    _server: Server,
    _dir: TempDir,
}

/// Results of trying a call.
pub(crate) struct Tried {
    pub verdict: Verdict,
    /// HTTP statuses of the answers, both for a running VM and for a stopped one.
    pub statuses: BTreeSet<u16>,
}

/// Information about a VM, with all optional fields.
fn info() -> VmInfo {
    let node = json!({"id": "_disk0", "resources": [], "children": [], "pci_bdf": "0000:00:01.0"});
    serde_json::from_value(json!({
        "config": {"payload": {"kernel": "/k"}}, "state": "Running", "memory_actual_size": 1,
        "device_tree": {"_disk0": node}
    }))
    .expect("vm.info's fields")
}

/// Answers every request as the VM task would on success.
async fn own(mut requests: Requests, asked: Arc<Mutex<Vec<String>>>, runs: Arc<AtomicBool>) {
    while let Some(request) = requests.recv().await {
        asked.lock().push(format!("{request:?}"));
        match request {
            VmRequest::Info(reply) => drop(reply.send(Ok(info()))),
            VmRequest::AddDevice(_, reply) => {
                let added =
                    PciDeviceInfo { id: "_disk0".to_owned(), bdf: "0000:00:01.0".to_owned() };
                drop(reply.send(Ok(runs.load(Ordering::Relaxed).then_some(added))));
            }
            VmRequest::Status(_) => unreachable!("no call of the API needs it"),
            VmRequest::Memory(reply) => drop(reply.send(Ok(Vec::new()))),
            VmRequest::Counters(reply) => drop(reply.send(Ok([].into()))),
            VmRequest::Volumes(reply) => drop(reply.send(Ok(Vec::new()))),
            VmRequest::Pools(reply) => drop(reply.send(Ok(Vec::new()))),
            VmRequest::Pressure(_, reply) => drop(reply.send(Ok(PressureInfo::default()))),
            VmRequest::Create(_, reply)
            | VmRequest::Delete(reply)
            | VmRequest::Resize(_, reply)
            | VmRequest::ResizeDisk(_, reply)
            | VmRequest::GrowPool(_, reply)
            | VmRequest::RemoveDevice(_, reply)
            | VmRequest::ChangePressure(_, reply)
            | VmRequest::Boot(reply)
            | VmRequest::Pause(reply)
            | VmRequest::Resume(reply)
            | VmRequest::Shutdown(reply)
            | VmRequest::Reboot(reply)
            | VmRequest::PowerButton(reply)
            | VmRequest::Nmi(reply)
            | VmRequest::ShutdownVmm(reply) => drop(reply.send(Ok(()))),
        }
    }
}

/// Valid bodies of calls. Calls that are not listed have no body.
const VALID: &[(&str, &str)] = &[
    ("pool.grow", r#"{"path": "/p"}"#),
    ("vm.add-disk", r#"{"path": "/d"}"#),
    ("vm.add-net", r#"{"tap": "t"}"#),
    ("vm.add-pm-volume", r#"{"pool": "/p", "name": "a"}"#),
    ("vm.add-pmem", r#"{"file": "/p"}"#),
    ("vm.add-vsock", r#"{"cid": 3, "socket": "/s"}"#),
    ("vm.create", r#"{"payload": {"kernel": "/k"}}"#),
    ("vm.pressure", r#"{"pause": true}"#),
    ("vm.remove-device", r#"{"id": "a"}"#),
    ("vm.resize", r#"{"desired_vcpus": 1}"#),
    ("vm.resize-disk", r#"{"id": "a", "desired_size": 512}"#),
    ("vm.resize-zone", r#"{"id": "a", "desired_ram": 2097152}"#),
];

impl Api {
    /// Runs `test` on a runtime with a single thread, as in the VMM.
    pub(crate) fn run<T, F: Future<Output = T>>(test: impl FnOnce(Self) -> F) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("api");
            let (vm, requests) = VmHandle::channel();
            let (asked, runs) = (Arc::default(), Arc::default());
            tokio::spawn(own(requests, Arc::clone(&asked), Arc::clone(&runs)));
            let socket =
                Socket::for_api(&ApiSocket::Path(path.clone(), Default::default())).unwrap();
            let server = Server::start(socket, router(vm, Events::start()), Limits::API).unwrap();
            test(Self { path, asked, runs, _server: server, _dir: dir }).await
        })
    }

    /// Sends a request on a new connection. Returns the HTTP status, and the body if the answer has
    /// a length. The stream of events has no length and never ends.
    pub(crate) async fn exchange(&self, method: &str, call: &str, body: &str) -> (u16, String) {
        let mut stream = BufReader::new(UnixStream::connect(&self.path).await.unwrap());
        let len = body.len();
        let head = format!(
            "{method} /api/v1/{call} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len}\r\n\r\n"
        );
        stream.write_all((head + body).as_bytes()).await.unwrap();
        let (mut status, mut len, mut line) = (None, 0, String::new());
        while line != "\r\n" {
            line.clear();
            assert_ne!(
                stream.read_line(&mut line).await.unwrap(),
                0,
                "{method} {call}: half an answer"
            );
            status = status.or_else(|| line.split(' ').nth(1)?.parse().ok());
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                len = value.trim().parse().unwrap();
            }
        }
        let mut answer = vec![0; len];
        stream.read_exact(&mut answer).await.unwrap();
        (status.expect("a status"), String::from_utf8(answer).unwrap())
    }

    /// Sends a valid request, once for a running VM and once for a stopped one. Returns the verdict
    /// and the HTTP statuses.
    pub(crate) async fn attempt(&self, method: &str, call: &str) -> Tried {
        let body = VALID
            .iter()
            .find(|(of, _)| *of == call && method == "PUT")
            .map_or("", |(_, body)| body);
        let (mut verdict, mut statuses) = (Verdict::Implemented, BTreeSet::new());
        for runs in [true, false] {
            self.runs.store(runs, Ordering::Relaxed);
            let (status, answer) = self.exchange(method, call, body).await;
            statuses.insert(status);
            match status {
                200..300 => {}
                501 => {
                    let reasons: Vec<String> = serde_json::from_str(&answer).unwrap();
                    let (_, reason) = reasons[0].split_once(": ").expect("a reason");
                    verdict = Verdict::Refused(reason.to_owned());
                }
                404 if answer.contains("no such call") => {
                    verdict = Verdict::NotThere("an unknown call".to_owned());
                }
                405 if answer.contains("does not support") => {
                    verdict = Verdict::NotThere("not with this method".to_owned());
                }
                _ => panic!("{method} {call} {body} is granted, and answered {status}: {answer}"),
            }
        }
        Tried { verdict, statuses }
    }

    async fn answer(&self, method: &str, call: &str, body: &str) -> Value {
        self.runs.store(true, Ordering::Relaxed);
        let (status, answer) = self.exchange(method, call, body).await;
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{call}: {status} {error}"))
    }

    /// Checks that a field in a body reaches the VM task.
    async fn of_body(&self, call: &str, base: &Value, field: &str, text: &str) -> Verdict {
        let mut body = base.clone();
        let value: Value = serde_json::from_str(text).unwrap();
        body[field] = value.clone();
        self.asked.lock().clear();
        let answer = self.exchange("PUT", call, &body.to_string()).await;
        match self.asked.lock().last() {
            Some(asked) if asked.contains(&value.to_string()) => Verdict::Implemented,
            Some(_) => Verdict::NotThere("it is passed over".to_owned()),
            None => panic!("{call} {body} is not a valid sample: {answer:?}"),
        }
    }
}

/// Function that returns a JSON value, which cannot be a constant.
pub(crate) type Json = fn() -> Value;

/// Request bodies: schema, call and required fields.
const BODIES: &[(&str, &str, Json)] = &[
    ("VmResize", "vm.resize", || json!({})),
    ("VmResizeDisk", "vm.resize-disk", || json!({"id": "a", "desired_size": 512})),
    ("VmResizeZone", "vm.resize-zone", || json!({"id": "a", "desired_ram": 2 << 20})),
    ("VmRemoveDevice", "vm.remove-device", || json!({"id": "a"})),
];
/// Answers: schema, method, call, body, and path in the answer.
const ANSWERS: &[(&str, &str, &str, &str, &str)] = &[
    ("VmmPingResponse", "GET", "vmm.ping", "", ""),
    ("VmInfo", "GET", "vm.info", "", ""),
    ("DeviceNode", "GET", "vm.info", "", "/device_tree/_disk0"),
    ("PciDeviceInfo", "PUT", "vm.add-disk", r#"{"path": "/d"}"#, ""),
];

/// Verdict on a field in a body or an answer. `None` for a schema of neither kind.
pub(crate) async fn of_field(api: &Api, name: &str, text: &'static str) -> Option<Verdict> {
    let (schema, field) = name.split_once('.').expect("a schema and a field");
    if let Some((_, call, base)) = BODIES.iter().find(|(of, ..)| *of == schema) {
        return Some(api.of_body(call, &base(), field, samples(text).other).await);
    }
    let (_, method, call, body, path) = ANSWERS.iter().find(|(of, ..)| *of == schema)?;
    let answer = api.answer(method, call, body).await;
    let is_in_answer = answer.pointer(path).is_some_and(|object| object.get(field).is_some());
    let not_in_answer = || Verdict::NotThere("it is not in the answer".to_owned());
    Some(if is_in_answer { Verdict::Implemented } else { not_in_answer() })
}

/// Verdicts on all calls. The statuses of successful calls should be those in Cloud Hypervisor's
/// API description.
pub(crate) async fn rows(api: &Api) -> Vec<(String, Verdict)> {
    let mut rows = Vec::new();
    for (name, statuses) in of_kind("call") {
        let (method, call) = name.split_once(' ').expect("a method and a call");
        let described =
            statuses.unwrap_or_else(|| panic!("{name} needs the statuses of its description"));
        let tried = api.attempt(method, call).await;
        if tried.verdict == Verdict::Implemented {
            let described =
                described.split(' ').map(|status| status.parse().expect("a status")).collect();
            assert_eq!(tried.statuses, described, "{name}");
        }
        rows.push((name.to_owned(), tried.verdict));
    }
    rows
}
