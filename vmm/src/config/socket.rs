//! Sockets of the API and of the metrics: `--api-socket` and `--metrics`.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::path::PathBuf;

use foreshore_config::{ConfigError, inherited_fd};
use foreshore_devices::unix_socket::{SocketAccess, check_path};

/// `--api-socket PATH|path=PATH[,mode=M][,group=G]|fd=N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiSocket {
    /// A path to listen on.
    Path(PathBuf, SocketAccess),
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
        let (text, access) = SocketAccess::split(flag, text, &["mode", "group"], |_, _| Ok(()))?;
        let path = PathBuf::from(text.strip_prefix("path=").unwrap_or(text));
        check_path(flag, &path)?;
        Ok(Self::Path(path, access.unwrap_or_default()))
    }
}

/// Longest name of a host (RFC 1035, 2.3.4, without the length bytes of the first label and the
/// root).
const MAX_HOST_NAME_BYTES: usize = 253;

/// Reads `host=`.
fn host_name(flag: &'static str, value: &str) -> Result<String, ConfigError> {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    if value.is_empty() || value.len() > MAX_HOST_NAME_BYTES || !value.chars().all(is_valid) {
        return Err(ConfigError::BadValue {
            flag,
            key: "host".to_owned(),
            value: value.to_owned(),
            expected: format!(
                "the name of a host: 1 to {MAX_HOST_NAME_BYTES} letters, digits, hyphens and dots, without a port"
            ),
        });
    }
    Ok(value.to_owned())
}

/// `--metrics [ADDRESS:]PORT[,host=NAME]...[,vm=NAME]|unix:PATH[,vm=NAME][,mode=M][,group=G]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A TCP address, and names under which clients may request it.
    Tcp(SocketAddr, Vec<String>),
    Unix(PathBuf, SocketAccess),
}

