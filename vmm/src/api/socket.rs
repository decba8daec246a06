//! Sockets that the VMM listens on: bound before anything is built, taken away at the end.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use thiserror::Error;

use super::path_lock::PathLock;
use crate::config::{ApiSocket, MetricsAddress};

/// Why a socket cannot be listened on.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Somebody else listens there, or is about to.
    #[error("{flag}: {path:?} is in use: another process {what}")]
    InUse {
        /// The flag.
        flag: &'static str,
        /// The path.
        path: PathBuf,
        /// What it does.
        what: &'static str,
    },
    /// There is a file, which is somebody's.
    #[error("{flag}: {path:?} exists, and is not a socket")]
    Exists {
        /// The flag.
        flag: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// A path cannot be bound to.
    #[error("{flag}: cannot listen on {path:?}")]
    BindPath {
        /// The flag.
        flag: &'static str,
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An address cannot be bound to.
    #[error("{flag}: cannot listen on {address}")]
    BindAddress {
        /// The flag.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file descriptor that was handed over is no listening unix socket.
    #[error("{flag}: file descriptor {fd} is not a unix socket that listens")]
    NotListening {
        /// The flag.
        flag: &'static str,
        /// The descriptor.
        fd: RawFd,
    },
}

/// A socket that listens; not blocking.
#[derive(Debug)]
pub struct Socket {
    pub(super) listener: Listener,
    /// Dropped after the listener, so that nobody finds a path on which nobody answers.
    pub(super) file: Option<SocketFile>,
}

#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Socket {
    /// Listens for the API's clients.
    pub fn for_api(wanted: &ApiSocket) -> Result<Self, SocketError> {
        let flag = "--api-socket";
        match wanted {
            ApiSocket::Path(path) => Self::bind_path(flag, path),
            ApiSocket::Fd(fd) => Self::inherit(flag, *fd),
        }
    }

    /// Listens for who scrapes metrics.
    pub fn for_metrics(wanted: &MetricsAddress) -> Result<Self, SocketError> {
        let flag = "--metrics";
        match wanted {
            MetricsAddress::Unix(path) => Self::bind_path(flag, path),
            MetricsAddress::Tcp(address) => {
                let bind = || -> io::Result<TcpListener> {
                    let listener = TcpListener::bind(address)?;
                    listener.set_nonblocking(true)?;
                    Ok(listener)
                };
                let listener =
                    bind().map_err(|source| SocketError::BindAddress { flag, address: *address, source })?;
                Ok(Self { listener: Listener::Tcp(listener), file: None })
            }
        }
    }

    /// Listens for who comes to a guest's console; not blocking. The file goes with what is returned.
    pub fn for_console(flag: &'static str, path: &Path) -> Result<(UnixListener, SocketFile), SocketError> {
        Self::listen(flag, path)
    }

    /// The TCP address that is listened on, if it is one.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match &self.listener {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix(_) => None,
        }
    }

    fn bind_path(flag: &'static str, path: &Path) -> Result<Self, SocketError> {
        let (listener, file) = Self::listen(flag, path)?;
        Ok(Self { listener: Listener::Unix(listener), file: Some(file) })
    }

    fn listen(flag: &'static str, path: &Path) -> Result<(UnixListener, SocketFile), SocketError> {
        let fail = |source| SocketError::BindPath { flag, path: path.to_owned(), source };
        let in_use = |what| SocketError::InUse { flag, path: path.to_owned(), what };
        let lock = PathLock::take(path).map_err(fail)?.ok_or_else(|| in_use("has its lock"))?;
        match what_is_at(path).map_err(fail)? {
            Place::Free => {}
            Place::Used => return Err(in_use("answers on it")),
            Place::SomethingElse => return Err(SocketError::Exists { flag, path: path.to_owned() }),
            Place::LeftBehind => {
                tracing::info!(?path, "A socket that was left behind is replaced");
                fs::remove_file(path).map_err(fail)?;
            }
        }
        let listener = UnixListener::bind(path).map_err(fail)?;
        let file = SocketFile::at(path, lock).map_err(fail)?;
        listener.set_nonblocking(true).map_err(fail)?;
        Ok((listener, file))
    }

    fn inherit(flag: &'static str, fd: RawFd) -> Result<Self, SocketError> {
        let refused = SocketError::NotListening { flag, fd };
        if !is_listening_unix_socket(fd) {
            return Err(refused);
        }
        // SAFETY: `fd` is open, as the check above shows, and it is ours: who started the VMM handed it over
        // for this and nothing else in this process opens or closes descriptors by number. It is called once,
        // before any thread but the first runs.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        // What the VMM may start one day shall not inherit its API.
        // SAFETY: plain system call on an open descriptor.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(refused);
        }
        let listener = UnixListener::from(owned);
        listener.set_nonblocking(true).map_err(|_| refused)?;
        Ok(Self { listener: Listener::Unix(listener), file: None })
    }
}

/// What a path is.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Nothing is there.
    Free,
    /// A socket that somebody has.
    Used,
    /// A socket that nobody has any more.
    LeftBehind,
    /// A file, a folder or a link.
    SomethingElse,
}

