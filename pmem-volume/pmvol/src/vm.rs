//! Changes of a pool by the VM that has it open.

use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use pmem_volume::{OpenMode, Pool, PoolError};
use serde::Deserialize;
use serde_json::json;
use thiserror::Error;

/// Maximum length of an answer. The longest one lists all volumes of a VM.
const MAX_ANSWER_BYTES: u64 = 4 << 20;

/// Failed call of a VMM's API.
#[derive(Debug, Error)]
pub(crate) enum CallError {
    #[error("cannot use the API socket {path}")]
    Socket { path: PathBuf, source: io::Error },
    #[error("the answer on the API socket {path} is not HTTP")]
    NotHttp { path: PathBuf },
    #[error("{call} was refused: {reason}")]
    Refused { call: &'static str, reason: String },
    #[error("the answer to {call} cannot be read")]
    Answer { call: &'static str, source: serde_json::Error },
    #[error(
        "the VM of {socket} has no volume {name} of the pool {pool} with interface=virtio-blk, and can grow no other"
    )]
    NoSuchVolume { socket: PathBuf, pool: PathBuf, name: String },
}

/// `vm.volumes`, without the fields that are not needed.
#[derive(Deserialize)]
struct AttachedVolumes {
    volumes: Vec<AttachedVolume>,
}

#[derive(Deserialize)]
struct AttachedVolume {
    pool: PathBuf,
    name: String,
    interface: String,
}

/// Pool that another process uses.
#[derive(Debug, Error)]
#[error("{error:#}; --api-socket lets its VM grow it")]
pub(crate) struct GrowByVm {
    error: anyhow::Error,
}

/// Adds to an error the flag by which a VM grows its pool or volume, if another process uses the
/// pool.
pub(crate) fn name_flag(error: anyhow::Error) -> anyhow::Error {
    if is_in_use(&error) { GrowByVm { error }.into() } else { error }
}

pub(crate) fn is_in_use(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(PoolError::InUse { .. }))
}

/// Grows a pool, and returns it open for an overview.
pub(crate) fn grow_pool(
    socket: &Path,
    pool: &Path,
    size_bytes: Option<u64>,
    force: bool,
) -> anyhow::Result<std::sync::Arc<Pool>> {
    // The VMM may have another working directory.
    let body = json!({ "path": std::path::absolute(pool)?, "size": size_bytes, "force": force });
    request(socket, "PUT", "pool.grow", &body.to_string())?;
    Ok(Pool::open(pool, OpenMode::Peek)?)
}

/// Grows a virtio-blk volume, and returns its pool open for an overview.
pub(crate) fn grow_volume(
    socket: &Path,
    pool: &Path,
    name: &str,
    size_bytes: u64,
) -> anyhow::Result<std::sync::Arc<Pool>> {
    // The VM may have another disk with this ID.
    let list = request(socket, "GET", "vm.volumes", "")?;
    let attached: AttachedVolumes = serde_json::from_str(&list)
        .map_err(|source| CallError::Answer { call: "vm.volumes", source })?;
    let is_wanted = |volume: &AttachedVolume| {
        volume.name == name && volume.interface == "virtio-blk" && is_same(&volume.pool, pool)
    };
    if !attached.volumes.iter().any(is_wanted) {
        let (socket, pool, name) = (socket.to_owned(), pool.to_owned(), name.to_owned());
        return Err(CallError::NoSuchVolume { socket, pool, name }.into());
    }
    // The name of the volume is the ID of its disk.
    let body = json!({ "id": name, "desired_size": size_bytes });
    request(socket, "PUT", "vm.resize-disk", &body.to_string())?;
    Ok(Pool::open(pool, OpenMode::Peek)?)
}

/// Returns true if two paths lead to the same file or device.
fn is_same(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        let is_device = found.file_type().is_block_device();
        Some(if is_device { (true, found.rdev(), 0) } else { (false, found.dev(), found.ino()) })
    };
    id(a).is_some_and(|a| Some(a) == id(b))
}

/// Makes a call, and waits for its answer. Returns the body of the answer.
fn request(
    socket: &Path,
    method: &str,
    call: &'static str,
    body: &str,
) -> Result<String, CallError> {
    let answer = exchange(socket, method, call, body)
        .map_err(|source| CallError::Socket { path: socket.to_owned(), source })?;
    match parse(&answer) {
        Some((200..300, body)) => Ok(body),
        Some((_, reason)) => Err(CallError::Refused { call, reason }),
        None => Err(CallError::NotHttp { path: socket.to_owned() }),
    }
}

fn exchange(socket: &Path, method: &str, call: &str, body: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    let length = body.len();
    write!(
        stream,
        "{method} /api/v1/{call} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER_BYTES).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Returns the status, and the body or the text of an error. The body of an error is a list with
/// its causes.
fn parse(answer: &str) -> Option<(u16, String)> {
    let status = answer.strip_prefix("HTTP/1.1 ")?.split([' ', '\r']).next()?.parse().ok()?;
    let (_, body) = answer.split_once("\r\n\r\n")?;
    let causes = serde_json::from_str::<Vec<String>>(body);
    Some((status, causes.map_or_else(|_| body.trim().to_owned(), |causes| causes.join(": "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_a_status_and_the_causes_of_an_error() {
        for (answer, expected) in [
            ("HTTP/1.1 204 \r\nx: y\r\n\r\n", Some((204, ""))),
            ("HTTP/1.1 204\r\n\r\n", Some((204, ""))),
            ("HTTP/1.1 400 \r\n\r\n[\"a\", \"b\"]", Some((400, "a: b"))),
            ("HTTP/1.1 500 \r\n\r\nno list\n", Some((500, "no list"))),
            ("HTTP/1.1 ", None),
            ("HTTP/1.1 204 ", None),
            ("SSH-2.0", None),
            ("", None),
        ] {
            let expected = expected.map(|(status, text)| (status, text.to_owned()));
            assert_eq!(parse(answer), expected, "{answer:?}");
        }
    }
}
