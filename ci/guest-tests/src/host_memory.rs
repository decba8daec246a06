//! Gives the emulated host's free memory the same past before each measurement.

use std::fs;
use std::io;

use anyhow::{Context, Result, ensure};

const MIB: u64 = 1 << 20;

/// Left free, for everybody else.
const SPARE_BYTES: u64 = 256 * MIB;
const HUGE_PAGE_BYTES: u64 = 2 * MIB;

/// Writes to all of the free memory once, in the emulated host.
///
/// There, a page from which code was run belongs to the emulator's translations, and whoever writes
/// to it next waits until they are dropped: some 50 us for each 4 KiB, in which 100 KiB could be
/// zeroed. A VMM whose guest gets the pages of the last guest's kernel would pay for that one.
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
    // SAFETY: a new anonymous mapping; the result is checked.
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
    // SAFETY: advice about the mapping just made: huge pages where there are some, and all pages
    // there, which the kernel has zeroed.
    let populated = unsafe {
        libc::madvise(addr, bytes, libc::MADV_HUGEPAGE);
        libc::madvise(addr, bytes, libc::MADV_POPULATE_WRITE)
    };
    let error = io::Error::last_os_error();
    // SAFETY: the mapping just made; nobody has its address.
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
