//! `--event-monitor`: events to a file, a FIFO or an inherited descriptor.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::thread::JoinHandle;

use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use thiserror::Error;
use tracing::{debug, warn};

use super::EventMonitor;
use super::{EmittedEvent, Events, Watcher, WatcherItem};
use crate::output_file::{admit, open_to_append};
use crate::standard_stream;

#[derive(Debug, Error)]
#[error("--event-monitor: cannot write events to {target}")]
pub struct MonitorError {
    target: EventMonitor,
    #[source]
    source: io::Error,
}

/// Writer of events, with its own thread.
#[derive(Debug)]
pub struct Monitor {
    thread: JoinHandle<()>,
}

impl Monitor {
    /// Starts to write events to `target`. If it is a FIFO, waits until the FIFO has a reader.
    /// libvirt opens its end after it has started the VMM.
    pub fn start(target: &EventMonitor, events: &Events) -> Result<Self, MonitorError> {
        let failed = |source| MonitorError { target: target.clone(), source };
        let file = open(target).map_err(failed)?;
        set_nonblocking(&file).map_err(failed)?;
        let watcher = events.watch();
        let thread =
            spawn_confined(ThreadKind::Writer, "_events", move || write_all(file, watcher))
                .map_err(failed)?;
        Ok(Self { thread })
    }

    /// Waits until all events have been written. Call it after [`Events::end`].
    pub fn finish(self) {
        if self.thread.join().is_err() {
            warn!("Event monitor thread panicked");
        }
    }
}

fn open(target: &EventMonitor) -> io::Result<File> {
    match target {
        EventMonitor::Path(path) => {
            let file = open_to_append(path)?;
            admit(&file, path)?;
            // The log may be written to the same standard stream.
            let is_shared = standard_stream::append_at(path)?;
            if !is_shared && file.metadata()?.is_file() {
                file.set_len(0)?;
            }
            Ok(file)
        }
        EventMonitor::Fd(fd) => {
            // SAFETY: F_GETFD reads a flag of any descriptor, or fails.
            if unsafe { libc::fcntl(*fd, libc::F_GETFD) } < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: the descriptor is open (checked above). It was inherited for this purpose, so
            // no other code uses it.
            Ok(unsafe { OwnedFd::from_raw_fd(*fd) }.into())
        }
    }
}

/// Makes writes non-blocking, because a FIFO that is not read must not block the exit of the VMM.
fn set_nonblocking(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? | OFlags::NONBLOCK)?)
}

fn write_all(mut file: File, mut watcher: Watcher) {
    while let Some(item) = watcher.next_blocking() {
        match item {
            WatcherItem::Event(event) => {
                if let Err(error) = write(&mut file, &event) {
                    watcher.counters.add_lost(1);
                    debug!(%error, event = event.event, "Event lost");
                }
            }
            WatcherItem::Lost(count) => debug!(count, "Events lost"),
        }
    }
}

/// Writes an event with one system call. A FIFO accepts up to PIPE_BUF bytes completely or not at
/// all (pipe(7)), and an event has a few hundred bytes.
fn write(file: &mut File, event: &EmittedEvent) -> io::Result<()> {
    let mut text = serde_json::to_string_pretty(event)?;
    text.push_str("\n\n");
    let written = file.write(text.as_bytes())?;
    if written < text.len() { Err(ErrorKind::WriteZero.into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::path::Path;

    use rustix::fs::{CWD, Mode, mkfifoat};
    use tempfile::TempDir;

    use super::*;
    use crate::events::Event;

    fn fifo(dir: &TempDir) -> std::path::PathBuf {
        let path = dir.path().join("fifo");
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        path
    }

    /// Splits `text` into events by counting braces, as libvirt does.
    fn events_in(text: &str) -> Vec<String> {
        let (mut depth, mut begin, mut found) = (0, 0, Vec::new());
        for (at, character) in text.char_indices() {
            match character {
                '{' => {
                    if depth == 0 {
                        begin = at;
                    }
                    depth += 1;
                }
                '}' => {
                    depth -= 1;
                    if depth == 0 {
                        let event: serde_json::Value =
                            serde_json::from_str(&text[begin..=at]).unwrap();
                        found.push(event["event"].as_str().unwrap().to_owned());
                    }
                }
                _ => {}
            }
        }
        assert_eq!(depth, 0, "{text}");
        found
    }

    #[test]
    fn file_has_every_event_after_the_monitor_finishes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        fs::write(&path, "earlier content").unwrap();
        let events = Events::start();
        let monitor = Monitor::start(&EventMonitor::Path(path.clone()), &events).unwrap();
        events.emit(Event::VmBooting);
        events.emit(Event::Failed { reason: "{{ \"quoted\" }" });
        events.emit(Event::VmmShutdown);
        events.end();
        monitor.finish();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(events_in(&text), ["booting", "failed", "shutdown"]);
        assert!(text.ends_with("}\n\n"));
    }

    #[test]
    fn start_waits_until_a_fifo_has_a_reader() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(&dir);
        let reader = {
            let path = path.clone();
            std::thread::spawn(move || {
                let mut text = String::new();
                File::open(path).unwrap().read_to_string(&mut text).unwrap();
                text
            })
        };
        let events = Events::start();
        let monitor = Monitor::start(&EventMonitor::Path(path), &events).unwrap();
        events.emit(Event::VmmStarting);
        events.end();
        monitor.finish();
        assert_eq!(events_in(&reader.join().unwrap()), ["starting"]);
    }

    /// Opens the read end of a FIFO without waiting for a writer.
    fn open_without_reading(path: &Path) -> File {
        use std::os::unix::fs::OpenOptionsExt;
        std::fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap()
    }

    #[test]
    fn missing_or_slow_reader_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(&dir);
        let mut reader = open_without_reading(&path);
        let events = Events::start();
        let monitor = Monitor::start(&EventMonitor::Path(path.clone()), &events).unwrap();
        let reason = "x".repeat(400);
        // Sends four times the capacity of a FIFO.
        for number in 0..640 {
            events.emit(Event::Failed { reason: &reason });
            // Lets the watcher catch up. Otherwise, events would be lost in its queue instead of in
            // the FIFO.
            while number % 256 == 255 && !events.queue.is_empty() {
                std::thread::yield_now();
            }
        }
        events.end();
        monitor.finish();
        let lost = events.counters().lost();
        assert!(lost > 300, "{lost}");
        // All received events are complete.
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(events_in(&text).len() as u64, 640 - lost);
        // The reader has already closed the FIFO.
        let monitor = Monitor::start(&EventMonitor::Path(path), &events).unwrap();
        drop(reader);
        events.emit(Event::VmBooted);
        events.end();
        monitor.finish();
        assert_eq!(events.counters().lost(), lost + 1);
    }

    #[test]
    fn target_that_cannot_be_opened_is_named() {
        let start = |target: &EventMonitor| {
            Monitor::start(target, &Events::start()).unwrap_err().to_string()
        };
        let path = EventMonitor::Path("/nowhere/events".into());
        assert_eq!(start(&path), "--event-monitor: cannot write events to /nowhere/events");
        assert_eq!(
            start(&EventMonitor::Fd(9999)),
            "--event-monitor: cannot write events to fd=9999"
        );
    }
}
