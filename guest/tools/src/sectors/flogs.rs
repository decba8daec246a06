//! Builds BTTs whose log (flog) is in every state that a crash can leave, with one state per lane.
//! The expected content after replaying the log follows from UEFI 2.10, 6.4.3 to 6.4.5, and from
//! drivers/nvdimm/btt.c.
//!
//! This module reads the info block at the offsets given in the specification. It does not use the
//! code under test.

use anyhow::{Result, ensure};
use pmem_volume::btt::START_BYTES;

use super::{Content, Outcome, Shape};
use pmem_volume::media::Media;

const LANES: u32 = 256;
const GROUP_BYTES: u64 = 64;
const ENTRY_BYTES: usize = 16;

/// Map entry of a block that reads as zeros.
const TRIMMED: u32 = 1 << 31;
/// Map entry of a block that cannot be read.
const FAILED: u32 = 1 << 30;
/// Map entry of an ordinary block.
const NORMAL: u32 = TRIMMED | FAILED;

/// Seeds of a lane's last write, and of the content before that write.
const NEW_SEED: u64 = 0xf1_06;
const OLD_SEED: u64 = 0x01d;

/// Which two of a lane's four slots are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// Slots 0 and 1.
    Current,
    /// Slots 0 and 2, as in Linux before 4.15.
    Former,
}

/// When the crash occurred, relative to a lane's last write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Crash {
    /// The lane has never written.
    Untouched,
    /// After a complete write.
    Done,
    /// After the log entry was written, before the map was updated.
    Pending,
    /// After the log entry was written, before the map was updated. The sector had been discarded
    /// before.
    PendingOnTrimmed,
    /// After a complete write, and after the sector was then discarded.
    TrimmedAfter,
    /// After a complete write whose block was later found to be bad.
    FailedAfter,
    /// After only half of the next write's log entry was written.
    NextHalfWritten,
}

/// State of a lane: the sequence numbers in its two slots, and when the crash occurred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lane {
    sequences: [u32; 2],
    crash: Crash,
}

