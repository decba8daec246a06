//! Writes blocks of a device, reads them back and verifies them.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use guest_tools::aligned::Aligned;
use guest_tools::content::Bytes;

const BLOCK_BYTES: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Direct,
    /// Writes through the page cache, and calls fdatasync after each round.
    Buffered,
}

impl Mode {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        match text {
            "direct" => Ok(Self::Direct),
            "buffered" => Ok(Self::Buffered),
            other => bail!("unknown mode: {other:?}"),
        }
    }
}

pub(crate) struct Range {
    device: File,
    mode: Mode,
    first: u64,
    count: u64,
}

impl Range {
    pub(crate) fn open(device: &str, mode: Mode, first: u64, count: u64) -> Result<Self> {
        ensure!(count > 0, "no blocks");
        let flags = if mode == Mode::Direct { libc::O_DIRECT } else { 0 };
        let device = OpenOptions::new().read(true).write(true).custom_flags(flags).open(device);
        Ok(Self { device: device.context("Cannot open the device")?, mode, first, count })
    }

    fn offset(&self, index: u64) -> u64 {
        (self.first + index) * BLOCK_BYTES as u64
    }

    /// Returns all indexes once, in a scattered order. The step and the count are coprime.
    fn shuffled(&self, seed: u64) -> impl Iterator<Item = u64> {
        let step = (1 + seed % self.count.max(2)..).find(|step| gcd(*step, self.count) == 1);
        let (count, step) = (self.count, step.expect("count + 1 shares no factor with count"));
        (0..count).map(move |index| index * step % count)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Fills a block with its index, the seed and the round, followed by random bytes derived from
/// them. A torn or misplaced block does not match any round.
fn fill(block: &mut [u8], index: u64, seed: u64, round: u64) {
    block[..8].copy_from_slice(&index.to_le_bytes());
    block[8..16].copy_from_slice(&seed.to_le_bytes());
    block[16..24].copy_from_slice(&round.to_le_bytes());
    Bytes::new(index ^ seed.rotate_left(20) ^ round.rotate_left(40)).fill(&mut block[24..]);
}

/// Writes all blocks `rounds` times, and verifies each round. Prints `round N` when a round is
/// durable.
pub(crate) fn write(range: &Range, seed: u64, rounds: u64) -> Result<()> {
    let mut block = Aligned::zeroed(BLOCK_BYTES);
    for round in 1..=rounds {
        for index in range.shuffled(seed + round) {
            fill(&mut block, index, seed, round);
            range
                .device
                .write_all_at(&block, range.offset(index))
                .with_context(|| format!("Cannot write block {index}"))?;
        }
        if range.mode == Mode::Buffered {
            range.device.sync_data().context("Cannot sync")?;
        }
        verify(range, seed, &[round])?;
        println!("round {round}");
        io::stdout().flush()?;
    }
    Ok(())
}

/// Verifies that every block is from `round` or, if the writer was killed, from the next round.
pub(crate) fn check(range: &Range, seed: u64, round: u64) -> Result<()> {
    verify(range, seed, &[round, round + 1])?;
    println!("checked {}", range.count);
    Ok(())
}

fn verify(range: &Range, seed: u64, rounds: &[u64]) -> Result<()> {
    let (mut found, mut expected) = (Aligned::zeroed(BLOCK_BYTES), Aligned::zeroed(BLOCK_BYTES));
    for index in 0..range.count {
        range
            .device
            .read_exact_at(&mut found, range.offset(index))
            .with_context(|| format!("Cannot read block {index}"))?;
        let matches = rounds.iter().any(|round| {
            fill(&mut expected, index, seed, *round);
            *found == *expected
        });
        ensure!(
            matches,
            "Block {index} matches none of the rounds {rounds:?}; its first bytes: {:02x?}",
            &found[..24]
        );
    }
    Ok(())
}

/// Prints the time of `count` direct transfers to scattered offsets in the device's first 16 MiB.
/// `depth` transfers are in flight at a time.
pub(crate) fn time(device: &str, what: &str, count: u64, depth: u64) -> Result<()> {
    ensure!((1..=256).contains(&depth), "depth is {depth}, must be 1 to 256");
    let range = Range::open(device, Mode::Direct, 0, 4096)?;
    let places: Vec<u64> = range.shuffled(1237).cycle_to(count);
    let each = places.len().div_ceil(usize::try_from(depth)?).max(1);
    let started = Instant::now();
    thread::scope(|scope| {
        // With a depth of 1, no other thread is started.
        let (first, others) = places.split_at(each.min(places.len()));
        let threads: Vec<_> = others
            .chunks(each)
            .map(|places| scope.spawn(|| transfer(&range, what, places)))
            .collect();
        transfer(&range, what, first)?;
        threads.into_iter().try_for_each(|thread| thread.join().expect("a transfer does not panic"))
    })?;
    println!("{}", started.elapsed().as_micros());
    Ok(())
}

fn transfer(range: &Range, what: &str, places: &[u64]) -> Result<()> {
    let mut block = Aligned::zeroed(BLOCK_BYTES);
    fill(&mut block, 0, 0, 0);
    for index in places {
        match what {
            "write" => range.device.write_all_at(&block, range.offset(*index)),
            "read" => range.device.read_exact_at(&mut block, range.offset(*index)),
            other => bail!("neither read nor write: {other:?}"),
        }
        .with_context(|| format!("Cannot {what} block {index}"))?;
    }
    Ok(())
}

/// Returns the first `count` items of an iterator, which is repeated as often as needed.
trait CycleTo: Iterator {
    fn cycle_to(self, count: u64) -> Vec<Self::Item>;
}

impl<I: Iterator<Item = u64>> CycleTo for I {
    fn cycle_to(self, count: u64) -> Vec<u64> {
        let all: Vec<u64> = self.collect();
        all.iter().copied().cycle().take(usize::try_from(count).unwrap_or(usize::MAX)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn scratch(name: &str, blocks: u64) -> (std::path::PathBuf, Range) {
        let path = std::env::temp_dir().join(format!("guest-tool-{name}-{}", std::process::id()));
        let device = OpenOptions::new()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        device.set_len(blocks * BLOCK_BYTES as u64).unwrap();
        (path, Range { device, mode: Mode::Buffered, first: 1, count: blocks - 1 })
    }

    #[test]
    fn shuffled_visits_every_block_once() {
        let (path, range) = scratch("shuffled", 98);
        for seed in 0..200 {
            assert_eq!(range.shuffled(seed).collect::<BTreeSet<u64>>().len(), 97);
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_changed_byte_is_found() {
        let (path, range) = scratch("changed", 9);
        write(&range, 5, 2).unwrap();
        check(&range, 5, 2).unwrap();
        assert!(check(&range, 6, 2).is_err(), "another writer's blocks passed");
        range.device.write_all_at(b"x", range.offset(3) + 4000).unwrap();
        assert!(check(&range, 5, 2).is_err(), "a torn block passed");
        std::fs::remove_file(path).unwrap();
    }
}
