//! The host's side of the device: the listening socket, ports in this process, and connections to
//! other sockets on the host. Also parses a client's first line, which contains the requested port.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use thiserror::Error;
use tokio::sync::mpsc;

use super::packet::{GuestPort, HostPort, Link};
use crate::event_loop::EventLoopError;
use crate::unix_socket::SocketAccess;
use crate::unix_socket::{self, SocketFile, UnixSocketError};

/// Maximum number of connections that wait to be accepted by a port in this process. Further
/// connections are refused.
pub const IN_PROCESS_BACKLOG: usize = 16;

/// Highest privileged port in the guest. For ports up to this one, Linux requires
/// CAP_NET_BIND_SERVICE in the guest's initial user namespace. It never assigns these ports
/// automatically (LAST_RESERVED_PORT in af_vsock.c).
const LAST_PRIVILEGED_PORT: GuestPort = GuestPort(1023);

/// Maximum length of a client's first line. It has room for any port and some white space.
const MAX_GREETING_BYTES: usize = 32;

/// Error that occurred while creating a vsock device.
#[derive(Debug, Error)]
pub enum VsockError {
    /// The context id is reserved (virtio 1.3, 5.10.4).
    #[error("context id {cid} is reserved; use 3 to 4294967294")]
    InvalidCid { cid: u32 },
    #[error(transparent)]
    Socket(#[from] UnixSocketError),
    #[error(transparent)]
    EventLoop(#[from] EventLoopError),
    #[error("port {port} already has a listener in this process")]
    PortTaken { port: u32 },
}

/// Ports on the host's side that have listeners in this process. All listeners must be added before
/// the device is created.
#[derive(Debug, Default)]
pub struct VsockPorts {
    listeners: HashMap<HostPort, Listener>,
}

#[derive(Debug)]
struct Listener {
    sender: mpsc::Sender<UnixStream>,
    guests: GuestPorts,
}

/// Guest ports from which connections are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestPorts {
    /// All ports. Every process in the guest can use them.
    All,
    /// Ports up to 1023. Only privileged processes in the guest can use them.
    Privileged,
}

impl VsockPorts {
    pub fn new() -> Self {
        Self::default()
    }

    /// Listens in this process for connections from guest ports in `guests` to the host's `port`.
    /// The received streams are non-blocking, as tokio requires. After the receiver is dropped,
    /// connections are refused.
    pub fn listen_in_process(
        &mut self,
        port: u32,
        guests: GuestPorts,
    ) -> Result<mpsc::Receiver<UnixStream>, VsockError> {
        let (sender, receiver) = mpsc::channel(IN_PROCESS_BACKLOG);
        self.listen(port, guests, sender)?;
        Ok(receiver)
    }

    /// Same as [`VsockPorts::listen_in_process`], but the caller creates the channel. Its receiver
    /// can outlive the device.
    pub fn listen(
        &mut self,
        port: u32,
        guests: GuestPorts,
        sender: mpsc::Sender<UnixStream>,
    ) -> Result<(), VsockError> {
        if self.listeners.contains_key(&HostPort(port)) {
            return Err(VsockError::PortTaken { port });
        }
        self.listeners.insert(HostPort(port), Listener { sender, guests });
        Ok(())
    }
}

/// Reason why a connection from the guest was refused.
#[derive(Debug, Error)]
pub(super) enum ConnectError {
    /// The listener in this process was dropped, or its backlog is full.
    #[error("listener of {port} in this process is full or closed")]
    InProcess { port: HostPort },
    /// The listener accepts connections only from privileged ports.
    #[error("port of {link} exceeds the last privileged port {LAST_PRIVILEGED_PORT}")]
    Unprivileged { link: Link },
    /// The socket does not exist or has no listener.
    #[error("cannot connect to socket {path:?}")]
    Socket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// No file descriptor is free.
    #[error("cannot create a socket pair")]
    Pair(#[from] io::Error),
}

/// The listening socket and the ports. Resets of the device do not affect them. A client can
/// therefore connect before the guest's driver is active, and then waits in the socket's backlog.
#[derive(Debug)]
pub(super) struct HostSide {
    path: PathBuf,
    listener: UnixListener,
    /// Socket file, removed after the listener is closed.
    _file: SocketFile,
    ports: VsockPorts,
}

impl HostSide {
    /// Listens on `path`. Replaces a stale socket file.
    pub(super) fn bind(path: &Path, ports: VsockPorts) -> Result<Self, VsockError> {
        let (listener, file) = unix_socket::listen("--vsock", path, &SocketAccess::default())?;
        file.log_replacement();
        Ok(Self { path: path.to_owned(), listener, _file: file, ports })
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Accepts a waiting client. Returns `None` if no client is waiting.
    pub(super) fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                Ok(Some(stream))
            }
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(err) => Err(err),
        }
    }

