//! Progress meter for a command that runs in a terminal.

use std::io::{self, IsTerminal};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pmem_volume::progress::{OnProgress, Progress, Task};

/// A command that ends within this time shows no meter.
const METER_DELAY: Duration = Duration::from_secs(1);
/// Interval at which the meter moves even without progress, for example during one long system
/// call.
const TICK: Duration = Duration::from_millis(200);
/// Higher rates are of no use, and a serial console is slow.
const FRAMES_HZ: u8 = 5;

const SPINNER: &str = "{spinner} {elapsed}";
const BAR: &str = "{spinner} {msg} [{bar:30}] {bytes} of {total_bytes}, {elapsed}, {eta} left";

/// Runs `work`, which may take long, and shows its progress on stderr. The meter appears on a
/// terminal after the first second and disappears when the work ends. The command prints its output
/// afterwards.
pub(crate) fn with_meter<T>(work: impl FnOnce(OnProgress<'_>) -> T) -> T {
    if !io::stderr().is_terminal() {
        return work(&mut |_| {});
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    bar.set_style(style(SPINNER));
    thread::scope(|scope| {
        // Dropped when the work ends or unwinds.
        let (working, ended) = mpsc::channel::<()>();
        let bar = &bar;
        scope.spawn(move || {
            let waited = ended.recv_timeout(METER_DELAY);
            if is_long(waited) {
                bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(FRAMES_HZ));
                bar.enable_steady_tick(TICK);
                // The thread that drew the bar also clears it, so that no frame can be drawn
                // afterwards.
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

/// Returns true if the work was still running after the first second.
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
    fn meter_appears_only_for_long_work() {
        assert!(is_long(Err(RecvTimeoutError::Timeout)));
        assert!(!is_long(Err(RecvTimeoutError::Disconnected)), "it was over sooner");
    }

    #[test]
    fn each_task_starts_a_new_bar() {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let mut task = None;
        let mut update = |kind, done_bytes, total_bytes| {
            show(&bar, &mut task, Progress { task: kind, done_bytes, total_bytes });
            (bar.message(), bar.position(), bar.length())
        };
        assert_eq!(update(Task::Erase, 3, 10), ("erasing".to_owned(), 3, Some(10)));
        assert_eq!(update(Task::Erase, 10, 10), ("erasing".to_owned(), 10, Some(10)));
        assert_eq!(update(Task::Check, 0, 7), ("checking".to_owned(), 0, Some(7)));
    }
}
