//! Serves the agent's command `trim`, which names free space of mapped thin volumes
//! ([`balloon::proto`], docs/reference/agent.md).
//!
//! The command is privileged in the guest and can only affect the guest's own volumes. A wrong
//! report has the effect of a discard of the named sectors.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use balloon::proto::{
    LineReader, MAX_TRIM_RANGES, NextLine, PROTOCOL_VERSION, Refusal, TrimAnswer, TrimMessage,
    decode_trim_message, encode_line,
};
use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use parking_lot::Mutex;
use pmem_volume::media::MediaError;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use thiserror::Error;
use tokio::sync::mpsc;
use tracing::info;

use crate::log::rate_limited;

/// Maximum time until a command confirms that it holds the space.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of commands that wait for another.
const BACKLOG: usize = 4;

/// Thin volume whose free space the guest may name.
pub trait TrimVolume: Send + Sync {
    fn name(&self) -> &str;

    /// Returns false if the volume was removed from the guest.
    fn is_attached(&self) -> bool;

    /// UUID of the BTT, as the guest sees it. `None` if the volume has no intact BTT.
    fn btt_uuid(&self) -> Option<String>;

    /// Releases the chunks that contain nothing except the bytes `free` of the disk, as long as
    /// `command` holds them. Returns the number of released bytes.
    fn release_reported(
        &self,
        free: &[Range<u64>],
        command: &mut dyn TrimCommand,
    ) -> Result<u64, MediaError>;
}

/// Command in the guest that holds the free space.
pub trait TrimCommand {
    /// Returns false if the command has ended, or if the service stops.
    fn may_continue(&self) -> bool;

    /// Requests a confirmation that the command holds the space, and waits for it. Returns false if
    /// none arrives in time. Meanwhile, stores to the withdrawn chunks wait.
    fn confirm(&mut self) -> bool;
}

/// Volumes that the guest may trim.
type Volumes = Mutex<Vec<Arc<dyn TrimVolume>>>;

/// Thread that serves the command. One connection is served at a time. Dropping it ends the command
/// in progress and waits for the end of the thread, so the vsock device must be dropped before it.
pub struct TrimService {
    volumes: Arc<Volumes>,
    /// Readable when the thread should end.
    stop: Arc<OwnedFd>,
    connections: Option<mpsc::Sender<UnixStream>>,
    thread: Option<JoinHandle<()>>,
}

impl TrimService {
    pub fn start() -> io::Result<Self> {
        let volumes = Arc::new(Volumes::default());
        let (sender, mut connections) = mpsc::channel(BACKLOG);
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (served, stopped) = (Arc::clone(&volumes), Arc::clone(&stop));
        let thread = spawn_confined(ThreadKind::Trim, "_trim", move || {
            while let Some(stream) = connections.blocking_recv() {
                if let Err(err) = serve(stream, &served, &stopped) {
                    rate_limited!(info, %err, "The connection of a trim command has failed");
                }
            }
        })?;
        Ok(Self { volumes, stop, connections: Some(sender), thread: Some(thread) })
    }

    /// Receiver of non-blocking connections from the guest.
    pub fn connections(&self) -> mpsc::Sender<UnixStream> {
        self.connections.clone().expect("only taken when the service is dropped")
    }

    /// Serves a volume while it is attached.
    pub fn add(&self, volume: Arc<dyn TrimVolume>) {
        let mut volumes = self.volumes.lock();
        volumes.retain(|volume| volume.is_attached());
        volumes.push(volume);
    }
}

impl Drop for TrimService {
    fn drop(&mut self) {
        self.connections = None;
        rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).expect("the counter is 0");
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the thread of trim commands does not panic");
        }
    }
}

