//! Runs `guest-tool` writers on thirds of a disk. They verify their blocks.

use anyhow::{Result, ensure};
use guest_tests::Guest;

use crate::volume::IO_LIMIT;

/// First block and seed of each writer.
const WRITERS: [(u32, u32); 3] = [(0, 1), (8192, 2), (16384, 3)];

/// Writes to all three thirds concurrently. Each writer uses the page cache (`buffered`) or
/// bypasses it (`direct`).
pub(crate) fn write(guest: &Guest, device: &str, modes: [&str; 3], rounds: u32) -> Result<()> {
    let start = |(mode, (first, seed)): (&str, _)| {
        let blocks = format!("{device} {mode} {first} 600 {seed} {rounds}");
        guest.start_script(IO_LIMIT, &format!("exec guest-tool write-blocks {blocks}"))
    };
    let writers = modes.into_iter().zip(WRITERS).map(start).collect::<Result<Vec<_>>>()?;
    for writer in writers {
        let output = writer.finish()?;
        ensure!(output.code == 0, "A writer ended with {}:\n{}", output.code, output.stderr);
    }
    Ok(())
}

/// Verifies the blocks that `write` wrote, on the disk instead of in the page cache.
pub(crate) fn check(guest: &Guest, device: &str, rounds: u32) -> Result<()> {
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    for (first, seed) in WRITERS {
        let blocks = format!("{device} {first} 600 {seed} {rounds}");
        guest.run_within(IO_LIMIT, &format!("guest-tool check-blocks {blocks}"))?;
    }
    Ok(())
}
