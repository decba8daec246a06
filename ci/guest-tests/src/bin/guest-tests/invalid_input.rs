//! Tests of invalid input that require a KVM host or a guest. Each input should be refused with one
//! clear error and change nothing. `vmm/tests/refusals.rs` and the unit tests of `vmm` test
//! refusals by the parser, by pools and by files.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::{FileSystem, LoopDevice, mount, need_private_mounts, unmount};
use guest_tests::guest::{GuestBuilder, program};
use guest_tests::runner::this_tests_dir;
use guest_tests::user::need_root;
use guest_tests::{Guest, Kernel, Pool};
use serde_json::json;

use crate::pmem::file;
use crate::volume::IO_LIMIT;

guest_tests::tests![
    memory_beyond_the_address_space_is_refused on none,
    missing_kvm_and_kvm_without_hardware_are_refused on none,
    files_pools_and_sockets_of_a_vm_are_refused_to_another: 240,
    impossible_reports_are_refused_and_counted,
];

/// Checks that the VMM refuses to start with a single line that contains all `words`. The name,
/// length and beginning of every file should be unchanged.
fn refuses(builder: &GuestBuilder, words: &[&str]) -> Result<()> {
    let before = files(&this_tests_dir(), BEGINNING_BYTES)?;
    let refusal = builder.clone().name("refused").expect_refusal()?;
    // Warnings about other flags may precede the line.
    let lines: Vec<&str> =
        refusal.message.lines().filter(|line| !line.contains(" WARN ")).collect();
    let message = lines.join("\n");
    ensure!(lines.len() == 1, "Not exactly one line:\n{message}");
    for word in words {
        ensure!(message.contains(word), "{word:?} is missing in: {message}");
    }
    are_unchanged(&before, &files(&this_tests_dir(), BEGINNING_BYTES)?)
}

fn are_unchanged(before: &[FileState], after: &[FileState]) -> Result<()> {
    ensure!(before == after, "Files before:\n{before:#?}\nand after:\n{after:#?}");
    Ok(())
}

/// Length of the superblocks, volume tables, log and chunk table in the pools of these tests.
const BEGINNING_BYTES: u64 = 4 << 20;
/// Number of bytes that covers any file completely.
const ALL_BYTES: u64 = u64::MAX;

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FileState {
    name: String,
    bytes: u64,
    /// Checksum of the requested part of the content.
    sum: u64,
}

/// States of the files in a directory, each with a checksum of its first `summed_bytes`. Files
/// written by the test harness are excluded.
fn files(dir: &Path, summed_bytes: u64) -> Result<Vec<FileState>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(dir).with_context(|| format!("Cannot read {}", dir.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".log") || name == "output" {
            continue;
        }
        let is_file = entry.file_type()?.is_file();
        let bytes = if is_file { entry.metadata()?.len() } else { 0 };
        let sum = if is_file { sum(&entry.path(), summed_bytes)? } else { 0 };
        found.push(FileState { name, bytes, sum });
    }
    found.sort();
    Ok(found)
}

/// Checksum of a file's first `bytes`. The checksum depends on the position of each byte.
fn sum(path: &Path, bytes: u64) -> Result<u64> {
    let mut file = File::open(path)?.take(bytes);
    let mut piece = vec![0; PIECE_BYTES];
    let mut sum = 0u64;
    loop {
        let len = file.read(&mut piece)?;
        if len == 0 {
            return Ok(sum);
        }
        piece[len..].fill(0);
        for word in piece.chunks_exact(8) {
            let word = u64::from_le_bytes(word.try_into()?);
            sum = (sum ^ word).wrapping_mul(FNV_PRIME).rotate_left(29);
        }
    }
}

const PIECE_BYTES: usize = 1 << 20;
/// Prime of the 64-bit FNV hash. The prime is odd, so that multiplying by it loses no bits.
const FNV_PRIME: u64 = 0x100_0000_01b3;