#[derive(Debug, Error, PartialEq, Eq)]
enum TrimError {
    #[error(transparent)]
    Message(#[from] Refusal),
    #[error("the command names more than {MAX_TRIM_RANGES} free parts")]
    TooMany,
    #[error(
        "a free part starts at {start_bytes} and has {length_bytes} bytes, which exceeds any disk"
    )]
    Overflow { start_bytes: u64, length_bytes: u64 },
    #[error("the command confirms without a request")]
    Unrequested,
    #[error(
        "the command did not confirm within {} s that it holds the free space; run it again while the guest is not paused",
        CONFIRM_TIMEOUT.as_secs()
    )]
    Unconfirmed,
    #[error("the command names free parts of two BTTs")]
    TwoDisks,
    #[error("no thin volume with interface=nvdimm or interface=virtio-pmem has the BTT {uuid:.40}")]
    UnknownDisk { uuid: String },
    #[error("{count} volumes have the BTT {uuid}")]
    AmbiguousDisk { uuid: String, count: usize },
    #[error("volume {volume} cannot release its space: {reason}")]
    Release { volume: String, reason: String },
}

/// Free parts of a disk that the command has named.
#[derive(Debug, Default)]
struct Request {
    uuid: Option<String>,
    free: Vec<Range<u64>>,
}

impl Request {
    /// Adds a line of the command. Returns true if it was the last.
    fn add(&mut self, line: &[u8]) -> Result<bool, TrimError> {
        let (btt_uuid, ranges) = match decode_trim_message(line)? {
            TrimMessage::End { .. } => return Ok(true),
            TrimMessage::Held { .. } => return Err(TrimError::Unrequested),
            TrimMessage::Free { btt_uuid, ranges, .. } => (btt_uuid, ranges),
        };
        if self.free.len() + ranges.len() > MAX_TRIM_RANGES {
            return Err(TrimError::TooMany);
        }
        if *self.uuid.get_or_insert_with(|| btt_uuid.clone()) != btt_uuid {
            return Err(TrimError::TwoDisks);
        }
        for [start_bytes, length_bytes] in ranges {
            let overflow = TrimError::Overflow { start_bytes, length_bytes };
            self.free.push(start_bytes..start_bytes.checked_add(length_bytes).ok_or(overflow)?);
        }
        Ok(false)
    }

    fn carry_out(
        &self,
        volumes: &Volumes,
        command: &mut dyn TrimCommand,
    ) -> Result<u64, TrimError> {
        let Some(uuid) = &self.uuid else { return Ok(0) };
        let volumes = volumes.lock().clone();
        let is_named = |volume: &Arc<dyn TrimVolume>| volume.btt_uuid().as_ref() == Some(uuid);
        let named: Vec<_> = volumes.into_iter().filter(is_named).collect();
        let uuid = uuid.clone();
        let volume = match &named[..] {
            [] => return Err(TrimError::UnknownDisk { uuid }),
            [volume] => volume,
            several => return Err(TrimError::AmbiguousDisk { uuid, count: several.len() }),
        };
        let name = volume.name();
        let released_bytes = volume.release_reported(&self.free, command).map_err(|err| {
            TrimError::Release { volume: name.to_owned(), reason: foreshore_types::chain(&err) }
        })?;
        info!(volume = name, released_bytes, "The guest has trimmed a volume");
        Ok(released_bytes)
    }
}

/// Serves a connection until the command has an answer.
fn serve(stream: UnixStream, volumes: &Volumes, stop: &OwnedFd) -> io::Result<()> {
    fcntl_setfl(&stream, OFlags::empty())?;
    let mut file = File::from(OwnedFd::from(stream));
    let Some(result) = receive(&mut file, stop)? else { return Ok(()) };
    let version = PROTOCOL_VERSION;
    let mut command = Connection { file: &file, stop, is_late: false, is_unconfirmed: false };
    let result = result.and_then(|request| request.carry_out(volumes, &mut command));
    let answer = match result {
        Ok(_) if command.is_late => failed(TrimError::Unconfirmed),
        Ok(released_bytes) => TrimAnswer::Trimmed { version, released_bytes },
        Err(err) => failed(err),
    };
    send(&file, &answer)
}

fn failed(err: TrimError) -> TrimAnswer {
    TrimAnswer::Failed { version: PROTOCOL_VERSION, reason: foreshore_types::chain(&err) }
}

fn send(mut to: &File, answer: &TrimAnswer) -> io::Result<()> {
    let mut line = Vec::new();
    encode_line(answer, &mut line);
    to.write_all(&line)
}

/// Connection of a command that has named all free space.
struct Connection<'a> {
    file: &'a File,
    stop: &'a OwnedFd,
    /// Set after a confirmation that did not arrive in time.
    is_late: bool,
    /// Set after a request that was not confirmed. The release ends.
    is_unconfirmed: bool,
}

