//! How far something is that may take long: allocating, erasing, checking.

use std::ops::Range;

/// What takes its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A file gets its blocks.
    Allocate,
    /// Bytes become zeros or holes.
    Erase,
    /// Free chunks and BTTs of volumes are read.
    Check,
    /// A volume's content goes to a file, or comes from one.
    Copy,
    /// An image becomes one of another format.
    Convert,
}

/// How far a task is. It starts at 0, never goes back and ends at the total; one call may have
/// several tasks, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub task: Task,
    /// To so many bytes.
    pub done_bytes: u64,
    /// Of so many.
    pub total_bytes: u64,
}

/// Hears of progress, on the thread that makes it. Between two calls may lie seconds if the media
/// is slow. Should it not come back, what it was told is done is done, and the rest is as a crash
/// would have left it.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress);

/// Nobody wants to hear.
pub(crate) fn unheard(_: Progress) {}

/// Does something to a range piece by piece, in its order, and says after each piece how far that
/// is.
pub(crate) fn in_steps<E>(
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
    fn steps_cover_the_range_once_and_are_told_when_they_are_done() {
        let (mut steps, mut heard) = (vec![], vec![]);
        let mut progress = |now: Progress| heard.push((now.done_bytes, now.total_bytes));
        let step = |range: Range<u64>| {
            steps.push(range);
            Ok::<_, ()>(())
        };
        in_steps(Task::Erase, 10..35, 10, &mut progress, step).unwrap();
        assert_eq!(steps, [10..20, 20..30, 30..35]);
        assert_eq!(heard, [(0, 25), (10, 25), (20, 25), (25, 25)]);
    }

    #[test]
    fn a_step_that_fails_is_not_told_and_is_the_last() {
        let mut heard = vec![];
        let mut progress = |now: Progress| heard.push(now.done_bytes);
        let step = |range: Range<u64>| if range.start == 10 { Err("full") } else { Ok(()) };
        assert_eq!(in_steps(Task::Allocate, 0..30, 10, &mut progress, step), Err("full"));
        assert_eq!(heard, [0, 10]);
    }
}
