//! What nobody should send is answered with one clear error, and changes nothing.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::guest::{GuestBuilder, program};
use guest_tests::http::send_raw_unix;
use guest_tests::runner::{skip, this_tests_dir};
use guest_tests::{Guest, Kernel, Pool};
use serde_json::json;

guest_tests::tests![
    memory_sizes_out_of_bounds_are_refused,
    pm_sizes_out_of_bounds_are_refused,
    memory_beyond_the_address_space_is_refused,
    unknown_keys_and_policies_are_refused,
    a_kernel_that_is_none_is_refused,
    a_missing_pool_is_refused,
    a_file_that_is_no_pool_is_refused,
    a_pool_of_a_newer_version_is_refused,
    no_kvm_and_one_without_hardware_are_refused,
    a_size_beyond_the_pool_is_refused,
    a_volume_that_does_not_exist_is_refused,
    another_size_than_the_volumes_is_refused,
    what_earlier_guests_said_outlives_a_refusal,
    virtio_pmem_on_two_cpus_is_refused,
    an_api_socket_in_use_is_refused,
    a_second_vm_on_a_pool_is_refused_and_told_who_has_it,
    malformed_requests_are_answered_with_400,
    reports_that_cannot_be_are_refused_and_counted,
];

/// The VMM says one line with all of the words, ends with 1, and has made and changed no file.
pub fn refuses(builder: &GuestBuilder, words: &[&str]) -> Result<()> {
    let before = files(&this_tests_dir())?;
    let refusal = builder.clone().name("refused").expect_refusal()?;
    // Warnings about other flags may come before it.
    let said: Vec<&str> = refusal.message.lines().filter(|line| !line.contains(" WARN ")).collect();
    let message = said.join("\n");
    ensure!(said.len() == 1, "Not one line:\n{message}");
    for word in words {
        ensure!(message.contains(word), "Nothing of {word:?} in: {message}");
    }
    let after = files(&this_tests_dir())?;
    ensure!(before == after, "Files before:\n{before:#?}\nand after:\n{after:#?}");
    Ok(())
}

/// Names and contents' sums of the files of a directory, but for the logs that the harness itself writes.
fn files(dir: &Path) -> Result<Vec<(String, u64)>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(dir).with_context(|| format!("Cannot read {}", dir.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".log") || name == "output" {
            continue;
        }
        let sum = if entry.file_type()?.is_file() { sum(&fs::read(entry.path())?) } else { 0 };
        found.push((name, sum));
    }
    found.sort();
    Ok(found)
}

fn sum(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| chunk.iter().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| sum.rotate_left(5) ^ word(chunk))
}

fn memory_sizes_out_of_bounds_are_refused() -> Result<()> {
    for (memory, words) in [
        ("size=0", ["--memory", "size", "0"]),
        ("size=4097", ["--memory", "4097", "4 KiB"]),
        ("size=8192T", ["--memory", "8192 TiB", "4096 TiB"]),
        ("size=512M,hotplug_method=virtio-mem,hotplug_size=3M", ["--memory", "3 MiB", "2 MiB"]),
        ("size=plenty", ["--memory", "size", "plenty"]),
    ] {
        refuses(&Guest::builder().memory(memory), &words).with_context(|| format!("--memory {memory}"))?;
    }
    Ok(())
}

fn pm_sizes_out_of_bounds_are_refused() -> Result<()> {
    let pool = Pool::create("128M")?;
    for (size, words) in
        [("0", ["size", "0"]), ("3M", ["3 MiB", "2 MiB"]), ("8192T", ["8192 TiB", "4096 TiB"])]
    {
        let memory = format!("pool={},size={size}", pool.name());
        refuses(&Guest::builder().pm_memory(&memory), &[&["--pm-memory"], &words[..]].concat())?;
        let volume = format!("pool={},name=data,create=on,size={size}", pool.name());
        refuses(&Guest::builder().pm_volume(&volume), &[&["--pm-volume"], &words[..]].concat())?;
    }
    Ok(())
}