    /// Returns true if the VMM itself listens on the host's `port`.
    pub(super) fn listens_in_process(&self, port: HostPort) -> bool {
        self.ports.listeners.contains_key(&port)
    }

    /// Connects to the listener on the host port of `link`. The call does not wait for the
    /// listener, but it may wait for a disk while the socket's path is resolved.
    pub(super) fn connect(&self, link: Link) -> Result<UnixStream, ConnectError> {
        let port = link.host;
        if let Some(Listener { sender, guests }) = self.ports.listeners.get(&port) {
            if *guests == GuestPorts::Privileged && link.guest > LAST_PRIVILEGED_PORT {
                return Err(ConnectError::Unprivileged { link });
            }
            let (local_end, remote_end) = UnixStream::pair()?;
            local_end.set_nonblocking(true)?;
            remote_end.set_nonblocking(true)?;
            sender.try_send(remote_end).map_err(|_| ConnectError::InProcess { port })?;
            return Ok(local_end);
        }
        let mut path = self.path.clone().into_os_string();
        path.push(format!("_{}", port.0));
        let path = PathBuf::from(path);
        connect_nonblocking(&path).map_err(|source| ConnectError::Socket { path, source })
    }
}

/// Same as `UnixStream::connect`, except that it fails if the listener's backlog is full. Otherwise
/// a guest could block the device by connecting to a busy server.
fn connect_nonblocking(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// Result of reading a client's first line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GreetingResult {
    /// The line is not complete yet.
    Incomplete,
    /// The client requests this port of the guest.
    Connect(GuestPort),
    /// The line is invalid, or the client has left.
    Refused,
}

#[derive(Debug, Default)]
pub(super) struct Greeting {
    line: Vec<u8>,
}

impl Greeting {
    /// Reads up to the end of the line and no further, because all later bytes are payload for the
    /// guest.
    pub(super) fn read(&mut self, mut stream: impl Read) -> GreetingResult {
        let mut byte = [0];
        loop {
            match stream.read(&mut byte) {
                Ok(0) => return GreetingResult::Refused,
                Ok(_) if byte == *b"\n" => return self.parse(),
                Ok(_) if self.line.len() == MAX_GREETING_BYTES => return GreetingResult::Refused,
                Ok(_) => self.line.push(byte[0]),
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {
                    return GreetingResult::Incomplete;
                }
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return GreetingResult::Refused,
            }
        }
    }

    fn parse(&self) -> GreetingResult {
        let Ok(line) = str::from_utf8(&self.line) else { return GreetingResult::Refused };
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next(), words.next()) {
            // The parser of u32 would also accept a plus sign.
            (Some(verb), Some(port), None)
                if verb.eq_ignore_ascii_case("connect")
                    && port.bytes().all(|byte| byte.is_ascii_digit()) =>
            {
                port.parse().map_or(GreetingResult::Refused, |port| {
                    GreetingResult::Connect(GuestPort(port))
                })
            }
            _ => GreetingResult::Refused,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn from(guest: u32, host: u32) -> Link {
        Link { host: HostPort(host), guest: GuestPort(guest) }
    }

    #[test]
    fn greeting_has_a_port_and_nothing_else() {
        let greeting_result = |line: &str| Greeting::default().read(line.as_bytes());
        assert_eq!(greeting_result("CONNECT 52\n"), GreetingResult::Connect(GuestPort(52)));
        assert_eq!(
            greeting_result("connect 4294967295\r\n"),
            GreetingResult::Connect(GuestPort(u32::MAX))
        );
        let long = format!("CONNECT {}\n", "1".repeat(40));
        for bad in [
            "CONNECT\n",
            "CONNECT 4294967296\n",
            "CONNECT +5\n",
            "CONNECT 5 6\n",
            "GET 5\n",
            "\n",
            &long,
            "C",
        ] {
            assert_eq!(greeting_result(bad), GreetingResult::Refused, "{bad:?}");
        }
        assert_eq!(Greeting::default().read(&b"\xff\xff 1\n"[..]), GreetingResult::Refused);
    }

    #[test]
    fn greeting_in_pieces_leaves_later_bytes_in_the_stream() {
        let (mut client, mut local_end) = UnixStream::pair().unwrap();
        local_end.set_nonblocking(true).unwrap();
        let mut greeting = Greeting::default();
        client.write_all(b"CONN").unwrap();
        assert_eq!(greeting.read(&local_end), GreetingResult::Incomplete);
        client.write_all(b"ECT 7\nhello").unwrap();
        assert_eq!(greeting.read(&local_end), GreetingResult::Connect(GuestPort(7)));
        let mut rest = [0; 5];
        local_end.read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"hello");
    }

