//! Checks the `Host` header to prevent DNS rebinding.
//!
//! The owner of a web page can make its DNS name resolve to an address of this host. A visitor's
//! browser then treats the page and this server as one origin, so the page could read the metrics.
//! The browser sends the page's name in `Host`. The server therefore accepts a request only if its
//! host is an IP address, `localhost`, or a name that the user has configured.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Uri, Version, header};
use axum::response::{IntoResponse, Response};
use thiserror::Error;

/// Reason for refusing a request because of its host.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum HostError {
    /// The request does not have exactly one Host header (RFC 9112, 3.2).
    #[error("the request has {0} Host headers, and must have exactly one")]
    Count(usize),
    /// The value of the header is not a valid host.
    #[error("{0:?} is not a valid host")]
    Malformed(String),
    /// The name is not configured, so it may be the name of a web page.
    #[error("{0:?} is neither an IP address nor localhost nor a name in --metrics host=")]
    Unknown(String),
}

impl IntoResponse for HostError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Count(_) | Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Unknown(_) => StatusCode::MISDIRECTED_REQUEST,
        };
        (status, format!("{self}\n")).into_response()
    }
}

/// Checks the host of a request. `names` are accepted in addition to IP addresses and `localhost`.
pub(super) fn check_host(
    version: Version,
    uri: &Uri,
    headers: &HeaderMap,
    names: &[String],
) -> Result<(), HostError> {
    // A request target in absolute form overrides the header (RFC 9112, 3.2.2).
    if let Some(authority) = uri.authority() {
        return check_authority(authority, names);
    }
    let mut hosts = headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.count()) {
        // Browsers never send a request without a host.
        (None, _) if version < Version::HTTP_11 => Ok(()),
        (Some(host), 0) => {
            let malformed =
                || HostError::Malformed(String::from_utf8_lossy(host.as_bytes()).into_owned());
            let authority = Authority::try_from(host.as_bytes()).map_err(|_| malformed())?;
            check_authority(&authority, names)
        }
        (first, more) => Err(HostError::Count(more + usize::from(first.is_some()))),
    }
}

fn check_authority(authority: &Authority, names: &[String]) -> Result<(), HostError> {
    if authority.as_str().contains('@') {
        return Err(HostError::Malformed(authority.to_string()));
    }
    let host = authority.host();
    let inside = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_address = match inside {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => host.parse::<Ipv4Addr>().is_ok(),
    };
    // The name `localhost.` is equivalent.
    let plain = |name: &str| name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let name = plain(host);
    if is_address || name == "localhost" || names.iter().any(|known| plain(known) == name) {
        return Ok(());
    }
    Err(HostError::Unknown(host.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(hosts: &[&str], names: &[&str]) -> Result<(), HostError> {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, host.parse().unwrap());
        }
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        check_host(Version::HTTP_11, &Uri::from_static("/metrics"), &headers, &names)
    }

    #[test]
    fn addresses_localhost_and_given_names_are_accepted() {
        for host in [
            "127.0.0.1:9745",
            "10.1.2.3",
            "[::1]:9745",
            "[2001:db8::1]",
            "localhost:9745",
            "LocalHost",
            "localhost.",
            "vm1.example.org:9745",
            "VM1.Example.org.",
        ] {
            assert_eq!(check(&[host], &["vm1.example.org"]), Ok(()), "{host}");
        }
    }

    #[test]
    fn other_hosts_are_refused() {
        for host in [
            "evil.example",
            "evil.example:9745",
            "vm1.example.org.evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "127.1",
            "2130706433",
            "[::1.evil]",
        ] {
            let refused = check(&[host], &["vm1.example.org"]);
            assert!(
                matches!(refused, Err(HostError::Unknown(_) | HostError::Malformed(_))),
                "{host}"
            );
        }
        for host in ["a@localhost", "a b", "", "localhost/x"] {
            assert!(matches!(check(&[host], &[]), Err(HostError::Malformed(_))), "{host:?}");
        }
        assert_eq!(check(&["localhost", "evil.example"], &[]), Err(HostError::Count(2)));
        assert_eq!(check(&[], &[]), Err(HostError::Count(0)));
    }

    #[test]
    fn target_overrides_header_and_http_1_0_needs_none() {
        let none = HeaderMap::new();
        let target = |uri| check_host(Version::HTTP_11, &Uri::from_static(uri), &none, &[]);
        assert_eq!(target("http://localhost:9745/metrics"), Ok(()));
        let evil = Err(HostError::Unknown("evil.example".to_owned()));
        assert_eq!(target("http://evil.example/metrics"), evil);
        assert_eq!(check_host(Version::HTTP_10, &Uri::from_static("/metrics"), &none, &[]), Ok(()));
    }
}
