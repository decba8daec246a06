//! What a thread has the CPU do with mapped media, in its order. Whether a store has left the
//! caches shows nowhere else but after a loss of power.

use std::cell::RefCell;
use std::ops::Range;

/// Addresses are those of the mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Noted {
    /// To the caches.
    Stored(Range<usize>),
    /// Past the caches.
    Streamed(Range<usize>),
    /// Lines.
    WrittenBack(Range<usize>),
    Fenced,
}

thread_local! {
    static NOTED: RefCell<Vec<Noted>> = const { RefCell::new(Vec::new()) };
}

pub(in crate::media) fn note(noted: Noted) {
    NOTED.with_borrow_mut(|all| all.push(noted));
}

/// What this thread does in `work`.
pub(crate) fn noted_in(work: impl FnOnce()) -> Vec<Noted> {
    NOTED.take();
    work();
    NOTED.take()
}

/// Stores to persistent memory that are not durable at the end of it: to the caches without a
/// write-back that comes later and covers them, or without a fence behind that.
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
