//! Consistency check of a BTT, based only on its media. After a replay of the flog in memory, the
//! map and the free list together must name every block exactly once.

use serde::ser::{SerializeStruct, Serializer};
use serde::{Serialize, ser};
use thiserror::Error;

use super::arena::{ArenaInfo, InfoError, InfoSource};
use super::arena_walk::arenas;
use super::flog::{MapKind, Recovery, decode_map, recover};
use super::map_reader::MapReader;
use crate::media::Media;

/// Maximum number of listed findings per arena. Further findings are only counted.
const MAX_FINDINGS: usize = 100;

/// Defect in a BTT. `L` is a sector that the guest sees (pre-map LBA), and `B` is a block (post-map
/// LBA).
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum Finding {
    #[error("neither info block is intact ({0})")]
    NoInfo(InfoError),
    #[error(
        "the first info block is damaged and its copy is intact, so a Linux guest would not detect the BTT"
    )]
    FirstInfo,
    #[error("the second info block is damaged and the first is intact")]
    SecondInfo,
    #[error("the two info blocks are intact but differ")]
    InfoDiffers,
    #[error("the error flag is set: the arena is read-only")]
    ErrorFlag,
    #[error("the flog cannot be read: {0}")]
    FlogUnreadable(String),
    #[error("the map cannot be read: {0}")]
    MapUnreadable(String),
    /// Reported only once, for the first unreadable sector among the newest entries of the lanes.
    #[error("the map entry of sector L{sector} cannot be read: {reason}")]
    EntryUnreadable { sector: u32, reason: String },
    #[error("the flog uses its slots in an unknown way")]
    FlogPadding,
    #[error("lane {lane} of the flog has invalid sequence numbers: {} and {}", sequences[0], sequences[1])]
    FlogSequence { lane: u32, sequences: [u32; 2] },
    #[error("lane {lane} of the flog has {field} {value}, which is not below {bound}")]
    FlogRange {
        lane: u32,
        field: &'static str,
        value: u32,
        /// First number that is out of range.
        bound: u32,
    },
    #[error("sector L{sector} is mapped to block B{block}, which is not below B{bound}")]
    MapRange {
        sector: u32,
        block: u32,
        /// First number that is out of range.
        bound: u32,
    },
    #[error("block B{block} is referenced twice, the second time by {by}")]
    BlockTwice { block: u32, by: String },
    #[error("{count} block(s) are referenced by neither map nor flog; the first is B{first}")]
    BlocksLost { count: u32, first: u32 },
}

impl Finding {
    /// Returns true if the media could not be read. A later check may produce a different finding.
    pub(super) fn is_unreadable(&self) -> bool {
        matches!(
            self,
            Self::FlogUnreadable(_) | Self::MapUnreadable(_) | Self::EntryUnreadable { .. }
        )
    }

    /// Returns true if the flog may contain writes that are missing in the map. In that case, the
    /// map entry of a sector may name a block that has been overwritten since.
    pub fn may_lose_writes(&self) -> bool {
        matches!(
            self,
            Self::FlogUnreadable(_)
                | Self::FlogPadding
                | Self::FlogSequence { .. }
                | Self::FlogRange { .. }
        )
    }
}

impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        ser::Serializer::collect_str(serializer, self)
    }
}

/// Result of the check of an arena.
#[derive(Debug)]
pub struct ArenaReport {
    /// Offset of the arena in the volume.
    pub start_bytes: u64,
    /// Verified info block, or `None` if neither info block is whole.
    pub info: Option<ArenaInfo>,
    /// Number of map entries that a crash prevented from being written. The next open for writing
    /// stores them.
    pub redo: u32,
    /// Number of sectors whose reads fail because the media failed.
    pub error_sectors: u32,
    /// First findings of the check, at most 100.
    pub findings: Vec<Finding>,
    /// Number of all findings.
    pub findings_total: u64,
}

impl Serialize for ArenaReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("ArenaReport", 7)?;
        fields.serialize_field("start_bytes", &self.start_bytes)?;
        fields.serialize_field("sectors", &self.info.as_ref().map(|info| info.sectors))?;
        fields
            .serialize_field("sector_bytes", &self.info.as_ref().map(|info| info.sector_bytes))?;
        fields.serialize_field("redo", &self.redo)?;
        fields.serialize_field("error_sectors", &self.error_sectors)?;
        fields.serialize_field("findings", &self.findings)?;
        fields.serialize_field("findings_total", &self.findings_total)?;
        fields.end()
    }
}

