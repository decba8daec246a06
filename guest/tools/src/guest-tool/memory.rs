//! Loads that allocate memory and keep it.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tools::content::Bytes;

const MIB: usize = 1 << 20;

/// Fills memory in steps of 1 MiB, and keeps it until killed. Prints `held N` after every 16 MiB
/// and at the end.
pub(crate) fn hog(mib: u64) -> Result<()> {
    guest_tools::oom::prefer_as_victim()?;
    let mut held = Vec::new();
    for index in 0..mib {
        let mut chunk = vec![0u8; MIB];
        // Zeros would compress to almost nothing in compressed swap.
        Bytes::new(index).fill(&mut chunk);
        held.push(chunk);
        if (index + 1) % 16 == 0 || index + 1 == mib {
            println!("held {}", index + 1);
        }
    }
    loop {
        // Prevents the compiler from freeing the memory before its last use.
        std::hint::black_box(&held);
        thread::park();
    }
}

/// Prints `touching`, holds `mib` of memory, and reads each page several times per second until
/// killed.
pub(crate) fn touch(mib: u64) -> Result<()> {
    const PAGE: usize = 4096;
    guest_tools::oom::prefer_as_victim()?;
    let held = vec![1u8; usize::try_from(mib)? * MIB];
    println!("touching");
    loop {
        let sum = held
            .iter()
            .step_by(PAGE)
            .fold(0u64, |sum, byte| sum + u64::from(*std::hint::black_box(byte)));
        std::hint::black_box(sum);
        thread::sleep(Duration::from_millis(200));
    }
}

/// Default capacity of a pipe in pages. An unprivileged process may not be allowed to increase it.
const PIPE_PAGES: usize = 16;

/// Fills memory and lends one page of every 2 MiB to a pipe without a reader. The page cannot be
/// moved until the pipe is closed. The rest of the memory is freed, so that almost no memory is in
/// use but no range of 2 MiB can be unplugged. Prints `pinned`, and keeps the memory until killed.
pub(crate) fn pin(mib: u64) -> Result<()> {
    guest_tools::oom::prefer_as_victim()?;
    let mut held: Vec<Vec<u8>> = Vec::new();
    let mut pipes: Vec<(PipeReader, PipeWriter)> = Vec::new();
    for index in 0..mib {
        let mut chunk = vec![0u8; MIB];
        Bytes::new(index).fill(&mut chunk);
        held.push(chunk);
    }
    for (nth, chunk) in held.iter().step_by(2).enumerate() {
        if nth % PIPE_PAGES == 0 {
            pipes.push(io::pipe()?);
        }
        let (_, writer) = pipes.last().expect("one was just created");
        let page = chunk.as_ptr().wrapping_add(chunk.as_ptr().align_offset(4096));
        let piece = libc::iovec { iov_base: page.cast_mut().cast(), iov_len: 4096 };
        // SAFETY: the page is within the chunk, which lives as long as the pipe. The kernel only
        // reads it.
        let spliced = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const piece, 1, 0) };
        ensure!(spliced == 4096, "Cannot lend a page: {}", io::Error::last_os_error());
    }
    for chunk in &mut held {
        let first = chunk.as_ptr().align_offset(4096);
        // Keeps the lent page, and the pages at both ends, which may contain other data.
        let pages = chunk[first + 4096..].chunks_exact_mut(4096).len();
        let rest = chunk[first + 4096..].as_mut_ptr();
        // SAFETY: these are whole pages of the chunk, and they are no longer read.
        let result = unsafe { libc::madvise(rest.cast(), pages * 4096, libc::MADV_DONTNEED) };
        ensure!(result == 0, "Cannot release memory: {}", io::Error::last_os_error());
    }
    println!("pinned");
    loop {
        std::hint::black_box((&held, &pipes));
        thread::park();
    }
}