impl MetricsAddress {
    /// Reads the flag's value: the address, and the name of the VM if `,vm=NAME` gives one.
    pub fn parse_named(text: &str) -> Result<(Self, Option<String>), ConfigError> {
        let (flag, mut name, mut hosts) = ("--metrics", None, Vec::new());
        let keys = ["vm", "host", "mode", "group"];
        let (address, access) = SocketAccess::split(flag, text, &keys, |key, value| {
            if key == "host" {
                hosts.push(host_name(flag, value)?);
                return Ok(());
            }
            if value.is_empty() || value.chars().any(char::is_control) {
                return Err(ConfigError::BadValue {
                    flag,
                    key: key.to_owned(),
                    value: value.to_owned(),
                    expected: "a name".to_owned(),
                });
            }
            name = Some(value.to_owned());
            Ok(())
        })?;
        let mut address = Self::parse(address)?;
        match (&mut address, access) {
            (Self::Unix(path, _), _) if !hosts.is_empty() => {
                let reason =
                    format!("host= is for ADDRESS:PORT, and {} is a unix socket", path.display());
                return Err(ConfigError::Conflict { flag, reason });
            }
            (Self::Unix(..), None) => {}
            (Self::Unix(_, socket), Some(access)) => *socket = access,
            (Self::Tcp(_, names), None) => *names = hosts,
            (Self::Tcp(tcp, _), Some(_)) => {
                let reason =
                    format!("mode= and group= are for unix:PATH, and {tcp} is a TCP address");
                return Err(ConfigError::Conflict { flag, reason });
            }
        }
        Ok((address, name))
    }

    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let flag = "--metrics";
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            check_path(flag, &path)?;
            return Ok(Self::Unix(path, SocketAccess::default()));
        }
        // A port without an address means localhost, so that the metrics are not served on the
        // network by accident.
        let port = text.parse().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let address = port.or_else(|_| text.parse()).map_err(|_| ConfigError::Conflict {
            flag,
            reason: format!(
                "{text:?} is neither ADDRESS:PORT, like 127.0.0.1:9745, nor PORT, nor unix:PATH"
            ),
        })?;
        Ok(Self::Tcp(address, Vec::new()))
    }

    /// Names under which clients may request a TCP address. `None` for a unix socket, which no
    /// browser reaches.
    pub fn host_names(&self) -> Option<Vec<String>> {
        match self {
            Self::Tcp(_, names) => Some(names.clone()),
            Self::Unix(..) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_sockets_are_read() {
        let path = ApiSocket::Path("/run/vm.sock".into(), SocketAccess::default());
        assert_eq!(ApiSocket::parse("/run/vm.sock").as_ref(), Ok(&path));
        assert_eq!(ApiSocket::parse("path=/run/vm.sock"), Ok(path));
        assert_eq!(ApiSocket::parse("fd=3"), Ok(ApiSocket::Fd(3)));
        for text in ["fd=2", "fd=-1", "fd=x", "fd="] {
            let error = ApiSocket::parse(text).unwrap_err().to_string();
            assert!(error.starts_with("--api-socket: fd="), "{error}");
        }
        assert!(ApiSocket::parse("").unwrap_err().to_string().contains("is empty"));
    }

    #[test]
    fn metrics_addresses_are_read() {
        let tcp = MetricsAddress::Tcp("127.0.0.1:9745".parse().unwrap(), Vec::new());
        assert_eq!(MetricsAddress::parse("127.0.0.1:9745").as_ref(), Ok(&tcp));
        assert_eq!(MetricsAddress::parse("9745"), Ok(tcp), "loopback without an address");
        assert_eq!(
            MetricsAddress::parse("unix:/run/m"),
            Ok(MetricsAddress::Unix("/run/m".into(), SocketAccess::default()))
        );
        assert!(MetricsAddress::parse("[::1]:9745").is_ok());
        for text in ["", ":9745", "70000", "127.0.0.1", "127.0.0.1:70000", "host:1", "unix:"] {
            let error = MetricsAddress::parse(text).unwrap_err().to_string();
            assert!(error.starts_with("--metrics: "), "{error}");
        }
    }

    #[test]
    fn host_names_are_read() {
        let names =
            |text: &str| MetricsAddress::parse_named(text).map(|(address, _)| address.host_names());
        assert_eq!(names("127.0.0.1:1"), Ok(Some(Vec::new())));
        let two = vec!["vm1.example.org".to_owned(), "vm1".to_owned()];
        assert_eq!(names("0.0.0.0:1,host=vm1.example.org,vm=a,host=vm1"), Ok(Some(two)));
        assert_eq!(names("unix:/run/m"), Ok(None));
        let error = |text: &str| names(text).unwrap_err().to_string();
        for host in ["", "a:9745", "a b", "http://a", "*", &"a".repeat(254)] {
            let text = error(&format!("1,host={host}"));
            let named = format!("--metrics: host={host:?} is not the name of a host: 1 to 253 ");
            assert!(text.starts_with(&named), "{text}");
        }
        let text = error("unix:/run/m,host=a");
        assert_eq!(text, "--metrics: host= is for ADDRESS:PORT, and /run/m is a unix socket");
    }

    #[test]
    fn mode_and_group_open_a_socket_to_other_users() {
        let access = SocketAccess { mode: 0o660, group: Some("prometheus".to_owned()) };
        let (address, name) =
            MetricsAddress::parse_named("unix:/run/m,vm=web,mode=0660,group=prometheus").unwrap();
        assert_eq!(address, MetricsAddress::Unix("/run/m".into(), access.clone()));
        assert_eq!(name.as_deref(), Some("web"));
        let api = ApiSocket::parse("path=/run/a,group=prometheus,mode=660").unwrap();
        assert_eq!(api, ApiSocket::Path("/run/a".into(), access));
        let error = |text: &str| MetricsAddress::parse_named(text).unwrap_err().to_string();
        for mode in ["", "abc", "0999", "01777", "0060", "-1"] {
            let text = error(&format!("unix:/run/m,mode={mode}"));
            let named = format!("--metrics: mode={mode:?} is not an octal mode from 0600 to 0777");
            assert!(text.starts_with(&named), "{text}");
        }
        assert!(error("unix:/run/m,group=").contains("the name or number of a group"));
        assert!(error("127.0.0.1:9745,mode=0660").contains("127.0.0.1:9745 is a TCP address"));
        assert!(error("unix:/run/m,mode=0660,owner=me").contains("unknown key \"owner\""));
        assert_eq!(
            MetricsAddress::parse_named("127.0.0.1:1,vm=a").unwrap().1.as_deref(),
            Some("a")
        );
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
