//! Unix sockets on which the VMM listens. Each path has one owner.
//!
//! The VMM replaces a stale socket of a killed VMM, but not a socket that is in use. On exit, it
//! removes its own sockets.

mod access;
mod path_lock;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use pmem_volume::file_mode::PRIVATE_MODE;
use rustix::fs::{AtFlags, Gid, Mode, Uid, chownat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use thiserror::Error;

use self::access::group_id;
pub use self::access::{MAX_SOCKET_PATH_BYTES, SocketAccess, SocketMode, check_path};
use self::path_lock::PathLock;

/// Maximum number of clients that wait to be accepted, the same as in the standard library.
const BACKLOG: i32 = 128;

#[derive(Debug, Error)]
pub enum UnixSocketError {
    /// Another process listens on the path or is about to.
    #[error("{flag}: {path:?} is in use: another process {claim}")]
    InUse { flag: &'static str, path: PathBuf, claim: &'static str },
    #[error("{flag}: {path:?} exists and is not a socket")]
    Exists { flag: &'static str, path: PathBuf },
    #[error("{flag}: cannot listen on {path:?}")]
    BindPath {
        flag: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{flag}: cannot give {path:?} to the user of --user")]
    Owner {
        flag: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{flag}: cannot look up group=")]
    Group {
        flag: &'static str,
        #[source]
        source: io::Error,
    },
}

/// Listens on `path`, the value of `flag`, and returns a non-blocking listener. `access` defines
/// which users may connect. Dropping the returned [`SocketFile`] removes the file. Drop it after
/// the listener.
pub fn listen(
    flag: &'static str,
    path: &Path,
    access: &SocketAccess,
) -> Result<(UnixListener, SocketFile), UnixSocketError> {
    let fail = |source| UnixSocketError::BindPath { flag, path: path.to_owned(), source };
    let in_use = |claim| UnixSocketError::InUse { flag, path: path.to_owned(), claim };
    let lock = PathLock::take(path).map_err(fail)?.ok_or_else(|| in_use("holds its lock"))?;
    let state = path_state(path).map_err(fail)?;
    match state {
        PathState::Free => {}
        PathState::Used => return Err(in_use("listens on it")),
        PathState::NotSocket => {
            return Err(UnixSocketError::Exists { flag, path: path.to_owned() });
        }
        PathState::Stale => {
            fs::remove_file(path).map_err(fail)?;
        }
    }
    let (listener, mut file) = bind(path, lock).map_err(fail)?;
    file.has_replaced_stale = state == PathState::Stale;
    // If setting the access fails, dropping `file` removes the socket again.
    file.open_to(&listener, access).map_err(fail)?;
    rustix::net::listen(&listener, BACKLOG).map_err(|err| fail(err.into()))?;
    Ok((listener, file))
}

/// Binds a socket to `path`. Only its owner may connect, regardless of the umask. The kernel gives
/// the file the mode of the socket, less the umask (unix_bind_bsd in Linux net/unix/af_unix.c).
fn bind(path: &Path, lock: PathLock) -> io::Result<(UnixListener, SocketFile)> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(PRIVATE_MODE))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok((UnixListener::from(socket), SocketFile::at(path, lock)?))
}

/// `SIOCUNIXFILE` of linux/un.h: opens the file to which a socket is bound, with `O_PATH`.
const SIOCUNIXFILE: libc::Ioctl = 0x89e0;

/// Opens the file to which `socket` is bound, wherever it is now. Returns `None` if the kernel does
/// not permit this without CAP_NET_ADMIN.
fn open_bound(socket: &UnixListener) -> io::Result<Option<File>> {
    // SAFETY: the descriptor is open, and the request has no argument (unix_open_file in Linux
    // net/unix/af_unix.c).
    let fd = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE) };
    if fd >= 0 {
        // SAFETY: the kernel has opened the descriptor for this call.
        return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }.into()));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EPERM) => Ok(None),
        error => Err(error),
    }
}

/// Opens a file only to change its attributes.
fn open_path(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(path)
}

fn replaced() -> io::Error {
    io::Error::other("the path was replaced meanwhile")
}

fn set_owner(file: &File, user: Option<u32>, group: Option<u32>) -> io::Result<()> {
    let (user, group) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
    Ok(chownat(file, "", user, group, AtFlags::EMPTY_PATH)?)
}

