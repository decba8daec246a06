//! Sends invalid requests to a VMM with a guest, from two clients concurrently. They cover every
//! field of every body with every kind of value. Each request should fail with a reason, the guest
//! should continue to run, and nothing may change.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::{Guest, http};
use serde_json::{Value, json};

use values::values;

/// Values that the API's unit tests also send.
#[path = "../../../../../vmm/src/api/tests/values.rs"]
mod values;

guest_tests::tests![
    guest_is_unaffected_by_invalid_api_requests: 300,
    guest_is_unaffected_by_a_hundred_thousand_requests: 2400 (extended) =>
        send_invalid_requests(100_000, 10_000),
];

/// All fields of Cloud Hypervisor's schemas.
const NAMES: &str =
    include_str!("../../../../../vmm/tests/compatibility/cloud-hypervisor-0.3.0.names");
/// Longest time without output from the guest, which prints a line per second unless it hangs.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(60);
/// Number of connections that send only half of a request.
const HALF_REQUESTS: usize = 50;

struct InvalidRequest {
    call: &'static str,
    body: String,
    statuses: &'static [u16],
}

/// Expected statuses of calls that do not exist.
const NOT_IMPLEMENTED: &[u16] = &[501];
const REFUSED: &[u16] = &[400, 404, 405, 409];
/// Expected statuses of calls that name files or devices missing on the host.
const REFUSED_BY_THE_HOST: &[u16] = &[400, 404, 405, 409, 500];
/// Expected statuses of calls that succeed without effect if the body contains no known field.
const REFUSED_OR_EMPTY: &[u16] = &[204, 400, 404, 405, 409];

fn fields_of(schema: &str) -> Vec<&'static str> {
    let fields = NAMES.lines().filter_map(|line| line.strip_prefix("field ")?.split(' ').next());
    fields.filter_map(|field| field.strip_prefix(schema)?.strip_prefix('.')).collect()
}

/// Returns an object for each field and value. Each object also contains fields that make the
/// request fail: `failing_fields`, or `other_failing_fields` if `failing_fields` contains the
/// field.
fn each(fields: &[&str], failing_fields: &Value, other_failing_fields: &Value) -> Vec<Value> {
    let with = |field: &str, value| {
        let mut object = if failing_fields.get(field).is_some() {
            other_failing_fields.clone()
        } else {
            failing_fields.clone()
        };
        object[field] = value;
        object
    };
    fields
        .iter()
        .flat_map(|field| values().into_iter().map(move |value| with(field, value)))
        .collect()
}

/// Bodies with sections of vm.create. They are rejected because a VM exists.
fn of_create() -> Vec<Value> {
    let of_section = |(section, schema, is_list): (&'static str, &str, bool)| {
        let all = [values(), each(&fields_of(schema), &json!({}), &json!({}))].concat();
        all.into_iter().map(move |value| {
            let value = if is_list { json!([value]) } else { value };
            json!({"payload": {"kernel": "/vmlinux"}, section: value})
        })
    };
    [
        ("payload", "PayloadConfig", false),
        ("cpus", "CpusConfig", false),
        ("memory", "MemoryConfig", false),
        ("disks", "DiskConfig", true),
        ("net", "NetConfig", true),
        ("rng", "RngConfig", false),
        ("balloon", "BalloonConfig", false),
        ("pmem", "PmemConfig", true),
        ("serial", "SerialConfig", false),
        ("console", "ConsoleConfig", false),
        ("vsock", "VsockConfig", false),
        ("numa", "NumaConfig", true),
        ("platform", "PlatformConfig", false),
    ]
    .into_iter()
    .flat_map(of_section)
    .collect()
}

