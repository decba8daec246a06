//! Speaks to the host's ports.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::limits;

/// The host's address (vsock(7)).
const HOST_CID: u32 = libc::VMADDR_CID_HOST;

/// What root alone may bind: the host's agent port listens to nobody else.
const PRIVILEGED_PORT: u32 = 900;

/// More connections than any VMM should take.
const MOST_HELD: usize = 4096;

const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

const ADDRESS_LEN: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: all zeros is a valid address; the fields that count follow.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

/// Makes a socket, and binds it to `own_port` if there is one.
fn socket(own_port: Option<u32>) -> Result<OwnedFd> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    ensure!(fd >= 0, "No vsock: {}", io::Error::last_os_error());
    // SAFETY: the kernel has just made this descriptor for us.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Some(port) = own_port {
        let own = address(libc::VMADDR_CID_ANY, port);
        // SAFETY: the address is one of vsock, and lives through the call.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const own).cast(), ADDRESS_LEN) };
        ensure!(bound == 0, "Port {port} cannot be taken: {}", io::Error::last_os_error());
    }
    Ok(socket)
}

fn connect(socket: &OwnedFd, port: u32) -> io::Result<()> {
    let address = address(HOST_CID, port);
    // SAFETY: the address is one of vsock, and lives through the call.
    match unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), ADDRESS_LEN) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends the standard input to a port of the host from a privileged port, and closes the
/// connection.
pub fn send(port: u32) -> Result<()> {
    let socket = socket(Some(PRIVILEGED_PORT))?;
    connect(&socket, port).with_context(|| format!("Port {port} of the host"))?;
    io::copy(&mut io::stdin().lock(), &mut File::from(socket))
        .context("The host does not take it all")?;
    Ok(())
}

/// Connects to a port of the host until killed, and holds every connection. Prints `held COUNT`
/// when the host refuses the first one, and starts `command`.
pub fn hold(port: u32, command: &str) -> Result<()> {
    limits::allow_open_files(MOST_HELD + 64)?;
    let mut held = Vec::new();
    let mut running = None;
    loop {
        let socket = socket(None)?;
        match connect(&socket, port) {
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
            // The next attempt can take the place of a connection that another process closes.
            Err(_) => thread::sleep(BETWEEN_ATTEMPTS),
        }
        ensure!(held.len() < MOST_HELD, "The host takes {} connections", held.len());
    }
}