    #[test]
    fn socket_is_removed_unless_it_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let host = HostSide::bind(&path, VsockPorts::new()).unwrap();
        assert!(path.exists());
        drop(host);
        assert!(!path.exists());

        let host = HostSide::bind(&path, VsockPorts::new()).unwrap();
        fs::remove_file(&path).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        drop(host);
        assert!(UnixStream::connect(&path).is_ok());
        drop(other);
    }

    #[test]
    fn used_path_is_refused_and_stale_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let first = HostSide::bind(&path, VsockPorts::new()).unwrap();
        let error = HostSide::bind(&path, VsockPorts::new()).unwrap_err();
        let named = format!("--vsock: {path:?} is in use: another process holds its lock");
        assert_eq!(error.to_string(), named);
        assert!(UnixStream::connect(&path).is_ok());
        assert!(path.exists());
        drop(first);

        // The listener is closed without removing its socket file, as after SIGKILL.
        drop(UnixListener::bind(&path).unwrap());
        let second = HostSide::bind(&path, VsockPorts::new()).unwrap();
        drop(second);

        fs::write(&path, "precious").unwrap();
        let error = HostSide::bind(&path, VsockPorts::new()).unwrap_err();
        assert!(error.to_string().ends_with("exists and is not a socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn port_has_one_listener_and_a_bounded_backlog() {
        let dir = tempfile::tempdir().unwrap();
        let mut ports = VsockPorts::new();
        let mut receiver = ports.listen_in_process(7, GuestPorts::All).unwrap();
        assert!(matches!(
            ports.listen_in_process(7, GuestPorts::All),
            Err(VsockError::PortTaken { port: 7 })
        ));
        let host = HostSide::bind(&dir.path().join("vsock"), ports).unwrap();
        let mut open_clients: Vec<_> =
            (0..IN_PROCESS_BACKLOG).map(|_| host.connect(from(2000, 7)).unwrap()).collect();
        assert!(matches!(host.connect(from(2000, 7)), Err(ConnectError::InProcess { .. })));
        receiver.try_recv().unwrap();
        open_clients.push(host.connect(from(2000, 7)).unwrap());
        drop(receiver);
        assert!(matches!(host.connect(from(2000, 7)), Err(ConnectError::InProcess { .. })));
    }

    #[test]
    fn privileged_listener_accepts_privileged_ports_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut ports = VsockPorts::new();
        let mut receiver = ports.listen_in_process(7, GuestPorts::Privileged).unwrap();
        let host = HostSide::bind(&dir.path().join("vsock"), ports).unwrap();
        // The connection is refused even if a socket with the port's name exists on the host.
        let _listener = UnixListener::bind(dir.path().join("vsock_7")).unwrap();
        for guest in [1024, 4000, u32::MAX] {
            let refused = host.connect(from(guest, 7)).unwrap_err();
            assert!(
                matches!(refused, ConnectError::Unprivileged { link } if link == from(guest, 7))
            );
        }
        assert!(receiver.try_recv().is_err());
        for guest in [0, 1, 1023] {
            host.connect(from(guest, 7)).unwrap();
            receiver.try_recv().unwrap();
        }
    }

    #[test]
    fn full_backlog_refuses_instead_of_blocking() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostSide::bind(&dir.path().join("vsock"), VsockPorts::new()).unwrap();
        let path = dir.path().join("vsock_9");
        let _listener = UnixListener::bind(&path).unwrap();
        let mut open_clients = Vec::new();
        let error = loop {
            match host.connect(from(2000, 9)) {
                Ok(stream) => open_clients.push(stream),
                Err(error) => break error,
            }
            assert!(open_clients.len() < 100_000, "the backlog did not fill up");
        };
        let ConnectError::Socket { source, .. } = error else { panic!("{error}") };
        assert!(!open_clients.is_empty());
        assert!(
            source.kind() == io::ErrorKind::WouldBlock
                || source.raw_os_error() == Some(libc::EMFILE),
            "{source}"
        );
    }
}