impl Connection<'_> {
    fn request_confirmation(&mut self) -> io::Result<bool> {
        send(self.file, &TrimAnswer::Confirm { version: PROTOCOL_VERSION })?;
        let deadline = Instant::now() + CONFIRM_TIMEOUT;
        let (mut lines, mut buffer) = (LineReader::new(), [0; 512]);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).expect("a short time");
            match events(self.file, PollFlags::IN, self.stop, Some(&left))? {
                None => return Ok(false),
                Some(arrived) if arrived.is_empty() => {
                    self.is_late = true;
                    return Ok(false);
                }
                Some(_) => {}
            }
            let mut file = self.file;
            let len = file.read(&mut buffer)?;
            if len == 0 {
                return Ok(false);
            }
            // A command sends nothing else.
            match lines.next(&mut &buffer[..len]) {
                None => {}
                Some(NextLine::Refused(_)) => return Ok(false),
                Some(NextLine::Line(line)) => {
                    return Ok(matches!(decode_trim_message(line), Ok(TrimMessage::Held { .. })));
                }
            }
        }
    }
}

impl TrimCommand for Connection<'_> {
    /// A command that ends closes its connection, and the guest may then use the space. A failure
    /// counts as an end.
    fn may_continue(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ended = events(self.file, PollFlags::RDHUP, self.stop, Some(&now));
        !self.is_unconfirmed && matches!(ended, Ok(Some(ended)) if ended.is_empty())
    }

    fn confirm(&mut self) -> bool {
        // A late reply must not confirm the next group.
        self.is_unconfirmed |= !self.request_confirmation().unwrap_or(false);
        !self.is_unconfirmed
    }
}

/// Waits for events of a connection. Returns `None` if the service stops.
fn events(
    connection: &File,
    wanted: PollFlags,
    stop: &OwnedFd,
    timeout: Option<&Timespec>,
) -> io::Result<Option<PollFlags>> {
    let wanted = [(connection.as_fd(), wanted), (stop.as_fd(), PollFlags::IN)];
    let mut fds = wanted.map(|(fd, events)| PollFd::from_borrowed_fd(fd, events));
    while let Err(err) = poll(&mut fds, timeout) {
        if err != Errno::INTR {
            return Err(err.into());
        }
    }
    Ok(fds[1].revents().is_empty().then(|| fds[0].revents()))
}

