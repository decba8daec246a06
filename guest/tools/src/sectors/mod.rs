//! Computes the expected content of a disk's sectors from seeds alone. A guest writes through
//! Linux' BTT driver, and a test writes through our engine. Both check the disk against the same
//! [`Outcome`], without exchanging any data.

mod flogs;
mod program;

use std::fmt;
use std::ops::Range;

use anyhow::{Context, Result, anyhow, ensure};

pub use flogs::{Flogs, Padding};
pub use program::{Erasures, Mix, Program, Storage, run};

use crate::CorruptData;
use crate::aligned::Aligned;
use crate::content::Bytes;

/// Number of sectors that a check reads in one call.
const BATCH_SECTORS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub sectors: u64,
    pub sector_bytes: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Sector that has never been written, or has been discarded.
    Zeros,
    /// Sector written by this operation of the seed's program.
    Written { seed: u64, operation: u64 },
    /// Sector that reads as zeros because of its map entry. A check reads such a sector separately.
    /// Otherwise Linux' driver would skip the 512-byte sectors that follow it in the same page, and
    /// report success (btt_read_pg in drivers/nvdimm/btt.c).
    Trimmed,
    /// Sector that cannot be read.
    Fails,
}

impl Content {
    /// Fills `bytes` with the expected content: position and origin, followed by random bytes
    /// derived from them. A torn or misplaced sector matches no content.
    fn fill(self, sector: u64, bytes: &mut [u8]) {
        bytes.fill(0);
        if let Self::Written { seed, operation } = self {
            bytes[..8].copy_from_slice(&sector.to_le_bytes());
            bytes[8..16].copy_from_slice(&seed.to_le_bytes());
            bytes[16..24].copy_from_slice(&operation.to_le_bytes());
            Bytes::new(sector ^ seed.rotate_left(20) ^ operation.rotate_left(40))
                .fill(&mut bytes[24..]);
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zeros | Self::Trimmed => write!(formatter, "zeros"),
            Self::Written { seed, operation } => {
                write!(formatter, "the content of operation {operation:#x} of seed {seed}")
            }
            Self::Fails => write!(formatter, "an error"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    shape: Shape,
    contents: Vec<Content>,
}

impl Outcome {
    pub fn untouched(shape: Shape) -> Self {
        let sectors = usize::try_from(shape.sectors).expect("a test's disk is small");
        Self { shape, contents: vec![Content::Zeros; sectors] }
    }

    /// Returns the outcome of the items in `history`. An item `flogs:SHIFT` stands for a disk built
    /// by [`Flogs`] and must be the first. Any other item is a program that has run to its end.
    pub fn of_history(shape: Shape, history: &[impl AsRef<str>]) -> Result<Self> {
        let mut outcome = Self::untouched(shape);
        for (at, item) in history.iter().map(AsRef::as_ref).enumerate() {
            match item.strip_prefix("flogs:") {
                Some(shift) => {
                    ensure!(at == 0, "{item} is not the first");
                    let shift = shift.parse().with_context(|| format!("{item} has no number"))?;
                    outcome = Flogs::outcome(shape, shift);
                }
                None => outcome.apply(&item.parse()?),
            }
        }
        Ok(outcome)
    }

    pub fn apply(&mut self, program: &Program) {
        for (sectors, content) in program.effects(self.shape) {
            self.set(sectors, content);
        }
    }

    fn set(&mut self, sectors: Range<u64>, content: Content) {
        self.contents[sectors.start as usize..sectors.end as usize].fill(content);
    }

    /// Reads and compares every sector. `read` fills a buffer, starting at a sector. An error about
    /// wrong content has the context [`CorruptData`]. An error about a failed read does not,
    /// because the emulation may cause it.
    pub fn check(&self, mut read: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
        let sector_bytes = self.shape.sector_bytes as usize;
        let mut found = Aligned::zeroed(BATCH_SECTORS * sector_bytes);
        let mut expected = vec![0; sector_bytes];
        let mut first = 0;
        while first < self.shape.sectors {
            let count = self.readable_from(first);
            let found = &mut found[..count * sector_bytes];
            let outcome = read(first, found);
            if self.contents[first as usize] == Content::Fails {
                ensure!(
                    outcome.is_err(),
                    anyhow!("Sector {first} is readable, but must fail").context(CorruptData)
                );
            } else {
                outcome
                    .with_context(|| format!("Cannot read {count} sectors from sector {first}"))?;
                for (sector, found) in (first..).zip(found.chunks_exact(sector_bytes)) {
                    let content = self.contents[sector as usize];
                    content.fill(sector, &mut expected);
                    let difference = || {
                        let found = describe(found, &expected);
                        anyhow!("Sector {sector} is not {content}: {found}").context(CorruptData)
                    };
                    ensure!(found == expected, difference());
                }
            }
            first += count as u64;
        }
        Ok(())
    }

    /// Returns how many sectors from `first` on can be read in one call. Trimmed and failing
    /// sectors are read separately.
    fn readable_from(&self, first: u64) -> usize {
        let rest = &self.contents[first as usize..];
        let is_special = |content: &Content| matches!(content, Content::Trimmed | Content::Fails);
        rest.iter().take(BATCH_SECTORS).take_while(|content| !is_special(content)).count().max(1)
    }
}

fn describe(found: &[u8], expected: &[u8]) -> String {
    let word = |at: usize| u64::from_le_bytes(found[at..at + 8].try_into().expect("eight bytes"));
    let same = found.iter().zip(expected).filter(|(a, b)| a == b).count();
    if found.iter().all(|byte| *byte == 0) {
        return "it contains zeros".to_owned();
    }
    format!(
        "it contains sector {}, operation {:#x} of seed {}; {same} of its {} bytes match",
        word(0),
        word(16),
        word(8),
        found.len()
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    pub(super) const SHAPE: Shape = Shape { sectors: 1000, sector_bytes: 512 };

    /// In-memory disk that can lose or tear one write.
    #[derive(Debug, Default)]
    pub(super) struct Memory {
        bytes: Mutex<Vec<u8>>,
        writes: std::sync::atomic::AtomicU64,
        /// Index of the write that is lost.
        lost: Option<u64>,
        torn: Option<u64>,
    }

    impl Memory {
        pub(super) fn new() -> Self {
            let bytes = Mutex::new(vec![0; SHAPE.sectors as usize * SHAPE.sector_bytes as usize]);
            Self { bytes, ..Self::default() }
        }

        pub(super) fn check(&self, outcome: &Outcome) -> Result<()> {
            outcome.check(|first, into| {
                let at = first as usize * 512;
                into.copy_from_slice(&self.bytes.lock().unwrap()[at..at + into.len()]);
                Ok(())
            })
        }
    }

    impl Storage for Memory {
        fn write(&self, first: u64, bytes: &[u8], _buffered: bool) -> Result<()> {
            let number = self.writes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let len = match number {
                number if self.lost == Some(number) => 0,
                number if self.torn == Some(number) => bytes.len() - 256,
                _ => bytes.len(),
            };
            let at = first as usize * 512;
            self.bytes.lock().unwrap()[at..at + len].copy_from_slice(&bytes[..len]);
            Ok(())
        }
        fn discard(&self, sectors: Range<u64>) -> Result<()> {
            self.bytes.lock().unwrap()[sectors.start as usize * 512..sectors.end as usize * 512]
                .fill(0);
            Ok(())
        }
        fn write_zeroes(&self, sectors: Range<u64>) -> Result<()> {
            self.discard(sectors)
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn history_matches_only_its_disk() {
        let memory = Memory::new();
        let history = ["writes:1:300:2", "discards:2:300:3", "writes:3:40:1"];
        for item in history {
            run(&item.parse().unwrap(), SHAPE, &memory).unwrap();
        }
        let outcome = Outcome::of_history(SHAPE, &history).unwrap();
        memory.check(&outcome).unwrap();
        for other in [&history[..2], &["writes:1:300:2", "discards:2:300:3", "writes:4:40:1"]] {
            assert!(
                memory.check(&Outcome::of_history(SHAPE, other).unwrap()).is_err(),
                "{other:?}"
            );
        }
    }

    #[test]
    fn lost_or_torn_write_is_found() {
        // The last write is not overwritten by a later operation.
        let program: Program = "writes:9:200:1".parse().unwrap();
        let outcome = Outcome::of_history(SHAPE, &["writes:9:200:1"]).unwrap();
        for broken in [
            Memory { lost: Some(199), ..Memory::new() },
            Memory { torn: Some(199), ..Memory::new() },
        ] {
            run(&program, SHAPE, &broken).unwrap();
            let error = broken.check(&outcome).unwrap_err();
            assert_eq!(CorruptData::code_of(&error), CorruptData::CODE, "{error:?}");
        }
    }

    #[test]
    fn sector_with_an_expected_failure_must_fail() {
        let mut outcome = Outcome::untouched(SHAPE);
        outcome.set(70..71, Content::Fails);
        let memory = Memory::new();
        let error = format!("{:#}", memory.check(&outcome).unwrap_err());
        assert!(error.contains("Sector 70 is readable"), "{error}");
        let reads_but_70 = |first: u64, into: &mut [u8]| {
            ensure!(first + into.len() as u64 / 512 <= 70 || first > 70, "bad");
            into.fill(0);
            Ok(())
        };
        outcome.check(reads_but_70).unwrap();
        // The failed read is unexpected, but it is not wrong data.
        let error = Outcome::untouched(SHAPE).check(reads_but_70).unwrap_err();
        assert_ne!(CorruptData::code_of(&error), CorruptData::CODE, "{error:?}");
    }

    #[test]
    fn flogs_must_be_first_in_a_history() {
        assert!(Outcome::of_history(SHAPE, &["writes:1:1:1", "flogs:0"]).is_err());
        assert!(Outcome::of_history(SHAPE, &["flogs:x"]).is_err());
        assert!(Outcome::of_history(SHAPE, &["writes:1:1"]).is_err());
    }
}
