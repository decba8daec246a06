//! Command `trim`: gives free space of a file system on a BTT disk back to the pool.
//!
//! A file takes the free space, so that nothing else in the guest can use it. The command sends the
//! extents of the file to the VMM, which releases chunks that contain nothing else. The file has no
//! name, so it disappears when this process ends, even after a crash.

mod disk;
mod extents;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use foreshore_proto::{
    LineReader, MAX_TRIM_RANGES, NextLine, PROTOCOL_VERSION, Refusal, TrimAnswer, TrimMessage,
    decode_trim_answer, encode_line,
};
use rustix::fs::{self, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use thiserror::Error;

use crate::args::Address;
use crate::sys;
use disk::{Disk, FileSystem};

#[derive(Debug, Error)]
pub(crate) enum TrimError {
    #[error("cannot open {path}")]
    Open { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Disk(#[from] disk::DiskError),
    #[error("cannot take the free space of {path}")]
    Allocate { path: PathBuf, source: io::Error },
    #[error("cannot read the extents of the free space of {path}")]
    Extents { path: PathBuf, source: io::Error },
    #[error("files in {path} are on the realtime device of XFS, which trim does not support")]
    Realtime { path: PathBuf },
    #[error("the free space has {count} parts, but the maximum is {MAX_TRIM_RANGES}")]
    TooManyParts { count: usize },
    #[error(
        "cannot connect to the VMM ({address}), which serves this command on a VM with --vsock"
    )]
    Connect { address: String, source: io::Error },
    #[error("the connection to the VMM failed")]
    Broken(#[from] io::Error),
    #[error("the VMM closed the connection without an answer")]
    NoAnswer,
    #[error("the answer of the VMM is not valid")]
    Refused(#[from] Refusal),
    #[error("the VMM refuses: {reason}")]
    Failed { reason: String },
}

/// Result of the command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Trimmed {
    /// Name of the disk.
    pub disk: String,
    /// Free space that was reported to the VMM.
    pub free_bytes: u64,
    /// Space that the volume gave to its pool.
    pub released_bytes: u64,
}

/// Part of the free space that stays available to the guest while the command runs.
const MARGIN_PART: u64 = 16;
const MIN_MARGIN_BYTES: u64 = 16 << 20;
/// Maximum and minimum size of one allocation.
const MAX_STEP_BYTES: u64 = 1 << 30;
const MIN_STEP_BYTES: u64 = 1 << 20;

pub(crate) fn run(folder: &Path, address: &Address, sys: &Path) -> Result<Trimmed, TrimError> {
    let open_error = |source: Errno| TrimError::Open { path: folder.into(), source: source.into() };
    let directory = fs::open(folder, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let directory = directory.map_err(open_error)?;
    let disk = Disk::of(&directory, folder, sys)?;
    // Connected first, because taking the free space is useless without a VMM that listens.
    let mut socket = connect(address)?;
    // A signal must not end the process while the VMM relies on the file.
    let _signals = sys::BlockedSignals::of_termination();
    let taken = take_free_space(&directory, disk.file_system);
    let taken = taken.map_err(|source| TrimError::Allocate { path: folder.into(), source })?;
    let extents_error = |source| TrimError::Extents { path: folder.into(), source };
    if disk.file_system == FileSystem::Xfs && extents::is_realtime(&taken).map_err(extents_error)? {
        return Err(TrimError::Realtime { path: folder.into() });
    }
    let ranges = disk.ranges(&extents::of(&taken).map_err(extents_error)?, folder)?;
    if ranges.len() > MAX_TRIM_RANGES {
        return Err(TrimError::TooManyParts { count: ranges.len() });
    }
    let free_bytes = ranges.iter().map(|[_, bytes]| bytes).sum();
    let released_bytes = report(&mut socket, &disk.btt_uuid, &ranges)?;
    // Until here, the command confirms that it holds the space.
    drop(taken);
    Ok(Trimmed { disk: disk.name, free_bytes, released_bytes })
}

/// Returns a file that contains nearly all free space. Blocks of files whose deletion is not
/// durable are not free, so they are made durable first.
fn take_free_space(directory: &OwnedFd, file_system: FileSystem) -> io::Result<File> {
    fs::syncfs(directory)?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(fs::openat(directory, ".", flags, Mode::RUSR | Mode::WUSR)?);
    if file_system == FileSystem::F2fs {
        // Without this, F2FS allocates the blocks of a file only when they are written.
        extents::pin(&file)?;
    }
    let (mut at, mut step) = (0, MAX_STEP_BYTES);
    let space = fs::fstatvfs(&file)?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    let end = free.saturating_sub((free / MARGIN_PART).max(MIN_MARGIN_BYTES));
    while at < end && step >= MIN_STEP_BYTES {
        let length = step.min(end - at);
        match fs::fallocate(&file, FallocateFlags::empty(), at, length) {
            Ok(()) => at += length,
            // The file system also needs space for the metadata of the file.
            Err(Errno::NOSPC) => step /= 2,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    file.sync_all()?;
    Ok(file)
}

/// Reports free ranges of a disk to the VMM. Returns the number of bytes that the VMM released.
fn report(
    socket: &mut (impl Read + Write),
    btt_uuid: &str,
    ranges: &[[u64; 2]],
) -> Result<u64, TrimError> {
    let mut line = Vec::new();
    let sent = TrimMessage::all(btt_uuid, ranges).try_for_each(|message| {
        encode_line(&message, &mut line);
        socket.write_all(&line)
    });
    let Err(error) = sent else { return receive_answer(socket) };
    let is_closed =
        matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
    // A VMM that refuses a message sends the answer and closes the connection.
    match is_closed.then(|| receive_answer(socket)) {
        None | Some(Err(TrimError::NoAnswer | TrimError::Broken(_))) => Err(error.into()),
        Some(answer) => answer,
    }
}

/// Receives the result, and confirms that this process still holds the free space.
fn receive_answer(socket: &mut (impl Read + Write)) -> Result<u64, TrimError> {
    let (mut reader, mut buffer) = (LineReader::new(), [0; 4096]);
    loop {
        let len = socket.read(&mut buffer)?;
        if len == 0 {
            return Err(TrimError::NoAnswer);
        }
        match reader.next(&mut &buffer[..len]) {
            None => {}
            Some(NextLine::Refused(refusal)) => return Err(refusal.into()),
            Some(NextLine::Line(line)) => match decode_trim_answer(line)? {
                TrimAnswer::Confirm { .. } => {
                    let mut held = Vec::new();
                    encode_line(&TrimMessage::Held { version: PROTOCOL_VERSION }, &mut held);
                    socket.write_all(&held)?;
                }
                TrimAnswer::Trimmed { released_bytes, .. } => return Ok(released_bytes),
                TrimAnswer::Failed { reason, .. } => return Err(TrimError::Failed { reason }),
            },
        }
    }
}

fn connect(address: &Address) -> Result<UnixStream, TrimError> {
    let (socket, name) = match address {
        Address::Vsock { cid, port } => {
            (sys::connect_vsock(*cid, *port), format!("vsock port {port} of CID {cid}"))
        }
        Address::Unix(path) => {
            (UnixStream::connect(path).map(OwnedFd::from), path.display().to_string())
        }
    };
    let socket = socket.map_err(|source| TrimError::Connect { address: name, source })?;
    // read() and write() work on all stream sockets.
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use foreshore_proto::{MAX_RANGES_PER_LINE, decode_trim_message};

    use super::*;

    const VERSION: u32 = PROTOCOL_VERSION;

    fn confirm(command: &mut UnixStream) {
        let mut line = Vec::new();
        encode_line(&TrimAnswer::Confirm { version: VERSION }, &mut line);
        command.write_all(&line).unwrap();
    }

    /// Reports ranges to a VMM that gives `answer` after a confirmation. Returns the result and
    /// what the VMM has read.
    fn report_to(answer: &[u8], ranges: &[[u64; 2]]) -> (Result<u64, TrimError>, Vec<[u64; 2]>) {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let vmm = scope.spawn(move || {
                let (mut reader, mut buffer, mut named) = (LineReader::new(), [0; 999], vec![]);
                loop {
                    let len = theirs.read(&mut buffer).unwrap();
                    let mut input = &buffer[..len];
                    while let Some(NextLine::Line(line)) = reader.next(&mut input) {
                        match decode_trim_message(line).unwrap() {
                            TrimMessage::Free { ranges, btt_uuid, .. } => {
                                assert_eq!(btt_uuid, "uuid");
                                named.extend(ranges);
                            }
                            TrimMessage::End { .. } => confirm(&mut theirs),
                            TrimMessage::Held { .. } => {
                                theirs.write_all(answer).unwrap();
                                return named;
                            }
                        }
                    }
                }
            });
            let result = report(&mut ours, "uuid", ranges);
            (result, vmm.join().unwrap())
        })
    }

    #[test]
    fn vmm_is_told_of_all_ranges_and_its_answer_is_returned() {
        let ranges: Vec<_> = (0..3 * MAX_RANGES_PER_LINE as u64).map(|at| [at, 1]).collect();
        let mut line = Vec::new();
        encode_line(&TrimAnswer::Trimmed { version: VERSION, released_bytes: 42 }, &mut line);
        let (result, named) = report_to(&line, &ranges);
        assert_eq!((result.unwrap(), named), (42, ranges));

        let failed = TrimAnswer::Failed { version: VERSION, reason: "no such disk".to_owned() };
        encode_line(&failed, &mut line);
        let (result, named) = report_to(&line, &[]);
        assert_eq!(result.unwrap_err().to_string(), "the VMM refuses: no such disk");
        assert_eq!(named, [] as [[u64; 2]; 0]);
    }

    #[test]
    fn answer_of_a_vmm_that_refuses_early_is_returned() {
        let ranges: Vec<_> = (0..MAX_TRIM_RANGES as u64).map(|at| [at << 20, 1 << 12]).collect();
        let refuse = |answer: &[u8]| {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(answer).unwrap();
            drop(theirs);
            report(&mut ours, "uuid", &ranges).unwrap_err()
        };
        let mut line = Vec::new();
        let failed = TrimAnswer::Failed { version: VERSION, reason: "no such disk".to_owned() };
        encode_line(&failed, &mut line);
        assert_eq!(refuse(&line).to_string(), "the VMM refuses: no such disk");
        let lost = refuse(b"").to_string();
        assert_eq!(lost, "the connection to the VMM failed");
    }

    #[test]
    fn missing_or_invalid_answer_is_an_error() {
        assert!(matches!(report_to(b"", &[]).0, Err(TrimError::NoAnswer)));
        assert!(matches!(report_to(b"{}\n", &[]).0, Err(TrimError::Refused(_))));
    }
}
