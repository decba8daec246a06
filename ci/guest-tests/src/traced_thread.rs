//! A thread of a VMM that a test stops alone, as a debugger does.

use std::fs;
use std::io;
use std::ptr;

use anyhow::{Context, Result};

/// Thread that is stopped until its process ends. The process can be waited for only after
/// [`TracedThread::wait_for_end`].
pub struct TracedThread {
    thread: i32,
}

impl TracedThread {
    /// Stops the thread `name` of a process (ptrace(2)). Call this on the thread that calls the
    /// other functions.
    pub fn stop(pid: u32, name: &str) -> Result<Self> {
        let thread = find(pid, name)?;
        ptrace(libc::PTRACE_SEIZE, thread)?;
        ptrace(libc::PTRACE_INTERRUPT, thread)?;
        wait(thread).context("The thread has not stopped")?;
        Ok(Self { thread })
    }

    /// Waits until the thread has ended, because its process was killed.
    pub fn wait_for_end(self) -> Result<()> {
        while !libc::WIFSIGNALED(wait(self.thread)?) {}
        Ok(())
    }
}

fn find(pid: u32, name: &str) -> Result<i32> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?;
        if fs::read_to_string(task.path().join("comm"))?.trim_end() == name {
            return Ok(task.file_name().to_string_lossy().parse()?);
        }
    }
    anyhow::bail!("Process {pid} has no thread {name}")
}

fn ptrace(request: libc::c_uint, thread: i32) -> Result<()> {
    let none = ptr::null_mut::<libc::c_void>();
    // SAFETY: these requests access no memory.
    match unsafe { libc::ptrace(request, thread, none, none) } {
        -1 => Err(io::Error::last_os_error()).context("ptrace"),
        _ => Ok(()),
    }
}

/// Waits for a change of the thread, and returns its status.
fn wait(thread: i32) -> Result<i32> {
    let mut status = 0;
    // SAFETY: the status is an integer of this type.
    match unsafe { libc::waitpid(thread, &mut status, libc::__WALL) } {
        -1 => Err(io::Error::last_os_error()).context("waitpid"),
        _ => Ok(status),
    }
}
