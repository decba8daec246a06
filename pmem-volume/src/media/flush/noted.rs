//! Record of a thread's operations on mapped media, in order. Without this record, only a power
//! loss would reveal that a store has not left the caches.

use std::cell::RefCell;
use std::ops::Range;

/// Operation on mapped media. Addresses are those of the mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Noted {
    /// Store into the caches.
    Stored(Range<usize>),
    /// Non-temporal store, which bypasses the caches.
    Streamed(Range<usize>),
    /// Lines that were written back.
    WrittenBack(Range<usize>),
    Fenced,
}

thread_local! {
    static NOTED: RefCell<Vec<Noted>> = const { RefCell::new(Vec::new()) };
}

pub(in crate::media) fn note(noted: Noted) {
    NOTED.with_borrow_mut(|all| all.push(noted));
}

/// Returns the operations of this thread during `work`.
pub(crate) fn noted_in(work: impl FnOnce()) -> Vec<Noted> {
    NOTED.take();
    work();
    NOTED.take()
}

/// Returns the stores to persistent memory that are not durable at the end. A store into the caches
/// needs a later write-back of its range. Every store then needs a fence.
pub(crate) fn not_durable(noted: &[Noted]) -> Vec<Range<usize>> {
    let (mut in_caches, mut on_their_way) = (Vec::<Range<usize>>::new(), Vec::new());
    for noted in noted {
        match noted {
            Noted::Stored(range) => in_caches.push(range.clone()),
            Noted::Streamed(range) => on_their_way.push(range.clone()),
            Noted::WrittenBack(lines) => {
                let is_covered = |stored: &mut Range<usize>| {
                    lines.start <= stored.start && stored.end <= lines.end
                };
                on_their_way.extend(in_caches.extract_if(.., is_covered));
            }
            Noted::Fenced => on_their_way.clear(),
        }
    }
    in_caches.into_iter().chain(on_their_way).collect()
}
