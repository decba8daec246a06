//! Console output to a file on a disk. A separate thread writes the file, because a disk may block
//! a writer for any length of time.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use foreshore_confinement::thread::{ThreadKind, spawn_confined};
use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing::warn;

use super::Lost;
use super::config::MIN_MAX_RATE;
use super::file_rate::{BURST_BYTES, FileThrottle};

/// Capacity of the queue in bytes: more than the output of a boot.
const LEN_MAX: usize = 1 << 20;
/// Maximum number of bytes in one write.
const STEP_LEN_MAX: usize = 64 << 10;
/// Time that a guest waits for the disk when the queue is full. After it, the disk counts as
/// stalled. Linux delays a process that writes too fast by a fifth of a second at a time (MAX_PAUSE
/// in mm/page-writeback.c).
const STALL_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that the VM's shutdown waits for a disk that makes no progress.
const LINGER: Duration = Duration::from_secs(10);

// Waiting for the rate limit must not look like a stalled disk.
const _: () =
    assert!(STEP_LEN_MAX as u128 * 1000 / MIN_MAX_RATE as u128 * 10 < STALL_TIMEOUT.as_millis());
// The token bucket never holds enough tokens for a longer write.
const _: () = assert!(STEP_LEN_MAX as u64 <= BURST_BYTES);

/// File with the thread that writes it. Dropping it waits until all output is written.
#[derive(Debug)]
pub(super) struct DiskFile {
    /// Path of the file, for log lines.
    path: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    throttle: Option<FileThrottle>,
    queue: Mutex<Queue>,
    /// Notified when bytes are queued or the queue is closed.
    sent: Condvar,
    /// Notified when the thread has removed bytes from the queue or has ended.
    drained: Condvar,
    /// Notified when the queue is closed.
    closed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    bytes: VecDeque<u8>,
    /// Set if a sender has timed out and the disk has made no progress since.
    is_stalled: bool,
    /// Lost output that was not reported yet.
    unreported: Lost,
    /// Set if no more bytes will be queued.
    is_closed: bool,
    /// Set if all output is written.
    is_done: bool,
}

impl DiskFile {
    /// Starts the thread that writes to `file` at the rate that `throttle` allows.
    pub(super) fn start(
        path: &Path,
        file: impl Write + Send + 'static,
        throttle: Option<FileThrottle>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(throttle));
        let thread = spawn_confined(ThreadKind::ConsoleFile, "_console_file", {
            let shared = Arc::clone(&shared);
            move || shared.write_to(file)
        })?;
        Ok(Self { path: path.to_owned(), shared, thread: Some(thread) })
    }

    /// Queues `data`, and returns the output that was lost since the last call.
    ///
    /// A file should be complete, so a sender that is faster than the disk waits as long as the
    /// disk makes progress. A stalled disk blocks the guest, and other devices on the console's
    /// thread, only once and for one second. After that, output that does not fit into the queue is
    /// lost.
    pub(super) fn send(&self, data: &[u8]) -> Lost {
        let Shared { queue, sent, drained, .. } = &*self.shared;
        let (mut queue, mut rest) = (queue.lock(), data);
        loop {
            let (next, more) = rest.split_at(rest.len().min(LEN_MAX - queue.bytes.len()));
            queue.bytes.extend(next);
            rest = more;
            sent.notify_one();
            if rest.is_empty() || queue.is_stalled {
                break;
            }
            let timed_out = drained.wait_for(&mut queue, STALL_TIMEOUT).timed_out();
            // The disk may have made progress just before the timeout.
            queue.is_stalled = timed_out && queue.bytes.len() == LEN_MAX;
        }
        let unreported = std::mem::take(&mut queue.unreported);
        Lost { len: unreported.len + rest.len(), error: unreported.error }
    }

    /// Returns true if [`Self::send`] may have to wait.
    pub(super) fn is_full(&self) -> bool {
        self.shared.queue.lock().bytes.len() > LEN_MAX - STEP_LEN_MAX
    }
}

