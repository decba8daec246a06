//! Loads that use a lot of kernel memory and almost no user memory.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::null_mut;
use std::thread;

use anyhow::{Context, Result, ensure};

use crate::limits;

const MIB: u64 = 1 << 20;
/// Number of files between two progress lines.
const FILES_PER_PROGRESS_LINE: u64 = 20_000;

/// Creates `count` empty files. On a tmpfs, each file takes about 1 KiB for its inode and dentry.
pub(crate) fn make_files(dir: &Path, count: u64) -> Result<()> {
    guest_tools::oom::prefer_as_victim()?;
    for index in 0..count {
        File::create(dir.join(format!("some-file-name-of-an-archive-{index}")))
            .with_context(|| format!("File {index}"))?;
        if (index + 1) % FILES_PER_PROGRESS_LINE == 0 {
            println!("made {}", index + 1);
        }
    }
    Ok(())
}

/// Looks up `count` missing files. For each, most file systems cache a negative dentry of about 200
/// bytes.
pub(crate) fn look_up_missing_files(dir: &Path, count: u64) -> Result<()> {
    guest_tools::oom::prefer_as_victim()?;
    for index in 0..count {
        let missing = dir.join(format!("no-such-file-{index}"));
        ensure!(fs::symlink_metadata(&missing).is_err(), "{} is there", missing.display());
        if (index + 1) % FILES_PER_PROGRESS_LINE == 0 {
            println!("missed {}", index + 1);
        }
    }
    Ok(())
}

/// Queues `mib` of data in sockets without a reader. Prints `held MIB`, and keeps the sockets open
/// until killed.
pub(crate) fn fill_sockets(mib: u64) -> Result<()> {
    guest_tools::oom::prefer_as_victim()?;
    limits::allow_open_files(1 << 20)?;
    let data = [1u8; 4096];
    let (mut pairs, mut queued_bytes, mut said_mib) = (Vec::new(), 0u64, 0);
    while queued_bytes < mib * MIB {
        let (mut from, to) = UnixStream::pair()?;
        from.set_nonblocking(true)?;
        while let Ok(len) = from.write(&data) {
            queued_bytes += len as u64;
        }
        pairs.push((from, to));
        if queued_bytes / MIB >= said_mib + 16 {
            said_mib = queued_bytes / MIB;
            println!("queued {said_mib}");
        }
    }
    println!("held {mib}");
    loop {
        std::hint::black_box(&pairs);
        thread::park();
    }
}

/// Starts `count` processes that map `file` and touch all of it, which allocates page tables,
/// stacks and task structures. Prints `held COUNT`, or `killed after INDEX` if one of them was
/// killed first. Keeps the other processes until killed.
pub(crate) fn map_by_processes(file: &Path, count: u64) -> Result<()> {
    guest_tools::oom::prefer_as_victim()?;
    let file_bytes = usize::try_from(fs::metadata(file)?.len())?;
    let opened = File::open(file)?;
    for index in 0..count {
        // SAFETY: this process has only one thread, so the child may call any function.
        match unsafe { libc::fork() } {
            -1 => {
                return Err(io::Error::last_os_error()).with_context(|| format!("Process {index}"));
            }
            0 => map_and_wait(&opened, file_bytes),
            _ => {}
        }
        if (index + 1) % 100 == 0 {
            println!("started {}", index + 1);
        }
        if is_child_dead() {
            println!("killed after {index}");
            park();
        }
    }
    println!("held {count}");
    park();
}

/// Returns true if a child has ended, which happens only if it was killed.
fn is_child_dead() -> bool {
    // SAFETY: a null pointer makes waitpid return no status.
    unsafe { libc::waitpid(-1, null_mut(), libc::WNOHANG) > 0 }
}

fn park() -> ! {
    loop {
        thread::park();
    }
}

fn map_and_wait(file: &File, len: usize) -> ! {
    use std::os::fd::AsRawFd;
    // SAFETY: a new mapping of a file, to which no other code has a pointer.
    let mapped = unsafe {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // Ends this process when its parent ends.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::mmap(null_mut(), len, libc::PROT_READ, flags, file.as_raw_fd(), 0)
    };
    if mapped == libc::MAP_FAILED {
        // SAFETY: the call takes no pointers.
        unsafe { libc::_exit(1) };
    }
    park()
}
