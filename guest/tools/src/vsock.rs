//! vsock streams (vsock(7)).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const ADDRESS_LEN: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: all zeros is a valid address. The relevant fields are set below.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Creates a socket, and binds it to `own_port` if one is given.
pub fn socket(own_port: Option<u32>) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = checked(unsafe {
        libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)
    })?;
    // SAFETY: the kernel has just created the descriptor, and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Some(port) = own_port {
        let own = address(libc::VMADDR_CID_ANY, port);
        // SAFETY: the address is a sockaddr_vm, which outlives the call.
        checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const own).cast(), ADDRESS_LEN) })?;
    }
    Ok(socket)
}

pub fn connect(socket: &impl AsRawFd, cid: u32, port: u32) -> io::Result<()> {
    let address = address(cid, port);
    // SAFETY: the address is a sockaddr_vm, which outlives the call.
    checked(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), ADDRESS_LEN) })
        .map(drop)
}

pub fn listen(port: u32) -> io::Result<OwnedFd> {
    let socket = socket(Some(port))?;
    // SAFETY: the call takes no pointers.
    checked(unsafe { libc::listen(socket.as_raw_fd(), 16) })?;
    Ok(socket)
}

pub fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let null = std::ptr::null_mut();
    loop {
        // SAFETY: accept4 allows null pointers if the peer's address is not needed.
        let fd = checked(unsafe {
            libc::accept4(listener.as_raw_fd(), null, null.cast(), libc::SOCK_CLOEXEC)
        });
        match fd {
            // SAFETY: fd is a socket that nothing else owns.
            Ok(fd) => return Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
