//! `--pressure record=FILE`: records the guest's reports and the governor's decisions as a trace
//! (docs/reference/format.md).
//!
//! Decisions never wait for the file. Lines pass through a bounded queue to a separate thread. A
//! line that does not fit into the queue is dropped and counted. Before the next line that fits,
//! the trace contains the number of missing lines. The recording ends when it reaches its size
//! limit or when writing its file fails; the governor continues without it.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, channel, sync_channel};
use std::time::Duration;

use balloon::plan::Plan;
use balloon::proto::Report;
use balloon::trace::{Header, Writer};
use balloon::{HostView, TimeMs};
use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use parking_lot::Mutex;
use pmem_volume::file_mode::PRIVATE_MODE;
use rustix::fs::{OFlags, fcntl_setfl};
use tracing::{info, warn};

use crate::governor::info::{RecordingInfo, RecordingState};

/// Maximum number of queued lines: 10 s of reports and plans for a guest that is short of memory.
const QUEUE_LINES: usize = 1024;
/// Maximum number of bytes in queued lines. One line can have 65 KiB.
const QUEUE_BYTES: u64 = 4 << 20;
/// Maximum time that the end of a VM is delayed by its recording.
const END_LIMIT: Duration = Duration::from_secs(5);
const MAX_NAME_BYTES: usize = 128;

/// Opens the trace of the `nth` machine in the life of a VM, counted from 0.
///
/// The file must not exist yet, so that no trace is overwritten. Each machine has a trace of its
/// own (`FILE`, `FILE.2` and so on), because a reboot starts a new guest. A pipe or a device is
/// used by all machines. If it is a pipe, it must have a reader.
pub fn open(path: &Path, nth: u64) -> io::Result<(PathBuf, File)> {
    if is_stream(path) {
        // Without O_NONBLOCK, opening a pipe that has no reader would block the VM. With
        // O_NONBLOCK, it fails with ENXIO.
        let open = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = open.map_err(|err| match err.raw_os_error() {
            Some(libc::ENXIO) => io::Error::other("no process reads the pipe"),
            _ => err,
        })?;
        wait_in_writes(&file)?;
        return Ok((path.to_owned(), file));
    }
    let path = name_of(path, nth);
    let file = OpenOptions::new().write(true).create_new(true).mode(PRIVATE_MODE).open(&path)?;
    Ok((path, file))
}

/// Maximum number of traces of a VM. Without a limit, a guest that keeps restarting could create
/// any number.
pub const MAX_TRACES: u64 = 16;

/// Size limit for the trace of the `nth` machine, counted from 0, so that all traces of the VM
/// together do not exceed `max_bytes`. `None` if there are too many traces, or if earlier traces
/// have used all bytes.
pub fn room(path: &Path, nth: u64, max_bytes: u64) -> Option<u64> {
    let len = |path: PathBuf| {
        path.metadata().ok().filter(|metadata| metadata.is_file()).map(|file| file.len())
    };
    if is_stream(path) {
        return Some(max_bytes);
    }
    if nth >= MAX_TRACES {
        return None;
    }
    let used_bytes: u64 = (0..nth).filter_map(|earlier| len(name_of(path, earlier))).sum();
    max_bytes.checked_sub(used_bytes).filter(|bytes| *bytes > 0)
}

/// Returns true for a pipe or a device. Neither stores what is written to it.
fn is_stream(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| {
        let kind = metadata.file_type();
        kind.is_fifo() || kind.is_char_device()
    })
}

fn name_of(path: &Path, nth: u64) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if nth > 0 {
        name.push(format!(".{}", nth + 1));
    }
    PathBuf::from(name)
}

/// Makes writes to the file blocking. Blocking is safe because the recording has a thread of its
/// own.
fn wait_in_writes(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, OFlags::empty())?)
}

/// State of a recording, shared by both ends of the queue.
#[derive(Debug, Default)]
struct Shared {
    queued_lines: AtomicU64,
    queued_bytes: AtomicU64,
    written_bytes: AtomicU64,
    lost_lines: AtomicU64,
    /// Reason for the end of the recording, once it has ended.
    end: Mutex<Option<RecordingState>>,
}

impl Shared {
    fn end(&self, state: RecordingState) {
        self.end.lock().get_or_insert(state);
    }
}

/// Sending end of the queue of lines. Each call of `write` sends one line.
#[derive(Debug)]
struct Queue {
    /// Path of the file, for log lines.
    path: PathBuf,
    lines: Option<SyncSender<Vec<u8>>>,
    shared: Arc<Shared>,
    taken_bytes: u64,
    max_bytes: u64,
    /// Number of lines dropped since a line last fitted into the queue.
    behind: u64,
}

impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let Some(lines) = &self.lines else { return Ok(line.len()) };
        let bytes = line.len() as u64;
        if self.taken_bytes + bytes > self.max_bytes {
            warn!(
                file = %self.path.display(),
                max_bytes = self.max_bytes,
                "The recording of reports has reached its maximum size; the recording ends"
            );
            self.shared.end(RecordingState::Full);
            self.lines = None;
            return Ok(line.len());
        }
        let room = self.shared.queued_bytes.load(Ordering::Relaxed) + bytes <= QUEUE_BYTES;
        // Incremented before the line is sent, because the receiver may decrement them immediately
        // afterwards.
        self.shared.queued_lines.fetch_add(1, Ordering::Relaxed);
        self.shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let sent =
            if room { lines.try_send(line.to_vec()) } else { Err(TrySendError::Full(Vec::new())) };
        match sent {
            Ok(()) => self.taken_bytes += bytes,
            Err(refused) => {
                self.shared.queued_lines.fetch_sub(1, Ordering::Relaxed);
                self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
                match refused {
                    TrySendError::Full(_) => {
                        self.behind += 1;
                        self.shared.lost_lines.fetch_add(1, Ordering::Relaxed);
                    }
                    // Writing the file failed, and the receiver has logged the error.
                    TrySendError::Disconnected(_) => self.lines = None,
                }
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Recording of a governor. Dropping it waits up to 5 s until all queued lines are written.
#[derive(Debug)]
pub struct Recorder {
    writer: Writer<Queue>,
    path: PathBuf,
    shared: Arc<Shared>,
    /// The channel is disconnected when the thread ends.
    written: Receiver<()>,
}

/// File of a trace and its size limit.
#[derive(Debug)]
pub struct Target<W> {
    pub path: PathBuf,
    pub file: W,
    pub max_bytes: u64,
}

impl Recorder {
    pub fn start<W: Write + Send + 'static>(
        target: Target<W>,
        vm: &str,
        host: &HostView,
        now: TimeMs,
    ) -> io::Result<Self> {
        let Target { path, file, max_bytes } = target;
        let shared = Arc::new(Shared::default());
        let (sender, lines) = sync_channel(QUEUE_LINES);
        let (ended, written) = channel();
        spawn_confined(ThreadKind::Writer, "_record", {
            let (shared, path) = (Arc::clone(&shared), path.clone());
            move || {
                let _ended = ended;
                if let Err(err) = write_lines(BufWriter::new(file), &lines, &shared) {
                    warn!(file = %path.display(), %err, "Cannot write the recording of reports; the recording ends");
                    shared.end(RecordingState::Failed(err.to_string()));
                }
            }
        })?;
        let queue = Queue {
            path: path.clone(),
            lines: Some(sender),
            shared: Arc::clone(&shared),
            taken_bytes: 0,
            max_bytes,
            behind: 0,
        };
        let vm = vm.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' });
        let header = Header {
            vm: vm.take(MAX_NAME_BYTES).collect(),
            boot_bytes: host.boot_bytes,
            zones: host.zones.clone(),
            balloon: host.balloon,
            distances: host.distances.clone(),
        };
        let mut writer = Writer::new(queue, &header)?;
        writer.host(now, host)?;
        info!(file = %path.display(), max_bytes, "Recording reports");
        Ok(Self { writer, path, shared, written })
    }

    /// Records a report, with the state of the host at that time.
    pub fn report(&mut self, report: &Report, host: &HostView, now: TimeMs) {
        self.record(host, now, |writer| writer.report(now, report));
    }

    /// Records a plan, with `host`, the state of the host on which it is based.
    pub fn plan(&mut self, plan: &Plan, host: &HostView, now: TimeMs) {
        self.record(host, now, |writer| writer.plan(now, plan, host));
    }

    /// Records the sizes on the host if they have changed.
    pub fn host(&mut self, host: &HostView, now: TimeMs) {
        self.record(host, now, |writer| writer.host(now, host).map(drop));
    }

    /// Writes one line. If lines were dropped before it, first writes their number.
    fn record(
        &mut self,
        host: &HostView,
        now: TimeMs,
        line: impl FnOnce(&mut Writer<Queue>) -> io::Result<()>,
    ) {
        let behind = self.writer.get_ref().behind;
        if behind > 0 {
            // If half of the queue is empty, there is room for more than this line.
            let half_empty = self.shared.queued_lines.load(Ordering::Relaxed)
                <= QUEUE_LINES as u64 / 2
                && self.shared.queued_bytes.load(Ordering::Relaxed) <= QUEUE_BYTES / 2;
            if !half_empty {
                self.writer.get_mut().behind += 1;
                self.shared.lost_lines.fetch_add(1, Ordering::Relaxed);
                return;
            }
            self.writer.get_mut().behind = 0;
            // The call cannot fail, because the queue either accepts or counts each line.
            let _ = self.writer.host_after_loss(now, host, behind);
        }
        let _ = line(&mut self.writer);
    }

    pub fn info(&self) -> RecordingInfo {
        RecordingInfo {
            file: self.path.clone(),
            written_bytes: self.shared.written_bytes.load(Ordering::Relaxed),
            lost_lines: self.shared.lost_lines.load(Ordering::Relaxed),
            status: self.shared.end.lock().clone().unwrap_or(RecordingState::Recording),
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.writer.get_mut().lines = None;
        // The channel never carries a message. The wait ends when the thread drops its sender.
        if self.written.recv_timeout(END_LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            warn!(file = %self.path.display(), "The file of the recording accepts no more data; the last lines are lost");
        }
    }
}

/// Writes lines until the sender is dropped. Flushes the buffer whenever the queue is empty.
fn write_lines<W: Write>(
    mut file: BufWriter<W>,
    lines: &Receiver<Vec<u8>>,
    shared: &Shared,
) -> io::Result<()> {
    loop {
        let line = match lines.try_recv() {
            Ok(line) => line,
            Err(TryRecvError::Disconnected) => return file.flush(),
            Err(TryRecvError::Empty) => {
                file.flush()?;
                match lines.recv() {
                    Ok(line) => line,
                    Err(_) => return Ok(()),
                }
            }
        };
        let bytes = line.len() as u64;
        let written = file.write_all(&line);
        shared.queued_lines.fetch_sub(1, Ordering::Relaxed);
        shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        written?;
        shared.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
