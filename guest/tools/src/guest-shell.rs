//! Guest program that receives shell scripts over vsock, runs them, and returns their output and
//! exit code.
//!
//! Tests use it instead of a console. It restricts nothing, and is only part of test images.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

use anyhow::{Context, Result, ensure};
use guest_tools::shell_protocol::{Frame, GUEST_SHELL_PORT, MAX_FRAME_BYTES, Request};
use guest_tools::{oom, vsock};

/// First line of each script. It makes the script an ordinary victim for the OOM killer, although
/// this shell itself is spared. If this line fails, the script does not run.
const RESET_OOM_SCORE: &str = "echo 0 >/proc/self/oom_score_adj || exit\n";

fn main() -> Result<()> {
    oom::exempt()?;
    let listener = vsock::listen(GUEST_SHELL_PORT)
        .context("Cannot listen on vsock (is the transport's module loaded?)")?;
    loop {
        let connection = File::from(vsock::accept(&listener).context("Cannot accept on vsock")?);
        thread::spawn(move || {
            if let Err(error) = serve(connection) {
                eprintln!("guest-shell: {error:#}");
            }
        });
    }
}

/// Serves one connection. A connection runs one script.
fn serve(mut connection: File) -> Result<()> {
    let Request(script) = Request::read_from(&mut connection).context("Cannot read the request")?;
    let mut child = Command::new("/bin/sh")
        .arg("-c")
        .arg(RESET_OOM_SCORE.to_owned() + &script)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // The script gets its own process group, so that the whole group can be killed when the
        // client disconnects.
        .process_group(0)
        .spawn()
        .context("Cannot start a shell")?;
    let pumped = pump(&mut child, &mut connection);
    if pumped.is_err() {
        // SAFETY: the call takes no pointers. The group belongs to the child, which has not been
        // reaped.
        unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
    }
    let status = child.wait().context("Cannot wait for the shell")?;
    pumped?;
    Frame::Exit(code_of(status)).write_to(&mut connection).context("Cannot send the exit code")
}

/// Exit code in the convention of shells: 128 plus the signal's number for a killed process.
fn code_of(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Forwards the child's output until the child has ended, as a terminal would. The connection
/// closes even if a background process of the script still holds a pipe open.
fn pump(child: &mut Child, connection: &mut File) -> Result<()> {
    let mut stdout = File::from(OwnedFd::from(child.stdout.take().expect("stdout is piped")));
    let mut stderr = File::from(OwnedFd::from(child.stderr.take().expect("stderr is piped")));
    let ended = pidfd_open(child.id()).context("Cannot open a pidfd")?;
    let (mut stdout_open, mut stderr_open, mut is_known_to_have_ended) = (true, true, false);
    loop {
        let mut fds = [
            poll_entry(if stdout_open { stdout.as_raw_fd() } else { -1 }),
            poll_entry(if stderr_open { stderr.as_raw_fd() } else { -1 }),
            poll_entry(ended.as_raw_fd()),
            poll_entry(connection.as_raw_fd()),
        ];
        // SAFETY: the array outlives the call, and its length is correct.
        if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) } < 0 {
            let error = io::Error::last_os_error();
            ensure!(error.kind() == io::ErrorKind::Interrupted, "Cannot poll: {error}");
            continue;
        }
        let [out_ready, err_ready, child_ended, client_moved] = fds.map(|entry| entry.revents != 0);
        if out_ready {
            stdout_open = forward(&mut stdout, connection, Frame::Stdout)?;
        }
        if err_ready {
            stderr_open = forward(&mut stderr, connection, Frame::Stderr)?;
        }
        // The client sends nothing after its request. If the connection is readable, the client has
        // disconnected.
        ensure!(!client_moved, "The client closed the connection");
        // All output has been read if the child has ended and both pipes are empty. poll(2) checks
        // the pipes first. Output written between that check and the child's end is found in the
        // next iteration.
        if is_known_to_have_ended && !out_ready && !err_ready {
            return Ok(());
        }
        is_known_to_have_ended = child_ended;
    }
}

/// Reads once and sends the data. Returns false at the end of the pipe.
fn forward(pipe: &mut File, connection: &mut File, frame: fn(Vec<u8>) -> Frame) -> Result<bool> {
    let mut buffer = vec![0u8; MAX_FRAME_BYTES as usize];
    let len = pipe.read(&mut buffer).context("Cannot read from the shell")?;
    buffer.truncate(len);
    if len > 0 {
        frame(buffer).write_to(connection).context("Cannot send output")?;
    }
    Ok(len > 0)
}

fn poll_entry(fd: RawFd) -> libc::pollfd {
    // poll(2) ignores a negative descriptor.
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers, and its result is checked.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}
