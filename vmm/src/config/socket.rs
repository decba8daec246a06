//! Sockets of the API and of the metrics server: `--api-socket` and `--metrics`.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::path::PathBuf;

use foreshore_config::{ConfigError, InheritedFd, Label, PATH_OR_FD, Table, section, text_value};
use foreshore_devices::unix_socket::{SocketAccess, check_path};
use serde::Serialize;

section! {
    /// Keys of `--api-socket`.
    struct ApiKeys: "--api-socket" "REST API at a path or a descriptor" {
        path (bare): Option<PathBuf> => "Unix socket to listen on",
        fd: Option<InheritedFd> => "Inherited unix socket that already listens",
        access (flatten): SocketAccess => "Users who may connect",
    }
}

/// Socket of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiSocket {
    /// Path on which the VMM listens.
    Path(PathBuf, SocketAccess),
    /// Inherited socket that is already listening.
    Fd(RawFd),
}

impl ApiSocket {
    /// Users who may connect. `None` for an inherited socket.
    pub(crate) fn access_mut(&mut self) -> Option<&mut SocketAccess> {
        match self {
            Self::Path(_, access) => Some(access),
            Self::Fd(_) => None,
        }
    }

    pub(super) const TABLE: Table = Table::of::<ApiKeys>();

    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let flag = ApiKeys::FLAG;
        match ApiKeys::parse(text)? {
            ApiKeys { path: Some(path), fd: None, access } => {
                check_path(flag, &path)?;
                Ok(Self::Path(path, access))
            }
            ApiKeys { path: None, fd: Some(InheritedFd(fd)), access } => {
                access.check_absent(flag, &format!("fd={fd} is open already"))?;
                Ok(Self::Fd(fd))
            }
            _ => Err(ConfigError::NotOneOf { flag, text: text.to_owned(), forms: PATH_OR_FD }),
        }
    }
}

section! {
    /// Keys of `--metrics`.
    struct MetricsKeys: "--metrics" "Serve metrics for Prometheus at a TCP address or a unix socket" {
        address (bare): MetricsAddress => "Address to listen on; a port alone means 127.0.0.1",
        host (repeated): Option<HostNames> => "DNS name that clients may use for the TCP address",
        vm: Option<Label> => "Name of the VM in the metrics, instead of the API socket's",
        access (flatten): SocketAccess => "Users who may connect",
    }
}

/// Longest host name (RFC 1035, 2.3.4, without the length bytes of the first label and of the
/// root).
const MAX_HOST_NAME_BYTES: usize = 253;

/// Comma-separated host names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct HostNames(Vec<String>);

text_value!(
    HostNames,
    "NAME",
    format!(
        "the name of a host: 1 to {MAX_HOST_NAME_BYTES} letters, digits, hyphens and dots, without a port"
    ),
    |text| {
        let is_in_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let is_name = |name: &str| {
            (1..=MAX_HOST_NAME_BYTES).contains(&name.len()) && name.chars().all(is_in_name)
        };
        let names = text.split(',').map(|name| is_name(name).then(|| name.to_owned()));
        names.collect::<Option<_>>().map(HostNames)
    }
);

/// Address of the metrics server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum MetricsAddress {
    /// TCP address, and additional host names by which clients may request it.
    Tcp(SocketAddr, Vec<String>),
    Unix(PathBuf, SocketAccess),
}

text_value!(
    MetricsAddress,
    "PORT|ADDRESS:PORT|unix:PATH",
    "PORT, ADDRESS:PORT, like 127.0.0.1:9745, or unix:PATH",
    |text| {
        if let Some(path) = text.strip_prefix("unix:") {
            return Some(MetricsAddress::Unix(path.into(), SocketAccess::default()));
        }
        // A port without an address means localhost, so that the metrics are not served on the
        // network by accident.
        let port = text.parse().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        Some(MetricsAddress::Tcp(port.or_else(|_| text.parse()).ok()?, Vec::new()))
    }
);

impl MetricsAddress {
    /// Users who may connect. `None` for a TCP address.
    pub(crate) fn access_mut(&mut self) -> Option<&mut SocketAccess> {
        match self {
            Self::Unix(_, access) => Some(access),
            Self::Tcp(..) => None,
        }
    }

