//! Record of a thread's operations on mapped media, in order. Without this record, only a power
//! loss would reveal that a store has not left the caches.

use std::cell::RefCell;
use std::ops::Range;

/// Operation on mapped media. Addresses are those of the mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RecordedOp {
    /// Store into the caches.
    Stored(Range<usize>),
    /// Non-temporal store, which bypasses the caches.
    Streamed(Range<usize>),
    /// Lines that were written back.
    WrittenBack(Range<usize>),
    Fenced,
}

thread_local! {
    static OPS: RefCell<Vec<RecordedOp>> = const { RefCell::new(Vec::new()) };
}

pub(in crate::media) fn record(op: RecordedOp) {
    OPS.with_borrow_mut(|all| all.push(op));
}

/// Returns the operations of this thread during `work`.
pub(crate) fn record_ops(work: impl FnOnce()) -> Vec<RecordedOp> {
    OPS.take();
    work();
    OPS.take()
}

/// Returns the stores to persistent memory that are not durable at the end. A store into the caches
/// needs a later write-back of its range. Every store then needs a fence.
pub(crate) fn not_durable(ops: &[RecordedOp]) -> Vec<Range<usize>> {
    let (mut cached, mut unfenced) = (Vec::<Range<usize>>::new(), Vec::new());
    for op in ops {
        match op {
            RecordedOp::Stored(range) => cached.push(range.clone()),
            RecordedOp::Streamed(range) => unfenced.push(range.clone()),
            RecordedOp::WrittenBack(lines) => {
                let is_covered = |stored: &mut Range<usize>| {
                    lines.start <= stored.start && stored.end <= lines.end
                };
                unfenced.extend(cached.extract_if(.., is_covered));
            }
            RecordedOp::Fenced => unfenced.clear(),
        }
    }
    cached.into_iter().chain(unfenced).collect()
}
