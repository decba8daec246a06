//! Clients of Cloud Hypervisor (ci/clients) against live guests.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::runner::{skip, this_tests_dir};
use guest_tests::{BOOT_LIMIT, Guest, Image, Kernel, program};

use crate::api::empty_vmm;
use crate::net::{NO_TUN, has_tun};

guest_tests::tests![
    every_call: 300,
    curl_keeps_its_connection,
    flintlock_reads_the_counters (extended),
    hypeman_waits_until_memory_has_settled,
    katas_runtime_in_go_adds_a_disk_and_memory: 240,
    katas_runtime_in_rust_writes_out_every_null: 240,
    libvirt_reboots: 240,
    virtink_reboots: 240 (extended),
];

/// Until a VMM that was told to end has ended.
const END_LIMIT: Duration = Duration::from_secs(30);

fn image(name: &str, mib: u64) -> Result<PathBuf> {
    fs::create_dir_all(this_tests_dir())?;
    let path = this_tests_dir().join(name);
    File::create(&path)?.set_len(mib << 20)?;
    Ok(path)
}

/// Runs a client to its end beside a VMM without a VM, and says when the guest is up.
fn run(client: &str) -> Result<Guest> {
    let vmm = empty_vmm()?;
    let kernel = Kernel::V6_12;
    let paths = [
        vmm.api_socket(),
        kernel.path(),
        Image::Basic.path(kernel),
        vmm.console_file(),
        vmm.vsock_socket(),
        image("disk0", 64)?,
        image("disk1", 64)?,
        image("pmem", 128)?,
    ];
    let mut command = Command::new(program("client-tests"));
    command.arg(client).args(paths).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().context("client-tests cannot be started")?;
    let mut told = child.stdin.take().expect("a pipe");
    for line in BufReader::new(child.stdout.take().expect("a pipe")).lines() {
        match line?.as_str() {
            "until up" => {
                vmm.wait_for_shell(BOOT_LIMIT)?;
                writeln!(told)?;
            }
            said => println!("{client}: {said}"),
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "{client} ended with {status}: it says above why");
    Ok(vmm)
}

/// The same, where the client ends the VMM.
fn run_to_the_end(client: &str) -> Result<()> {
    let status = run(client)?.wait_for_exit(END_LIMIT)?;
    ensure!(status.success(), "The VMM ended with {status}");
    Ok(())
}

/// The same, where the client leaves a VMM without a VM.
fn run_and_leave(client: &str) -> Result<()> {
    let vmm = run(client)?;
    ensure!(vmm.try_api("GET", "vm.info", None)?.status == 404, "{client} leaves a VM");
    vmm.api("PUT", "vmm.shutdown", None)?;
    let status = vmm.wait_for_exit(END_LIMIT)?;
    ensure!(status.success(), "The VMM ended with {status}");
    Ok(())
}

fn every_call() -> Result<()> {
    // It adds an interface, for which the VMM makes a tap.
    if !has_tun() {
        return skip(NO_TUN);
    }
    run_to_the_end("every-call")
}

fn curl_keeps_its_connection() -> Result<()> {
    run_and_leave("curl")
}

fn flintlock_reads_the_counters() -> Result<()> {
    run_and_leave("flintlock")
}

fn hypeman_waits_until_memory_has_settled() -> Result<()> {
    run_to_the_end("hypeman")
}

fn katas_runtime_in_go_adds_a_disk_and_memory() -> Result<()> {
    run_to_the_end("kata-go")
}

fn katas_runtime_in_rust_writes_out_every_null() -> Result<()> {
    run_to_the_end("kata-runtime-rs")
}

fn libvirt_reboots() -> Result<()> {
    run_to_the_end("libvirt")
}

fn virtink_reboots() -> Result<()> {
    run_and_leave("virtink")
}
