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
        sent_so_often(100_000, 10_000),
];

/// All fields of Cloud Hypervisor's schemas.
const NAMES: &str =
    include_str!("../../../../../vmm/tests/compatibility/cloud-hypervisor-0.3.0.names");
/// Longest time without output from the guest, which prints a line per second unless it hangs.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(60);
/// Number of connections that send only half of a request.
const SILENT: usize = 50;

struct Bad {
    call: &'static str,
    body: String,
    statuses: &'static [u16],
}

/// Expected statuses of calls that do not exist.
const NOT_HERE: &[u16] = &[501];
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
/// request fail: `beside`, or `instead` if `beside` contains the field.
fn each(fields: &[&str], beside: &Value, instead: &Value) -> Vec<Value> {
    let with = |field: &str, value| {
        let mut object = if beside.get(field).is_some() { instead.clone() } else { beside.clone() };
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
    let known = |call, schema: &str, beside: Value, instead: Value, statuses| {
        (call, each(&fields_of(schema), &beside, &instead), statuses)
    };
    let (no_disk, no_file) = (json!({"path": "/nowhere/disk"}), json!({"file": "/nowhere/file"}));
    let (no_tap, no_mtu) = (json!({"tap": "lo"}), json!({"mtu": 5}));
    let (no_size, no_zone) = (json!({"id": "dram", "desired_ram": 7}), json!({"id": "dram"}));
    let nobody = json!({"id": "nobody", "desired_size": 1});
    let ours = ["policy", "size", "params", "rules", "dry_run", "pause", "resume", "zone"];
    vec![
        known("vm.add-disk", "DiskConfig", no_disk, none.clone(), REFUSED_BY_THE_HOST),
        known("vm.add-net", "NetConfig", no_tap, no_mtu, REFUSED_BY_THE_HOST),
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
        known("vm.resize-disk", "VmResizeDisk", nobody.clone(), nobody, REFUSED),
        ("vm.pressure", each(&ours, &json!({"policy": "greed"}), &none), REFUSED_OR_EMPTY),
    ]
}

fn without_a_place_here() -> Vec<(&'static str, Vec<Value>, &'static [u16])> {
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
    schemas.map(|(call, schema)| (call, each(&fields_of(schema), &none, &none), NOT_HERE)).into()
}

fn campaign() -> Result<Vec<Bad>> {
    let mut calls = [of_a_vm_that_runs(), without_a_place_here()].concat();
    calls.push(("vm.create", of_create(), REFUSED));
    let mut all = Vec::new();
    for (call, bodies, statuses) in calls {
        ensure!(!bodies.is_empty(), "{call} has no fields");
        all.extend(bodies.into_iter().map(|body| Bad { call, body: body.to_string(), statuses }));
        let deep = "[".repeat(60_000);
        let no_objects =
            ["", " ", "{", "[]", "7", "null", "\"{}\"", "{}{}", "{\"a\": }", "\u{feff}{}", &deep];
        all.extend(no_objects.map(|body| Bad { call, body: body.to_owned(), statuses }));
    }
    Ok(all)
}

fn send(stream: &mut UnixStream, Bad { call, body, statuses }: &Bad) -> Result<()> {
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

/// Sends `requests` requests from two clients concurrently. The first `on_their_own` requests each
/// use a separate connection.
fn sent_so_often(requests: usize, on_their_own: usize) -> Result<()> {
    let bad = campaign()?;
    let guest = Guest::builder().boot()?;
    // The agent reports the kernel some time after boot. A request does not cause this change.
    guest.wait_until("vm.info has the guest's kernel", LIMIT, || {
        Ok(!guest.get("vm.info")?["guest_kernel"].is_null())
    })?;
    let before = guest.get("vm.info")?;
    let mut heart = guest
        .start_script(SILENCE_LIMIT, "while ! test -e /tmp/end; do echo beat; sleep 1; done")?;
    let held = guest.holdings()?;
    let connect = || UnixStream::connect(guest.api_socket()).context("Cannot connect");
    // Each of these connections sends half a request, and then nothing until the end.
    let silent = (0..SILENT).map(|_| {
        let mut stream = connect()?;
        stream.write_all(b"PUT /api/v1/vm.shutdown HTTP/1.1\r\nHost: x\r\nContent-Le")?;
        Ok(stream)
    });
    let silent: Vec<_> = silent.collect::<Result<_>>()?;
    let client = |first: usize| -> Result<()> {
        let mut stream = connect()?;
        for nth in (first..requests).step_by(2) {
            if nth < on_their_own {
                stream = connect()?;
            }
            send(&mut stream, &bad[nth % bad.len()])?;
        }
        Ok(())
    };
    thread::scope(|scope| -> Result<()> {
        let clients = [0, 1].map(|first| scope.spawn(move || client(first)));
        while !clients.iter().all(|client| client.is_finished()) {
            ensure!(
                heart.next_line().is_some_and(|line| line == "beat"),
                "The guest's heartbeat stopped"
            );
            nothing_has_changed(&before, &guest)?;
        }
        clients.into_iter().try_for_each(|client| client.join().expect("a client does not panic"))
    })?;
    println!("{requests} requests, of {} bad ones", bad.len());
    drop(silent);
    guest.wait_until_nothing_is_left(&held)?;
    nothing_has_changed(&before, &guest)?;
    guest.run("touch /tmp/end")?;
    ensure!(heart.finish()?.code == 0, "The guest's heartbeat failed");
    guest.no_kernel_complaints()
}

fn guest_is_unaffected_by_invalid_api_requests() -> Result<()> {
    let all = campaign()?.len();
    sent_so_often(all, all / 20)
}
