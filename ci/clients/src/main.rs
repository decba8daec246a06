//! Runs one client against a VMM: `client-tests CLIENT API-SOCKET KERNEL INITRAMFS CONSOLE VSOCK
//! DISK DISK PMEM EVENTS TAP...`.
//!
//! When the client needs a running guest, the program prints `until up` and waits for a line on its
//! input.

#![forbid(unsafe_code)]

use std::io::{BufRead, stdin};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use client_tests::vm::Vm;
use client_tests::{every_call, replay};
use guest_tests::tap;

fn until_up() -> Result<()> {
    println!("until up");
    let read = stdin().lock().read_line(&mut String::new())?;
    ensure!(read > 0, "Standard input ended before the guest was up");
    Ok(())
}

fn run() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let client = args.next().context("The name of the client is missing")?;
    let paths: Vec<PathBuf> = args.by_ref().take(9).map(PathBuf::from).collect();
    let [api_socket, kernel, initramfs, console, vsock, first, second, pmem, events] = &paths[..]
    else {
        bail!(
            "Expected API-SOCKET KERNEL INITRAMFS CONSOLE VSOCK DISK DISK PMEM EVENTS, got {paths:?}"
        );
    };
    let vm = Vm {
        api_socket: api_socket.clone(),
        kernel: kernel.clone(),
        initramfs: initramfs.clone(),
        console: console.clone(),
        vsock: vsock.clone(),
        disks: [first.clone(), second.clone()],
        pmem: pmem.clone(),
        events: events.clone(),
        taps: args.collect(),
        open_tap: |name| tap::open(name, 1),
    };
    if client == "every-call" {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let calls = runtime.block_on(every_call::run(&vm, &until_up))?;
        println!("{} calls", calls.len());
        return Ok(());
    }
    let (_, replay) =
        replay::ALL.iter().find(|(name, _)| *name == client).context("No such client")?;
    replay(&vm, &until_up)
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("client-tests: {error:#}");
            ExitCode::FAILURE
        }
    }
}
