//! Checks of the umask that a program sets. Test programs of other packages include this file by
//! its path.

use std::fs;
use std::io::{ErrorKind, PipeWriter, Write, pipe};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Maximum time for a program to start.
const PATIENCE: Duration = Duration::from_secs(60);

/// Checks that `program` denies all access to other users before it does anything else, whatever
/// umask it inherits. The program is examined while it waits to print its help to a full pipe.
pub(crate) fn check(program: &str) {
    for umask in [0o000, 0o022] {
        let (reader, writer) = pipe().unwrap();
        fill(&writer);
        let mut command = Command::new(program);
        command.arg("--help").stdout(writer);
        let mut child = set(&mut command, umask).spawn().unwrap();
        let found = last_umask(&mut child);
        drop(reader);
        let _ = child.kill();
        child.wait().unwrap();
        assert_eq!(found, "0077", "{program} was started with umask {umask:03o}");
    }
}

/// Starts `command` with `umask`.
pub(crate) fn set(command: &mut Command, umask: libc::mode_t) -> &mut Command {
    // SAFETY: umask() is a system call that takes a number. It may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::umask(umask);
            Ok(())
        })
    }
}

/// Writes to the pipe until a write would block.
fn fill(mut writer: &PipeWriter) {
    set_flags(writer, libc::O_NONBLOCK);
    let full = loop {
        if let Err(error) = writer.write(&[0; 4096]) {
            break error;
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    set_flags(writer, 0);
}

fn set_flags(writer: &PipeWriter, flags: libc::c_int) {
    // SAFETY: fcntl() with F_SETFL takes only numbers, and the descriptor is open.
    assert_eq!(unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, flags) }, 0);
}

/// Returns the umask of the process once it is 0077, or after [`PATIENCE`].
fn last_umask(child: &mut Child) -> String {
    let begin = Instant::now();
    loop {
        assert!(child.try_wait().unwrap().is_none(), "the program has ended");
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let umask =
            status.lines().find_map(|line| line.strip_prefix("Umask:")).expect("a line").trim();
        if umask == "0077" || begin.elapsed() > PATIENCE {
            return umask.to_owned();
        }
        std::thread::yield_now();
    }
}
