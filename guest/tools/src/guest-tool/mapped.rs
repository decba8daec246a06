//! Mapped files and devices. Stores to a mapping reach the memory behind it without a system call.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr;
use std::thread;

use anyhow::{Context, Result, bail, ensure};

pub(crate) struct Mapping {
    start: *mut u64,
    words: usize,
}

impl Mapping {
    /// Maps `len_bytes` of a file or devdax device, starting at `offset`.
    pub(crate) fn new(path: &Path, offset: u64, len_bytes: u64) -> Result<Self> {
        let file = open(path)?;
        map(&file, offset, len_bytes, libc::MAP_SHARED)
            .with_context(|| format!("Cannot map {}", path.display()))
    }

    pub(crate) fn len(&self) -> usize {
        self.words
    }

    pub(crate) fn as_ptr(&self) -> *mut u64 {
        self.start
    }

    fn store(&self, index: usize, word: u64) {
        assert!(index < self.words);
        // SAFETY: the index was just checked to be within the mapping, which is aligned. The access
        // is volatile because other programs may store there at the same time.
        unsafe { self.start.add(index).write_volatile(word) }
    }

    fn load(&self, index: usize) -> u64 {
        assert!(index < self.words);
        // SAFETY: as in store().
        unsafe { self.start.add(index).read_volatile() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: self owns the mapping, and its addresses are no longer used.
        unsafe { libc::munmap(self.start.cast(), self.words * 8) };
    }
}

fn open(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.with_context(|| format!("Cannot open {}", path.display()))
}

fn map(file: &File, offset: u64, len_bytes: u64, flags: libc::c_int) -> io::Result<Mapping> {
    let (len, offset) = (len_bytes as usize, offset as libc::off_t);
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, file.as_raw_fd(), offset) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(Mapping { start: start.cast(), words: len / 8 })
}

/// How the program makes its stores durable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Care {
    /// Does not flush.
    None,
    /// Writes back cache lines and executes a fence, as MAP_SYNC allows.
    Fence,
}

/// Stores the words `seed`, `seed + 1` and so on, prints `stored`, and keeps the mapping until
/// killed. Does not ask the kernel to flush anything.
pub(crate) fn store(path: &Path, offset: u64, len_bytes: u64, seed: u64, care: Care) -> Result<()> {
    let flags = match care {
        Care::None => libc::MAP_SHARED,
        Care::Fence => libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC,
    };
    let mapping = map(&open(path)?, offset, len_bytes, flags).context("Cannot map the file")?;
    for index in 0..mapping.len() {
        mapping.store(index, seed + index as u64);
    }
    if care == Care::Fence {
        for line in (0..mapping.len()).step_by(8) {
            // SAFETY: SSE2 is part of x86-64. The address is within the mapping.
            unsafe { std::arch::x86_64::_mm_clflush(mapping.start.add(line).cast()) };
        }
        // SAFETY: SSE2 is part of x86-64. The instruction takes no address.
        unsafe { std::arch::x86_64::_mm_sfence() };
    }
    println!("stored");
    io::stdout().flush()?;
    loop {
        thread::park();
    }
}

/// Stores the same words as [`store`], and then repeatedly writes them from the mapping to the
/// start of a disk with O_DIRECT, so that the device reads the mapped memory. Prints `written`
/// after the first write.
pub(crate) fn transfer(path: &Path, len_bytes: u64, seed: u64, disk: &Path) -> Result<()> {
    let mapping = Mapping::new(path, 0, len_bytes)?;
    for index in 0..mapping.len() {
        mapping.store(index, seed + index as u64);
    }
    let disk = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(disk)?;
    for pass in 0u64.. {
        // SAFETY: the kernel reads bytes within the mapping, which still exists.
        let written =
            unsafe { libc::pwrite(disk.as_raw_fd(), mapping.start.cast(), len_bytes as usize, 0) };
        ensure!(
            written == len_bytes as isize,
            "Write {pass}: {written}, {}",
            io::Error::last_os_error()
        );
        if pass == 0 {
            println!("written");
            io::stdout().flush()?;
        }
    }
    Ok(())
}

/// Checks the words that [`store`] wrote with this seed.
pub(crate) fn check(path: &Path, offset: u64, len_bytes: u64, seed: u64) -> Result<()> {
    let mapping = Mapping::new(path, offset, len_bytes)?;
    for index in 0..mapping.len() {
        let (found, expected) = (mapping.load(index), seed + index as u64);
        ensure!(found == expected, "Word {index} is {found:#x}, not {expected:#x}");
    }
    println!("checked {}", mapping.len());
    Ok(())
}

/// Maps a page, prints `waiting`, and polls the page's first word until it is equal to `word`.
pub(crate) fn wait_for_word(path: &Path, offset: u64, len_bytes: u64, word: u64) -> Result<()> {
    let mapping = Mapping::new(path, offset, len_bytes)?;
    println!("waiting at {:#x}", mapping.load(0));
    io::stdout().flush()?;
    while mapping.load(0) != word {
        thread::yield_now();
    }
    println!("seen");
    Ok(())
}

/// Prints `allowed` if the kernel allows a mapping in which a fence is sufficient for durability
/// (MAP_SYNC), and `refused` otherwise.
pub(crate) fn print_map_sync(path: &Path, len_bytes: u64) -> Result<()> {
    let file = open(path)?;
    match map(&file, 0, len_bytes, libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC) {
        Ok(_) => println!("allowed"),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => println!("refused"),
        Err(error) => return Err(error).context("Cannot map the file"),
    }
    Ok(())
}

/// `struct fiemap` with space for extents (Linux uapi/linux/fiemap.h).
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; 64],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_too: [u32; 3],
}

/// _IOWR('f', 11, struct fiemap). The encoded size excludes the extents.
const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
const FIEMAP_FLAG_SYNC: u32 = 1;

/// Prints where a file is on its device. Each extent has a line with its offset in the file, its
/// offset on the device, and its length.
pub(crate) fn print_extents(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("Cannot open {}", path.display()))?;
    // SAFETY: the structure contains only numbers, for which zero is valid.
    let mut map: Fiemap = unsafe { std::mem::zeroed() };
    map.length = u64::MAX;
    map.flags = FIEMAP_FLAG_SYNC;
    map.extent_count = map.extents.len() as u32;
    // SAFETY: the kernel fills the structure, which has space for `extent_count` extents.
    if unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) } != 0 {
        return Err(io::Error::last_os_error()).context("Cannot query the extents");
    }
    if map.mapped_extents as usize == map.extents.len() {
        bail!("The file has too many extents");
    }
    for extent in &map.extents[..map.mapped_extents as usize] {
        println!("{} {} {}", extent.logical, extent.physical, extent.length);
    }
    Ok(())
}
