//! Speaks to the host's ports.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};

/// The host's address (vsock(7)).
const HOST_CID: u32 = libc::VMADDR_CID_HOST;

/// What root alone may bind: the host's agent port listens to nobody else.
const PRIVILEGED_PORT: u32 = 900;

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: all zeros is a valid address; the fields that count follow.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

/// Sends the standard input to a port of the host from a privileged port, and closes the connection.
pub fn send(port: u32) -> Result<()> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    ensure!(fd >= 0, "No vsock: {}", io::Error::last_os_error());
    // SAFETY: the kernel has just made this descriptor for us.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    let own = address(libc::VMADDR_CID_ANY, PRIVILEGED_PORT);
    // SAFETY: the address is one of vsock, and lives through the call.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const own).cast(), len) };
    ensure!(bound == 0, "Port {PRIVILEGED_PORT} cannot be taken: {}", io::Error::last_os_error());
    let address = address(HOST_CID, port);
    // SAFETY: the address is one of vsock, and lives through the call.
    let connected = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) };
    ensure!(connected == 0, "Port {port} of the host: {}", io::Error::last_os_error());
    io::copy(&mut io::stdin().lock(), &mut File::from(socket)).context("The host does not take it all")?;
    Ok(())
}
