//! Runs seeded programs on a block device, and checks the device against the expected outcome.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use guest_tools::sectors::{Outcome, Program, Shape, Storage, run};

/// Block device that is open both with and without O_DIRECT.
struct Device {
    direct: File,
    buffered: File,
    shape: Shape,
}

impl Device {
    fn open(path: &str) -> Result<Self> {
        let open = |flags| {
            let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
            file.with_context(|| format!("Cannot open {path}"))
        };
        let (direct, buffered) = (open(libc::O_DIRECT)?, open(0)?);
        let name = Path::new(path)
            .file_name()
            .context("Device path without a file name")?
            .to_str()
            .context("Device name is not UTF-8")?;
        let attribute = |what: &str| -> Result<u64> {
            let text = fs::read_to_string(format!("/sys/class/block/{name}/{what}"))?;
            Ok(text.trim().parse()?)
        };
        let sector_bytes = attribute("queue/logical_block_size")?;
        // The kernel reports units of 512 bytes, whatever the device's sector size.
        let sectors = attribute("size")? * 512 / sector_bytes;
        Ok(Self {
            direct,
            buffered,
            shape: Shape { sectors, sector_bytes: u32::try_from(sector_bytes)? },
        })
    }

    fn offset(&self, sector: u64) -> u64 {
        sector * u64::from(self.shape.sector_bytes)
    }

    /// Calls BLKDISCARD or BLKZEROOUT. Both take a start and a length in bytes.
    fn range_ioctl(&self, request: libc::Ioctl, sectors: Range<u64>) -> Result<()> {
        let start = self.offset(sectors.start);
        let range = [start, self.offset(sectors.end) - start];
        // SAFETY: these requests read two 64-bit numbers (linux/fs.h), which outlive the call.
        let result = unsafe { libc::ioctl(self.buffered.as_raw_fd(), request, range.as_ptr()) };
        ensure!(result == 0, io::Error::last_os_error());
        Ok(())
    }
}

/// Defined in linux/fs.h as `_IO(0x12, 119)` and `_IO(0x12, 127)`.
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKZEROOUT: libc::Ioctl = 0x127f;

impl Storage for Device {
    /// Each CPU uses its own lane of a BTT, so threads on different CPUs use different lanes.
    fn enter(&self, thread: u32) -> Result<()> {
        let cpus = std::thread::available_parallelism()?.get();
        // SAFETY: zeros are an empty set, the CPU number is below the set's size, and the call only
        // reads it.
        let result = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(thread as usize % cpus, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
        };
        ensure!(result == 0, io::Error::last_os_error());
        Ok(())
    }

    fn write(&self, first: u64, bytes: &[u8], buffered: bool) -> Result<()> {
        let file = if buffered { &self.buffered } else { &self.direct };
        Ok(file.write_all_at(bytes, self.offset(first))?)
    }

    fn discard(&self, sectors: Range<u64>) -> Result<()> {
        self.range_ioctl(BLKDISCARD, sectors)
    }

    fn write_zeroes(&self, sectors: Range<u64>) -> Result<()> {
        self.range_ioctl(BLKZEROOUT, sectors)
    }

    fn flush(&self) -> Result<()> {
        Ok(self.buffered.sync_data()?)
    }
}

pub(crate) fn write(device: &str, program: &str) -> Result<()> {
    let program: Program = program.parse()?;
    let device = Device::open(device)?;
    run(&program, device.shape, &device)
}

pub(crate) fn check(device: &str, history: &[&str]) -> Result<()> {
    let device = Device::open(device)?;
    let outcome = Outcome::of_history(device.shape, history)?;
    outcome.check(|first, into| Ok(device.direct.read_exact_at(into, device.offset(first))?))?;
    println!("checked {}", device.shape.sectors);
    Ok(())
}