/// Kind of object at a path.
#[derive(Debug, PartialEq, Eq)]
enum PathState {
    Free,
    /// A socket in use.
    Used,
    /// A stale socket.
    Stale,
    /// A file, folder or link.
    NotSocket,
}

fn path_state(path: &Path) -> io::Result<PathState> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => {}
        Ok(_) => return Ok(PathState::NotSocket),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(PathState::Free),
        Err(error) => return Err(error),
    }
    // The socket is non-blocking, because a listener that accepts no clients would block the call.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    for kind in [SocketType::STREAM, SocketType::SEQPACKET, SocketType::DGRAM] {
        let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
        match connect(&socket, &SocketAddrUnix::new(path)?) {
            // The socket at the path is of another type (unix(7)).
            Err(Errno::PROTOTYPE) => {}
            Err(Errno::CONNREFUSED) => return Ok(PathState::Stale),
            Ok(()) | Err(Errno::AGAIN) => return Ok(PathState::Used),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(PathState::Used)
}

/// File of a socket. Dropping it removes the file, unless another file has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
    has_replaced_stale: bool,
    /// Lock of the path, held until the file is removed.
    lock: PathLock,
}

impl SocketFile {
    fn at(path: &Path, lock: PathLock) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
            has_replaced_stale: false,
            lock,
        })
    }
}

impl SocketFile {
    /// Opens the file only to change its attributes. Fails if another file has replaced it, for
    /// example a socket of another user who may write to the folder.
    ///
    /// Such a user may also have replaced the file, or a folder of the path, between the bind and
    /// [`Self::at`]. Therefore, the file is compared with that of `socket` if this process has
    /// CAP_NET_ADMIN. Two gaps remain: root without this capability may change another socket that
    /// has the same name, and a stale socket that is replaced is removed by its path.
    fn open(&self, socket: &UnixListener) -> io::Result<File> {
        let found = open_path(&self.path)?;
        let metadata = found.metadata()?;
        let (file, expected) = match open_bound(socket)? {
            Some(bound) => {
                let metadata = bound.metadata()?;
                (bound, (metadata.dev(), metadata.ino()))
            }
            None => (found, (self.device, self.inode)),
        };
        let is_own = (metadata.dev(), metadata.ino()) == expected;
        if is_own && metadata.file_type().is_socket() { Ok(file) } else { Err(replaced()) }
    }

