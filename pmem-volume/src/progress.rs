//! Progress of long operations: allocating, erasing, checking.

use std::ops::Range;

/// Kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Allocation of a file's blocks.
    Allocate,
    /// Erasure of bytes with zeros or holes.
    Erase,
    /// Check of free chunks and of BTTs in volumes.
    Check,
    /// Export or import of a volume's content.
    Copy,
    /// Conversion of an image to another format.
    Convert,
}

/// Progress of a task. The progress starts at 0, never decreases, and ends at the total. One call
/// may report several tasks in succession.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Task in progress.
    pub task: Task,
    /// Number of completed bytes.
    pub done_bytes: u64,
    /// Total number of bytes.
    pub total_bytes: u64,
}

/// Callback for progress, called on the thread of the operation. On slow media, seconds may pass
/// between two calls. If the callback panics, the reported part is complete, and the rest is in the
/// same state as after a crash.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress);

/// Callback that ignores progress.
pub(crate) fn ignore_progress(_: Progress) {}

/// Executes `step` on pieces of a range, in order, and reports the progress after each piece.
pub(crate) fn run_in_steps<E>(
    task: Task,
    range: Range<u64>,
    step_bytes: u64,
    progress: OnProgress<'_>,
    mut step: impl FnMut(Range<u64>) -> Result<(), E>,
) -> Result<(), E> {
    let total_bytes = range.end - range.start;
    let mut at = range.start;
    progress(Progress { task, done_bytes: 0, total_bytes });
    while at < range.end {
        let end = range.end.min(at + step_bytes);
        step(at..end)?;
        at = end;
        progress(Progress { task, done_bytes: at - range.start, total_bytes });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cover_the_range_once_and_are_reported_afterwards() {
        let (mut steps, mut reported) = (vec![], vec![]);
        let mut progress = |now: Progress| reported.push((now.done_bytes, now.total_bytes));
        let step = |range: Range<u64>| {
            steps.push(range);
            Ok::<_, ()>(())
        };
        run_in_steps(Task::Erase, 10..35, 10, &mut progress, step).unwrap();
        assert_eq!(steps, [10..20, 20..30, 30..35]);
        assert_eq!(reported, [(0, 25), (10, 25), (20, 25), (25, 25)]);
    }

    #[test]
    fn failed_step_is_the_last_and_is_not_reported() {
        let mut reported = vec![];
        let mut progress = |now: Progress| reported.push(now.done_bytes);
        let step = |range: Range<u64>| if range.start == 10 { Err("full") } else { Ok(()) };
        assert_eq!(run_in_steps(Task::Allocate, 0..30, 10, &mut progress, step), Err("full"));
        assert_eq!(reported, [0, 10]);
    }
}
