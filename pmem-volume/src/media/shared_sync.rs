//! One error for all: what Linux tells one caller about a failed write-back, everybody learns who
//! relied on it.
//!
//! A page that cannot be written back is reported once per open file (Linux
//! file_check_and_advance_wb_err(), called by every fsync(), msync() and waiting
//! sync_file_range()), to whoever asks first, whosever page it was; and then the page
//! counts as clean. All who make a pool's file durable share one open file. So of two flushes that
//! overlap, one may be told of the other's lost page, and the other that all is well.
//!
//! Hence a flush that went well ends when all have ended that were under way when the kernel
//! answered it, and did so without an error: any of them may have got the one that was meant for
//! it. They run side by side, none waits for one that began later than that. After the first error
//! every flush fails: nobody knows whose page was lost.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard};

use thiserror::Error;

use super::MediaError;

/// The kernel reported no error of this flush, and one to somebody else.
#[derive(Debug, Error)]
#[error("another write to the file failed, and it may have been this one: {cause}")]
pub(super) struct Overlooked {
    cause: String,
}

/// What is under way on one open file, and the first error. All media on that open file have the
/// same one.
#[derive(Debug, Default)]
pub(super) struct SharedSync {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    under_way: BTreeSet<u64>,
    failed: Option<String>,
}

/// One that is under way. It ends also if its caller panics.
struct Ticket<'a> {
    shared: &'a SharedSync,
    number: u64,
}

impl SharedSync {
    /// Runs `sync`, which asks the kernel to make something durable, and returns when its answer
    /// can be believed. The error of somebody else's is `overlooked` here.
    pub(super) fn run(
        &self,
        sync: impl FnOnce() -> Result<(), MediaError>,
        overlooked: impl FnOnce(Overlooked) -> MediaError,
    ) -> Result<(), MediaError> {
        // 1. An error is known before this one ends.
        let ticket = self.begin();
        let result = sync();
        if let Err(error) = &result {
            self.locked().failed.get_or_insert_with(|| foreshore_types::chain(error));
        }
        drop(ticket);
        result?;
        // 2. Whoever may have taken this one's error began before the kernel answered, which it
        //    has.
        let state = self.locked();
        let latest = state.next;
        let is_awaited =
            |state: &mut State| state.under_way.first().is_some_and(|first| *first < latest);
        let state = self.ended.wait_while(state, is_awaited).expect(NO_PANIC);
        // 3. Then it is known.
        match &state.failed {
            None => Ok(()),
            Some(cause) => Err(overlooked(Overlooked { cause: cause.clone() })),
        }
    }

    fn begin(&self) -> Ticket<'_> {
        let mut state = self.locked();
        let number = state.next;
        state.next += 1;
        state.under_way.insert(number);
        Ticket { shared: self, number }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(NO_PANIC)
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.shared.locked().under_way.remove(&self.number);
        self.shared.ended.notify_all();
    }
}

const NO_PANIC: &str = "no code panics while it holds it";

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn error() -> MediaError {
        let source = io::Error::from_raw_os_error(libc::EIO);
        MediaError::Io { operation: "msync", offset_bytes: 0, length_bytes: 8, source }
    }

    fn other(overlooked: Overlooked) -> MediaError {
        let source = io::Error::other(overlooked);
        MediaError::Io { operation: "msync", offset_bytes: 8, length_bytes: 8, source }
    }

    /// Two flushes overlap; the kernel says `first` to the one that began first and ended last, and
    /// `second` to the other.
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
                    has_answered.recv_timeout(PATIENCE).unwrap();
                    first
                };
                shared.run(sync, other)
            });
            has_began.recv_timeout(PATIENCE).unwrap();
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
    fn both_of_two_that_overlap_fail_whichever_of_them_is_told() {
        for results in [two_overlap(Err(error()), Ok(())), two_overlap(Ok(()), Err(error()))] {
            assert!(results.iter().all(Result::is_err), "{results:?}");
        }
        assert!(two_overlap(Ok(()), Ok(())).iter().all(Result::is_ok));
    }

    #[test]
    fn one_that_has_its_answer_waits_for_those_under_way() {
        let shared = SharedSync::default();
        let before = shared.begin();
        let (ended, has_ended) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| ended.send(shared.run(|| Ok(()), other)).unwrap());
            // Its ticket is the second one, and is given back before it waits.
            while shared.locked().next < 2 || shared.locked().under_way.len() > 1 {
                thread::yield_now();
            }
            assert!(has_ended.try_recv().is_err(), "one before it is under way");
            drop(before);
            has_ended.recv_timeout(PATIENCE).unwrap().unwrap();
        });
    }

    #[test]
    fn after_the_first_error_every_one_fails_and_says_why() {
        let shared = SharedSync::default();
        shared.run(|| Ok(()), other).unwrap();
        shared.run(|| Err(error()), other).unwrap_err();
        let MediaError::Io { source, .. } = shared.run(|| Ok(()), other).unwrap_err() else {
            panic!()
        };
        assert!(source.to_string().contains("msync of 0x8 bytes at offset 0x0 failed"), "{source}");
    }
}