    pub(super) const TABLE: Table = Table::of::<MetricsKeys>();

    /// Parses the flag's value. Returns the address, and the name in `vm=NAME` if there is one.
    pub fn parse_named(text: &str) -> Result<(Self, Option<String>), ConfigError> {
        let (flag, keys) = (MetricsKeys::FLAG, MetricsKeys::parse(text)?);
        let address = match (keys.address, keys.host) {
            (Self::Unix(path, _), Some(_)) => {
                let reason =
                    format!("host= needs ADDRESS:PORT, but {} is a unix socket", path.display());
                return Err(ConfigError::Conflict { flag, reason });
            }
            (Self::Unix(path, _), None) => {
                check_path(flag, &path)?;
                Self::Unix(path, keys.access)
            }
            (Self::Tcp(address, _), hosts) => {
                keys.access.check_absent(flag, &format!("{address} is a TCP address"))?;
                Self::Tcp(address, hosts.unwrap_or_default().0)
            }
        };
        Ok((address, keys.vm.map(|name| name.0)))
    }

    /// Host names by which clients may request a TCP address. `None` for a unix socket, because
    /// browsers cannot reach it.
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

    /// Text of `error` without the leading flag.
    fn of(error: ConfigError, flag: &str) -> String {
        error.to_string().strip_prefix(&format!("{flag}: ")).unwrap().to_owned()
    }

    fn json(access: &SocketAccess) -> String {
        serde_json::to_string(access).unwrap()
    }

