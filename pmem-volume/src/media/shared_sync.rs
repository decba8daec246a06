//! Sharing of write-back errors between concurrent flushes. Linux reports a failed write-back to
//! only one caller, but every affected flush must fail.
//!
//! If a page cannot be written back, the first caller on each open file receives the error, even if
//! another caller has written the page (Linux file_check_and_advance_wb_err(), called by every
//! fsync(), msync() and waiting sync_file_range()). The page is then marked as clean. All flushes
//! of a pool's file share one open file. If two flushes overlap, one may receive the error for the
//! other's page, and the other then succeeds.
//!
//! Therefore, a successful flush waits for all flushes that were still in progress when the kernel
//! returned. It succeeds only if they succeed too, because any of them may have received its error.
//! Flushes run in parallel, and none waits for a flush that began later. After the first error
//! every flush fails, because it is unknown which page was lost.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard};

use thiserror::Error;

use super::MediaError;

/// The kernel reported no error to this flush, but reported one to a concurrent flush.
#[derive(Debug, Error)]
#[error("another flush of the file failed, possibly because of this write: {cause}")]
pub(super) struct MissedError {
    cause: String,
}

/// Flushes in progress on one open file, and the first error. All media with that open file share
/// it.
#[derive(Debug, Default)]
pub(super) struct SharedSync {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    in_progress: BTreeSet<u64>,
    failed: Option<String>,
}

/// Flush in progress. Dropping it ends the flush, even if its caller panics.
struct Ticket<'a> {
    shared: &'a SharedSync,
    number: u64,
}

impl SharedSync {
    /// Runs `sync`, which makes data durable, and returns when its result is certain.
    /// `missed_error` converts an error that another flush received.
    pub(super) fn run(
        &self,
        sync: impl FnOnce() -> Result<(), MediaError>,
        missed_error: impl FnOnce(MissedError) -> MediaError,
    ) -> Result<(), MediaError> {
        // 1. Record an error before this flush ends.
        let ticket = self.begin();
        let result = sync();
        if let Err(error) = &result {
            self.locked().failed.get_or_insert_with(|| foreshore_types::chain(error));
        }
        drop(ticket);
        result?;
        // 2. Wait for flushes that may have received the error of this one, because they began
        //    before the kernel returned.
        let state = self.locked();
        let latest = state.next;
        let is_awaited =
            |state: &mut State| state.in_progress.first().is_some_and(|first| *first < latest);
        let state = self.ended.wait_while(state, is_awaited).expect(NO_PANIC);
        // 3. The result is now certain.
        match &state.failed {
            None => Ok(()),
            Some(cause) => Err(missed_error(MissedError { cause: cause.clone() })),
        }
    }

    fn begin(&self) -> Ticket<'_> {
        let mut state = self.locked();
        let number = state.next;
        state.next += 1;
        state.in_progress.insert(number);
        Ticket { shared: self, number }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(NO_PANIC)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.shared.locked().in_progress.remove(&self.number);
        self.shared.ended.notify_all();
    }
}

const NO_PANIC: &str = "no code panics while holding the lock";

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn error() -> MediaError {
        let source = io::Error::from_raw_os_error(libc::EIO);
        MediaError::Io { operation: "msync", offset_bytes: 0, length_bytes: 8, source }
    }

    fn other(missed_error: MissedError) -> MediaError {
        let source = io::Error::other(missed_error);
        MediaError::Io { operation: "msync", offset_bytes: 8, length_bytes: 8, source }
    }

    /// Runs two overlapping flushes. `first` is the kernel's result for the one that begins first
    /// and ends last, and `second` is the result for the other.
    fn two_overlap(
        first: Result<(), MediaError>,
        second: Result<(), MediaError>,
    ) -> [Result<(), MediaError>; 2] {
        let shared = SharedSync::default();
        let (began, has_began) = mpsc::channel();
        let (answered, has_answered) = mpsc::channel();
        let shared = &shared;
        thread::scope(|scope| {
            let a = scope.spawn(move || {
                let sync = || {
                    began.send(()).unwrap();
                    has_answered.recv_timeout(TIMEOUT).unwrap();
                    first
                };
                shared.run(sync, other)
            });
            has_began.recv_timeout(TIMEOUT).unwrap();
            let b = scope.spawn(move || {
                let sync = || {
                    answered.send(()).unwrap();
                    second
                };
                shared.run(sync, other)
            });
            [a.join().unwrap(), b.join().unwrap()]
        })
    }

    #[test]
    fn both_overlapping_flushes_fail_whichever_gets_the_error() {
        for results in [two_overlap(Err(error()), Ok(())), two_overlap(Ok(()), Err(error()))] {
            assert!(results.iter().all(Result::is_err), "{results:?}");
        }
        assert!(two_overlap(Ok(()), Ok(())).iter().all(Result::is_ok));
    }

    #[test]
    fn successful_flush_waits_for_flushes_in_progress() {
        let shared = SharedSync::default();
        let before = shared.begin();
        let (ended, has_ended) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| ended.send(shared.run(|| Ok(()), other)).unwrap());
            // The ticket of the other flush is the second one, and is dropped before that flush
            // waits.
            while shared.locked().next < 2 || shared.locked().in_progress.len() > 1 {
                thread::yield_now();
            }
            assert!(has_ended.try_recv().is_err(), "one before it is under way");
            drop(before);
            has_ended.recv_timeout(TIMEOUT).unwrap().unwrap();
        });
    }

    #[test]
    fn every_flush_after_the_first_error_fails_with_its_cause() {
        let shared = SharedSync::default();
        shared.run(|| Ok(()), other).unwrap();
        shared.run(|| Err(error()), other).unwrap_err();
        let MediaError::Io { source, .. } = shared.run(|| Ok(()), other).unwrap_err() else {
            panic!()
        };
        assert!(source.to_string().contains("msync of 0x8 bytes at offset 0x0 failed"), "{source}");
    }
}
