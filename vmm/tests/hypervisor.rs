//! Tests the error of a VMM that cannot run a guest. KVM is not needed, and the test works on every
//! machine.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use pmem_volume::Pool;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn foreshore(pool: &Path) -> Output {
    let volume = format!("pool={},name=data,size=8M,create=on", pool.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_foreshore"));
    command.args(["--kernel", "/nonexistent/vmlinuz", "--console", "off", "--pm-volume", &volume]);
    command.output().expect("the VMM starts")
}

/// First requirement that this machine does not meet.
fn expected() -> &'static str {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let hardware = cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| line.split_ascii_whitespace().any(|flag| flag == "svm" || flag == "vmx"));
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        "cannot open /dev/kvm"
    } else if hardware {
        "--kernel /nonexistent/vmlinuz"
    } else {
        "/dev/kvm cannot run a stock guest: the processor shows neither svm nor vmx"
    }
}

#[test]
fn machine_without_kvm_causes_one_line_and_no_change() {
    let folder = TempDir::new().unwrap();
    let pool = folder.path().join("pool");
    drop(Pool::create(&pool, 64 * MIB, 0).unwrap());
    let before = fs::read(&pool).unwrap();
    let output = foreshore(&pool);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.contains(expected()), "{message}");
    assert!(output.stdout.is_empty());
    assert!(before == fs::read(&pool).unwrap(), "the pool has changed");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
