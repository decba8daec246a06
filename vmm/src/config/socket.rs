//! Where the VMM listens: `--api-socket`, `--metrics`, and the bound that all unix sockets have.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::error::ConfigError;

/// The longest path in a `sockaddr_un`, whose 108 bytes end with a zero (unix(7)).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// `--api-socket PATH|path=PATH|fd=N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiSocket {
    /// A path to listen on.
    Path(PathBuf),
    /// A socket that listens already, handed over by who started the VMM.
    Fd(RawFd),
}

impl ApiSocket {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let flag = "--api-socket";
        if let Some(number) = text.strip_prefix("fd=") {
            return inherited_fd(flag, number).map(Self::Fd);
        }
        let path = PathBuf::from(text.strip_prefix("path=").unwrap_or(text));
        check_path(flag, &path)?;
        Ok(Self::Path(path))
    }
}

/// `--event-monitor path=PATH|fd=N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventMonitor {
    /// A file, which is made or emptied, or a FIFO.
    Path(PathBuf),
    /// A descriptor that was handed over by who started the VMM.
    Fd(RawFd),
}

impl EventMonitor {
    /// Reads the flag's value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let flag = "--event-monitor";
        match (text.strip_prefix("fd="), text.strip_prefix("path=")) {
            (Some(number), _) => inherited_fd(flag, number).map(Self::Fd),
            (None, Some(path)) if !path.is_empty() => Ok(Self::Path(path.into())),
            _ => {
                Err(ConfigError::Conflict { flag, reason: format!("{text:?} is neither path=PATH nor fd=N") })
            }
        }
    }
}

impl fmt::Display for EventMonitor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(out, "{}", path.display()),
            Self::Fd(fd) => write!(out, "fd={fd}"),
        }
    }
}

/// A descriptor that was handed over, by its number.
fn inherited_fd(flag: &'static str, number: &str) -> Result<RawFd, ConfigError> {
    let fd = number.parse().ok().filter(|fd| *fd > libc::STDERR_FILENO);
    fd.ok_or_else(|| ConfigError::BadValue {
        flag,
        key: "fd".to_owned(),
        value: number.to_owned(),
        expected: "the number of an inherited file descriptor, 3 and up".to_owned(),
    })
}

/// `--metrics ADDRESS:PORT|unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

impl MetricsAddress {
    /// Reads the flag's value, with the name of the VM where it ends in `,vm=NAME`.
    pub fn parse_named(text: &str) -> Result<(Self, Option<String>), ConfigError> {
        let Some((address, name)) = text.rsplit_once(",vm=") else { return Ok((Self::parse(text)?, None)) };
        if name.is_empty() || name.chars().any(char::is_control) {
            return Err(ConfigError::BadValue {
                flag: "--metrics",
                key: "vm".to_owned(),
                value: name.to_owned(),
                expected: "a name".to_owned(),
            });
        }
        Ok((Self::parse(address)?, Some(name.to_owned())))
    }

    /// Reads an address.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let flag = "--metrics";
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            check_path(flag, &path)?;
            return Ok(Self::Unix(path));
        }
        text.parse().map(Self::Tcp).map_err(|_| ConfigError::Conflict {
            flag,
            reason: format!("{text:?} is neither ADDRESS:PORT, like 127.0.0.1:9745, nor unix:PATH"),
        })
    }
}

/// Checks that a socket can be bound to `path`.
pub(super) fn check_path(flag: &'static str, path: &Path) -> Result<(), ConfigError> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() {
        return Err(ConfigError::Conflict { flag, reason: "the path of the socket is empty".to_owned() });
    }
    if bytes.len() > MAX_SOCKET_PATH_BYTES {
        let (path, len) = (path.to_string_lossy().into_owned(), bytes.len());
        return Err(ConfigError::SocketPath { flag, path, len, most: MAX_SOCKET_PATH_BYTES });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_sockets_are_read() {
        assert_eq!(ApiSocket::parse("/run/vm.sock"), Ok(ApiSocket::Path("/run/vm.sock".into())));
        assert_eq!(ApiSocket::parse("path=/run/vm.sock"), Ok(ApiSocket::Path("/run/vm.sock".into())));
        assert_eq!(ApiSocket::parse("fd=3"), Ok(ApiSocket::Fd(3)));
        for text in ["fd=2", "fd=-1", "fd=x", "fd="] {
            let error = ApiSocket::parse(text).unwrap_err().to_string();
            assert!(error.starts_with("--api-socket: fd="), "{error}");
        }
        assert!(ApiSocket::parse("").unwrap_err().to_string().contains("is empty"));
    }

    #[test]
    fn metrics_addresses_are_read() {
        let tcp = MetricsAddress::Tcp("127.0.0.1:9745".parse().unwrap());
        assert_eq!(MetricsAddress::parse("127.0.0.1:9745"), Ok(tcp));
        assert_eq!(MetricsAddress::parse("unix:/run/m"), Ok(MetricsAddress::Unix("/run/m".into())));
        assert!(MetricsAddress::parse("[::1]:9745").is_ok());
        for text in ["", "9745", "127.0.0.1", "127.0.0.1:70000", "host:1", "unix:"] {
            let error = MetricsAddress::parse(text).unwrap_err().to_string();
            assert!(error.starts_with("--metrics: "), "{error}");
        }
    }

    #[test]
    fn long_paths_are_refused() {
        assert!(ApiSocket::parse(&"a".repeat(107)).is_ok());
        let error = ApiSocket::parse(&"a".repeat(108)).unwrap_err().to_string();
        assert!(
            error.ends_with("is 108 bytes long, and the path of a unix socket has at most 107"),
            "{error}"
        );
    }
}
