//! Load that exhausts kernel memory in the guest.

use std::fs::{self, File};
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::limits;

const PAGE: usize = 4096;
/// Bytes per step. It must be less than the memory that is left.
const STEP: usize = 64 << 10;
/// Capacity of each pipe. The capacity is Linux' default maximum (fs.pipe-max-size).
const PIPE: usize = 1 << 20;
/// Interval between checks for memory that was freed in the meantime, which is then taken as well.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Number of checks without free memory after which all memory counts as exhausted.
const QUIET_CHECKS: u32 = 25;
/// Value of vm.min_free_kbytes. Real-time tasks may use half of this memory (mm/page_alloc.c,
/// gfp_to_alloc_flags).
const RESERVE_KIB: &str = "16384";
/// Number of empty slabs of each kind that the kernel keeps. No kernel has that many, so all are
/// kept.
const EMPTY_SLABS: &str = "1000";
/// Kernel thread that starts all other kernel threads.
const KTHREADD: libc::pid_t = 2;
/// Driver message when page descriptors cannot be allocated (drivers/virtio/virtio_mem.c).
const NO_DESCRIPTORS: &str = "adding memory failed: -12";
/// Kernel message when the OOM killer kills a process.
const KILLED: &str = "Killed process";

/// Takes all memory above the watermarks that the kernel could use for itself, except `left_kib`.
/// It also takes memory that is freed later. The program is exempt from the OOM killer. It prints
/// `dried` when no memory is left, and keeps the memory until killed. From then on, it prints
/// `failed` for each failed allocation of page descriptors, and `killed` with the kernel's message
/// for each killed process.
///
/// The memory is taken by filling pipes. Pipe contents are kernel memory: they are neither swapped
/// nor moved, and are never allocated from a movable zone (fs/pipe.c). User pages are allocated
/// from the movable zone first, so a guest with such a zone continues to run.
///
/// The kernel thread that adds memory allocates pages for descriptors until no page is left, and
/// then gives up. Any other task that needs a page at that moment would invoke the OOM killer, and
/// memory of the killed process would then be used for descriptors. Therefore, all other tasks may
/// use a reserve below the watermark. The kernel worker that adds memory may not.
pub(crate) fn exhaust(left_kib: u64) -> Result<()> {
    guest_tools::oom::exempt()?;
    // SAFETY: the call takes no pointers.
    let locked = unsafe { libc::mlockall(libc::MCL_CURRENT) };
    ensure!(locked == 0, "Cannot lock memory: {}", io::Error::last_os_error());
    let_others_use_reserve()?;
    release_caches()?;
    let mut kernel = KernelMemory::open()?;
    let mut log = KernelLog::open()?;
    let mut taken = TakenMemory::new(total_bytes()?)?;
    let left_pages = left_kib * 1024 / PAGE as u64;
    let (mut quiet_checks, mut is_printed) = (0, false);
    loop {
        if kernel.free_pages()? > left_pages + (STEP / PAGE) as u64 {
            taken.take_step()?;
            quiet_checks = 0;
            continue;
        }
        quiet_checks += 1;
        if quiet_checks == QUIET_CHECKS && !is_printed {
            // Done only now, because a real-time task would have occupied a CPU until now.
            run_in_real_time(0)?;
            println!("dried");
            is_printed = true;
        }
        if is_printed {
            log.print_messages()?;
        }
        thread::sleep(CHECK_INTERVAL);
    }
}

/// Makes the kernel release memory that it could otherwise find when it needs some, and sets the
/// size of the reserve.
fn release_caches() -> Result<()> {
    let set = |setting: &str, value: &str| {
        fs::write(setting, value).with_context(|| format!("Cannot write {value} to {setting}"))
    };
    // Linux logs a hundred lines about a failed allocation, which take seconds on a serial line. A
    // block without descriptors would exist during that time.
    set("/proc/sys/kernel/printk", "1")?;
    set("/proc/sys/vm/min_free_kbytes", RESERVE_KIB)?;
    // Limits the free pages on per-CPU lists, which count as used.
    set("/proc/sys/vm/percpu_pagelist_high_fraction", "1000000")?;
    set("/proc/sys/vm/drop_caches", "3")?;
    // From now on, freed slabs remain in their caches instead of becoming free pages.
    for slab in fs::read_dir("/sys/kernel/slab").context("Cannot read /sys/kernel/slab")? {
        let setting = slab?.path().join("min_partial");
        fs::write(&setting, EMPTY_SLABS)
            .with_context(|| format!("Cannot write {}", setting.display()))?;
    }
    Ok(())
}

