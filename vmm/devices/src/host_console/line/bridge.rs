//! Connection between a guest's console and its client. There is at most one client at a time.

use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::event::PollFlags;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tracing::{debug, warn};
use vmm_sys_util::timerfd::TimerFd;

use super::super::Window;
use super::super::readiness::ready;
use super::pty::{Pty, is_hung_up};
use super::ring::Ring;
use crate::event_loop::Interest;
use crate::log::rate_limited;
use crate::unix_socket::SocketFile;

const FILLED: u32 = 0;
const ARRIVAL: u32 = 1;
const INPUT: u32 = 2;
const OUTPUT: u32 = 3;
const ROOM: u32 = 4;
const RETRY: u32 = 5;

/// Maximum number of bytes in one write.
const OUTPUT_LEN_MAX: usize = 16 << 10;
/// Maximum number of bytes in one read: PIPE_BUF. A pipe accepts this much completely or not at all
/// (pipe(7)), and a pipe that is ready has room for it.
const INPUT_LEN_MAX: usize = 4096;
/// Maximum number of reads or writes before other subscribers of the event loop run.
const BATCH: usize = 16;
/// Delay after a failed accept before clients are accepted again. An accept fails, for example, if
/// no file descriptors are left.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Time that the VM's shutdown waits for a slow reader.
const LINGER: Duration = Duration::from_secs(1);

pub(super) enum End {
    Pty(Pty),
    Socket {
        listener: UnixListener,
        /// Dropped after the listener.
        _file: SocketFile,
    },
}

/// Moves bytes between the guest and the client of a console line.
pub(super) struct Bridge {
    /// Flag of the console, for log lines.
    flag: &'static str,
    peer: Option<Peer>,
    ring: Arc<Ring>,
    /// Output that was taken from the ring, but not written yet.
    unwritten_output: Vec<u8>,
    /// Write end of the pipe that carries the guest's input.
    input_pipe: PipeWriter,
    /// Input that was read, but not passed to the guest yet.
    unread_input: Vec<u8>,
    input_pipe_ready: Interest,
    end: End,
    listening: Interest,
    retry: TimerFd,
    /// Window size of a pseudo terminal. The window size is checked on each event, because a client
    /// that changes the size also sends or receives data soon.
    window: Option<Arc<Window>>,
}

struct Peer {
    /// `reader` and `writer` are duplicates of one file, so that each can be registered separately.
    reader: File,
    writer: File,
    reading: Interest,
    writing: Interest,
    /// Set if the client has closed its sending side.
    is_silent: bool,
}

impl Peer {
    /// `files` must be duplicates of one non-blocking file.
    fn new([reader, writer]: [File; 2]) -> Self {
        let reading = Interest::new("input of a console client", INPUT, EventSet::IN);
        let writing = Interest::new("output of a console client", OUTPUT, EventSet::OUT);
        Self { reader, writer, reading, writing, is_silent: false }
    }

    fn forget(&mut self, ops: &mut EventOps) {
        self.reading.set(false, &self.reader, ops);
        self.writing.set(false, &self.writer, ops);
    }
}

impl Bridge {
    pub(super) fn new(
        flag: &'static str,
        end: End,
        window: Option<Arc<Window>>,
        ring: Arc<Ring>,
        input_pipe: PipeWriter,
    ) -> io::Result<Self> {
        fcntl_setfl(&input_pipe, fcntl_getfl(&input_pipe)? | OFlags::NONBLOCK)?;
        let input_pipe_ready = Interest::new("input pipe of a console", ROOM, EventSet::OUT);
        let listening = Interest::new("clients of a console", ARRIVAL, EventSet::IN);
        let (unwritten_output, unread_input, retry) = (Vec::new(), Vec::new(), TimerFd::new()?);
        Ok(Self {
            flag,
            peer: None,
            ring,
            unwritten_output,
            input_pipe,
            unread_input,
            input_pipe_ready,
            end,
            listening,
            retry,
            window,
        })
    }

    fn listen(&mut self, on: bool, ops: &mut EventOps) {
        match &self.end {
            End::Pty(pty) => self.listening.set(on, &pty.arrivals(), ops),
            End::Socket { listener, .. } => self.listening.set(on, listener, ops),
        }
    }

    /// Checks for a new client, and connects it.
    fn accept_client(&mut self, ops: &mut EventOps) {
        match self.next_client() {
            Ok(Some(files)) => {
                self.leave(ops);
                self.peer = Some(Peer::new(files));
                self.serve_input(ops);
                self.serve_output(ops);
            }
            Ok(None) => {}
            Err(err) => {
                rate_limited!(warn, flag = self.flag, %err, "Cannot accept a console client; retrying later");
                // Stops listening. The pending client would otherwise wake the loop again and
                // again.
                self.listen(false, ops);
                if let Err(err) = self.retry.reset(RETRY_DELAY, None) {
                    warn!(flag = self.flag, %err, "Console accepts no further clients until the VM is deleted");
                }
            }
        }
    }

    /// Returns the files of a new client, if there is one.
    fn next_client(&mut self) -> io::Result<Option<[File; 2]>> {
        match &mut self.end {
            End::Pty(pty) => match pty.poll_client()? && self.peer.is_none() {
                true => Ok(Some([pty.side()?, pty.side()?])),
                false => Ok(None),
            },
            End::Socket { listener, .. } => {
                let mut newest = None;
                // If several clients are waiting, connects the last one, because a user may
                // reconnect after losing a terminal.
                for _ in 0..BATCH {
                    match listener.accept() {
                        Ok((stream, _)) => newest = Some(stream),
                        Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                        Err(err) => return Err(err),
                    }
                }
                let Some(stream) = newest else { return Ok(None) };
                stream.set_nonblocking(true)?;
                let file = |stream| File::from(OwnedFd::from(stream));
                Ok(Some([file(stream.try_clone()?), file(stream)]))
            }
        }
    }

