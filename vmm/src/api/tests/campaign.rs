//! Invalid requests: every field of every body with every kind of value, in every state, and from
//! many concurrent clients. Each request is answered, each refusal has a reason, and the VMM
//! continues to run.

use std::io::Write;

use super::live::{Raw, with_vmm};
use super::values::values;
use super::*;
use crate::api::body::{MAX_BODY_BYTES, MAX_CONFIG_BYTES};
use crate::config::fields;

/// Number of requests in [`many_requests_are_answered_and_leave_no_file_open`].
/// `FORESHORE_API_REQUESTS` overrides it.
const REQUESTS: usize = 2000;
/// Environment variable that marks the process of a test that runs alone.
const ALONE: &str = "FORESHORE_TEST_ALONE";

/// Valid VM configuration with `fields` added or replaced.
fn vm(fields: Value) -> String {
    let mut config = json!({"payload": {"kernel": "/vmlinux"}});
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    config.to_string()
}

/// Checks that docs/reference/api.md documents the status for this request, and that an error has a
/// reason.
#[track_caller]
fn check(what: &str, (status, body): &Answer, allowed: &[u16]) {
    assert!(allowed.contains(status), "{what}: {status} {body}");
    if *status >= 400 {
        assert!(messages(body).iter().any(|message| !message.is_empty()), "{what}: {body}");
    }
}

/// Bodies that set each field of the section to each value, in addition to all required fields.
fn bodies(section: &str, names: &[&str], needed: &Value) -> Vec<Value> {
    // Each value in place of the whole section, and then in place of each field.
    let mut all = values();
    all.extend(names.iter().flat_map(|name| {
        let with = move |value: Value| {
            let mut object = needed.clone();
            object.as_object_mut().unwrap().insert((*name).to_owned(), value);
            object
        };
        values().into_iter().map(with)
    }));
    // One required field is missing, or one unknown field is present.
    all.push(json!({"no such field": 1}));
    all.extend(needed.as_object().unwrap().keys().map(|missing| {
        let mut object = needed.clone();
        object.as_object_mut().unwrap().remove(missing);
        object
    }));
    let is_list = ["disks", "net", "pmem", "pm_volumes"].contains(&section);
    all.into_iter().map(|body| if is_list { json!([body]) } else { body }).collect()
}

/// Required fields of a section.
fn needed(section: &str) -> Value {
    match section {
        "payload" => json!({"kernel": "/vmlinux"}),
        "cpus" => json!({"boot_vcpus": 1, "max_vcpus": 1}),
        "memory" => json!({"size": 512 << 20}),
        "disks" => json!({"path": "/d"}),
        "pmem" => json!({"file": "/p"}),
        "vsock" => json!({"cid": 3, "socket": "/s"}),
        "serial" | "console" => json!({"mode": "Null"}),
        "rng" => json!({"src": "/dev/urandom"}),
        "pm_memory" => json!({"pool": "/p", "size": 2 << 20}),
        "pm_volumes" => json!({"pool": "/p", "name": "v"}),
        "pressure" => json!({"policy": "psi"}),
        _ => json!({}),
    }
}

#[test]
fn any_value_of_a_vm_field_is_accepted_or_refused() {
    with_vmm(|path| {
        let mut client = Raw::connect(path);
        let (mut taken, mut refused) = (0, 0);
        for (section, names) in fields() {
            for body in bodies(section, &names, &needed(section)) {
                let body = vm(json!({ section: body }));
                let answer = client.call("PUT", "vm.create", &body);
                check(&body, &answer, &[204, 400, 409]);
                if answer.0 == 204 {
                    taken += 1;
                    check(&body, &client.call("GET", "vm.info", ""), &[200]);
                    check(&body, &client.call("PUT", "vm.delete", ""), &[204]);
                } else {
                    refused += 1;
                }
            }
        }
        // Checks both numbers, so that the test fails if most requests are refused or cannot be
        // parsed for an unrelated reason.
        assert!(taken > 300 && refused > 1500, "{taken} taken, {refused} refused");
        check("ping", &client.call("GET", "vmm.ping", ""), &[200]);
    });
}

