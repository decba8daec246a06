//! Reports the guest's memory use over time. The process locks its own memory, because it must also
//! report from guests that swap.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_tools::memory_sample::MemorySample;

/// Prints one line per interval until killed.
pub(crate) fn watch(interval_ms: u64) -> Result<()> {
    // SAFETY: the call takes no pointers.
    let locked = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
    ensure!(locked == 0, "Cannot lock memory: {}", io::Error::last_os_error());
    let mut sources = Sources::open()?;
    let started = Instant::now();
    for number in 1.. {
        let at = started.elapsed();
        let sample = sources.sample(at.as_millis() as u64)?;
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{sample}")?;
        stdout.flush()?;
        // Intervals that have already passed are skipped.
        let next = Duration::from_millis(number * interval_ms);
        thread::sleep(
            next.saturating_sub(started.elapsed()).max(Duration::from_millis(interval_ms / 4)),
        );
    }
    Ok(())
}

/// Prints the current counters as one line.
pub(crate) fn print_counters() -> Result<()> {
    println!("{}", Sources::open()?.sample(0)?);
    Ok(())
}

struct Sources {
    meminfo: File,
    vmstat: File,
    pressure: File,
    text: Vec<u8>,
}

impl Sources {
    fn open() -> Result<Self> {
        let open = |path: &str| File::open(path).with_context(|| format!("Cannot open {path}"));
        Ok(Self {
            meminfo: open("/proc/meminfo")?,
            vmstat: open("/proc/vmstat")?,
            pressure: open("/proc/pressure/memory")?,
            text: vec![0; 64 << 10],
        })
    }

    fn sample(&mut self, at_ms: u64) -> Result<MemorySample> {
        let mut texts = Vec::new();
        for file in [&self.meminfo, &self.vmstat, &self.pressure] {
            let len = file.read_at(&mut self.text, 0)?;
            texts.push(String::from_utf8_lossy(&self.text[..len]).into_owned());
        }
        MemorySample::parse(at_ms, &texts[0], &texts[1], &texts[2])
    }
}