    /// Handles the disconnection of a client.
    fn leave(&mut self, ops: &mut EventOps) {
        if let Some(mut peer) = self.peer.take() {
            peer.forget(ops);
            debug!(flag = self.flag, "Console client disconnected");
        }
        self.ring.put_back(&std::mem::take(&mut self.unwritten_output));
    }

    fn serve_output(&mut self, ops: &mut EventOps) {
        let Some(peer) = &mut self.peer else { return };
        for _ in 0..BATCH {
            match write_some(&self.ring, &mut self.unwritten_output, &mut peer.writer) {
                Ok(Written::Some) => {}
                Ok(Written::All) => return peer.writing.set(false, &peer.writer, ops),
                Ok(Written::NoRoom) => break,
                Err(err) => {
                    debug!(flag = self.flag, %err, "Cannot write to a console client");
                    return self.leave(ops);
                }
            }
        }
        peer.writing.set(true, &peer.writer, ops);
    }

    fn serve_input(&mut self, ops: &mut EventOps) {
        for _ in 0..BATCH {
            if !self.pass_on(ops) {
                return;
            }
            let Some(peer) = self.peer.as_mut().filter(|peer| !peer.is_silent) else { return };
            let mut data = [0; INPUT_LEN_MAX];
            match peer.reader.read(&mut data) {
                Ok(0) => {
                    peer.is_silent = true;
                    peer.reading.set(false, &peer.reader, ops);
                    // The client may still read after it has stopped sending, for example `echo
                    // date | socat - UNIX:...`.
                    if is_hung_up(&peer.reader).unwrap_or(true) {
                        self.leave(ops);
                    }
                    return;
                }
                Ok(len) => self.unread_input.extend(&data[..len]),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return self.leave(ops),
            }
        }
        if self.pass_on(ops)
            && let Some(peer) = &mut self.peer
        {
            peer.reading.set(true, &peer.reader, ops);
        }
    }

    /// Passes input to the guest. Returns false if the pipe is full because the guest does not
    /// read.
    fn pass_on(&mut self, ops: &mut EventOps) -> bool {
        while !self.unread_input.is_empty() {
            match self.input_pipe.write(&self.unread_input) {
                Ok(len) => drop(self.unread_input.drain(..len)),
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) => {
                    if err.kind() != io::ErrorKind::WouldBlock {
                        rate_limited!(warn, flag = self.flag, %err, "Cannot pass console input to the guest");
                    }
                    if let Some(peer) = &mut self.peer {
                        peer.reading.set(false, &peer.reader, ops);
                    }
                    self.input_pipe_ready.set(true, &self.input_pipe, ops);
                    return false;
                }
            }
        }
        self.input_pipe_ready.set(false, &self.input_pipe, ops);
        true
    }
}

enum Written {
    Some,
    All,
    NoRoom,
}

/// Writes a part of the pending output.
fn write_some(
    ring: &Ring,
    unwritten_output: &mut Vec<u8>,
    writer: &mut File,
) -> io::Result<Written> {
    if unwritten_output.is_empty() {
        *unwritten_output = ring.take(OUTPUT_LEN_MAX);
        if unwritten_output.is_empty() {
            return Ok(Written::All);
        }
    }
    match writer.write(unwritten_output) {
        Ok(0) => Err(io::ErrorKind::WriteZero.into()),
        Ok(len) => {
            unwritten_output.drain(..len);
            Ok(Written::Some)
        }
        Err(err) if err.kind() == io::ErrorKind::Interrupted => Ok(Written::Some),
        Err(err) if err.kind() == io::ErrorKind::WouldBlock => Ok(Written::NoRoom),
        Err(err) => Err(err),
    }
}

impl MutEventSubscriber for Bridge {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(err) = ops.add(Events::with_data(self.ring.filled(), FILLED, EventSet::IN)) {
            warn!(
                flag = self.flag,
                ?err,
                "Cannot watch the output of a console; clients receive it late"
            );
        }
        if let Err(err) = ops.add(Events::with_data(&self.retry, RETRY, EventSet::IN)) {
            warn!(flag = self.flag, ?err, "Cannot watch the timer of a console");
        }
        self.listen(true, ops);
        self.accept_client(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            FILLED => {
                // One read clears all pending notifications.
                let _ = self.ring.filled().read();
                self.serve_output(ops);
            }
            OUTPUT => self.serve_output(ops),
            ARRIVAL => self.accept_client(ops),
            RETRY => {
                // A failed read only means that the timer has not expired.
                let _ = self.retry.wait();
                self.listen(true, ops);
            }
            _ => self.serve_input(ops),
        }
        if let Some(window) = &self.window {
            window.poll();
        }
    }
}

impl Drop for Bridge {
    /// Waits briefly until the last output is written, because a client that does not read must not
    /// keep the VM alive.
    fn drop(&mut self) {
        let Some(peer) = &mut self.peer else { return };
        let deadline = Instant::now() + LINGER;
        loop {
            match write_some(&self.ring, &mut self.unwritten_output, &mut peer.writer) {
                Ok(Written::Some) => {}
                Ok(Written::All) | Err(_) => return,
                Ok(Written::NoRoom) => {
                    let timeout = deadline.saturating_duration_since(Instant::now());
                    if timeout.is_zero()
                        || ready(peer.writer.as_fd(), PollFlags::OUT, timeout).is_err()
                    {
                        return;
                    }
                }
            }
        }
    }
}
