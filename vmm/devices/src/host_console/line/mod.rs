//! Console lines: pseudo terminals and sockets, whose clients connect and disconnect. Lines are
//! kept across reboots, so that clients remain connected.
//!
//! ```text
//!  device ── output ──► Ring ──► Bridge ◄──► pseudo terminal, or the socket's last client
//!         ◄─ input ─── pipe ◄──────┘
//! ```

mod bridge;
mod pty;
pub(super) mod ring;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader};
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use event_manager::SubscriberId;
use foreshore_confinement::thread::ThreadKind;
use parking_lot::Mutex;

use self::bridge::{Bridge, End};
use self::pty::Pty;
use self::ring::Ring;
use super::config::{ConsoleConfig, ConsoleMode};
use super::file_rate::FileRates;
use super::{ConsoleError, ConsoleInput, ConsoleOutput, HostConsole, Window};
use crate::event_loop::{EventLoop, EventLoopHandle};
use crate::throttle::TokenBucket;
use crate::unix_socket;
use crate::unix_socket::SocketAccess;

/// Console of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Port {
    /// COM1.
    Serial,
    /// hvc0.
    Console,
}

impl Port {
    /// Name in metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Serial => "serial",
            Self::Console => "console",
        }
    }

    fn flag(self) -> &'static str {
        match self {
            Self::Serial => "--serial",
            Self::Console => "--console",
        }
    }
}

/// State of a VM's consoles that is kept across reboots: lines, and rate limits of output files.
#[derive(Clone, Default)]
pub struct Lines(Arc<Mutex<Open>>);

#[derive(Default)]
struct Open {
    /// Dropped before the event loop, because dropping a line removes its bridge from the loop.
    lines: BTreeMap<Port, Line>,
    /// Event loop, which is started with the first line.
    event_loop: Option<EventLoop>,
    file_rates: FileRates,
}

struct Line {
    config: ConsoleConfig,
    /// Path of the pseudo terminal. `None` for a socket.
    path: Option<PathBuf>,
    ring: Arc<Ring>,
    keyboard: PipeReader,
    /// Window size of a pseudo terminal, which virtio-console reports to the guest.
    window: Option<Arc<Window>>,
    event_loop: EventLoopHandle,
    bridge: SubscriberId,
}

impl Lines {
    /// Opens the line for `config` unless it is already open. Returns the device's end of the line.
    pub(super) fn open(
        &self,
        port: Port,
        config: &ConsoleConfig,
    ) -> Result<HostConsole, ConsoleError> {
        let mut open = self.0.lock();
        let open = &mut *open;
        if open.lines.get(&port).is_none_or(|line| !line.is_of(config)) {
            // Closes the old line before the new one is opened, because both may use the same path.
            open.lines.remove(&port);
            if open.event_loop.is_none() {
                open.event_loop = Some(
                    EventLoop::spawn(ThreadKind::Device, "_console")
                        .map_err(ConsoleError::Worker)?,
                );
            }
            let event_loop = open.event_loop.as_ref().expect("it was begun").handle();
            open.lines.insert(port, Line::open(port, config, event_loop)?);
        }
        let line = &open.lines[&port];
        line.machines_end().map_err(ConsoleError::Line)
    }

    /// Token bucket that limits the rate of a console's output file.
    pub(super) fn rate_bucket(
        &self,
        port: Port,
        bytes_per_s: NonZeroU64,
        now: Instant,
    ) -> Arc<Mutex<TokenBucket>> {
        self.0.lock().file_rates.bucket(port, bytes_per_s, now)
    }

    /// Path of a console's pseudo terminal, if it has one.
    pub fn path(&self, port: Port) -> Option<PathBuf> {
        self.0.lock().lines.get(&port)?.path.clone()
    }
}

impl Line {
    fn open(
        port: Port,
        config: &ConsoleConfig,
        event_loop: EventLoopHandle,
    ) -> Result<Self, ConsoleError> {
        let (end, path, window) = if config.mode == ConsoleMode::Pty {
            let pty = Pty::open().map_err(ConsoleError::Pty)?;
            let path = pty.path().to_owned();
            let window = (port == Port::Console).then(|| pty.window()).transpose();
            (End::Pty(pty), Some(path), window.map_err(ConsoleError::Pty)?.map(Arc::new))
        } else {
            let socket = config.socket.as_ref().ok_or(ConsoleError::NoSocket)?;
            let (listener, file) =
                unix_socket::listen(port.flag(), socket, &SocketAccess::default())?;
            file.log_replacement();
            (End::Socket { listener, _file: file }, None, None)
        };
        let pipe = || -> io::Result<_> { Ok((io::pipe()?, Arc::new(Ring::new()?))) };
        let ((keyboard, typing), ring) = pipe().map_err(ConsoleError::Line)?;
        let bridge = Bridge::new(port.flag(), end, window.clone(), Arc::clone(&ring), typing)
            .map_err(ConsoleError::Line)?;
        let bridge = event_loop.add(Box::new(bridge)).map_err(ConsoleError::Worker)?;
        Ok(Self { config: config.clone(), path, ring, keyboard, window, event_loop, bridge })
    }

    fn is_of(&self, config: &ConsoleConfig) -> bool {
        (self.config.mode, &self.config.socket) == (config.mode, &config.socket)
    }

    fn machines_end(&self) -> io::Result<HostConsole> {
        let keyboard = File::from(OwnedFd::from(self.keyboard.try_clone()?));
        let input = Some(ConsoleInput::from(keyboard));
        let output = ConsoleOutput::line(Arc::clone(&self.ring));
        Ok(HostConsole { output, input, window: self.window.clone() })
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // Dropping the bridge writes the remaining output. If the loop has already ended, it has
        // dropped the bridge.
        let _ = self.event_loop.remove(self.bridge);
    }
}