fn memory_beyond_the_address_space_is_refused() -> Result<()> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let sizes =
        cpuinfo.lines().find_map(|line| line.strip_prefix("address sizes")).unwrap_or_default();
    let bits = sizes.trim_start_matches(['\t', ' ', ':']).split(' ').next().unwrap_or_default();
    let bytes = 1u64 << bits.parse::<u32>().with_context(|| format!("Address bits: {bits:?}"))?;
    for method in ["virtio-mem", "acpi"] {
        let memory = format!("size=512M,hotplug_method={method},hotplug_size={bytes}");
        let words = ["--memory", &bytes.to_string(), &format!("{bits}-bit")];
        refuses(&Guest::builder().memory(&memory), &words)?;
    }
    Ok(())
}

/// Runs a VMM in a mount namespace that `prepare` has changed. Returns the single line that it
/// prints.
fn refusal_where(prepare: &str, pool: &Pool) -> Result<String> {
    let before = files(&this_tests_dir(), ALL_BYTES)?;
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
    ensure!(message.lines().count() == 1, "Not exactly one line:\n{message}");
    are_unchanged(&before, &files(&this_tests_dir(), ALL_BYTES)?)?;
    Ok(message)
}

fn missing_kvm_and_kvm_without_hardware_are_refused() -> Result<()> {
    need_root("mount a file system")?;
    let pool = Pool::create("64M")?;
    let none = refusal_where("mount -t tmpfs none /dev", &pool)?;
    ensure!(none.contains("cannot open /dev/kvm"), "Without /dev/kvm: {none}");
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

fn files_pools_and_sockets_of_a_vm_are_refused_to_another() -> Result<()> {
    let dir = this_tests_dir();
    let pool = Pool::create("192M")?;
    pool.create_volume("data", "32M")?;
    let [pmem, image] = ["pmem", "image"].map(|name| file(&dir, name, 4, name));
    let (pmem, image, device) = (pmem?, image?, LoopDevice::create(64)?);
    let (pool_path, pmem_path) = (pool.name(), pmem.display().to_string());
    let (image_path, device_path) =
        (image.display().to_string(), device.path().display().to_string());
    let memory = format!("pool={pool_path},size=128M");
    let volume = format!("pool={pool_path},name=data");
    let with = |flag: &str, value: &str| Guest::builder().memory("size=384M").argument(flag, value);
    let disk = |path: &str, options: &str| with("--disk", &format!("path={path}{options}"));

    let idle = ["--disk", "is marked as a pool; attach its volumes with --pm-volume pool="];
    let before = files(&dir, ALL_BYTES)?;
    refuses(&disk(&pool_path, ""), &idle).context("Pool that is not in use")?;
    are_unchanged(&before, &files(&dir, ALL_BYTES)?).context("Pool that is not in use")?;
    let first = disk(&image_path, "")
        .argument("--disk", &format!("path={device_path}"))
        .argument("--pmem", &format!("file={pmem_path}"))
        .pm_memory(&memory)
        .pm_volume(&format!("{volume},interface=nvdimm"))
        .pressure("off")
        .boot()?;
    // No PM is plugged, and the guest no longer writes to its disks once it has found them.
    let disks = "test -b /dev/vda && test -b /dev/vdb && ls /dev/pmem?s && ls /dev/pmem?";
    first.wait_until_run("the guest has its disks", IO_LIMIT, disks)?;
    let (process, contents) = (first.pid().to_string(), files(&dir, ALL_BYTES)?);
    let socket = first.api_socket().display().to_string();
    refuses(&with("--api-socket", &socket), &["--api-socket", &socket, "in use"])?;
    refuses(&with("--pm-memory", &memory), &["--pm-memory", &pool_path, &process])?;
    for interface in ["nvdimm", "virtio-blk", "virtio-pmem"] {
        let volume = format!("{volume},interface={interface}");
        refuses(&with("--pm-volume", &volume), &["--pm-volume", &pool_path, &process])?;
    }
    for options in ["", ",discard_writes=on"] {
        let pmem = format!("file={pmem_path}{options}");
        refuses(&with("--pmem", &pmem), &["--pmem", &pmem_path, &process])?;
    }
    let holder = format!("in use by process {process}");
    for path in [&pool_path, &pmem_path, &image_path, &device_path] {
        refuses(&disk(path, ""), &["--disk", path, &holder])?;
    }
    let refused = pool.create_volume("other", "32M").err().context("pmvol created a volume")?;
    let refused = format!("{refused:#}");
    ensure!(refused.contains(&holder), "pmvol refused for another reason: {refused}");
    // Console files may be truncated only when the start can no longer fail.
    let [used_output, unused_output] = ["said", "unsaid"].map(|name| dir.join(name));
    fs::write(&used_output, "by an earlier guest")?;
    let consoles = with("--serial", &format!("file={}", used_output.display()))
        .argument("--console", &format!("file={}", unused_output.display()))
        .pm_volume(&volume);
    refuses(&consoles, &["--pm-volume", &process])?;
    ensure!(
        fs::read_to_string(&used_output)? == "by an earlier guest",
        "The output of an earlier guest is lost"
    );
    ensure!(!unused_output.exists(), "A guest that never ran has a console file");
    fs::remove_file(&used_output)?;

    are_unchanged(&contents, &files(&dir, ALL_BYTES)?)?;
    first.run("true")?;
    first.no_kernel_complaints()?;
    first.command("vmm.shutdown")?;
    let status = first.wait_for_exit(IO_LIMIT)?;
    ensure!(status.success(), "The VMM ended with {status} after vmm.shutdown");
    pool.check()?;
    a_mounted_device_is_read_only(&device)
}

fn a_mounted_device_is_read_only(device: &LoopDevice) -> Result<()> {
    need_private_mounts()?;
    FileSystem::Ext4.make(device.path())?;
    let mounted = this_tests_dir().join("mounted");
    mount(device.path(), &mounted, FileSystem::Ext4, "defaults")?;
    let with = |options: &str| {
        Guest::builder()
            .memory("size=384M")
            .argument("--disk", &format!("path={}{options}", device.path().display()))
    };
    let result = refuses(&with(""), &["--disk", "in use: mounted on"]).and_then(|()| {
        let reader = with(",readonly=on").start()?;
        reader.wait_until("a VM that only reads it runs", IO_LIMIT, || {
            Ok(reader.get("vm.info").is_ok_and(|info| info["state"] == "Running"))
        })
    });
    unmount(&mounted)?;
    result
}

/// The agent is not started. Another process that can reach its port sends these lines.
fn impossible_reports_are_refused_and_counted() -> Result<()> {
    let hello = r#"{"type":"hello","version":1,"agent_version":"0","kernel_release":"6.12","preemption":"voluntary","page_size_bytes":4096}"#;
    let report = |seq: u64, available_bytes: u64| {
        let memory =
            json!({ "total_bytes": 1 << 29, "free_bytes": 0, "available_bytes": available_bytes });
        let zone = json!({ "node": 0, "kind": "dma32", "free_pages": 0, "min_pages": 0, "low_pages": 0,
            "high_pages": 0, "managed_pages": 0 });
        json!({ "type": "report", "version": 1, "seq": seq, "monotonic_ms": 1000, "memory": memory, "zones": [zone] })
            .to_string()
    };
    let lines = [
        report(1, 0),
        "this is not a report".to_owned(),
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
        Ok::<_, anyhow::Error>(
            guest.metrics()?.sum("foreshore_pressure_refused_reports_total", &labels),
        )
    };
    guest.wait_until("the last line is counted", Duration::from_secs(30), || {
        Ok(refused("wrong_shape")? > 0.0)
    })?;
    let found = expected.map(|(reason, _)| (reason, refused(reason).unwrap_or(f64::NAN)));
    ensure!(found == expected, "Refused lines: {found:?} instead of {expected:?}");
    let zone = crate::zones::zone(&guest, "dram")?;
    ensure!(
        zone.requested_bytes == 0,
        "Refused lines made the governor request {} bytes",
        zone.requested_bytes
    );
    guest.get("vmm.ping")?;
    Ok(())
}