fn what_is_at(path: &Path) -> io::Result<Place> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {}
        Ok(_) => return Ok(Place::SomethingElse),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Place::Free),
        Err(error) => return Err(error),
    }
    // Who listens and accepts nothing would be waited for.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    for kind in [SocketType::STREAM, SocketType::SEQPACKET, SocketType::DGRAM] {
        let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
        match connect(&socket, &SocketAddrUnix::new(path)?) {
            // Of a socket that is not of this kind (unix(7)).
            Err(Errno::PROTOTYPE) => {}
            Err(Errno::CONNREFUSED) => return Ok(Place::LeftBehind),
            Ok(()) | Err(Errno::AGAIN) => return Ok(Place::Used),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Place::Used)
}

fn is_listening_unix_socket(fd: RawFd) -> bool {
    let option = |name| {
        let mut value: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `value` and `len` are valid for writes of what `len` says; a descriptor that is closed or no
        // socket is an error.
        let result =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
        (result == 0).then_some(value)
    };
    option(libc::SO_DOMAIN) == Some(libc::AF_UNIX) && option(libc::SO_ACCEPTCONN) == Some(1)
}

/// A socket's file, removed when this is dropped, unless somebody has put another one in its place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// Until the file is gone.
    _lock: PathLock,
}

impl SocketFile {
    fn at(path: &Path, lock: PathLock) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino(), _lock: lock })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|now| (now.dev(), now.ino()) == (self.device, self.inode));
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = ?self.path, %error, "A socket is left behind");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_socket_that_is_used_is_told_from_one_that_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let wanted = ApiSocket::Path(path.clone());
        let first = Socket::for_api(&wanted).unwrap();
        let text = Socket::for_api(&wanted).unwrap_err().to_string();
        assert!(
            text.starts_with("--api-socket: ") && text.ends_with("in use: another process has its lock"),
            "{text}"
        );
        drop(first);
        assert!(!path.exists(), "the socket goes with its owner");
        // What a VMM that was killed leaves behind, one that held a lock and one that knew none.
        for lock in [true, false] {
            drop(UnixListener::bind(&path).unwrap());
            if lock {
                fs::write(dir.path().join("api.lock"), "").unwrap();
            }
            let socket = Socket::for_api(&wanted).unwrap();
            UnixStream::connect(&path).unwrap();
            drop(socket);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn what_somebody_has_is_neither_replaced_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let error = || Socket::for_api(&ApiSocket::Path(path.clone())).unwrap_err().to_string();
        // 1. Files of other kinds.
        fs::write(&path, "mine").unwrap();
        assert!(error().ends_with("exists, and is not a socket"), "{}", error());
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        fs::remove_file(&path).unwrap();
        let elsewhere = dir.path().join("elsewhere");
        drop(UnixListener::bind(&elsewhere).unwrap());
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(error().ends_with("is not a socket") && elsewhere.exists());
        fs::remove_file(&path).unwrap();
        // 2. Sockets: one that accepts nothing, one whose queue is full, one of another kind.
        let listener = UnixListener::bind(&path).unwrap();
        assert!(error().ends_with("is in use: another process answers on it"), "{}", error());
        // SAFETY: a system call on an open descriptor.
        assert_eq!(unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&listener), 0) }, 0);
        let _fills_it = [what_is_at(&path).unwrap(), what_is_at(&path).unwrap()];
        assert!(error().ends_with("answers on it"), "{}", error());
        drop(listener);
        fs::remove_file(&path).unwrap();
        let datagrams = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        assert!(error().ends_with("answers on it"), "{}", error());
        drop(datagrams);
        fs::remove_file(&path).unwrap();
        // 3. A path that somebody is about to listen on.
        let lock = PathLock::take(&path).unwrap();
        assert!(error().ends_with("another process has its lock"), "{}", error());
        drop(lock);
        assert!(Socket::for_api(&ApiSocket::Path(path.clone())).is_ok());
    }

    #[test]
    fn a_file_that_took_the_sockets_place_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let socket = Socket::for_api(&ApiSocket::Path(path.clone())).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        drop(socket);
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }

    #[test]
    fn what_cannot_be_bound_is_named() {
        let text = Socket::for_api(&ApiSocket::Path("/nowhere/api".into())).unwrap_err().to_string();
        assert_eq!(text, r#"--api-socket: cannot listen on "/nowhere/api""#);
        let any = MetricsAddress::Tcp("127.0.0.1:0".parse().unwrap());
        let first = Socket::for_metrics(&any).unwrap();
        let same = MetricsAddress::Tcp(first.tcp_address().unwrap());
        let text = Socket::for_metrics(&same).unwrap_err().to_string();
        assert!(text.starts_with("--metrics: cannot listen on 127.0.0.1:"), "{text}");
    }

    #[test]
    fn only_a_listening_unix_socket_is_inherited() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("api")).unwrap();
        assert!(Socket::for_api(&ApiSocket::Fd(listener.into_raw_fd())).is_ok());
        let (stream, _peer) = UnixStream::pair().unwrap();
        let file = fs::File::open("/dev/null").unwrap();
        for fd in [stream.into_raw_fd(), file.into_raw_fd(), 1_000_000] {
            let text = Socket::for_api(&ApiSocket::Fd(fd)).unwrap_err().to_string();
            assert!(text.ends_with("is not a unix socket that listens"), "{text}");
        }
    }
}