/// Returns all states. Sequence numbers cycle through 1, 2, 3. A lane's first entry has no
/// predecessor.
fn states() -> Vec<Lane> {
    use Crash::{
        Done, FailedAfter, NextHalfWritten, Pending, PendingOnTrimmed, TrimmedAfter, Untouched,
    };
    let first = [Untouched, NextHalfWritten].map(|crash| Lane { sequences: [1, 0], crash });
    let pairs = [[1, 2], [3, 2], [3, 1], [2, 1], [2, 3], [1, 3]];
    let crashes = [Done, Pending, PendingOnTrimmed, TrimmedAfter, FailedAfter, NextHalfWritten];
    let later =
        pairs.into_iter().flat_map(|pair| crashes.map(|crash| Lane { sequences: pair, crash }));
    first.into_iter().chain(later).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flogs {
    pub padding: Padding,
    /// Index of lane 0's state in the list. The states of other lanes follow.
    pub shift: u32,
}

impl Flogs {
    pub fn states() -> u32 {
        states().len() as u32
    }

    /// Returns the content of such a disk. It does not depend on the padding.
    pub fn outcome(shape: Shape, shift: u32) -> Outcome {
        let mut outcome = Outcome::untouched(shape);
        for lane in 0..LANES {
            let sector = u64::from(sector_of(lane));
            let state = state_of(lane, shift);
            let content = match state.crash {
                Crash::Untouched => Content::Zeros,
                Crash::TrimmedAfter => Content::Trimmed,
                Crash::FailedAfter => Content::Fails,
                // The first write did not reach the log.
                Crash::NextHalfWritten if state.sequences == [1, 0] => Content::Zeros,
                _ => Content::Written { seed: NEW_SEED, operation: u64::from(lane) },
            };
            outcome.set(sector..sector + 1, content);
        }
        outcome
    }

    pub fn make(&self, media: &impl Media) -> Result<()> {
        let arena = Arena::read(media)?;
        ensure!(
            sector_of(LANES - 1) < arena.sectors,
            "The arena has too few sectors: {}",
            arena.sectors
        );
        (0..LANES).try_for_each(|lane| {
            arena.make_lane(media, lane, state_of(lane, self.shift), self.padding)
        })
    }
}

fn state_of(lane: u32, shift: u32) -> Lane {
    let states = states();
    states[(lane + shift) as usize % states.len()]
}

/// Returns the sector of each lane's last write.
fn sector_of(lane: u32) -> u32 {
    lane * 16 + 3
}

struct Arena {
    sectors: u32,
    sector_bytes: u32,
    block_bytes: u32,
    data_at: u64,
    map_at: u64,
    flog_at: u64,
}

impl Arena {
    /// Reads the info block (UEFI 2.10, table 6.1).
    fn read(media: &impl Media) -> Result<Self> {
        let mut info = [0; 4096];
        media.read(START_BYTES, &mut info)?;
        ensure!(info.starts_with(b"BTT_ARENA_INFO\0\0"), "The media has no BTT");
        let u32_at =
            |at: usize| u32::from_le_bytes(info[at..at + 4].try_into().expect("four bytes"));
        let place = |at: usize| {
            START_BYTES + u64::from_le_bytes(info[at..at + 8].try_into().expect("eight bytes"))
        };
        ensure!(u32_at(72) == LANES, "The arena has {} lanes, must be {LANES}", u32_at(72));
        Ok(Self {
            sector_bytes: u32_at(56),
            sectors: u32_at(60),
            block_bytes: u32_at(64),
            data_at: place(88),
            map_at: place(96),
            flog_at: place(104),
        })
    }

    fn make_lane(
        &self,
        media: &impl Media,
        lane: u32,
        state: Lane,
        padding: Padding,
    ) -> Result<()> {
        let sector = sector_of(lane);
        // Initial blocks of the lane and of the sector.
        let (spare, own) = (self.sectors + lane, sector);
        let is_first = state.sequences == [1, 0];
        let (newest, mut older) = if is_first {
            ([lane, spare, spare], [0; 3])
        } else {
            ([sector, own, spare], [sector, spare, own])
        };
        if state.crash == Crash::NextHalfWritten {
            // The half with the sector and the old block belongs to the next write. The other half
            // still belongs to the previous write.
            (older[0], older[1]) = (sector + 1, sector + 1);
            self.write_block(media, if is_first { spare } else { own }, &[0xee; 4096])?;
        }
        if !is_first {
            let old = Content::Written { seed: OLD_SEED, operation: u64::from(lane) };
            let new = Content::Written { seed: NEW_SEED, operation: u64::from(lane) };
            let mut bytes = vec![0; self.sector_bytes as usize];
            new.fill(u64::from(sector), &mut bytes);
            self.write_block(media, spare, &bytes)?;
            if state.crash != Crash::NextHalfWritten {
                old.fill(u64::from(sector), &mut bytes);
                self.write_block(media, own, &bytes)?;
            }
        }
        let entry = match state.crash {
            // The map entry had not been written.
            Crash::Untouched | Crash::Pending => 0,
            Crash::NextHalfWritten if is_first => 0,
            Crash::PendingOnTrimmed => TRIMMED | own,
            Crash::Done | Crash::NextHalfWritten => NORMAL | spare,
            Crash::TrimmedAfter => TRIMMED | spare,
            Crash::FailedAfter => FAILED | spare,
        };
        media.store(self.map_at + u64::from(sector) * 4, &entry.to_le_bytes())?;
        let second = match padding {
            Padding::Current => 1,
            Padding::Former => 2,
        };
        let [a, b] = state.sequences;
        let newest_is_second = [[1, 2], [2, 3], [3, 1]].contains(&[a, b]);
        let [first_entry, second_entry] =
            if newest_is_second { [older, newest] } else { [newest, older] };
        let mut group = [0; GROUP_BYTES as usize];
        for (slot, entry, sequence) in [(0, first_entry, a), (second, second_entry, b)] {
            let words = entry.into_iter().chain([sequence]).flat_map(u32::to_le_bytes);
            group[slot * ENTRY_BYTES..(slot + 1) * ENTRY_BYTES]
                .copy_from_slice(&words.collect::<Vec<u8>>());
        }
        media.store(self.flog_at + u64::from(lane) * GROUP_BYTES, &group)?;
        Ok(())
    }

    fn write_block(&self, media: &impl Media, block: u32, bytes: &[u8]) -> Result<()> {
        let bytes = &bytes[..self.sector_bytes as usize];
        Ok(media.store(self.data_at + u64::from(block) * u64::from(self.block_bytes), bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use pmem_volume::btt::{Layout, Reader, Sector, check};
    use pmem_volume::media::MemoryMedia;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn our_reader_replays_every_state() {
        for (sector_bytes, padding, shift) in
            [(512, Padding::Current, 0), (4096, Padding::Former, 0), (4096, Padding::Current, 17)]
        {
            let media = MemoryMedia::new(20 << 20);
            Layout::new(20 << 20, sector_bytes, Uuid::new_v4()).unwrap().format(&media).unwrap();
            Flogs { padding, shift }.make(&media).unwrap();
            let report = check(&media);
            assert_eq!(report.arenas[0].findings, [], "{padding:?}");
            let each = |crash: Crash| {
                (0..LANES).filter(|lane| state_of(*lane, shift).crash == crash).count()
            };
            assert_eq!(
                report.arenas[0].redo as usize,
                each(Crash::Pending) + each(Crash::PendingOnTrimmed)
            );
            let reader = Reader::open(&media).unwrap();
            let shape = Shape { sectors: reader.sectors(), sector_bytes };
            let read = |first: u64, into: &mut [u8]| {
                for (sector, bytes) in (first..).zip(into.chunks_exact_mut(sector_bytes as usize)) {
                    ensure!(reader.read(sector, bytes)? != Sector::Error, "an error");
                }
                Ok(())
            };
            Flogs::outcome(shape, shift).check(read).unwrap();
            // A lane in a different state should read differently.
            assert!(Flogs::outcome(shape, shift + 1).check(read).is_err());
        }
    }
}