/// Gives real-time priority to all other programs, and to the thread that starts kernel threads.
/// They may then allocate below the watermark. Tasks that they start inherit the priority.
fn let_others_use_reserve() -> Result<()> {
    let ours = std::process::id() as libc::pid_t;
    for process in fs::read_dir("/proc").context("Cannot read /proc")? {
        let process = process?.path();
        let Some(id) = number_in(&process).filter(|id| *id != ours) else { continue };
        // Kernel threads have no command line. A process that has ended in the meantime is ignored.
        let is_program = fs::read(process.join("cmdline")).is_ok_and(|line| !line.is_empty());
        if is_program || id == KTHREADD {
            let Ok(threads) = fs::read_dir(process.join("task")) else { continue };
            for thread in threads.flatten() {
                let Some(thread) = number_in(&thread.path()) else { continue };
                run_in_real_time(thread)?;
            }
        }
    }
    Ok(())
}

fn number_in(path: &Path) -> Option<libc::pid_t> {
    path.file_name()?.to_str()?.parse().ok()
}

/// Gives a thread real-time priority. If `thread` is 0, gives it to the caller.
fn run_in_real_time(thread: libc::pid_t) -> Result<()> {
    let least = libc::sched_param { sched_priority: 1 };
    // SAFETY: the structure outlives the call.
    if unsafe { libc::sched_setscheduler(thread, libc::SCHED_FIFO, &raw const least) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    ensure!(
        error.raw_os_error() == Some(libc::ESRCH),
        "Thread {thread} cannot run in real time: {error}"
    );
    Ok(())
}

/// Reader for new kernel messages. They no longer appear on the console, because it is slow.
struct KernelLog {
    kmsg: File,
    record: Vec<u8>,
}

impl KernelLog {
    fn open() -> Result<Self> {
        let mut kmsg = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg")
            .context("Cannot open /dev/kmsg")?;
        kmsg.seek(SeekFrom::End(0)).context("Cannot seek to the end of /dev/kmsg")?;
        // Filled with ones, so that its pages are allocated before all other memory is taken. No
        // record is longer than this buffer (kernel/printk/internal.h).
        Ok(Self { kmsg, record: vec![1; 8 << 10] })
    }

    /// Prints messages about failed allocations and killed processes.
    fn print_messages(&mut self) -> Result<()> {
        loop {
            match self.kmsg.read(&mut self.record) {
                Ok(len) => {
                    if let Some(message) =
                        memory_message(&String::from_utf8_lossy(&self.record[..len]))
                    {
                        println!("{message}");
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // Unread records have been overwritten. The next read continues after the lost
                // records.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) => return Err(error).context("Cannot read /dev/kmsg"),
            }
        }
    }
}

/// Extracts messages about memory from a record of /dev/kmsg:
/// `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT` (Documentation/ABI/testing/dev-kmsg).
fn memory_message(record: &str) -> Option<String> {
    let (_, text) = record.split_once(';')?;
    let text = text.lines().next()?;
    if text.contains(NO_DESCRIPTORS) {
        return Some("failed".to_owned());
    }
    text.contains(KILLED).then(|| format!("killed: {text}"))
}

fn total_bytes() -> Result<usize> {
    // SAFETY: a zeroed sysinfo is valid.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the structure outlives the call.
    let result = unsafe { libc::sysinfo(&raw mut info) };
    ensure!(result == 0, "sysinfo: {}", io::Error::last_os_error());
    Ok(usize::try_from(info.totalram * u64::from(info.mem_unit))?)
}

/// Pipes that hold the taken memory. All except the last one are full.
struct TakenMemory {
    full: Vec<PipeReader>,
    last: (PipeReader, PipeWriter),
    len: usize,
}

impl TakenMemory {
    /// Allocates the list for as many pipes as `max_bytes` fill, so that it never has to grow
    /// later.
    fn new(max_bytes: usize) -> Result<Self> {
        let max_pipes = max_bytes / PIPE + 1;
        limits::allow_open_files(max_pipes + 64)?;
        Ok(Self { full: Vec::with_capacity(max_pipes), last: pipe()?, len: 0 })
    }

    fn take_step(&mut self) -> Result<()> {
        // Not zeros, because they would be a shared page of the program. Pipes copy the data.
        static BYTES: [u8; STEP] = [1; STEP];
        if self.len == PIPE {
            ensure!(
                self.full.len() < self.full.capacity(),
                "More memory became free than the list of pipes has room for"
            );
            let (full, _) = std::mem::replace(&mut self.last, pipe()?);
            self.full.push(full);
            self.len = 0;
        }
        self.last.1.write_all(&BYTES).context("Cannot fill a pipe")?;
        self.len += STEP;
        Ok(())
    }
}

fn pipe() -> Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = io::pipe().context("Cannot create a pipe")?;
    // SAFETY: the call takes no pointers, and the descriptor is open.
    let size = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE as libc::c_int) };
    ensure!(
        size == PIPE as libc::c_int,
        "A pipe has {size} bytes instead of {PIPE}: {}",
        io::Error::last_os_error()
    );
    Ok((reader, writer))
}