impl Drop for DiskFile {
    /// Waits until the guest's last output is written, but not for a stalled disk, which must not
    /// keep the VM alive.
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock();
        queue.is_closed = true;
        self.shared.sent.notify_one();
        self.shared.closed.notify_one();
        while !queue.is_done {
            if self.shared.drained.wait_for(&mut queue, LINGER).timed_out() && !queue.is_done {
                warn!(
                    path = ?self.path,
                    bytes = queue.bytes.len(),
                    "Console file is stalled; the guest's last output is lost"
                );
                return;
            }
        }
        drop(queue);
        if let Some(thread) = self.thread.take() {
            // The thread has no work left.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn new(throttle: Option<FileThrottle>) -> Self {
        let (queue, sent, drained, closed) = Default::default();
        Self { throttle, queue, sent, drained, closed }
    }

    fn write_to(&self, mut file: impl Write) {
        while let Some(data) = self.take() {
            let mut rest = &data[..];
            let error = loop {
                match file.write(rest) {
                    Ok(0) => break Some(io::ErrorKind::WriteZero.into()),
                    Ok(written) => rest = &rest[written..],
                    Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                    Err(err) => break Some(err),
                }
                if rest.is_empty() {
                    break None;
                }
            };
            if error.is_some() {
                let unreported = &mut self.queue.lock().unreported;
                *unreported = Lost { len: unreported.len + rest.len(), error };
            }
        }
    }

    /// Waits for bytes to write. Returns `None` after the queue was closed.
    fn take(&self) -> Option<Vec<u8>> {
        let mut queue = self.queue.lock();
        while queue.bytes.is_empty() && !queue.is_closed {
            self.sent.wait(&mut queue);
        }
        let len = self.wait_for_rate(&mut queue);
        let data: Vec<u8> = queue.bytes.drain(..len).collect();
        (queue.is_stalled, queue.is_done) = (false, data.is_empty());
        self.drained.notify_one();
        Some(data).filter(|data| !data.is_empty())
    }

    /// Waits until the rate limit allows the next write, and returns its length. The VM's shutdown
    /// ends the wait, because little output is left and the next VM may need the file.
    fn wait_for_rate(&self, queue: &mut MutexGuard<'_, Queue>) -> usize {
        let step_len = |queue: &Queue| queue.bytes.len().min(STEP_LEN_MAX);
        let Some(throttle) = &self.throttle else { return step_len(queue) };
        let mut delayed_since = None;
        let len = loop {
            let (len, now) = (step_len(queue), Instant::now());
            if queue.is_closed {
                throttle.take_available(len, now);
                break len;
            }
            let Err(wait) = throttle.take(len, now) else { break len };
            if delayed_since.is_none() {
                throttle.metrics().begin();
                delayed_since = Some(now);
            }
            self.closed.wait_for(queue, wait);
        };
        if let Some(since) = delayed_since {
            throttle.metrics().end(since.elapsed());
        }
        len
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::super::rotated_file::ConsoleFileMetrics;
    use super::*;
    use crate::throttle::TokenBucket;

    /// Fake disk that needs the test's permission for each write, and reports each write.
    struct Disk {
        results: Receiver<io::Result<()>>,
        written: Sender<Vec<u8>>,
    }

    impl Write for Disk {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            // After the test has dropped its end, no permission is needed.
            self.results.recv().unwrap_or(Ok(()))?;
            // The test may have dropped its end.
            let _ = self.written.send(data.to_vec());
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn disk() -> (Sender<io::Result<()>>, Receiver<Vec<u8>>, DiskFile) {
        let (hold, results) = channel();
        let (written, written_chunks) = channel();
        (
            hold,
            written_chunks,
            DiskFile::start(Path::new("disk"), Disk { results, written }, None).unwrap(),
        )
    }

    /// Creates a file with a rate limit, on a disk that is always ready.
    fn throttled(
        burst: u64,
        bytes_per_s: u64,
    ) -> (Arc<ConsoleFileMetrics>, Receiver<Vec<u8>>, DiskFile) {
        let rate = NonZeroU64::new(bytes_per_s).unwrap();
        let bucket = Arc::new(Mutex::new(TokenBucket::full(burst, rate, Instant::now())));
        let metrics = Arc::new(ConsoleFileMetrics::default());
        let throttle = FileThrottle::new(bucket, Arc::clone(&metrics));
        let (results, (written, written_chunks)) = (channel().1, channel());
        (
            metrics,
            written_chunks,
            DiskFile::start(Path::new("disk"), Disk { results, written }, Some(throttle)).unwrap(),
        )
    }

    fn text(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n % 251) as u8).collect()
    }