    #[test]
    fn api_sockets_are_read_or_refused() {
        let read = |text: &str| {
            Ok(match ApiSocket::parse(text)? {
                ApiSocket::Path(path, access) => format!("{} {}", path.display(), json(&access)),
                ApiSocket::Fd(fd) => format!("fd {fd}"),
            })
        };
        let rows = [
            ("/run/x", "/run/x {}"),
            (" relative ", "relative {}"),
            ("path=/run/x", "/run/x {}"),
            (r#"path="/a,b""#, "/a,b {}"),
            ("/a,b=c", "/a,b=c {}"),
            (r#"/a"[b,mode=0660"#, r#"/a"[b {"mode":432}"#),
            ("pth=/a", "pth=/a {}"),
            ("path= /a ,mode=,group=,fd=", "/a {}"),
            (r#"mode=600,path=/a,group="g,h""#, r#"/a {"mode":384,"group":"g,h"}"#),
            ("fd=3", "fd 3"),
            (" fd= 3 ,mode=,path=", "fd 3"),
            ("", r#""" is not one of path=PATH and fd=N"#),
            ("path=", r#""path=" is not one of path=PATH and fd=N"#),
            ("mode=0660", r#""mode=0660" is not one of path=PATH and fd=N"#),
            ("path=/a,fd=3", r#""path=/a,fd=3" is not one of path=PATH and fd=N"#),
            ("/a,fd=3", r#""/a,fd=3" is not one of path=PATH and fd=N"#),
            ("fd=2", r#"fd="2" is not the number of an inherited file descriptor, 3 and up"#),
            ("fd=-1", r#"fd="-1" is not the number of an inherited file descriptor, 3 and up"#),
            ("fd=x", r#"fd="x" is not the number of an inherited file descriptor, 3 and up"#),
            (
                "fd=3,group=g",
                "mode= and group= need the path of a socket, but fd=3 is open already",
            ),
            ("path=/a,b", r#"unknown key "b"; the keys are path=, fd=, mode=, group="#),
            ("/a,mode=660,a=b", r#"unknown key "a"; the keys are path=, fd=, mode=, group="#),
            ("path=/a,mode=0660,mode=0660", "mode is given twice"),
            ("/a,path=/b", "path is given twice"),
            ("path=/[a", r#""path=/[a" has an unclosed bracket"#),
        ];
        for (text, expected) in rows {
            assert_eq!(read(text).unwrap_or_else(|error| of(error, "--api-socket")), expected);
        }
    }

    #[test]
    fn metrics_addresses_are_read_or_refused() {
        let read = |text: &str| {
            let (address, name) = MetricsAddress::parse_named(text)?;
            let (at, more) = match &address {
                MetricsAddress::Tcp(address, hosts) => (address.to_string(), hosts.join(" ")),
                MetricsAddress::Unix(path, access) => (path.display().to_string(), json(access)),
            };
            let is_tcp = matches!(address, MetricsAddress::Tcp(..));
            assert_eq!(address.host_names().is_some(), is_tcp);
            Ok(format!("{at} [{more}] {}", name.as_deref().unwrap_or("-")))
        };
        let rows = [
            ("127.0.0.1:1", "127.0.0.1:1 [] -"),
            (" 1 ", "127.0.0.1:1 [] -"),
            ("address=1,vm=,host=,mode=", "127.0.0.1:1 [] -"),
            ("[::1]:1,vm=__a", "[::1]:1 [] __a"),
            ("0.0.0.0:1,host=a.b,vm= x ,host=c", "0.0.0.0:1 [a.b c] x"),
            (
                "1,vm=6ba7b810-9dad-11d1-80b4-00c04fd430c8",
                "127.0.0.1:1 [] 6ba7b810-9dad-11d1-80b4-00c04fd430c8",
            ),
            (r#"1,host="a,b""#, "127.0.0.1:1 [a b] -"),
            ("unix:/m", "/m [{}] -"),
            ("unix:/a,b,vm=x", "/a,b [{}] x"),
            (r#"unix:/m,vm="a,b""#, "/m [{}] a,b"),
            ("unix:/m,mode=0660,group=g", r#"/m [{"mode":432,"group":"g"}] -"#),
            ("", "address= is missing"),
            ("vm=a", "address= is missing"),
            ("unix:", "the path of the socket is empty"),
            ("unix:/m,vm=a\tb", r#"vm="a\tb" is not a name without control characters"#),
            (r#"unix:/m,group="""#, r#"group="" is not a name without control characters"#),
            ("unix:/m,vm=a,vm=b", "vm is given twice"),
            ("unix:/m,host=a", "host= needs ADDRESS:PORT, but /m is a unix socket"),
            (
                "127.0.0.1:1,mode=0600",
                "mode= and group= need the path of a socket, but 127.0.0.1:1 is a TCP address",
            ),
            (
                "unix:/m,mode=0660,owner=me",
                r#"unknown key "owner"; the keys are address=, host=, vm=, mode=, group="#,
            ),
        ];
        for (text, expected) in rows {
            assert_eq!(read(text).unwrap_or_else(|error| of(error, "--metrics")), expected);
        }
    }

    #[test]
    fn unreadable_values_of_metrics_are_named() {
        let error = |text: &str| MetricsAddress::parse_named(text).unwrap_err().to_string();
        for address in ["9745,", ":9745", "70000", "127.0.0.1", "127.0.0.1:70000", "host:1"] {
            let expected = "is not PORT, ADDRESS:PORT, like 127.0.0.1:9745, or unix:PATH";
            assert_eq!(error(address), format!("--metrics: address={address:?} {expected}"));
        }
        for host in ["a:9745", "a b", "http://a", "*", "[a]", &"a".repeat(254)] {
            let expected = format!("--metrics: host={host:?} is not the name of a host: 1 to 253 ");
            let text = error(&format!("1,host={host}"));
            assert!(text.starts_with(&expected), "{text}");
        }
        for mode in ["abc", "0999", "01777", "0060", "-1"] {
            let expected = format!("--metrics: mode={mode:?} is not an octal mode from 0600 to ");
            let text = error(&format!("unix:/m,mode={mode}"));
            assert!(text.starts_with(&expected), "{text}");
        }
    }

    #[test]
    fn long_paths_are_refused() {
        let long = "a".repeat(108);
        assert!(ApiSocket::parse(&long[1..]).is_ok());
        let expected = "has 108 bytes, but the path of a Unix socket has at most 107";
        let error = ApiSocket::parse(&long).unwrap_err();
        assert_eq!(error.to_string(), format!("--api-socket: {long:?} {expected}"));
    }
}
