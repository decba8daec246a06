//! Client of the host's vsock ports.

use std::fs::File;
use std::io;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tools::vsock::{connect, socket};

use crate::limits;

/// vsock address of the host (vsock(7)).
const HOST_CID: u32 = libc::VMADDR_CID_HOST;

/// Port that only root may bind. The host's agent port rejects connections from unprivileged ports.
const PRIVILEGED_PORT: u32 = 900;

/// More connections than a VMM should accept.
const MAX_CONNECTIONS: usize = 4096;

const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Sends standard input from a privileged port to a port of the host, and closes the connection.
pub(crate) fn send(port: u32) -> Result<()> {
    let socket = socket(Some(PRIVILEGED_PORT))
        .context("Cannot create a vsock socket with a privileged port")?;
    connect(&socket, HOST_CID, port)
        .with_context(|| format!("Cannot connect to port {port} of the host"))?;
    io::copy(&mut io::stdin().lock(), &mut File::from(socket))
        .context("Cannot send all input to the host")?;
    Ok(())
}

/// Connects to a port of the host until killed, and keeps all connections open. When the host first
/// refuses one, prints `held COUNT` and starts `command`.
pub(crate) fn hold(port: u32, command: &str) -> Result<()> {
    limits::allow_open_files(MAX_CONNECTIONS + 64)?;
    let mut held = Vec::new();
    let mut running = None;
    loop {
        let socket = socket(None).context("Cannot create a vsock socket")?;
        match connect(&socket, HOST_CID, port) {
            Ok(()) => held.push(socket),
            Err(_) if running.is_none() => {
                println!("held {}", held.len());
                running = Some(
                    Command::new("sh")
                        .args(["-c", command])
                        .spawn()
                        .context("Cannot start a shell")?,
                );
            }
            // The next attempt may get the slot of a connection that another process closes.
            Err(_) => thread::sleep(RETRY_INTERVAL),
        }
        ensure!(
            held.len() < MAX_CONNECTIONS,
            "The host accepted {} connections without a refusal",
            held.len()
        );
    }
}
