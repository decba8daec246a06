//! Brings the emulated host's free memory into the same state before each measurement.

use std::fs;
use std::io;

use anyhow::{Context, Result, ensure};

const MIB: u64 = 1 << 20;

/// Memory that stays free for other programs.
const SPARE_BYTES: u64 = 256 * MIB;
const HUGE_PAGE_BYTES: u64 = 2 * MIB;

/// Writes to all of the free memory once, in the emulated host.
///
/// A page from which code was executed has translations in the emulator. The next write to it waits
/// until they are dropped: some 50 us for each 4 KiB, in which 100 KiB could be zeroed. Without
/// this call, a VMM that gets pages of the previous guest's kernel would be charged for it.
pub fn even_out() -> Result<()> {
    if !std::env::var("FORESHORE_HOST").is_ok_and(|host| host == "nested") {
        return Ok(());
    }
    let bytes = free_bytes()?.saturating_sub(SPARE_BYTES) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if bytes > 0 {
        write_once(bytes as usize).context("Cannot write to the host's free memory")
    } else {
        Ok(())
    }
}

/// Free memory of the host (`MemFree`), without page cache.
pub fn free_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("Cannot read /proc/meminfo")?;
    let value =
        text.lines().find_map(|line| line.strip_prefix("MemFree:")?.trim().strip_suffix(" kB"));
    let value = value.context("/proc/meminfo has no MemFree")?;
    Ok(value.trim().parse::<u64>().with_context(|| format!("MemFree is {value:?}"))? * 1024)
}

fn write_once(bytes: usize) -> Result<()> {
    // SAFETY: a new anonymous mapping. The result is checked.
    let addr = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    ensure!(addr != libc::MAP_FAILED, "{}", io::Error::last_os_error());
    // SAFETY: advice about the mapping just created: use huge pages if available, and populate all
    // pages, which the kernel has zeroed.
    let populated = unsafe {
        libc::madvise(addr, bytes, libc::MADV_HUGEPAGE);
        libc::madvise(addr, bytes, libc::MADV_POPULATE_WRITE)
    };
    let error = io::Error::last_os_error();
    // SAFETY: the mapping just created, to which nothing else refers.
    unsafe { libc::munmap(addr, bytes) };
    ensure!(populated == 0, "{error}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_known_and_can_be_written() {
        assert!(free_bytes().unwrap() > 0);
        write_once(4 << 20).unwrap();
        assert!(write_once(0).is_err());
    }
}
