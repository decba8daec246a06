//! Media that are as fast as a call: each step is over when it has begun. The queue has a thread of its own, so nobody
//! else waits.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::{Done, Executor, Step};
use crate::virtio::block::request::{DiskRange, Unmap};

/// Steps before those that are over are told to the guest.
const BATCH: usize = 8;

/// Bytes that are read and written by calls that return when it is done.
pub trait Store: Send + Sync {
    /// Fills `data` from an offset.
    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes `data` to an offset.
    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()>;

    /// Makes everything written durable.
    fn flush(&self) -> io::Result<()>;

    /// Gives a range away.
    fn discard(&self, range: DiskRange) -> io::Result<()>;

    /// Makes a range read as zeros.
    fn write_zeroes(&self, range: DiskRange, unmap: Unmap) -> io::Result<()>;
}

/// Carries steps out one after the other.
pub struct Blocking<S> {
    store: Arc<S>,
    added: VecDeque<(usize, Step)>,
    done: VecDeque<Done>,
}

impl<S: Store> Blocking<S> {
    /// On `store`.
    pub fn new(store: Arc<S>) -> Self {
        Self { store, added: VecDeque::new(), done: VecDeque::new() }
    }

    fn carry_out(&self, step: &mut Step) -> io::Result<()> {
        match step {
            Step::Read(offset, buffer) => self.store.read(*offset, buffer.bytes_mut()),
            Step::Write(offset, buffer) => self.store.write(*offset, buffer.bytes()),
            Step::Flush => self.store.flush(),
            Step::Discard(range) => self.store.discard(*range),
            Step::WriteZeroes(range, unmap) => self.store.write_zeroes(*range, *unmap),
        }
    }
}

impl<S: Store> Executor for Blocking<S> {
    fn add(&mut self, token: usize, step: Step) {
        self.added.push_back((token, step));
    }

    fn begin(&mut self) -> bool {
        if let Some((token, mut step)) = self.added.pop_front() {
            let result = self.carry_out(&mut step);
            self.done.push_back(Done { token, step, result });
        }
        !self.added.is_empty()
    }

    fn next_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    fn event(&self) -> Option<&EventFd> {
        None
    }

    fn batch(&self) -> usize {
        BATCH
    }

    fn drain(&mut self) -> Vec<Done> {
        self.added.clear();
        self.done.drain(..).collect()
    }
}