    #[test]
    fn stalled_disk_delays_once_and_losses_are_counted() {
        let (hold, written_chunks, file) = disk();
        assert_eq!(file.send(b"x").len, 0);
        // The first byte may still be in the queue, or may have been passed to the disk.
        let sent = text(LEN_MAX + STEP_LEN_MAX + 2);
        let lost = file.send(&sent).len;
        assert!((1..=STEP_LEN_MAX + 3).contains(&lost), "{lost}");
        assert_eq!(file.send(b"lost").len, 4);
        assert!(file.is_full());
        drop(hold);
        drop(file);
        let written = written_chunks.iter().collect::<Vec<_>>().concat();
        assert_eq!(written[0], b'x');
        assert!(written[1..] == sent[..sent.len() - lost], "the remaining output is out of order");
    }

    #[test]
    fn writer_faster_than_disk_is_throttled_without_loss() {
        let (hold, written_chunks, file) = disk();
        let sent = text(3 * LEN_MAX);
        let sending = std::thread::spawn({
            let sent = sent.clone();
            move || sent.chunks(100_000).map(|part| file.send(part).len).sum::<usize>()
        });
        let mut written = Vec::new();
        while written.len() < sent.len() {
            // Sending fails if the disk's thread has already ended.
            let _ = hold.send(Ok(()));
            written.extend(written_chunks.recv().unwrap());
        }
        assert_eq!(sending.join().unwrap(), 0);
        assert!(written == sent);
    }

    #[test]
    fn write_error_is_reported_by_the_next_send_and_output_continues() {
        let (hold, written_chunks, file) = disk();
        file.send(b"one");
        hold.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
        hold.send(Ok(())).unwrap();
        // Polls until the failure is reported.
        let lost = (0..).map(|_| file.send(b"")).find(|lost| lost.len > 0).unwrap();
        assert_eq!((lost.len, lost.error.unwrap().kind()), (3, io::ErrorKind::StorageFull));
        assert_eq!(file.send(b"two").len, 0);
        assert_eq!(written_chunks.recv().unwrap(), b"two");
    }

    #[test]
    fn drop_waits_until_all_output_is_written() {
        let (hold, written_chunks, file) = disk();
        file.send(b"Power down");
        let ending = std::thread::spawn(move || drop(file));
        hold.send(Ok(())).unwrap();
        ending.join().unwrap();
        assert_eq!(written_chunks.try_recv().unwrap(), b"Power down");
    }

    #[test]
    fn output_beyond_the_burst_waits_for_the_rate_until_the_file_is_closed() {
        // A rate that is too low to refill tokens during the test.
        const BURST: usize = 2 * STEP_LEN_MAX;
        let (metrics, written_chunks, file) = throttled(BURST as u64, 1);
        let sent = text(BURST + LEN_MAX / 2);
        assert_eq!(file.send(&sent).len, 0);
        let mut written = Vec::new();
        while metrics.throttled.requests() == 0 {
            written.extend(written_chunks.try_iter().flatten());
            assert!(written.len() <= BURST, "{}", written.len());
            std::thread::yield_now();
        }
        drop(file);
        written.extend(written_chunks.try_iter().flatten());
        assert!(written == sent);
        assert!(metrics.throttled.delay() > Duration::ZERO);
        assert_eq!(metrics.throttled.requests(), 1, "the remaining output was delayed");
    }

    #[test]
    fn delayed_output_is_written_without_loss() {
        let (_metrics, written_chunks, file) = throttled(STEP_LEN_MAX as u64, 32 << 20);
        let sent = text(3 * LEN_MAX);
        let lost: usize = sent.chunks(100_000).map(|part| file.send(part).len).sum();
        assert_eq!(lost, 0);
        let mut written = Vec::new();
        while written.len() < sent.len() {
            written.extend(written_chunks.recv().unwrap());
        }
        assert!(written == sent);
    }
}
