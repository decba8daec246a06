//! Calls, tried on a server whose owner does nothing.

use std::sync::Arc;

use foreshore::api::{Client, ClientError, Limits, Server, Socket, router};
use foreshore::config::ApiSocket;
use foreshore::events::Events;
use foreshore::vm::request::{PciDeviceInfo, Requests, VmHandle, VmInfo, VmRequest};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::names::{of_kind, samples};
use crate::verdict::Verdict;

/// A server, and what its owner was asked, in words.
pub struct Api {
    pub client: Client,
    asked: Arc<Mutex<Vec<String>>>,
    _server: Server,
    _dir: TempDir,
}

/// A VM that has all there is to tell.
fn info() -> VmInfo {
    let node = json!({"id": "_disk0", "resources": [], "children": [], "pci_bdf": "0000:00:01.0"});
    serde_json::from_value(json!({
        "config": {"payload": {"kernel": "/k"}}, "state": "Running", "memory_actual_size": 1,
        "device_tree": {"_disk0": node}
    }))
    .expect("vm.info's fields")
}

/// Answers what the answers' fields are looked up in. All others are left without an answer, which is one as well: there is a call.
async fn own(mut requests: Requests, asked: Arc<Mutex<Vec<String>>>) {
    while let Some(request) = requests.recv().await {
        asked.lock().push(format!("{request:?}"));
        match request {
            VmRequest::Info(reply) => drop(reply.send(Ok(info()))),
            VmRequest::AddDevice(_, reply) => {
                let added = PciDeviceInfo { id: "_disk0".to_owned(), bdf: "0000:00:01.0".to_owned() };
                drop(reply.send(Ok(Some(added))));
            }
            _ => {}
        }
    }
}

impl Api {
    /// Runs `test` on the runtime that the VMM has: one thread.
    pub fn run<T, F: Future<Output = T>>(test: impl FnOnce(Self) -> F) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("api");
            let (vm, requests) = VmHandle::channel();
            let asked = Arc::<Mutex<Vec<String>>>::default();
            tokio::spawn(own(requests, asked.clone()));
            let socket = Socket::for_api(&ApiSocket::Path(path.clone())).unwrap();
            let server = Server::start(socket, router(vm, Events::start()), Limits::API).unwrap();
            test(Self { client: Client::new(&path), asked, _server: server, _dir: dir }).await
        })
    }

    pub async fn call(&self, method: &str, call: &str, body: &str) -> Result<Vec<u8>, ClientError> {
        let answer = match method {
            "GET" => self.client.get(call).await,
            "PUT" => self.client.put(call, Some(body.to_owned())).await,
            _ => panic!("{call}: the API has no {method}"),
        };
        answer.map(|body| body.to_vec())
    }

    /// Whether there is such a call, and if not, why.
    pub async fn verdict(&self, method: &str, call: &str) -> Verdict {
        match self.call(method, call, "{}").await {
            Err(ClientError::Refused { status, reason }) => match status.as_u16() {
                501 => Verdict::Refused(reason.split_once(": ").expect("a reason").1.to_owned()),
                404 if reason.starts_with("There is no call") => {
                    Verdict::NotThere("an unknown call".to_owned())
                }
                405 if reason.contains("does not take") => {
                    Verdict::NotThere("not with this method".to_owned())
                }
                _ => Verdict::Implemented,
            },
            Ok(_) => Verdict::Implemented,
            Err(error) => panic!("{call}: {error}"),
        }
    }

    async fn answer(&self, method: &str, call: &str, body: &str) -> Value {
        let answer = self.call(method, call, body).await.unwrap_or_else(|error| panic!("{call}: {error}"));
        serde_json::from_slice(&answer).unwrap()
    }

    /// Whether the owner hears of a field of a body.
    async fn of_body(&self, call: &str, base: &Value, field: &str, text: &str) -> Verdict {
        let mut body = base.clone();
        let value: Value = serde_json::from_str(text).unwrap();
        body[field] = value.clone();
        self.asked.lock().clear();
        let answer = self.call("PUT", call, &body.to_string()).await;
        match self.asked.lock().last() {
            Some(asked) if asked.contains(&value.to_string()) => Verdict::Implemented,
            Some(_) => Verdict::NotThere("it is passed over".to_owned()),
            None => panic!("{call} {body} is no fair try: {answer:?}"),
        }
    }
}

/// JSON, which no constant can be.
pub type Json = fn() -> Value;

/// Bodies of calls: schema, call, and what must be in it.
const BODIES: &[(&str, &str, Json)] = &[
    ("VmResize", "vm.resize", || json!({})),
    ("VmResizeDisk", "vm.resize-disk", || json!({"id": "a", "desired_size": 512})),
    ("VmResizeZone", "vm.resize-zone", || json!({"id": "a", "desired_ram": 2 << 20})),
    ("VmRemoveDevice", "vm.remove-device", || json!({"id": "a"})),
];
/// Answers: schema, call, and where in it.
const ANSWERS: &[(&str, &str, &str, &str, &str)] = &[
    ("VmmPingResponse", "GET", "vmm.ping", "", ""),
    ("VmInfo", "GET", "vm.info", "", ""),
    ("DeviceNode", "GET", "vm.info", "", "/device_tree/_disk0"),
    ("PciDeviceInfo", "PUT", "vm.add-disk", r#"{"path": "/d"}"#, ""),
];

/// The verdict on a field of a body or an answer; none if the schema is of something else.
pub async fn of_field(api: &Api, name: &str, text: &'static str) -> Option<Verdict> {
    let (schema, field) = name.split_once('.').expect("a schema and a field");
    if let Some((_, call, base)) = BODIES.iter().find(|(of, ..)| *of == schema) {
        return Some(api.of_body(call, &base(), field, samples(text).other).await);
    }
    let (_, method, call, body, path) = ANSWERS.iter().find(|(of, ..)| *of == schema)?;
    let answer = api.answer(method, call, body).await;
    let is_told = answer.pointer(path).is_some_and(|object| object.get(field).is_some());
    let not_told = || Verdict::NotThere("it is not told".to_owned());
    Some(if is_told { Verdict::Implemented } else { not_told() })
}

/// Every call.
pub async fn rows(api: &Api) -> Vec<(String, Verdict)> {
    let mut rows = Vec::new();
    for (name, _) in of_kind("call") {
        let (method, call) = name.split_once(' ').expect("a method and a call");
        rows.push((name.to_owned(), api.verdict(method, call).await));
    }
    rows
}
