//! Connection of the agent: reads its lines, and writes the settings.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use balloon::proto::{
    AgentMessage, LineReader, MAX_LINE_BYTES, NextLine, Refusal, Settings, VmmMessage, encode_line,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::WriteHalf;

/// Maximum number of bytes in one read from the socket.
const READ_BYTES: usize = 8192;
/// Maximum number of lines per second, over all connections. Each new connection also counts as a
/// line. Further lines wait in the guest, at no cost to the host.
const MAX_LINES_PER_SECOND: usize = 200;
/// Maximum number of bytes per second over all connections, enough for [`MAX_LINES_PER_SECOND`]. It
/// also applies to a line that never ends, which the limit on lines does not count.
const MAX_BYTES_PER_SECOND: usize = MAX_LINES_PER_SECOND * MAX_LINE_BYTES;

pub(super) type Parse = fn(&[u8]) -> Result<AgentMessage, Refusal>;

/// Message of the agent, or the reason for refusing its line.
#[derive(Debug)]
pub(super) struct Heard {
    pub message: Result<AgentMessage, Refusal>,
    /// Time at which the line was completely received.
    pub at: Instant,
}

/// Serves one connection until it ends, and parses the agent's lines. `settings` returns the
/// governor's current settings, `bytes` counts the bytes read, and `decide` returns once the
/// governor has handled a message.
pub(super) async fn serve(
    mut stream: UnixStream,
    settings: impl Fn() -> Settings,
    bytes: &AtomicU64,
    budget: &mut LineBudget,
    parse: Parse,
    decide: impl AsyncFn(Heard),
) -> io::Result<()> {
    let mut reader = LineReader::new();
    let mut buffer = vec![0; READ_BYTES];
    let (mut from, mut to) = stream.split();
    let mut outgoing = Outgoing::default();
    loop {
        outgoing.send(settings());
        let len = tokio::select! {
            biased;
            written = outgoing.write(&mut to), if outgoing.is_waiting() => {
                written?;
                continue;
            }
            len = from.read(&mut buffer) => len?,
        };
        if len == 0 {
            return Ok(());
        }
        bytes.fetch_add(len as u64, Ordering::Relaxed);
        budget.spend_bytes(len).await;
        let mut input = &buffer[..len];
        while let Some(next) = reader.next(&mut input) {
            budget.spend().await;
            let at = Instant::now();
            let message = match next {
                NextLine::Line(line) => parse(line),
                NextLine::Refused(refusal) => Err(refusal),
            };
            decide(Heard { message, at }).await;
        }
    }
}

/// Settings that are being sent to the agent. An agent may be arbitrarily slow to read them,
/// because only one line is queued and its own lines are still read.
#[derive(Debug, Default)]
struct Outgoing {
    /// Settings in `line`, which may already have been written.
    sent: Option<Settings>,
    line: Vec<u8>,
    /// Number of bytes in `line` that have been written.
    written: usize,
}

impl Outgoing {
    /// Queues `settings` if they have changed. The new line replaces a queued line, unless part of
    /// that line has already been written.
    fn send(&mut self, settings: Settings) {
        let is_begun = self.is_waiting() && self.written > 0;
        if is_begun || self.sent == Some(settings) {
            return;
        }
        self.line.clear();
        encode_line(&VmmMessage::Settings(settings), &mut self.line);
        (self.sent, self.written) = (Some(settings), 0);
    }

    fn is_waiting(&self) -> bool {
        self.written < self.line.len()
    }

    /// Writes as many bytes as the socket accepts, and waits while it accepts none. The call is
    /// cancel safe: if it is dropped, it has written nothing.
    async fn write(&mut self, to: &mut WriteHalf<'_>) -> io::Result<()> {
        match to.write(&self.line[self.written..]).await {
            Ok(len) => self.written += len,
            // The agent has closed its end of the connection. Lines that it sent before are still
            // read, and `read` then returns the end of the stream.
            Err(err) if err.kind() == io::ErrorKind::BrokenPipe => self.written = self.line.len(),
            Err(err) => return Err(err),
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct LineBudget {
    second: tokio::time::Instant,
    lines_left: usize,
    bytes_left: usize,
}

impl LineBudget {
    pub(super) fn new() -> Self {
        Self {
            second: tokio::time::Instant::now(),
            lines_left: MAX_LINES_PER_SECOND,
            bytes_left: MAX_BYTES_PER_SECOND,
        }
    }

    /// Charges one line to the budget. If the budget for this second is used up, waits for the next
    /// second.
    pub(super) async fn spend(&mut self) {
        self.take(1, 0).await;
    }

    /// Charges `bytes` to the budget, and waits if it is used up. `bytes` must not exceed the limit
    /// for one second.
    pub(super) async fn spend_bytes(&mut self, bytes: usize) {
        self.take(0, bytes).await;
    }

    async fn take(&mut self, lines: usize, bytes: usize) {
        let second = std::time::Duration::from_secs(1);
        if self.second.elapsed() >= second {
            *self = Self::new();
        } else if self.lines_left < lines || self.bytes_left < bytes {
            tokio::time::sleep_until(self.second + second).await;
            *self = Self::new();
        }
        self.lines_left -= lines;
        self.bytes_left -= bytes;
    }
}
