//! One connection of the agent: reads lines, writes settings.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use balloon::proto::{
    AgentMessage, LineReader, MAX_LINE_BYTES, NextLine, Refusal, Settings, VmmMessage, encode_line,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::WriteHalf;

/// Bytes read from the socket at a time.
const READ_BYTES: usize = 8192;
/// Limit of lines per second from all connections together. Each new connection counts as a line.
/// Further lines wait in the guest and cost the host nothing.
const MAX_LINES_PER_SECOND: usize = 200;
/// Limit of bytes per second from all connections together, enough for [`MAX_LINES_PER_SECOND`]. It
/// also bounds a line that never ends, which the limit of lines does not count.
const MAX_BYTES_PER_SECOND: usize = MAX_LINES_PER_SECOND * MAX_LINE_BYTES;

pub(super) type Parse = fn(&[u8]) -> Result<AgentMessage, Refusal>;

/// A message of the agent, or the reason why its line was refused.
#[derive(Debug)]
pub(super) struct Heard {
    pub message: Result<AgentMessage, Refusal>,
    /// Time at which the line was complete.
    pub at: Instant,
}

/// Serves one connection until it ends, and parses its lines. `settings` returns the governor's
/// present settings, `bytes` counts the bytes read, and `decide` returns when the governor has
/// handled a message.
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
        outgoing.tell(settings());
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

/// Settings on their way to the agent. An agent may read them arbitrarily late, because only one
/// line waits and the agent's own lines are still read.
#[derive(Debug, Default)]
struct Outgoing {
    /// Settings in `line`, which may have been written already.
    told: Option<Settings>,
    line: Vec<u8>,
    /// Bytes of `line` that were written.
    written: usize,
}

impl Outgoing {
    /// Queues `settings` if they are new, in place of a waiting line. A line that is partly written
    /// is completed first.
    fn tell(&mut self, settings: Settings) {
        let is_begun = self.is_waiting() && self.written > 0;
        if is_begun || self.told == Some(settings) {
            return;
        }
        self.line.clear();
        encode_line(&VmmMessage::Settings(settings), &mut self.line);
        (self.told, self.written) = (Some(settings), 0);
    }

    fn is_waiting(&self) -> bool {
        self.written < self.line.len()
    }

    /// Writes as much as the socket takes, and waits if it takes nothing. Cancel safe: a dropped
    /// call has written nothing.
    async fn write(&mut self, to: &mut WriteHalf<'_>) -> io::Result<()> {
        match to.write(&self.line[self.written..]).await {
            Ok(len) => self.written += len,
            // The agent has closed its end. The lines that it sent before still count, and `read`
            // returns the end after them.
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

    /// Accounts for one line. Waits for the next second if the lines of this one are used up.
    pub(super) async fn spend(&mut self) {
        self.take(1, 0).await;
    }

    /// Accounts for `bytes`, at most the limit of one second, in the same way.
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