#[test]
fn any_value_of_a_device_or_resize_field_is_answered_in_every_state() {
    with_vmm(|path| {
        let mut client = Raw::connect(path);
        let sections = fields();
        let names =
            |section: &str| sections.iter().find(|(name, _)| *name == section).unwrap().1.clone();
        let device = |call, section: &str| (call, names(section), needed(section));
        let fixed = |call, names: &[&'static str], needed| (call, names.to_vec(), needed);
        let calls = [
            device("vm.add-disk", "disks"),
            device("vm.add-net", "net"),
            device("vm.add-pm-volume", "pm_volumes"),
            device("vm.add-pmem", "pmem"),
            device("vm.add-vsock", "vsock"),
            fixed("vm.remove-device", &["id"], json!({"id": "nobody"})),
            fixed("vm.resize", &["desired_vcpus", "desired_ram", "desired_balloon"], json!({})),
            fixed(
                "vm.resize-zone",
                &["id", "desired_ram"],
                json!({"id": "x", "desired_ram": 2 << 20}),
            ),
            fixed("vm.resize-disk", &["id", "desired_size"], json!({"id": "x", "desired_size": 1})),
            fixed(
                "vm.pressure",
                &["policy", "size", "params", "rules", "dry_run", "pause", "zone"],
                json!({}),
            ),
        ];
        for state in ["none", "Created", "Running", "Paused"] {
            let mut before = None;
            for (call, names, needed) in &calls {
                for body in bodies("", names, needed) {
                    // The VM does not change until a request succeeds.
                    let shown = before.get_or_insert_with(|| vm_that_is(state, &mut client));
                    let answer = client.call("PUT", call, &body.to_string());
                    let what = format!("{call} {body} of a VM that is {state}");
                    check(&what, &answer, &[200, 204, 400, 404, 405, 409]);
                    if answer.0 >= 400 {
                        assert_eq!(client.call("GET", "vm.info", ""), *shown, "{what}: {answer:?}");
                    } else {
                        before = None;
                    }
                }
            }
        }
    });
}

/// Creates a new VM in `state`, and returns its information.
fn vm_that_is(state: &str, client: &mut Raw) -> Answer {
    let steps =
        ["none", "Created", "Running", "Paused"].iter().position(|known| *known == state).unwrap();
    check("delete", &client.call("PUT", "vm.delete", ""), &[204]);
    for call in ["vm.create", "vm.boot", "vm.pause"].iter().take(steps) {
        let body = if *call == "vm.create" { vm(json!({})) } else { String::new() };
        check(call, &client.call("PUT", call, &body), &[204]);
    }
    client.call("GET", "vm.info", "")
}

#[test]
fn invalid_and_too_long_bodies_are_refused() {
    with_vmm(|path| {
        let long = format!(r#"{{"payload": {{"kernel": "{}"}}}}"#, "x".repeat(10 << 20));
        let deep = "[".repeat(60_000);
        let nested = format!(r#"{{"payload": {}"#, r#"{"a":"#.repeat(10_000));
        for call in [
            "vm.create",
            "vm.add-disk",
            "vm.add-net",
            "vm.resize",
            "vm.pressure",
            "vm.remove-device",
        ] {
            for body in [
                "",
                " ",
                "{",
                "[]",
                "7",
                "null",
                "\"{}\"",
                "{}{}",
                "{\"a\": }",
                "\u{feff}{}",
                &deep,
                &nested,
            ] {
                let answer = Raw::connect(path).call("PUT", call, body);
                check(&format!("{call} {:.20}", body), &answer, &[400, 404]);
            }
            // The announced length is too large, so the server need not read the body.
            let mut client = Raw::connect(path);
            client.send(&request("PUT", &format!("/api/v1/{call}"), &long)[..2000], &[]);
            check(call, &client.receive(), &[413]);
        }
        check("ping", &Raw::connect(path).call("GET", "vmm.ping", ""), &[200]);
    });
}

#[test]
fn concurrent_creates_and_deletes_are_answered() {
    with_vmm(|path| {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut client = Raw::connect(path);
                    for _ in 0..300 {
                        check(
                            "create",
                            &client.call("PUT", "vm.create", &vm(json!({}))),
                            &[204, 405],
                        );
                        check("boot", &client.call("PUT", "vm.boot", ""), &[204, 404, 405]);
                        check("info", &client.call("GET", "vm.info", ""), &[200, 404]);
                        check("delete", &client.call("PUT", "vm.delete", ""), &[204]);
                    }
                });
            }
        });
        let mut client = Raw::connect(path);
        check("info", &client.call("GET", "vm.info", ""), &[404]);
        check("create", &client.call("PUT", "vm.create", &vm(json!({}))), &[204]);
    });
}