fn memory_beyond_the_address_space_is_refused() -> Result<()> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let sizes = cpuinfo.lines().find_map(|line| line.strip_prefix("address sizes")).unwrap_or_default();
    let bits = sizes.trim_start_matches(['\t', ' ', ':']).split(' ').next().unwrap_or_default();
    let bytes = 1u64 << bits.parse::<u32>().with_context(|| format!("Address bits: {bits:?}"))?;
    for method in ["virtio-mem", "acpi"] {
        let memory = format!("size=512M,hotplug_method={method},hotplug_size={bytes}");
        let words = ["--memory", &bytes.to_string(), &format!("{bits}-bit")];
        refuses(&Guest::builder().memory(&memory), &words)?;
    }
    Ok(())
}

fn unknown_keys_and_policies_are_refused() -> Result<()> {
    refuses(&Guest::builder().memory("size=512M,colour=red"), &["--memory", "colour"])?;
    refuses(&Guest::builder().argument("--pressure", "policy=greedy"), &["--pressure", "greedy", "psi"])?;
    refuses(&Guest::builder().argument("--rng", "source=/dev/urandom"), &["--rng", "source"])
}

fn a_kernel_that_is_none_is_refused() -> Result<()> {
    let nothing = this_tests_dir().join("not-there").display().to_string();
    refuses(&Guest::builder().argument("--kernel", &nothing), &["--kernel", "not-there"])?;
    let text = this_tests_dir().join("text");
    fs::write(&text, "This is not a kernel.\n".repeat(1000))?;
    let text = text.display().to_string();
    refuses(&Guest::builder().argument("--kernel", &text), &["--kernel", &text])
}

fn a_missing_pool_is_refused() -> Result<()> {
    let pool = this_tests_dir().join("no-pool").display().to_string();
    refuses(&Guest::builder().pm_memory(&format!("pool={pool},size=64M")), &["--pm-memory", &pool])?;
    refuses(&Guest::builder().pm_volume(&format!("pool={pool},name=data")), &["--pm-volume", &pool])
}

fn a_file_that_is_no_pool_is_refused() -> Result<()> {
    let file = this_tests_dir().join("zeros");
    fs::write(&file, vec![0u8; 32 << 20])?;
    let file = file.display().to_string();
    refuses(&Guest::builder().pm_memory(&format!("pool={file},size=8M")), &["--pm-memory", &file])?;
    fs::write(&file, [])?;
    refuses(&Guest::builder().pm_memory(&format!("pool={file},size=8M")), &["--pm-memory", &file])
}

/// CRC-32 as gzip's: what seals a superblock (docs/format.md).
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

fn a_pool_of_a_newer_version_is_refused() -> Result<()> {
    const SUPERBLOCK_BYTES: usize = 4096;
    let pool = Pool::create("128M")?;
    let mut bytes = fs::read(pool.path())?;
    for start in [0, (2 << 20) - SUPERBLOCK_BYTES] {
        let superblock = &mut bytes[start..start + SUPERBLOCK_BYTES];
        ensure!(superblock[8..12] == 1u32.to_le_bytes(), "Not where the version is");
        superblock[8..12].copy_from_slice(&7u32.to_le_bytes());
        let sum = u64::from(crc32(&superblock[..SUPERBLOCK_BYTES - 8]));
        superblock[SUPERBLOCK_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
    }
    fs::write(pool.path(), bytes)?;
    let (name, words) = (pool.name(), ["format version 7", "version 1"]);
    let memory = format!("pool={name},size=8M");
    refuses(&Guest::builder().pm_memory(&memory), &[&["--pm-memory", &name], &words[..]].concat())?;
    let volume = format!("pool={name},name=data");
    refuses(&Guest::builder().pm_volume(&volume), &[&["--pm-volume", &name], &words[..]].concat())
}

/// The VMM in a mount namespace that `prepare` has changed: its one line.
fn refusal_where(prepare: &str, pool: &Pool) -> Result<String> {
    let before = files(&this_tests_dir())?;
    let script = format!("{prepare} && exec \"$0\" \"$@\"");
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", &script])
        .arg(program("foreshore"))
        .args(["--memory", "size=256M", "--serial", "null", "--console", "off"])
        .arg("--kernel")
        .arg(Kernel::V6_12.path())
        .args(["--pm-volume", &format!("pool={},name=data,size=8M,create=on", pool.name())])
        .stdin(Stdio::null())
        .output()
        .context("Cannot start unshare")?;
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "{}: {message}", output.status);
    ensure!(message.lines().count() == 1, "Not one line:\n{message}");
    ensure!(before == files(&this_tests_dir())?, "A refusal has changed a file");
    Ok(message)
}

