//! How far a command is, for who waits in front of a terminal.

use std::io::{self, IsTerminal};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pmem_volume::progress::{OnProgress, Progress, Task};

/// What is over sooner needs no meter.
const PATIENCE: Duration = Duration::from_secs(1);
/// Also where nothing is heard for a while, as in one long system call, something moves.
const TICK: Duration = Duration::from_millis(200);
/// More is of no use, and a serial console has its limits.
const FRAMES_HZ: u8 = 5;

const SPINNER: &str = "{spinner} {elapsed}";
const BAR: &str = "{spinner} {msg} [{bar:30}] {bytes} of {total_bytes}, {elapsed}, {eta} left";

/// Does something that may take long, and shows on stderr how far it is: on a terminal, from its
/// first second on, and no longer than it takes. Whatever the command prints comes after it.
pub(crate) fn watched<T>(work: impl FnOnce(OnProgress<'_>) -> T) -> T {
    if !io::stderr().is_terminal() {
        return work(&mut |_| {});
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    bar.set_style(style(SPINNER));
    thread::scope(|scope| {
        // Dropped when the work ends, or unwinds.
        let (working, ended) = mpsc::channel::<()>();
        let bar = &bar;
        scope.spawn(move || {
            let waited = ended.recv_timeout(PATIENCE);
            if is_long(waited) {
                bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(FRAMES_HZ));
                bar.enable_steady_tick(TICK);
                // Cleared by the thread that has drawn it, so that nothing is drawn behind that.
                let _ = ended.recv();
            }
            bar.finish_and_clear();
        });
        let mut task = None;
        let result = work(&mut |progress| show(bar, &mut task, progress));
        drop(working);
        result
    })
}

/// Did the first second pass, and the work was still going on?
fn is_long(waited: Result<(), RecvTimeoutError>) -> bool {
    waited == Err(RecvTimeoutError::Timeout)
}

fn show(bar: &ProgressBar, task: &mut Option<Task>, progress: Progress) {
    if *task != Some(progress.task) {
        *task = Some(progress.task);
        bar.reset();
        bar.set_style(style(BAR));
        bar.set_message(name(progress.task));
    }
    bar.set_length(progress.total_bytes);
    bar.set_position(progress.done_bytes);
}

fn name(task: Task) -> &'static str {
    match task {
        Task::Allocate => "allocating",
        Task::Erase => "erasing",
        Task::Check => "checking",
        Task::Copy => "copying",
        Task::Convert => "converting",
    }
}

fn style(template: &str) -> ProgressStyle {
    // ASCII, for serial consoles and rescue systems.
    let style = ProgressStyle::with_template(template).expect("our templates are well formed");
    style.progress_chars("=> ").tick_chars(r"|/-\ ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_outlasts_our_patience_is_shown() {
        assert!(is_long(Err(RecvTimeoutError::Timeout)));
        assert!(!is_long(Err(RecvTimeoutError::Disconnected)), "it was over sooner");
    }

    #[test]
    fn every_task_starts_a_bar_of_its_own() {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let mut task = None;
        let mut hear = |kind, done_bytes, total_bytes| {
            show(&bar, &mut task, Progress { task: kind, done_bytes, total_bytes });
            (bar.message(), bar.position(), bar.length())
        };
        assert_eq!(hear(Task::Erase, 3, 10), ("erasing".to_owned(), 3, Some(10)));
        assert_eq!(hear(Task::Erase, 10, 10), ("erasing".to_owned(), 10, Some(10)));
        assert_eq!(hear(Task::Check, 0, 7), ("checking".to_owned(), 0, Some(7)));
    }
}
