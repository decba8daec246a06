//! Takes what memory the guest's kernel has left for itself.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

const PAGE: usize = 4096;
/// At a time: less than what is left.
const STEP: usize = 64 << 10;
/// What is freed is gone again as soon.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// After so long without anything to take, all is taken.
const CALM_LOOKS: u32 = 25;

/// Takes all memory that the kernel could have for itself above its watermarks, but for so many KiB, and what becomes free
/// later as well: locked, so that none of it is swapped or moved away, and as somebody whom the OOM killer spares. Says `dried`
/// once there is no more, and keeps it until killed.
///
/// For guests without a movable zone of DRAM: user memory comes from there first.
pub fn dry(left_kib: u64) -> Result<()> {
    crate::oom::be_spared()?;
    // SAFETY: no pointers.
    let locked = unsafe { libc::mlockall(libc::MCL_CURRENT) };
    ensure!(locked == 0, "Cannot lock memory: {}", io::Error::last_os_error());
    let mut kernel = KernelMemory::open()?;
    let mut taken = Taken::reserve(total_bytes()?)?;
    let left_pages = left_kib * 1024 / PAGE as u64;
    let (mut calm_looks, mut is_said) = (0, false);
    loop {
        if kernel.free_pages()? > left_pages + (STEP / PAGE) as u64 {
            taken.take_step()?;
            calm_looks = 0;
            continue;
        }
        calm_looks += 1;
        if calm_looks == CALM_LOOKS && !is_said {
            println!("dried");
            is_said = true;
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

fn total_bytes() -> Result<usize> {
    // SAFETY: a sysinfo of zeros is valid.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives through the call.
    let told = unsafe { libc::sysinfo(&raw mut info) };
    ensure!(told == 0, "sysinfo: {}", io::Error::last_os_error());
    Ok(usize::try_from(info.totalram * u64::from(info.mem_unit))?)
}

/// Addresses, of which the first part has memory.
struct Taken {
    start: *mut libc::c_void,
    reserved: usize,
    len: usize,
}

impl Taken {
    fn reserve(bytes: usize) -> Result<Self> {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        );
        // SAFETY: a new mapping, which nothing else knows.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        ensure!(start != libc::MAP_FAILED, "Cannot reserve addresses: {}", io::Error::last_os_error());
        // SAFETY: the range is the mapping's. A huge page would be more than what is to be left.
        let small = unsafe { libc::madvise(start, bytes, libc::MADV_NOHUGEPAGE) };
        ensure!(small == 0, "Cannot do without huge pages: {}", io::Error::last_os_error());
        Ok(Self { start, reserved: bytes, len: 0 })
    }

    fn take_step(&mut self) -> Result<()> {
        ensure!(self.len + STEP <= self.reserved, "There is more memory than there was");
        // SAFETY: the range is the mapping's.
        let locked = unsafe { libc::mlock(self.start.byte_add(self.len), STEP) };
        ensure!(locked == 0, "Cannot lock memory: {}", io::Error::last_os_error());
        self.len += STEP;
        Ok(())
    }
}

/// What /proc/zoneinfo says of the zones that the kernel itself can use.
struct KernelMemory {
    zoneinfo: File,
    text: Vec<u8>,
}

impl KernelMemory {
    fn open() -> Result<Self> {
        let zoneinfo = File::open("/proc/zoneinfo").context("Cannot open /proc/zoneinfo")?;
        // Written to: it is there before all else is taken.
        Ok(Self { zoneinfo, text: vec![1; 64 << 10] })
    }

    fn free_pages(&mut self) -> Result<u64> {
        let len = self.zoneinfo.read_at(&mut self.text, 0)?;
        ensure!(len < self.text.len(), "/proc/zoneinfo is longer than anybody's");
        usable_pages(std::str::from_utf8(&self.text[..len])?)
    }
}

/// What an allocation of the kernel's may take of DMA, DMA32 and Normal: what is free above the least watermark and what the
/// zone keeps from allocations that could have come from Normal. (mm/page_alloc.c, __zone_watermark_ok.)
fn usable_pages(zoneinfo: &str) -> Result<u64> {
    /// Normal's place in a zone's `protection`.
    const NORMAL: usize = 2;
    let mut sum = 0u64;
    let (mut is_kernels, mut free, mut min) = (false, 0u64, 0u64);
    for line in zoneinfo.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next(), words.next()) {
            (Some("Node"), _, Some("zone")) => {
                is_kernels = matches!(words.next(), Some("DMA" | "DMA32" | "Normal"));
                (free, min) = (0, 0);
            }
            (Some("pages"), Some("free"), Some(pages)) => free = pages.parse()?,
            (Some("min"), Some(pages), None) => min = pages.parse()?,
            (Some("protection:"), ..) if is_kernels => {
                let (_, list) = line.split_once('(').context("No list of protections")?;
                let kept = list.trim_end_matches(')').split(',').nth(NORMAL).context("No zone Normal")?;
                let kept: u64 = kept.trim().parse()?;
                sum += free.saturating_sub(min + kept);
            }
            _ => {}
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_can_have_is_above_watermark_and_protection() {
        let zoneinfo = "\
Node 0, zone      DMA
  pages free     3000
        boost    0
        min      100
        low      125
        protection: (0, 300, 500, 900, 900)
Node 0, zone    DMA32
  pages free     1000
        min      990
        protection: (0, 0, 20, 20, 20)
Node 0, zone   Normal
  pages free     400
        min      40
        protection: (0, 0, 0, 1000, 0)
  pagesets
    cpu: 0
              count:    7
Node 1, zone  Movable
  pages free     9000
        min      10
        protection: (0, 0, 0, 0, 0)
";
        assert_eq!(usable_pages(zoneinfo).unwrap(), (3000 - 600) + (400 - 40));
    }

    #[test]
    fn this_machine_has_some() {
        assert!(KernelMemory::open().unwrap().free_pages().unwrap() > 0);
    }
}
