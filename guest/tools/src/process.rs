//! Ties the life of a process to the thread that started it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the kernel kill the process of `command` when the thread that started it ends, even if a
/// signal ended that thread.
pub fn end_with_parent(command: &mut Command) -> &mut Command {
    let set = || {
        // SAFETY: this prctl takes no pointers.
        match unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure only makes one system call, which is async-signal-safe, and does not
    // allocate.
    unsafe { command.pre_exec(set) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::wait::wait_for;

    #[test]
    fn process_ends_with_the_thread_that_started_it() {
        let start = || end_with_parent(Command::new("sleep").arg("1000")).spawn();
        let mut child = thread::spawn(start).join().unwrap().unwrap();
        let status =
            wait_for("the process ended", Duration::from_secs(20), || Ok(child.try_wait()?));
        let _ = child.kill();
        assert_eq!(status.unwrap().signal(), Some(libc::SIGKILL));
    }
}
