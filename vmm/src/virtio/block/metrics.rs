//! What a disk counts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::request::Operation;
use crate::metrics::LatencyHistogram;

/// Kinds of requests, as metrics name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
    /// Makes durable.
    Flush,
    /// Gives blocks away.
    Discard,
    /// Fills with zeros.
    WriteZeroes,
    /// Asks for the serial number.
    GetId,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::GetId];

    /// The value of the metric label `operation`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write-zeroes",
            Self::GetId => "get-id",
        }
    }
}

impl From<&Operation> for Kind {
    fn from(operation: &Operation) -> Self {
        match operation {
            Operation::Read(..) => Self::Read,
            Operation::Write(..) => Self::Write,
            Operation::Flush => Self::Flush,
            Operation::Discard(_) => Self::Discard,
            Operation::WriteZeroes(_) => Self::WriteZeroes,
            Operation::GetId(_) => Self::GetId,
        }
    }
}

/// Counters of one disk; they only grow.
#[derive(Debug, Default)]
pub struct BlockMetrics {
    done: [AtomicU64; Kind::ALL.len()],
    failed: [AtomicU64; Kind::ALL.len()],
    /// The disk's size now.
    pub size_bytes: AtomicU64,
    /// Bytes that the guest has read.
    pub read_bytes: AtomicU64,
    /// Bytes that the guest has written.
    pub written_bytes: AtomicU64,
    /// Chains that are no request, or one that the disk refuses.
    pub bad_requests: AtomicU64,
    /// Queues whose ring the driver has made nonsense of; each is served again after a reset.
    pub broken_queues: AtomicU64,
    /// Passes of the queues' workers: what they do when there is nothing to be done must not grow.
    #[cfg(test)]
    pub passes: AtomicU64,
    /// The queues that were started last work by io_uring.
    pub io_uring: AtomicBool,
    /// Time that the media took for a flush, good or bad.
    pub flushes: LatencyHistogram,
    /// Set by the first flush that failed: nothing is written from then on.
    pub read_only: AtomicBool,
}

impl BlockMetrics {
    /// Counts a request that was carried out, or was tried to be.
    pub fn finished(&self, kind: Kind, ok: bool) {
        let counters = if ok { &self.done } else { &self.failed };
        counters[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts what went from or to the disk.
    pub fn transferred(&self, kind: Kind, bytes: u64) {
        match kind {
            Kind::Read => self.read_bytes.fetch_add(bytes, Ordering::Relaxed),
            Kind::Write => self.written_bytes.fetch_add(bytes, Ordering::Relaxed),
            Kind::Flush | Kind::Discard | Kind::WriteZeroes | Kind::GetId => 0,
        };
    }

    /// Requests answered with success.
    pub fn done(&self, kind: Kind) -> u64 {
        self.done[kind as usize].load(Ordering::Relaxed)
    }

    /// Requests answered with an error, because memory or media failed.
    pub fn failed(&self, kind: Kind) -> u64 {
        self.failed[kind as usize].load(Ordering::Relaxed)
    }
}