/// Bodies that name unknown devices, impossible sizes or missing objects.
fn of_a_vm_that_runs() -> Vec<(&'static str, Vec<Value>, &'static [u16])> {
    let none = json!({});
    let known =
        |call, schema: &str, failing_fields: Value, other_failing_fields: Value, statuses| {
            (call, each(&fields_of(schema), &failing_fields, &other_failing_fields), statuses)
        };
    let (no_disk, no_file) = (json!({"path": "/nowhere/disk"}), json!({"file": "/nowhere/file"}));
    let (no_tap, no_mtu) = (json!({"tap": "lo"}), json!({"mtu": 5}));
    let (no_size, no_zone) = (json!({"id": "dram", "desired_ram": 7}), json!({"id": "dram"}));
    let no_device = json!({"id": "nobody", "desired_size": 1});
    let volume_fields =
        ["pool", "name", "size", "format", "interface", "create", "thin", "readonly", "force"];
    let no_volume = json!({"pool": "/nowhere/pool", "name": "none"});
    let no_pool = json!({"path": "/nowhere/pool"});
    let pressure_fields =
        ["policy", "size", "params", "rules", "dry_run", "pause", "resume", "zone"];
    vec![
        known("vm.add-disk", "DiskConfig", no_disk, none.clone(), REFUSED_BY_THE_HOST),
        known("vm.add-net", "NetConfig", no_tap, no_mtu, REFUSED_BY_THE_HOST),
        (
            "vm.add-pm-volume",
            each(&volume_fields, &no_volume, &json!({"name": "none"})),
            REFUSED_BY_THE_HOST,
        ),
        known("vm.add-pmem", "PmemConfig", no_file, none.clone(), REFUSED_BY_THE_HOST),
        // The VM already has a vsock device.
        known(
            "vm.add-vsock",
            "VsockConfig",
            json!({"cid": 4, "socket": "/nowhere/s"}),
            none.clone(),
            REFUSED,
        ),
        known("vm.remove-device", "VmRemoveDevice", none.clone(), none.clone(), REFUSED),
        known("vm.resize", "VmResize", none.clone(), none.clone(), REFUSED_OR_EMPTY),
        known("vm.resize-zone", "VmResizeZone", no_size, no_zone, REFUSED),
        known("vm.resize-disk", "VmResizeDisk", no_device.clone(), no_device, REFUSED),
        ("pool.grow", each(&["path", "size", "force"], &no_pool, &none), REFUSED),
        (
            "vm.pressure",
            each(&pressure_fields, &json!({"policy": "greed"}), &none),
            REFUSED_OR_EMPTY,
        ),
    ]
}

fn unsupported_calls() -> Vec<(&'static str, Vec<Value>, &'static [u16])> {
    let schemas = [
        ("vm.add-device", "DeviceConfig"),
        ("vm.add-fs", "FsConfig"),
        ("vm.add-generic-vhost-user", "GenericVhostUserConfig"),
        ("vm.add-user-device", "VmAddUserDevice"),
        ("vm.add-vdpa", "VdpaConfig"),
        ("vm.coredump", "VmCoredumpData"),
        ("vm.receive-migration", "ReceiveMigrationData"),
        ("vm.restore", "RestoreConfig"),
        ("vm.send-migration", "SendMigrationData"),
        ("vm.snapshot", "VmSnapshotConfig"),
    ];
    let none = json!({});
    schemas
        .map(|(call, schema)| (call, each(&fields_of(schema), &none, &none), NOT_IMPLEMENTED))
        .into()
}

fn invalid_requests() -> Result<Vec<InvalidRequest>> {
    let mut calls = [of_a_vm_that_runs(), unsupported_calls()].concat();
    calls.push(("vm.create", of_create(), REFUSED));
    let mut all = Vec::new();
    for (call, bodies, statuses) in calls {
        ensure!(!bodies.is_empty(), "{call} has no fields");
        all.extend(bodies.into_iter().map(|body| InvalidRequest {
            call,
            body: body.to_string(),
            statuses,
        }));
        let nested_arrays = "[".repeat(60_000);
        let no_objects = [
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
            &nested_arrays,
        ];
        all.extend(no_objects.map(|body| InvalidRequest { call, body: body.to_owned(), statuses }));
    }
    Ok(all)
}

