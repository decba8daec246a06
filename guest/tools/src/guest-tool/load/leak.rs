//! Load that allocates memory at a steady rate.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use guest_tools::content::Bytes;

use super::MIB;

/// Fills `mib` MiB at `rate` MiB/s, and prints `held N` after every 16 MiB. Keeps the memory until
/// killed.
pub(crate) fn leak(mib: u64, rate: u64) -> Result<()> {
    guest_tools::oom::prefer_as_victim()?;
    std::fs::write("/proc/sys/vm/overcommit_memory", "1")?;
    let started = Instant::now();
    let mut held: Vec<Vec<u8>> = Vec::new();
    for index in 0..mib {
        let due = Duration::from_micros(index * 1_000_000 / rate.max(1));
        thread::sleep(due.saturating_sub(started.elapsed()));
        let mut chunk = vec![0u8; MIB as usize];
        // Zeros would compress to almost nothing in compressed swap.
        Bytes::new(index).fill(&mut chunk);
        held.push(chunk);
        if (index + 1) % 16 == 0 || index + 1 == mib {
            println!("held {} {}", index + 1, started.elapsed().as_millis());
        }
    }
    loop {
        std::hint::black_box(&held);
        thread::park();
    }
}
