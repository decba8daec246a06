//! Listening sockets of the API and of metrics. The listening sockets are bound before the VM is
//! built, and removed at exit.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use foreshore_confinement::identity::Ids;
use foreshore_devices::unix_socket::SocketAccess;
use foreshore_devices::unix_socket::{self, SocketFile, UnixSocketError};
use rustix::io::{FdFlags, fcntl_setfd};
use thiserror::Error;

use crate::config::{ApiSocket, MetricsAddress};

#[derive(Debug, Error)]
pub enum SocketError {
    #[error(transparent)]
    Path(#[from] UnixSocketError),
    #[error("{flag}: cannot listen on {address}")]
    BindAddress {
        flag: &'static str,
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    /// The inherited file descriptor is not a listening unix socket.
    #[error("{flag}: file descriptor {fd} is not a listening unix socket")]
    NotListening { flag: &'static str, fd: RawFd },
}

/// Listening non-blocking socket.
#[derive(Debug)]
pub struct Socket {
    /// Flag that describes the socket, for log lines.
    pub(super) flag: &'static str,
    pub(super) listener: Listener,
    /// Declared after the listener so that it is dropped later, and the path never outlives the
    /// listener.
    pub(super) file: Option<SocketFile>,
}

#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Socket {
    pub fn for_api(wanted: &ApiSocket) -> Result<Self, SocketError> {
        let flag = "--api-socket";
        match wanted {
            ApiSocket::Path(path, access) => Self::bind_path(flag, path, access),
            ApiSocket::Fd(fd) => Self::inherit(flag, *fd),
        }
    }

    pub fn for_metrics(wanted: &MetricsAddress) -> Result<Self, SocketError> {
        let flag = "--metrics";
        match wanted {
            MetricsAddress::Unix(path, access) => Self::bind_path(flag, path, access),
            MetricsAddress::Tcp(address, _) => {
                let bind = || -> io::Result<TcpListener> {
                    let listener = TcpListener::bind(address)?;
                    listener.set_nonblocking(true)?;
                    Ok(listener)
                };
                let listener = bind().map_err(|source| SocketError::BindAddress {
                    flag,
                    address: *address,
                    source,
                })?;
                Ok(Self { flag, listener: Listener::Tcp(listener), file: None })
            }
        }
    }

    /// Gives the socket's file to the user and the group that the process is about to get.
    pub(crate) fn give_to(&self, ids: &Ids, access: &SocketAccess) -> Result<(), SocketError> {
        let (Some(file), Listener::Unix(socket)) = (&self.file, &self.listener) else {
            return Ok(());
        };
        if ids.user().or(ids.group()).is_none() {
            return Ok(());
        }
        let (flag, path) = (self.flag, file.path().to_owned());
        let given = file.give_to(socket, ids.user(), ids.group(), access);
        Ok(given.map_err(|source| UnixSocketError::Owner { flag, path, source })?)
    }

    /// TCP address of the socket, if it has one.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match &self.listener {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix(_) => None,
        }
    }

    fn bind_path(
        flag: &'static str,
        path: &Path,
        access: &SocketAccess,
    ) -> Result<Self, SocketError> {
        let (listener, file) = unix_socket::listen(flag, path, access)?;
        Ok(Self { flag, listener: Listener::Unix(listener), file: Some(file) })
    }

    fn inherit(flag: &'static str, fd: RawFd) -> Result<Self, SocketError> {
        let refused = SocketError::NotListening { flag, fd };
        if !is_listening_unix_socket(fd) {
            return Err(refused);
        }
        // SAFETY: `fd` is open, as checked above. The VMM inherited it for this purpose, and no
        // other code opens or closes descriptors by number. This runs once, while the process has
        // only one thread.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        // Child processes of the VMM must not inherit the socket.
        if fcntl_setfd(&owned, FdFlags::CLOEXEC).is_err() {
            return Err(refused);
        }
        let listener = UnixListener::from(owned);
        listener.set_nonblocking(true).map_err(|_| refused)?;
        Ok(Self { flag, listener: Listener::Unix(listener), file: None })
    }
}

fn is_listening_unix_socket(fd: RawFd) -> bool {
    let option = |name| {
        let mut value: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `value` is valid for writes of `len` bytes, and `len` for a write of its own
        // type. If the descriptor is closed or is not a socket, the call fails.
        let result = unsafe {
            libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len)
        };
        (result == 0).then_some(value)
    };
    option(libc::SO_DOMAIN) == Some(libc::AF_UNIX) && option(libc::SO_ACCEPTCONN) == Some(1)
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn errors_name_the_address_that_cannot_be_bound() {
        let text =
            Socket::for_api(&ApiSocket::Path("/nowhere/api".into(), SocketAccess::default()))
                .unwrap_err()
                .to_string();
        assert_eq!(text, r#"--api-socket: cannot listen on "/nowhere/api""#);
        let any = MetricsAddress::Tcp("127.0.0.1:0".parse().unwrap(), Vec::new());
        let first = Socket::for_metrics(&any).unwrap();
        let same = MetricsAddress::Tcp(first.tcp_address().unwrap(), Vec::new());
        let text = Socket::for_metrics(&same).unwrap_err().to_string();
        assert!(text.starts_with("--metrics: cannot listen on 127.0.0.1:"), "{text}");
    }

    #[test]
    fn only_a_listening_unix_socket_is_inherited() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("api")).unwrap();
        assert!(Socket::for_api(&ApiSocket::Fd(listener.into_raw_fd())).is_ok());
        let (stream, _peer) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for fd in [stream.into_raw_fd(), file.into_raw_fd(), 1_000_000] {
            let text = Socket::for_api(&ApiSocket::Fd(fd)).unwrap_err().to_string();
            assert!(text.ends_with("is not a listening unix socket"), "{text}");
        }
    }
}
