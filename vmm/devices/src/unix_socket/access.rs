//! Access to a unix socket, and the bound of its path.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use foreshore_config::ConfigError;
use pmem_volume::file_mode::PRIVATE_MODE;

/// The longest path in a `sockaddr_un`, whose 108 bytes end with a zero (unix(7)).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Users of the host that may connect to a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// Permissions of its file.
    pub mode: u32,
    /// Name or number of its group, if that is not the group of the process.
    pub group: Option<String>,
}

impl Default for SocketAccess {
    fn default() -> Self {
        Self { mode: PRIVATE_MODE, group: None }
    }
}

impl SocketAccess {
    /// Reads `mode=` or `group=`. Returns false for another key.
    fn read(&mut self, flag: &'static str, key: &str, value: &str) -> Result<bool, ConfigError> {
        let bad = |expected: &str| ConfigError::BadValue {
            flag,
            key: key.to_owned(),
            value: value.to_owned(),
            expected: expected.to_owned(),
        };
        match key {
            "mode" => {
                let mode = u32::from_str_radix(value, 8).ok().filter(|mode| mode & !0o777 == 0);
                let mode = mode.filter(|mode| mode & PRIVATE_MODE == PRIVATE_MODE);
                self.mode = mode.ok_or_else(|| {
                    bad("an octal mode from 0600 to 0777 that the owner can read and write")
                })?;
            }
            "group" if value.is_empty() => return Err(bad("the name or number of a group")),
            "group" => self.group = Some(value.to_owned()),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Takes `,mode=` and `,group=` from the end of `text`, and hands every other key of `keys` to
    /// `other`.
    pub fn split<'a>(
        flag: &'static str,
        text: &'a str,
        keys: &[&str],
        mut other: impl FnMut(&str, &str) -> Result<(), ConfigError>,
    ) -> Result<(&'a str, Option<Self>), ConfigError> {
        let begin = keys.iter().filter_map(|key| text.find(&format!(",{key}="))).min();
        let Some(begin) = begin else { return Ok((text, None)) };
        let (mut access, mut is_given) = (Self::default(), false);
        for part in text[begin + 1..].split(',') {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            if !keys.contains(&key) {
                let (key, known) = (key.to_owned(), keys.join("=, ") + "=");
                return Err(ConfigError::UnknownKey { flag, key, known });
            }
            match access.read(flag, key, value)? {
                true => is_given = true,
                false => other(key, value)?,
            }
        }
        Ok((&text[..begin], is_given.then_some(access)))
    }
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
