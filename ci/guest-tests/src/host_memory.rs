//! Brings free memory of the emulated host into the same state before each measurement.

use std::fs;
use std::io;

use anyhow::{Context, Result, ensure};

const MIB: u64 = 1 << 20;

/// Memory that is left free for other programs.
const SPARE_BYTES: u64 = 256 * MIB;
const HUGE_PAGE_BYTES: u64 = 2 * MIB;

/// Writes to all free memory once, on the emulated host.
///
/// If code was executed from a page, the emulator has translations for it. The next write to the
/// page waits until they are dropped, which takes about 50 us for each 4 KiB. In that time, 100 KiB
/// could be zeroed. Without this call, a VMM that gets pages of the previous guest's kernel would
/// be charged for this time.
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

/// Returns the host's free memory (`MemFree`), without page cache.
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
    // SAFETY: advice about the new mapping. The kernel uses huge pages if available, and populates
    // all pages, which it has zeroed.
    let populated = unsafe {
        libc::madvise(addr, bytes, libc::MADV_HUGEPAGE);
        libc::madvise(addr, bytes, libc::MADV_POPULATE_WRITE)
    };
    let error = io::Error::last_os_error();
    // SAFETY: the new mapping is unmapped, and there are no other references to it.
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
