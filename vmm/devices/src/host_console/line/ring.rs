//! Newest output of a guest that no client has read yet.

use std::collections::VecDeque;
use std::io;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Maximum number of bytes that are kept for a client that connects later. The oldest bytes are
/// dropped first, because users need the latest output.
pub(in crate::host_console) const LEN_MAX: usize = 256 << 10;

/// Ring buffer. A device adds output without ever blocking, and the bridge takes it.
#[derive(Debug)]
pub(in crate::host_console) struct Ring {
    state: Mutex<State>,
    filled: EventFd,
}

#[derive(Debug, Default)]
struct State {
    bytes: VecDeque<u8>,
    /// Number of lost bytes that were not reported yet.
    unreported_len: usize,
}

impl State {
    /// Drops the oldest bytes if necessary to make room for `len` more bytes. `len` is at most
    /// [`LEN_MAX`].
    fn make_room(&mut self, len: usize) {
        let excess = (self.bytes.len() + len).saturating_sub(LEN_MAX);
        self.bytes.drain(..excess);
        self.unreported_len += excess;
    }
}

impl Ring {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { state: Mutex::default(), filled: EventFd::new(EFD_NONBLOCK)? })
    }

    /// Appends `data`. Returns the number of bytes lost since the last call.
    pub(in crate::host_console) fn push(&self, data: &[u8]) -> usize {
        let (too_much, newest) = data.split_at(data.len().saturating_sub(LEN_MAX));
        let mut state = self.state.lock();
        let was_empty = state.bytes.is_empty();
        state.make_room(newest.len());
        state.bytes.extend(newest);
        let is_filled = was_empty && !state.bytes.is_empty();
        let lost_len = too_much.len() + std::mem::take(&mut state.unreported_len);
        drop(state);
        if is_filled {
            // The write fails only if the counter is full, and the bridge is then already notified.
            let _ = self.filled.write(1);
        }
        lost_len
    }

    /// Removes and returns at most `len_max` of the oldest bytes.
    pub(super) fn take(&self, len_max: usize) -> Vec<u8> {
        let mut state = self.state.lock();
        let len = state.bytes.len().min(len_max);
        state.bytes.drain(..len).collect()
    }

    /// Puts back bytes that were taken but not delivered. Drops the oldest of them if the buffer is
    /// full.
    pub(super) fn put_back(&self, undelivered: &[u8]) {
        let mut state = self.state.lock();
        let room = LEN_MAX - state.bytes.len();
        let (too_much, rest) = undelivered.split_at(undelivered.len().saturating_sub(room));
        state.unreported_len += too_much.len();
        rest.iter().rev().for_each(|byte| state.bytes.push_front(*byte));
    }

    /// Readable when bytes arrive in an empty ring.
    pub(super) fn filled(&self) -> &EventFd {
        &self.filled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> Ring {
        Ring::new().unwrap()
    }

    #[test]
    fn oldest_bytes_are_dropped_and_counted() {
        let ring = ring();
        assert_eq!(ring.push(&[1; 10]), 0);
        assert_eq!(ring.push(&vec![2; LEN_MAX - 5]), 5);
        let all = ring.take(usize::MAX);
        assert_eq!((all.len(), all[..6].to_vec()), (LEN_MAX, vec![1, 1, 1, 1, 1, 2]));
        assert_eq!(ring.push(&vec![3; LEN_MAX + 7]), 7);
        assert_eq!(ring.take(usize::MAX).len(), LEN_MAX);
    }

    #[test]
    fn notification_is_sent_once_until_empty() {
        let ring = ring();
        ring.push(b"a");
        ring.push(b"b");
        assert_eq!(ring.filled().read().unwrap(), 1);
        ring.push(b"");
        assert_eq!(ring.take(2), b"ab");
        ring.push(b"");
        assert!(ring.filled().read().is_err(), "an empty push raised the event");
        ring.push(b"c");
        assert_eq!(ring.filled().read().unwrap(), 1);
    }

    #[test]
    fn bytes_put_back_are_first_again_if_there_is_room() {
        let ring = ring();
        ring.push(b"hello");
        let undelivered = ring.take(3);
        ring.put_back(&undelivered[1..]);
        assert_eq!(ring.take(usize::MAX), b"ello");
        ring.push(&vec![0; LEN_MAX - 2]);
        ring.put_back(b"abcde");
        assert!(ring.take(3).starts_with(b"de"));
        assert_eq!(ring.push(b"x"), 3, "the next push reports bytes that did not fit");
    }
}