/// Result of the check of a volume.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Results for each arena.
    pub arenas: Vec<ArenaReport>,
}

impl Report {
    /// Returns true if there are no findings.
    pub fn is_clean(&self) -> bool {
        !self.arenas.is_empty() && self.arenas.iter().all(|arena| arena.findings_total == 0)
    }

    /// Keeps only the findings that another check reports too. If the volume is written during the
    /// checks, only these are defects.
    pub(crate) fn retain_common(&mut self, other: &Self) {
        for (arena, again) in self.arenas.iter_mut().zip(&other.arenas) {
            let listed = arena.findings.len() as u64;
            arena.findings.retain(|finding| again.findings.contains(finding));
            let removed = listed - arena.findings.len() as u64;
            // Findings that are not listed cannot be compared.
            arena.findings_total = again.findings_total.min(arena.findings_total - removed);
        }
    }

    /// Returns the number of sectors that the guest sees.
    pub fn sectors(&self) -> u64 {
        self.arenas.iter().filter_map(|a| a.info.as_ref()).map(|info| u64::from(info.sectors)).sum()
    }
}

/// Checks a volume without changing it.
pub fn check(space: &impl Media) -> Report {
    check_with(space, &mut |_| {})
}

/// Checks a volume without changing it, and passes the number of checked bytes to `on_checked`. The
/// last number is the length of the volume.
pub fn check_with(space: &impl Media, on_checked: &mut dyn FnMut(u64)) -> Report {
    let arenas = arenas(space).into_iter();
    let arenas = arenas.map(|arena| match arena {
        Ok((info, source)) => check_arena(space, info, source, on_checked),
        Err(missing) => ArenaReport::without_info(missing.start_bytes, missing.reason),
    });
    let arenas = arenas.collect();
    on_checked(space.len_bytes());
    Report { arenas }
}

fn check_arena(
    space: &impl Media,
    info: ArenaInfo,
    source: InfoSource,
    on_checked: &mut dyn FnMut(u64),
) -> ArenaReport {
    let mut report = ArenaReport::new(info.start_bytes);
    match source {
        InfoSource::Both => {}
        InfoSource::Differ => report.add(Finding::InfoDiffers),
        InfoSource::First => report.add(Finding::SecondInfo),
        InfoSource::Second => report.add(Finding::FirstInfo),
    }
    if info.has_error {
        report.add(Finding::ErrorFlag);
    }
    let recovery = recover(space, &info);
    recovery.findings.iter().for_each(|finding| report.add(finding.clone()));
    let flog_is_whole = recovery.findings.is_empty();
    report.redo = recovery.redo.len() as u32;
    let mut referenced = BlockSet::new(info.blocks);
    let map_is_whole =
        report.reference_mapped_blocks(space, &info, &recovery, &mut referenced, on_checked);
    for (block, lane) in &recovery.free {
        report.reference_block(&mut referenced, *block, || format!("lane {lane} of the flog"));
    }
    // Blocks without a reference are a finding only if the flog and the map were read completely.
    if let (true, Some((count, first))) = (flog_is_whole && map_is_whole, referenced.missing()) {
        report.add(Finding::BlocksLost { count, first });
    }
    report.info = Some(info);
    report
}

impl ArenaReport {
    fn new(start_bytes: u64) -> Self {
        Self {
            start_bytes,
            info: None,
            redo: 0,
            error_sectors: 0,
            findings: vec![],
            findings_total: 0,
        }
    }

    fn without_info(start_bytes: u64, error: InfoError) -> Self {
        let mut report = Self::new(start_bytes);
        report.add(Finding::NoInfo(error));
        report
    }

