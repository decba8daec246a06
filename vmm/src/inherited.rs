//! Descriptors that were handed over by the process that started the VMM.

use std::os::fd::RawFd;

use foreshore_devices::events::EventMonitor;
use thiserror::Error;

use crate::config::{ApiSocket, Launch};

/// A flag names a descriptor that was not handed over.
#[derive(Debug, Error)]
#[error("{flag}: fd={fd} is not open: the process that starts the VMM has to hand it over")]
pub struct NotInherited {
    flag: &'static str,
    fd: RawFd,
}

/// Checks that every descriptor that a flag names is open. Call this before the VMM opens files of
/// its own. Otherwise such a file could have the number of a missing descriptor, and the log, for
/// example, would receive the events.
pub fn check(launch: &Launch) -> Result<(), NotInherited> {
    let api = match launch.api_socket {
        Some(ApiSocket::Fd(fd)) => Some(("--api-socket", fd)),
        _ => None,
    };
    let events = match launch.event_monitor {
        Some(EventMonitor::Fd(fd)) => Some(("--event-monitor", fd)),
        _ => None,
    };
    let nets = launch.config.iter().flat_map(|config| &config.net).flat_map(|net| &net.fds);
    let nets = nets.map(|given| ("--net", given.number()));
    // SAFETY: F_GETFD reads a flag of whatever the number names, or fails.
    let is_open = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    match api.into_iter().chain(events).chain(nets).find(|(_, fd)| !is_open(*fd)) {
        Some((flag, fd)) => Err(NotInherited { flag, fd }),
        None => Ok(()),
    }
}