fn send(
    stream: &mut UnixStream,
    InvalidRequest { call, body, statuses }: &InvalidRequest,
) -> Result<()> {
    let answer = http::request_with(stream, call, body, &[])
        .with_context(|| format!("{call} {body:.200}"))?;
    ensure!(statuses.contains(&answer.status), "{call} {body:.200}: {answer:?}");
    if answer.status >= 400 {
        let messages: Vec<String> = serde_json::from_str(&answer.body)?;
        ensure!(
            messages.iter().any(|message| !message.is_empty()),
            "{call} {body:.200}: {answer:?}"
        );
    }
    Ok(())
}

fn nothing_has_changed(before: &Value, guest: &Guest) -> Result<()> {
    let now = guest.get("vm.info")?;
    let differences = differences("", before, &now);
    ensure!(differences.is_empty(), "Bad requests changed the VM: {differences:#?}");
    Ok(())
}

/// Lists the paths at which two JSON values differ, with both values.
fn differences(path: &str, before: &Value, now: &Value) -> Vec<String> {
    let (Some(old), Some(new)) = (before.as_object(), now.as_object()) else {
        return if before == now { Vec::new() } else { vec![format!("{path}: {before} is {now}")] };
    };
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    names
        .into_iter()
        .flat_map(|name| differences(&format!("{path}.{name}"), &before[name], &now[name]))
        .collect()
}

/// Sends `requests` requests from two clients concurrently. The first `separate_connections`
/// requests each use a separate connection.
fn send_invalid_requests(requests: usize, separate_connections: usize) -> Result<()> {
    let requests_to_send = invalid_requests()?;
    let guest = Guest::builder().boot()?;
    // The agent reports the kernel some time after boot. A request does not cause this change.
    guest.wait_until("vm.info has the guest's kernel", LIMIT, || {
        Ok(!guest.get("vm.info")?["guest_kernel"].is_null())
    })?;
    let before = guest.get("vm.info")?;
    let mut heartbeat = guest
        .start_script(SILENCE_LIMIT, "while ! test -e /tmp/end; do echo beat; sleep 1; done")?;
    let first_counts = guest.resource_counts()?;
    let connect = || UnixStream::connect(guest.api_socket()).context("Cannot connect");
    // Each of these connections sends half a request, and then nothing until the end.
    let half_requests = (0..HALF_REQUESTS).map(|_| {
        let mut stream = connect()?;
        stream.write_all(b"PUT /api/v1/vm.shutdown HTTP/1.1\r\nHost: x\r\nContent-Le")?;
        Ok(stream)
    });
    let half_requests: Vec<_> = half_requests.collect::<Result<_>>()?;
    let client = |first: usize| -> Result<()> {
        let mut stream = connect()?;
        for nth in (first..requests).step_by(2) {
            if nth < separate_connections {
                stream = connect()?;
            }
            send(&mut stream, &requests_to_send[nth % requests_to_send.len()])?;
        }
        Ok(())
    };
    thread::scope(|scope| -> Result<()> {
        let clients = [0, 1].map(|first| scope.spawn(move || client(first)));
        while !clients.iter().all(|client| client.is_finished()) {
            ensure!(
                heartbeat.next_line().is_some_and(|line| line == "beat"),
                "The guest's heartbeat stopped"
            );
            nothing_has_changed(&before, &guest)?;
        }
        clients.into_iter().try_for_each(|client| client.join().expect("a client does not panic"))
    })?;
    println!("{requests} requests, of {} bad ones", requests_to_send.len());
    drop(half_requests);
    guest.wait_until_resources_are_freed(&first_counts)?;
    nothing_has_changed(&before, &guest)?;
    guest.run("touch /tmp/end")?;
    ensure!(heartbeat.finish()?.code == 0, "The guest's heartbeat failed");
    guest.no_kernel_complaints()
}

fn guest_is_unaffected_by_invalid_api_requests() -> Result<()> {
    let all = invalid_requests()?.len();
    send_invalid_requests(all, all / 20)
}