    fn add(&mut self, finding: Finding) {
        self.findings_total += 1;
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        }
    }

    fn reference_block(&mut self, referenced: &mut BlockSet, block: u32, by: impl Fn() -> String) {
        if !referenced.insert(block) {
            self.add(Finding::BlockTwice { block, by: by() });
        }
    }

    /// Inserts the blocks of all map entries, as they are after recovery. Returns false if a part
    /// of the map is unreadable.
    fn reference_mapped_blocks(
        &mut self,
        space: &impl Media,
        info: &ArenaInfo,
        recovery: &Recovery,
        referenced: &mut BlockSet,
        on_checked: &mut dyn FnMut(u64),
    ) -> bool {
        let mut reader = MapReader::new(space, info, 0..info.sectors);
        let mut is_whole = true;
        while let Some(piece) = reader.read_next() {
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) => {
                    self.add(Finding::MapUnreadable(foreshore_types::chain(&error)));
                    is_whole = false;
                    continue;
                }
            };
            for (sector, entry) in piece.iter() {
                if recovery.unresolved.contains(&sector) {
                    is_whole = false;
                    continue;
                }
                let entry = decode_map(sector, entry);
                let redone = recovery.redo.get(&sector);
                let block = redone.copied().unwrap_or(entry.block);
                if redone.is_none() && entry.kind == MapKind::Error {
                    self.error_sectors += 1;
                }
                if block >= info.blocks {
                    self.add(Finding::MapRange { sector, block, bound: info.blocks });
                } else {
                    self.reference_block(referenced, block, || format!("sector L{sector}"));
                }
            }
            // Most of the time is spent on the map, so the progress is based on its sectors.
            let checked = u64::from(piece.sectors().end);
            on_checked(info.start_bytes + checked * u64::from(info.sector_bytes));
        }
        is_whole
    }
}

/// Set of block numbers with one bit per block.
pub(super) struct BlockSet {
    words: Vec<u64>,
    bound: u32,
}

impl BlockSet {
    pub(super) fn new(bound: u32) -> Self {
        Self { words: vec![0; bound.div_ceil(64) as usize], bound }
    }

    /// Inserts a block. Returns false if it is already in the set.
    pub(super) fn insert(&mut self, block: u32) -> bool {
        assert!(block < self.bound);
        let (word, bit) = (&mut self.words[(block / 64) as usize], 1 << (block % 64));
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    /// Returns the blocks that are not in the set, in order.
    pub(super) fn iter_missing(&self) -> impl Iterator<Item = u32> {
        let in_word = |(at, word): (usize, &u64)| {
            let mut left = !word;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros();
                left &= left.wrapping_sub(1);
                (bit < 64).then_some(at as u32 * 64 + bit)
            })
        };
        self.words.iter().enumerate().flat_map(in_word).take_while(|block| *block < self.bound)
    }

    /// Returns the number of blocks that are not in the set, and the first of them.
    fn missing(&self) -> Option<(u32, u32)> {
        let count = self.bound - self.words.iter().map(|w| w.count_ones()).sum::<u32>();
        self.iter_missing().next().map(|first| (count, first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btt::Layout;
    use crate::btt::layout::MAP_ENTRY_BYTES;
    use crate::media::MemoryMedia;

    #[test]
    fn entry_of_unresolved_sector_references_no_block() {
        const SIZE: u64 = 18 << 20;
        let media = MemoryMedia::new(SIZE);
        Layout::new(SIZE, 4096, uuid::Uuid::from_u128(3)).unwrap().format(&media).unwrap();
        let arenas = arenas(&media);
        let [Ok((info, _))] = &arenas[..] else { panic!("one arena") };
        // Map after a lane has written sector 7. The redo of that lane is missing.
        let entry_at = info.map_at + 7 * MAP_ENTRY_BYTES;
        let (free, _) = recover(&media, info).free[0];
        media.store(entry_at, &(3 << 30 | free).to_le_bytes()).unwrap();
        for (is_unresolved, expected) in [(false, 1), (true, 0)] {
            let mut recovery = recover(&media, info);
            recovery.redo.clear();
            recovery.unresolved.extend(is_unresolved.then_some(7));
            let (mut report, mut referenced) = (ArenaReport::new(0), BlockSet::new(info.blocks));
            let is_whole = report.reference_mapped_blocks(
                &media,
                info,
                &recovery,
                &mut referenced,
                &mut |_| (),
            );
            report.reference_block(&mut referenced, free, || "lane".to_owned());
            assert_eq!((report.findings.len(), is_whole), (expected, !is_unresolved));
        }
    }
}