/// Receives the messages of a command. Returns `None` if the command ends before its last message,
/// or if the service stops.
fn receive(from: &mut File, stop: &OwnedFd) -> io::Result<Option<Result<Request, TrimError>>> {
    let (mut request, mut lines) = (Request::default(), LineReader::new());
    let mut buffer = vec![0; 8192];
    while events(from, PollFlags::IN, stop, None)?.is_some() {
        let len = from.read(&mut buffer)?;
        if len == 0 {
            break;
        }
        let mut input = &buffer[..len];
        while let Some(next) = lines.next(&mut input) {
            let added = match next {
                NextLine::Line(line) => request.add(line),
                NextLine::Refused(refusal) => Err(refusal.into()),
            };
            match added {
                Ok(false) => {}
                Ok(true) => return Ok(Some(Ok(request))),
                Err(err) => return Ok(Some(Err(err))),
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use balloon::proto::decode_trim_answer;

    use super::*;

    const UUID: &str = "0a0b0c0d-1122-3344-5566-77889900aabb";

    /// Volume that releases all reported bytes, or fails.
    struct Fake {
        uuid: Option<&'static str>,
        trimmed: Mutex<Vec<Range<u64>>>,
        fails: bool,
        /// Receives a message when a release starts, which then continues as long as it may.
        started: Option<std::sync::mpsc::SyncSender<()>>,
    }

    impl Fake {
        fn new(uuid: Option<&'static str>, fails: bool) -> Arc<Self> {
            Arc::new(Self { uuid, trimmed: Mutex::default(), fails, started: None })
        }
    }

    impl TrimVolume for Fake {
        fn name(&self) -> &str {
            "data"
        }

        fn is_attached(&self) -> bool {
            true
        }

        fn btt_uuid(&self) -> Option<String> {
            self.uuid.map(str::to_owned)
        }

        fn release_reported(
            &self,
            free: &[Range<u64>],
            command: &mut dyn TrimCommand,
        ) -> Result<u64, MediaError> {
            if self.fails {
                return Err(MediaError::ReadOnly);
            }
            if let Some(started) = &self.started {
                assert!(command.may_continue());
                started.send(()).unwrap();
                let deadline = Instant::now() + Duration::from_secs(60);
                while command.may_continue() {
                    assert!(Instant::now() < deadline, "the release has not ended");
                    std::thread::yield_now();
                }
                return Ok(0);
            }
            if !command.confirm() {
                assert!(
                    !command.may_continue(),
                    "a late confirmation would count for other chunks"
                );
                return Ok(0);
            }
            self.trimmed.lock().extend_from_slice(free);
            Ok(free.iter().map(|range| range.end - range.start).sum())
        }
    }

    fn service(volumes: &[&Arc<Fake>]) -> TrimService {
        let service = TrimService::start().unwrap();
        volumes.iter().for_each(|volume| service.add(Arc::clone(volume) as _));
        service
    }

    /// Sends lines as a command does, and confirms them. Returns the answer.
    fn send(service: &TrimService, lines: &[u8]) -> TrimAnswer {
        let ours = connect(service, lines);
        match receive_answer(&ours) {
            TrimAnswer::Confirm { .. } => {
                (&ours).write_all(&held()).unwrap();
                receive_answer(&ours)
            }
            answer => answer,
        }
    }

    fn connect(service: &TrimService, lines: &[u8]) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        service.connections().blocking_send(theirs).unwrap();
        (&ours).write_all(lines).unwrap();
        ours
    }

    fn receive_answer(ours: &UnixStream) -> TrimAnswer {
        let mut line = Vec::new();
        BufReader::new(ours).read_until(b'\n', &mut line).unwrap();
        decode_trim_answer(&line).unwrap()
    }

    fn held() -> Vec<u8> {
        lines([TrimMessage::Held { version: 1 }])
    }

    fn lines(messages: impl IntoIterator<Item = TrimMessage>) -> Vec<u8> {
        let encode = |message: TrimMessage| {
            let mut line = Vec::new();
            encode_line(&message, &mut line);
            line
        };
        messages.into_iter().flat_map(encode).collect()
    }

    fn failure(answer: TrimAnswer) -> String {
        match answer {
            TrimAnswer::Failed { reason, .. } => reason,
            answer => panic!("{answer:?}"),
        }
    }

    #[test]
    fn volume_with_the_btt_of_the_command_is_trimmed() {
        let (named, other) = (Fake::new(Some(UUID), false), Fake::new(None, false));
        let service = service(&[&other, &named]);
        let ranges: Vec<_> = (0..2500).map(|at| [at * 8192, 4096]).collect();
        let released_bytes = 2500 * 4096;
        assert_eq!(
            send(&service, &lines(TrimMessage::all(UUID, &ranges))),
            TrimAnswer::Trimmed { version: 1, released_bytes }
        );
        assert_eq!(named.trimmed.lock().len(), 2500);
        assert_eq!(named.trimmed.lock()[1], 8192..12288);
        assert_eq!(other.trimmed.lock().len(), 0);
        let nothing = TrimAnswer::Trimmed { version: 1, released_bytes: 0 };
        assert_eq!(send(&service, &lines(TrimMessage::all(UUID, &[]))), nothing);
    }

    #[test]
    fn bad_command_is_refused_with_the_reason_and_the_next_is_served() {
        let (named, twin) = (Fake::new(Some(UUID), true), Fake::new(Some(UUID), false));
        let service = service(&[&named]);
        let free = |uuid: &str, range| TrimMessage::Free {
            version: 1,
            btt_uuid: uuid.to_owned(),
            ranges: vec![range],
        };
        let end = || TrimMessage::End { version: 1 };
        let reason = |messages: &[TrimMessage]| failure(send(&service, &lines(messages.to_vec())));
        assert_eq!(
            reason(&[free("none", [0, 1]), end()]),
            "no thin volume with interface=nvdimm or interface=virtio-pmem has the BTT none"
        );
        assert_eq!(
            reason(&[free(UUID, [u64::MAX, 1])]),
            format!("a free part starts at {} and has 1 bytes, which exceeds any disk", u64::MAX)
        );
        let two_disks = reason(&[free(UUID, [0, 1]), free("none", [0, 1])]);
        assert_eq!(two_disks, "the command names free parts of two BTTs");
        let failed = reason(&[free(UUID, [0, 1]), end()]);
        assert!(failed.starts_with("volume data cannot release its space: "), "{failed}");
        let refused = failure(send(&service, b"{\"type\":\"free\",\"version\":2}\n"));
        assert_eq!(refused, "message has protocol version 2, must be 1");
        service.add(twin);
        let ambiguous = reason(&[free(UUID, [0, 1]), end()]);
        assert_eq!(ambiguous, format!("2 volumes have the BTT {UUID}"));
    }

    #[test]
    fn nothing_is_released_unless_the_command_confirms_in_time() {
        let volume = Fake::new(Some(UUID), false);
        let service = service(&[&volume]);
        let free = lines(TrimMessage::all(UUID, &[[0, 1]]));
        let ask = |reply: &[u8]| {
            let ours = connect(&service, &free);
            assert_eq!(receive_answer(&ours), TrimAnswer::Confirm { version: 1 });
            (&ours).write_all(reply).unwrap();
            ours
        };
        // The command was killed, or sends something else.
        drop(ask(b""));
        let nothing = TrimAnswer::Trimmed { version: 1, released_bytes: 0 };
        assert_eq!(receive_answer(&ask(b"{}\n")), nothing);
        assert_eq!(receive_answer(&ask(&lines([TrimMessage::End { version: 1 }]))), nothing);
        let late = failure(receive_answer(&ask(&held()[..9])));
        assert!(late.starts_with("the command did not confirm within 1 s"), "{late}");
        let early = failure(send(&service, &held()));
        assert_eq!(early, "the command confirms without a request");
        assert_eq!(volume.trimmed.lock().len(), 0);
        let released = TrimAnswer::Trimmed { version: 1, released_bytes: 1 };
        assert_eq!(receive_answer(&ask(&held())), released);
    }

    #[test]
    fn number_of_parts_is_limited() {
        let mut request = Request::default();
        let line = lines(TrimMessage::all(UUID, &vec![[0, 1]; 1000]).take(1));
        let mut add = || request.add(&line);
        for _ in 0..MAX_TRIM_RANGES / 1000 {
            assert_eq!(add(), Ok(false));
        }
        assert_eq!(add(), Err(TrimError::TooMany));
    }

    #[test]
    fn service_ends_although_a_command_has_not() {
        let service = service(&[]);
        // The first command sends nothing. The second one waits for it.
        let commands = [(); 2].map(|()| UnixStream::pair().unwrap());
        let ours = commands.map(|(ours, theirs)| {
            service.connections().blocking_send(theirs).unwrap();
            ours
        });
        drop(service);
        for mut ours in ours {
            assert_eq!(ours.read(&mut [0; 8]).unwrap(), 0);
        }
    }

    /// Starts a release that continues as long as it may.
    fn start_release() -> (TrimService, UnixStream) {
        let (started, start) = std::sync::mpsc::sync_channel(0);
        let (uuid, trimmed) = (Some(UUID), Mutex::default());
        let volume = Arc::new(Fake { uuid, trimmed, fails: false, started: Some(started) });
        let service = service(&[&volume]);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        service.connections().blocking_send(theirs).unwrap();
        ours.write_all(&lines(TrimMessage::all(UUID, &[[0, 1]]))).unwrap();
        start.recv().unwrap();
        (service, ours)
    }

    #[test]
    fn release_ends_when_the_command_or_the_service_ends() {
        // The next command is served after the release.
        let (service, ours) = start_release();
        drop(ours);
        let nothing = TrimAnswer::Trimmed { version: 1, released_bytes: 0 };
        assert_eq!(send(&service, &lines(TrimMessage::all(UUID, &[]))), nothing);

        let (_service, ours) = start_release();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let mut line = Vec::new();
        BufReader::new(&ours).read_until(b'\n', &mut line).unwrap();
        assert_eq!(decode_trim_answer(&line).unwrap(), nothing);

        let (service, _ours) = start_release();
        drop(service);
    }
}
