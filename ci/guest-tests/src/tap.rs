//! Tap interfaces that a test opens and passes to a VMM, as a network manager does.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};

/// Maximum number of descriptors per `SCM_RIGHTS` message in these tests.
const FDS_MAX: usize = 8;

pub fn open(name: &str, queues: usize) -> Result<Vec<File>> {
    open_with(name, queues, libc::IFF_VNET_HDR)
}

pub fn open_with(name: &str, queues: usize, flags: libc::c_int) -> Result<Vec<File>> {
    let several = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | several | flags;
    (0..queues).map(|_| queue(name, flags).with_context(|| format!("Cannot open {name}"))).collect()
}

fn queue(name: &str, flags: libc::c_int) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: the structure consists of numbers and arrays of numbers, for which zeros are valid.
    let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
    let last = interface.ifr_name.len() - 1;
    for (to, from) in interface.ifr_name[..last].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    interface.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the kernel reads and writes one `ifreq`.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut interface) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends all of `bytes` together with descriptors.
pub fn send_with(stream: &UnixStream, bytes: &[u8], files: &[File]) -> Result<()> {
    ensure!(files.len() <= FDS_MAX, "{} descriptors exceed the maximum {FDS_MAX}", files.len());
    let fds: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let data_len = size_of::<RawFd>() * fds.len();
    // Aligned as `cmsghdr` requires.
    let mut control = [0u64; 16];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: zeros are valid for pointers and lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    if !fds.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the macro only computes with numbers.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(data_len as u32) } as _;
        // SAFETY: the buffer has space for one header and `FDS_MAX` descriptors, as checked above.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(data_len as u32) as _;
            std::ptr::copy_nonoverlapping(
                fds.as_ptr().cast::<u8>(),
                libc::CMSG_DATA(header),
                data_len,
            );
        }
    }
    // SAFETY: everything that the message points to outlives the call.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    ensure!(sent == bytes.len() as isize, "Sent only {sent} bytes: {}", io::Error::last_os_error());
    Ok(())
}
