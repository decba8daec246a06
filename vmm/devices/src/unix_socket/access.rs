//! Access permissions of a Unix socket, and the maximum length of its path.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use foreshore_config::{ConfigError, Label, section, text_value};
use foreshore_confinement::accounts;
use pmem_volume::file_mode::PRIVATE_MODE;
use serde::Serialize;

/// Maximum length of a path in a `sockaddr_un`, whose 108 bytes include a terminating zero
/// (unix(7)).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

section! {
    /// Users of the host who may connect to a socket.
    pub struct SocketAccess: "--api-socket" "Users who may connect" {
        mode: Option<SocketMode> => "Octal permissions of the socket's file, instead of 0600",
        group: Option<Label> => "Name or number of the group of the socket's file, instead of the VMM's",
    }
    defaults true;
    parse none;
}

/// Permissions of a socket's file. The owner can always read and write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SocketMode(pub u32);

text_value!(
    SocketMode,
    "MODE",
    "an octal mode from 0600 to 0777 with read and write permission for the owner",
    |text| {
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| mode & !0o777 == 0);
        mode.filter(|mode| mode & PRIVATE_MODE == PRIVATE_MODE).map(SocketMode)
    }
);

impl SocketAccess {
    /// Replaces the name of the group with its number, because /etc/group may differ after a change
    /// of the root folder.
    pub fn look_up_group(&mut self) -> io::Result<()> {
        if let Some(group) = &mut self.group {
            group.0 = group_id(&group.0)?.to_string();
        }
        Ok(())
    }

    /// Refuses both keys for a socket whose file does not belong to this process. `reason` is a
    /// clause about the socket.
    pub fn check_absent(&self, flag: &'static str, reason: &str) -> Result<(), ConfigError> {
        if *self == Self::default() {
            return Ok(());
        }
        let reason = format!("mode= and group= need the path of a socket, but {reason}");
        Err(ConfigError::Conflict { flag, reason })
    }
}

pub(super) fn group_id(name: &str) -> io::Result<u32> {
    let missing = || io::Error::other(format!("the host has no group {name:?}"));
    accounts::group_id(name)?.ok_or_else(missing)
}

/// Checks that a socket can be bound to `path`.
pub fn check_path(flag: &'static str, path: &Path) -> Result<(), ConfigError> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() {
        return Err(ConfigError::Conflict {
            flag,
            reason: "the path of the socket is empty".to_owned(),
        });
    }
    if bytes.len() > MAX_SOCKET_PATH_BYTES {
        let (path, len) = (path.to_string_lossy().into_owned(), bytes.len());
        return Err(ConfigError::SocketPath { flag, path, len, most: MAX_SOCKET_PATH_BYTES });
    }
    Ok(())
}