fn no_kvm_and_one_without_hardware_are_refused() -> Result<()> {
    // SAFETY: no arguments, no memory.
    if unsafe { libc::geteuid() } != 0 {
        return skip("mounting over /dev needs root");
    }
    let pool = Pool::create("64M")?;
    let none = refusal_where("mount -t tmpfs none /dev", &pool)?;
    ensure!(none.contains("Cannot open /dev/kvm"), "Without /dev/kvm: {none}");
    let plain = this_tests_dir().join("cpuinfo.log");
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?.replace(" svm", "").replace(" vmx", "");
    fs::write(&plain, cpuinfo)?;
    let soft = refusal_where(&format!("mount --bind {} /proc/cpuinfo", plain.display()), &pool)?;
    ensure!(
        soft.contains("/dev/kvm cannot run a stock guest") && soft.contains("neither svm nor vmx"),
        "Without hardware: {soft}"
    );
    Ok(())
}

fn a_size_beyond_the_pool_is_refused() -> Result<()> {
    let pool = Pool::create("128M")?;
    let memory = format!("pool={},size=1G", pool.name());
    refuses(&Guest::builder().pm_memory(&memory), &["--pm-memory", "1 GiB", &pool.name()])?;
    let volume = format!("pool={},name=data,size=1G,create=on", pool.name());
    refuses(&Guest::builder().pm_volume(&volume), &["--pm-volume", "1 GiB", &pool.name()])?;
    let odd = format!("pool={},name=data,size=3M,create=on", pool.name());
    refuses(&Guest::builder().pm_volume(&odd), &["--pm-volume", "3 MiB", "2 MiB"])
}

fn a_volume_that_does_not_exist_is_refused() -> Result<()> {
    let pool = Pool::create("128M")?;
    pool.create_volume("data", "32M")?;
    let volume = format!("pool={},name=date", pool.name());
    refuses(&Guest::builder().pm_volume(&volume), &["--pm-volume", "date"])
}

fn another_size_than_the_volumes_is_refused() -> Result<()> {
    let pool = Pool::create("128M")?;
    pool.create_volume("data", "32M")?;
    let volume = format!("pool={},name=data,size=64M", pool.name());
    refuses(&Guest::builder().pm_volume(&volume), &["--pm-volume", "data", "64 MiB", "32 MiB"])
}

fn what_earlier_guests_said_outlives_a_refusal() -> Result<()> {
    let pool = Pool::create("128M")?;
    let [said, unsaid] = ["said", "unsaid"].map(|name| this_tests_dir().join(name));
    fs::write(&said, "by an earlier guest")?;
    let volume = format!("pool={},name=data", pool.name());
    let guest = Guest::builder()
        .argument("--serial", &format!("file={}", said.display()))
        .argument("--console", &format!("file={}", unsaid.display()))
        .pm_volume(&volume);
    refuses(&guest, &["--pm-volume", "data"])?;
    ensure!(fs::read_to_string(&said)? == "by an earlier guest", "What an earlier guest said has gone");
    ensure!(!unsaid.exists(), "A guest that never ran has a console's file");
    Ok(())
}

fn virtio_pmem_on_two_cpus_is_refused() -> Result<()> {
    let pool = Pool::create("128M")?;
    pool.create_volume("data", "32M")?;
    let volume = format!("pool={},name=data,interface=virtio-pmem", pool.name());
    // What is possible counts, not what boots.
    let guest = Guest::builder().cpus(1).max_cpus(2).pm_volume(&volume);
    refuses(&guest, &["--pm-volume", "virtio-pmem", "2"])
}

fn an_api_socket_in_use_is_refused() -> Result<()> {
    let first = Guest::builder().boot()?;
    let socket = first.api_socket().display().to_string();
    refuses(&Guest::builder().argument("--api-socket", &socket), &["--api-socket", &socket])?;
    first.api("GET", "vmm.ping", None)?;
    Ok(())
}