    /// Sets group and mode of the file. Uses a descriptor, so that another file is not changed if
    /// it replaces the socket meanwhile.
    fn open_to(&self, socket: &UnixListener, access: &SocketAccess) -> io::Result<()> {
        if *access == SocketAccess::default() {
            return Ok(());
        }
        let group = access.group.as_ref().map(|group| group_id(&group.0)).transpose()?;
        let file = self.open(socket)?;
        if group.is_some() {
            set_owner(&file, None, group)?;
        }
        let Some(mode) = access.mode else { return Ok(()) };
        let file = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        fs::set_permissions(&file, fs::Permissions::from_mode(mode.0))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Logs that the file has replaced a stale socket. The log may start after [`listen`].
    pub fn log_replacement(&self) {
        if self.has_replaced_stale {
            tracing::info!(path = ?self.path, "Replaced a stale socket");
        }
    }

    /// Gives the file of `socket` and its lock to another user, who can then remove them, and to a
    /// group unless `access` names one.
    pub fn give_to(
        &self,
        socket: &UnixListener,
        user: Option<u32>,
        group: Option<u32>,
        access: &SocketAccess,
    ) -> io::Result<()> {
        let file = self.open(socket)?;
        set_owner(&file, user, group.filter(|_| access.group.is_none()))?;
        self.lock.give_to(user, group)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_own_file = fs::symlink_metadata(&self.path)
            .is_ok_and(|now| (now.dev(), now.ino()) == (self.device, self.inode));
        if is_own_file && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = ?self.path, %error, "Cannot remove the socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use foreshore_config::Label;

    use super::*;

    fn listen_on(path: &Path) -> Result<(UnixListener, SocketFile), UnixSocketError> {
        listen("--api-socket", path, &SocketAccess::default())
    }

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn socket_is_private_unless_access_is_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let socket = listen_on(&path).unwrap();
        assert_eq!(mode_of(&path), 0o600);
        drop(socket);
        let group = fs::metadata(dir.path()).unwrap().gid();
        let access =
            SocketAccess { mode: Some(SocketMode(0o660)), group: Some(Label(group.to_string())) };
        let socket = listen("--metrics", &path, &access).unwrap();
        assert_eq!((mode_of(&path), fs::metadata(&path).unwrap().gid()), (0o660, group));
        UnixStream::connect(&path).unwrap();
        drop(socket);
        let unknown = SocketAccess { group: Some(Label("no such group".to_owned())), ..access };
        let error = listen("--metrics", &path, &unknown).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "the host has no group \"no such group\"");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "a file was left behind");
    }

    #[test]
    fn used_socket_is_distinguished_from_a_stale_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let first = listen_on(&path).unwrap();
        let text = listen_on(&path).unwrap_err().to_string();
        assert!(
            text.starts_with("--api-socket: ")
                && text.ends_with("in use: another process holds its lock"),
            "{text}"
        );
        drop(first);
        assert!(!path.exists(), "the socket outlived its owner");
        // Stale sockets of killed VMMs, with and without a lock.
        for lock in [true, false] {
            drop(UnixListener::bind(&path).unwrap());
            if lock {
                fs::write(dir.path().join("api.lock"), "").unwrap();
            }
            let socket = listen_on(&path).unwrap();
            UnixStream::connect(&path).unwrap();
            drop(socket);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn socket_that_has_replaced_another_is_not_opened_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let (listener, mut file) = listen_on(&path).unwrap();
        let access = SocketAccess { mode: Some(SocketMode(0o666)), ..SocketAccess::default() };
        file.open_to(&listener, &access).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        let before = mode_of(&path);
        let expected = replaced().to_string();
        assert_eq!(file.open_to(&listener, &access).unwrap_err().to_string(), expected);
        // Pretends that the other socket was there when this process first looked at the path.
        let metadata = fs::metadata(&path).unwrap();
        (file.device, file.inode) = (metadata.dev(), metadata.ino());
        if open_bound(&listener).unwrap().is_none() {
            return eprintln!("partly skipped: this process does not have CAP_NET_ADMIN");
        }
        assert_eq!(file.open_to(&listener, &access).unwrap_err().to_string(), expected);
        let given = file.give_to(&listener, Some(65534), None, &SocketAccess::default());
        assert_eq!(given.unwrap_err().to_string(), expected);
        assert_eq!((mode_of(&path), fs::metadata(&path).unwrap().uid()), (before, metadata.uid()));
    }

    #[test]
    fn used_path_is_neither_replaced_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let error = || listen_on(&path).unwrap_err().to_string();
        // 1. Files of other kinds.
        fs::write(&path, "mine").unwrap();
        assert!(error().ends_with("exists and is not a socket"), "{}", error());
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        fs::remove_file(&path).unwrap();
        let other_path = dir.path().join("elsewhere");
        drop(UnixListener::bind(&other_path).unwrap());
        std::os::unix::fs::symlink(&other_path, &path).unwrap();
        assert!(error().ends_with("is not a socket") && other_path.exists());
        fs::remove_file(&path).unwrap();
        // 2. Sockets: one that accepts no clients, one with a full queue, one of another type.
        let listener = UnixListener::bind(&path).unwrap();
        assert!(error().ends_with("is in use: another process listens on it"), "{}", error());
        // SAFETY: the descriptor is open.
        assert_eq!(unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&listener), 0) }, 0);
        let _fills_it = [path_state(&path).unwrap(), path_state(&path).unwrap()];
        assert!(error().ends_with("listens on it"), "{}", error());
        drop(listener);
        fs::remove_file(&path).unwrap();
        let datagrams = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        assert!(error().ends_with("listens on it"), "{}", error());
        drop(datagrams);
        fs::remove_file(&path).unwrap();
        // 3. A path on which another process is about to listen.
        let lock = PathLock::take(&path).unwrap();
        assert!(error().ends_with("another process holds its lock"), "{}", error());
        drop(lock);
        assert!(listen_on(&path).is_ok());
    }

    #[test]
    fn file_that_replaced_the_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let socket = listen_on(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        drop(socket);
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }
}