/// Reads the state of kernel zones from /proc/zoneinfo.
struct KernelMemory {
    zoneinfo: File,
    text: Vec<u8>,
}

impl KernelMemory {
    fn open() -> Result<Self> {
        let zoneinfo = File::open("/proc/zoneinfo").context("Cannot open /proc/zoneinfo")?;
        // Filled with ones, so that its pages are allocated before all other memory is taken.
        Ok(Self { zoneinfo, text: vec![1; 64 << 10] })
    }

    fn free_pages(&mut self) -> Result<u64> {
        let len = self.zoneinfo.read_at(&mut self.text, 0)?;
        ensure!(len < self.text.len(), "/proc/zoneinfo exceeds the buffer");
        usable_pages(std::str::from_utf8(&self.text[..len])?)
    }
}

/// Returns the number of pages that kernel allocations can get from DMA, DMA32 and Normal: the free
/// pages of each zone, less its `min` watermark and the pages that it protects from allocations for
/// Normal (mm/page_alloc.c, __zone_watermark_ok).
fn usable_pages(zoneinfo: &str) -> Result<u64> {
    /// Index of Normal in the `protection` list of a zone.
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
                let (_, list) = line
                    .split_once('(')
                    .context("/proc/zoneinfo has a zone without protections")?;
                let protected = list
                    .trim_end_matches(')')
                    .split(',')
                    .nth(NORMAL)
                    .context("/proc/zoneinfo has no protection for zone Normal")?;
                let protected: u64 = protected.trim().parse()?;
                sum += free.saturating_sub(min + protected);
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
    fn usable_pages_are_above_watermark_and_protection() {
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
    fn failures_and_kills_are_found_in_the_kernel_log() {
        let failed =
            "4,1021,93471220,-;virtio_mem virtio4: adding memory failed: -12\n SUBSYSTEM=virtio\n";
        assert_eq!(memory_message(failed).unwrap(), "failed");
        let killed = "3,1100,93471220,-;Out of memory: Killed process 71 (sleep) total-vm:4096kB\n";
        assert_eq!(
            memory_message(killed).unwrap(),
            "killed: Out of memory: Killed process 71 (sleep) total-vm:4096kB"
        );
        assert_eq!(memory_message("6,3,1,-;virtio_mem virtio4: plugged size: 0x0\n"), None);
        assert_eq!(
            memory_message("4,1021,93471220,-;virtio_mem virtio4: adding memory failed: -17\n"),
            None
        );
    }

    #[test]
    fn taken_memory_is_in_pipes() {
        let mut taken = TakenMemory::new(2 * PIPE).unwrap();
        (0..3 * PIPE / STEP / 2).for_each(|_| taken.take_step().unwrap());
        assert_eq!((taken.full.len(), taken.len), (1, PIPE / 2));
        let mut held: libc::c_int = 0;
        // SAFETY: the pipe is open, and FIONREAD writes an int.
        let result =
            unsafe { libc::ioctl(taken.full[0].as_raw_fd(), libc::FIONREAD, &raw mut held) };
        assert_eq!((result, held), (0, PIPE as libc::c_int));
    }

    #[test]
    fn this_machine_has_usable_pages() {
        assert!(KernelMemory::open().unwrap().free_pages().unwrap() > 0);
    }
}