fn a_second_vm_on_a_pool_is_refused_and_told_who_has_it() -> Result<()> {
    let pool = Pool::create("256M")?;
    let memory = format!("pool={},size=64M", pool.name());
    let first = Guest::builder().pm_memory(&memory).boot()?;
    let holder = first.pid().to_string();
    refuses(&Guest::builder().pm_memory(&memory), &["--pm-memory", &pool.name(), &holder])?;
    first.api("GET", "vm.info", None)?;
    Ok(())
}

fn malformed_requests_are_answered_with_400() -> Result<()> {
    let guest = Guest::builder().boot()?;
    let socket = guest.api_socket();
    let status = |bytes: &[u8]| send_raw_unix(&socket, bytes).map(|response| response.status);
    ensure!(status(b"how are you?\r\n\r\n")? == 400, "What is not HTTP is not a bad request");
    ensure!(status(b"\x00\xff\x00\xff\r\n\r\n")? == 400, "Binary is not a bad request");
    for body in
        ["{", "[]", "\"\"", "{\"desired_ram\": -1}", "{\"desired_ram\": \"all\"}", "{\"desired_ram\": 1e99}"]
    {
        let head = format!(
            "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let found = status((head + body).as_bytes())?;
        ensure!(found == 400, "vm.resize with {body}: status {found}");
    }
    ensure!(guest.try_api("GET", "vm.nonsense", None)?.status == 404, "A call that is none is found");
    let found = guest.try_api("PUT", "vm.resize", Some(json!({ "desired_ram": 1 })))?;
    ensure!(found.status == 400, "A resize to one byte: status {}", found.status);
    // After all that it works as before.
    guest.api("GET", "vmm.ping", None)?;
    guest.run("true")?;
    Ok(())
}

/// The agent is not started: these lines come from whoever reaches its port in the guest.
fn reports_that_cannot_be_are_refused_and_counted() -> Result<()> {
    let hello = r#"{"type":"hello","version":1,"agent_version":"0","kernel_release":"6.12","preemption":"voluntary","page_size_bytes":4096}"#;
    let report = |seq: u64, available_bytes: u64| {
        let memory = json!({ "total_bytes": 1 << 29, "free_bytes": 0, "available_bytes": available_bytes });
        let zone = json!({ "node": 0, "kind": "dma32", "free_pages": 0, "min_pages": 0, "low_pages": 0,
            "high_pages": 0, "managed_pages": 0 });
        json!({ "type": "report", "version": 1, "seq": seq, "monotonic_ms": 1000, "memory": memory, "zones": [zone] })
            .to_string()
    };
    let lines = [
        report(1, 0),
        "this is no report".to_owned(),
        hello.replace("\"version\":1", "\"version\":9"),
        hello.to_owned(),
        report(1, u64::MAX),
        r#"{"type":"report","version":1,"seq":-1}"#.to_owned(),
    ];
    let expected = [
        ("before_hello", 1.0),
        ("not_json", 1.0),
        ("wrong_version", 1.0),
        ("out_of_range", 1.0),
        ("wrong_shape", 1.0),
    ];

    let guest = Guest::builder()
        .memory("size=384M,hotplug_method=virtio-mem,hotplug_size=128M")
        .pressure("psi")
        .cmdline("foreshore.agent=off")
        .boot()?;
    guest.run(&format!("printf '%s\\n' '{}' | guest-tool vsock-send 9746", lines.join("' '")))?;
    let refused = |reason: &str| {
        let labels = [("reason", reason)];
        Ok::<_, anyhow::Error>(guest.metrics()?.sum("foreshore_pressure_refused_reports_total", &labels))
    };
    guest.wait_until("the last line is counted", Duration::from_secs(30), || {
        Ok(refused("wrong_shape")? > 0.0)
    })?;
    let found = expected.map(|(reason, _)| (reason, refused(reason).unwrap_or(f64::NAN)));
    ensure!(found == expected, "Refused were {found:?}, not {expected:?}");
    let zone = crate::zones::zone(&guest, "dram")?;
    ensure!(
        zone.requested_bytes == 0,
        "What was refused has made the governor plug {}",
        zone.requested_bytes
    );
    guest.api("GET", "vmm.ping", None)?;
    Ok(())
}