#[test]
fn incomplete_requests_do_not_block_other_clients() {
    with_vmm(|path| {
        let whole = request("PUT", "/api/v1/vm.create", &vm(json!({})));
        let silent: Vec<_> = (1..100)
            .map(|nth| {
                let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
                stream.write_all(&whole.as_bytes()[..whole.len() * nth / 100]).unwrap();
                stream
            })
            .collect();
        let mut client = Raw::connect(path);
        check("create", &client.call("PUT", "vm.create", &vm(json!({}))), &[204]);
        check("info", &client.call("GET", "vm.info", ""), &[200]);
        // Clients that disconnect within a request have no effect either.
        drop(silent);
        check("delete", &client.call("PUT", "vm.delete", ""), &[204]);
        check("info", &client.call("GET", "vm.info", ""), &[404]);
    });
}

#[test]
fn too_many_devices_are_refused_and_a_long_valid_body_is_accepted() {
    with_vmm(|path| {
        let mut client = Raw::connect(path);
        let parts = [
            ("disks", r#"{"path":"/d"}"#),
            ("net", "{}"),
            ("pmem", r#"{"file":"/p"}"#),
            ("pm_volumes", r#"{"pool":"/p","name":"v"}"#),
            ("pm_memory", r#"{"pool":"/p","size":2097152}"#),
            ("numa", r#"{"guest_numa_id":0}"#),
        ];
        for (section, one) in parts {
            let list = vec![one; (MAX_CONFIG_BYTES - 100) / (one.len() + 1)].join(",");
            let body = format!(r#"{{"payload":{{"kernel":"/k"}},"{section}":[{list}]}}"#);
            check(section, &client.call("PUT", "vm.create", &body), &[400]);
        }
        let host_cpus: Vec<usize> = (0..128).collect();
        let affinity: Vec<Value> =
            (0..254).map(|vcpu| json!({"vcpu": vcpu, "host_cpus": host_cpus})).collect();
        let cpus = json!({"boot_vcpus": 1, "max_vcpus": 254, "affinity": affinity});
        let body = vm(json!({ "cpus": cpus }));
        assert!(body.len() > MAX_BODY_BYTES);
        check("affinity", &client.call("PUT", "vm.create", &body), &[204]);
        check("info", &client.call("GET", "vm.info", ""), &[200]);
    });
}

/// Runs in its own process, so that no other test opens or closes files while they are counted.
#[test]
fn many_requests_are_answered_and_leave_no_file_open() {
    if std::env::var_os(ALONE).is_none() {
        let name = "api::tests::campaign::many_requests_are_answered_and_leave_no_file_open";
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let output =
            command.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let (text, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
        return;
    }
    let requests = match std::env::var("FORESHORE_API_REQUESTS") {
        Ok(number) => number.parse().expect("FORESHORE_API_REQUESTS is a number"),
        Err(_) => REQUESTS,
    };
    with_vmm(move |path| {
        let mut one = Raw::connect(path);
        check("create", &one.call("PUT", "vm.create", &vm(json!({}))), &[204]);
        let before = one.call("GET", "vm.info", "");
        let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let files_before = files();
        let ask = |nth: usize, client: &mut Raw| match nth % 4 {
            0 => check("info", &client.call("GET", "vm.info", ""), &[200]),
            1 => check("add", &client.call("PUT", "vm.add-disk", r#"{"path": 7}"#), &[400]),
            2 => check("pause", &client.call("PUT", "vm.pause", ""), &[405]),
            _ => check("call", &client.call("GET", "vm.nonsense", ""), &[404]),
        };
        for nth in 0..requests / 2 {
            ask(nth, &mut one);
        }
        for nth in 0..requests / 2 {
            ask(nth, &mut Raw::connect(path));
        }
        assert_eq!(one.call("GET", "vm.info", ""), before);
        // The server may need a moment to detect that connections are closed.
        let begin = std::time::Instant::now();
        while files() > files_before {
            assert!(begin.elapsed() < PATIENCE, "{} files, {files_before} before", files());
            std::thread::yield_now();
        }
    });
}
