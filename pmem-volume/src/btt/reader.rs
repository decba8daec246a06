//! Reader for sectors of a volume that is not being written, for checks, exports and tests.

use std::collections::BTreeMap;
use std::ops::Range;

use thiserror::Error;

use super::arena::ArenaInfo;
use super::arena_walk::arenas;
use super::check::Finding;
use super::flog::{MapEntry, MapKind, decode_map, read_map, recover};
use super::layout::{MAP_ENTRY_BYTES, MAP_ERROR, MAP_ZERO};
use super::map_reader::next_unwritten;
use crate::media::{Media, MediaError};

/// Minimum and maximum number of sectors whose map entries are searched at a time. A search starts
/// with few entries, which are enough if data is dense.
const MAP_PIECE_SECTORS: Range<u32> = 1 << 10..64 << 10;

fn is_unwritten(entry: &[u8; 4]) -> bool {
    u32::from_le_bytes(*entry) & (MAP_ERROR | MAP_ZERO) == 0
}

fn is_zeros(entry: &[u8; 4]) -> bool {
    decode_map(0, u32::from_le_bytes(*entry)).kind == MapKind::Zeros
}

/// Content of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sector {
    /// The sector contains data, which was read.
    Data,
    /// The sector reads as zeros.
    Zeros,
    /// The media of the sector failed.
    Error,
}

/// Reason why a sector cannot be read.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum ReadFailure {
    #[error("marked as lost")]
    Marked,
    #[error("mapped outside the arena")]
    Outside,
    #[error("{}", foreshore_types::chain(.0))]
    Media(MediaError),
    /// The sector's last write is unknown.
    #[error("not recovered, because a part of the map cannot be read")]
    NotRecovered,
    /// Both info blocks of the sector's arena are lost, so the position of its map is unknown.
    #[error("in arena {0}, which is lost")]
    Arena(usize),
}

/// Arena, and the changes that recovery would make to its map (`Recovery::pending`).
struct Arena {
    info: ArenaInfo,
    pending: BTreeMap<u32, Option<u32>>,
}

/// Part of the volume that is an arena, or that should be one.
enum ArenaSlot {
    Arena(Arena),
    /// Arena without a whole info block. The number of sectors is that of an arena with the usual
    /// layout in its place.
    Missing {
        arena: usize,
        sectors: u64,
    },
}

/// BTT as it will be after recovery, which is performed only in memory.
pub struct Reader<'a, S> {
    space: &'a S,
    arena_slots: Vec<ArenaSlot>,
    sector_bytes: u32,
}

impl<'a, S: Media> Reader<'a, S> {
    /// Finds the arenas and replays their flogs. Damage of an arena is an error.
    pub fn open(space: &'a S) -> Result<Self, Finding> {
        let (reader, damage) = Self::open_damaged(space);
        match damage.into_iter().next() {
            None => Ok(reader),
            Some((_, finding)) => Err(finding),
        }
    }

    /// Opens all arenas that can be found. Also returns the findings, each with the number of its
    /// arena.
    ///
    /// Recovery covers all readable lanes. If a lane or the whole flog is unreadable, the map entry
    /// of a recently written sector may name a block that has been overwritten since. Such a sector
    /// may read as its old data or as another sector's data. If a part of the map is unreadable,
    /// sectors whose last write is unknown cannot be read either.
    ///
    /// Arenas after a missing one are opened if their start is known.
    pub fn open_damaged(space: &'a S) -> (Self, Vec<(usize, Finding)>) {
        let mut damage = Vec::new();
        let mut reader = Self { space, arena_slots: Vec::new(), sector_bytes: 0 };
        for (number, arena) in arenas(space).into_iter().enumerate() {
            match arena {
                Ok((info, _)) => {
                    if number == 0 {
                        reader.sector_bytes = info.sector_bytes;
                    }
                    let recovery = recover(space, &info);
                    let pending = recovery.pending();
                    damage.extend(recovery.findings.into_iter().map(|found| (number, found)));
                    reader.arena_slots.push(ArenaSlot::Arena(Arena { info, pending }));
                }
                Err(missing) => {
                    let sectors = missing.sectors(reader.sector_bytes);
                    reader.arena_slots.extend(
                        sectors.map(|sectors| ArenaSlot::Missing { arena: number, sectors }),
                    );
                    damage.push((number, Finding::NoInfo(missing.reason)));
                }
            }
        }
        (reader, damage)
    }

    /// Number of sectors.
    pub fn sectors(&self) -> u64 {
        self.arena_slots.iter().map(ArenaSlot::sectors).sum()
    }

    /// Size of a sector in bytes, which is the same in all arenas, or 0 without a readable arena.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// Reads a sector into `bytes`, whose length must be the sector size. `sector` must be less
    /// than [`Reader::sectors`].
    pub fn read(&self, sector: u64, bytes: &mut [u8]) -> Result<Sector, MediaError> {
        assert_eq!(bytes.len(), self.sector_bytes() as usize);
        let (slot, sector) = self.locate(sector);
        let ArenaSlot::Arena(arena) = slot else { return Ok(Sector::Error) };
        let sector = sector as u32;
        let entry = match arena.pending.get(&sector) {
            Some(Some(block)) => MapEntry { block: *block, kind: MapKind::Data },
            Some(None) => return Ok(Sector::Error),
            None => read_map(self.space, &arena.info, sector)?,
        };
        match entry.kind {
            MapKind::Error => Ok(Sector::Error),
            MapKind::Zeros => {
                bytes.fill(0);
                Ok(Sector::Zeros)
            }
            MapKind::Data if entry.block >= arena.info.blocks => Ok(Sector::Error),
            MapKind::Data => {
                self.space.read(arena.info.block_at(entry.block), bytes).map(|()| Sector::Data)
            }
        }
    }

    /// Finds the first of `sectors` that may contain nonzero bytes or that cannot be examined.
    /// Returns `None` if all of them read as zeros.
    ///
    /// A sector reads as zeros if its map entry has the flag for zeros. If its map entry was never
    /// written, the sector maps to the block with its own number, and reads as zeros if that block
    /// is a hole. The file system reports holes, so they are not read.
    pub fn next_data(&self, sectors: Range<u64>) -> Option<u64> {
        let mut at = sectors.start;
        while at < sectors.end {
            let (slot, within) = self.locate(at);
            let end = (within + (sectors.end - at)).min(slot.sectors());
            let found = match slot {
                ArenaSlot::Arena(arena) => self.next_data_in(arena, within as u32..end as u32),
                ArenaSlot::Missing { .. } => Some(within as u32),
            };
            if let Some(sector) = found {
                return Some(at + (u64::from(sector) - within));
            }
            at += end - within;
        }
        None
    }

    /// Searches `sectors` in one arena. Also returns a sector that cannot be examined, because a
    /// read of it reports the reason.
    fn next_data_in(&self, arena: &Arena, sectors: Range<u32>) -> Option<u32> {
        let pending = arena.pending.range(sectors.clone()).next();
        let end = pending.map_or(sectors.end, |(sector, _)| *sector);
        let (mut at, mut piece) = (sectors.start, MAP_PIECE_SECTORS.start);
        while at < end {
            let entry_offset =
                |sector: u32| arena.info.map_at + u64::from(sector) * MAP_ENTRY_BYTES;
            let Ok(written) = self.space.next_data(entry_offset(at)..entry_offset(end)) else {
                return Some(at);
            };
            // Map entries in a hole were never written.
            let mapped = written
                .map_or(end, |data| ((data.start - arena.info.map_at) / MAP_ENTRY_BYTES) as u32);
            if let Some(sector) = self.next_unwritten_data(arena, at..mapped) {
                return Some(sector);
            }
            at = mapped.saturating_add(piece).min(end);
            piece = (2 * piece).min(MAP_PIECE_SECTORS.end);
            if let Some(sector) = self.next_mapped_data(arena, mapped..at) {
                return Some(sector);
            }
        }
        pending.map(|(sector, _)| *sector)
    }

    /// Searches for sectors with data by reading their map entries.
    fn next_mapped_data(&self, arena: &Arena, sectors: Range<u32>) -> Option<u32> {
        let mut bytes = vec![0; sectors.len() * MAP_ENTRY_BYTES as usize];
        let at = arena.info.map_at + u64::from(sectors.start) * MAP_ENTRY_BYTES;
        if self.space.read(at, &mut bytes).is_err() {
            return Some(sectors.start);
        }
        let (entries, _) = bytes.as_chunks::<4>();
        let mut first = sectors.start;
        for run in entries.chunk_by(|a, b| is_unwritten(a) == is_unwritten(b)) {
            let end = first + run.len() as u32;
            let found = match is_unwritten(&run[0]) {
                true => self.next_unwritten_data(arena, first..end),
                false => (first..).zip(run).find(|(_, entry)| !is_zeros(entry)).map(|(at, _)| at),
            };
            if found.is_some() {
                return found;
            }
            first = end;
        }
        None
    }

    /// Searches sectors that were never written, by examining their blocks.
    fn next_unwritten_data(&self, arena: &Arena, sectors: Range<u32>) -> Option<u32> {
        match next_unwritten(self.space, &arena.info, sectors.clone()) {
            Ok(found) => found.map(|found| found.start),
            Err(_) => Some(sectors.start),
        }
    }

    /// Reads sectors starting at `first`, as many as fit into `into`. Unreadable sectors are filled
    /// with zeros and passed to `lost`. All sectors must be less than [`Reader::sectors`].
    pub fn read_many(&self, first: u64, into: &mut [u8], lost: &mut dyn FnMut(u64, ReadFailure)) {
        let sector_bytes = self.sector_bytes() as usize;
        assert!(into.len().is_multiple_of(sector_bytes));
        let (mut first, mut rest) = (first, into);
        while !rest.is_empty() {
            let (slot, within) = self.locate(first);
            let count = (slot.sectors() - within).min((rest.len() / sector_bytes) as u64);
            let (now, later) = rest.split_at_mut(count as usize * sector_bytes);
            match slot {
                ArenaSlot::Arena(arena) => {
                    self.read_many_in(arena, within as u32, now, &mut |sector, reason| {
                        lost(first + u64::from(sector) - within, reason);
                    })
                }
                ArenaSlot::Missing { arena, .. } => {
                    now.fill(0);
                    (first..first + count)
                        .for_each(|sector| lost(sector, ReadFailure::Arena(*arena)));
                }
            }
            (first, rest) = (first + count, later);
        }
    }

    /// Reads adjacent sectors of one arena. Unreadable sectors are filled with zeros and passed to
    /// `lost`.
    fn read_many_in(
        &self,
        arena: &Arena,
        first: u32,
        into: &mut [u8],
        lost: &mut dyn FnMut(u32, ReadFailure),
    ) {
        into.fill(0);
        let sector_bytes = self.sector_bytes() as usize;
        let entries = self.entries(arena, first, into.len() / sector_bytes);
        // Runs of sectors in contiguous blocks. Each has its first sector, its offset, and its
        // number of sectors.
        let mut runs: Vec<(u32, u64, u64)> = Vec::new();
        for (sector, entry) in (first..).zip(entries) {
            let block = match entry {
                Ok(MapEntry { kind: MapKind::Zeros, .. }) => continue,
                Ok(MapEntry { kind: MapKind::Error, .. }) => Err(ReadFailure::Marked),
                Ok(entry) if entry.block >= arena.info.blocks => Err(ReadFailure::Outside),
                Ok(entry) => Ok(entry.block),
                Err(reason) => Err(reason),
            };
            match block.map(|block| arena.info.block_at(block)) {
                Ok(at) => match runs.last_mut() {
                    Some((start, from, count))
                        if u64::from(sector - *start) == *count
                            && *from + *count * sector_bytes as u64 == at =>
                    {
                        *count += 1;
                    }
                    _ => runs.push((sector, at, 1)),
                },
                Err(reason) => lost(sector, reason),
            }
        }
        for (start, from, count) in runs {
            let at = (start - first) as usize * sector_bytes;
            let bytes = &mut into[at..at + count as usize * sector_bytes];
            if self.space.read(from, bytes).is_ok() {
                continue;
            }
            for (number, bytes) in bytes.chunks_mut(sector_bytes).enumerate() {
                if let Err(error) = self.space.read(from + (number * sector_bytes) as u64, bytes) {
                    bytes.fill(0);
                    lost(start + number as u32, ReadFailure::Media(error));
                }
            }
        }
    }

    /// Returns map entries as they are after recovery. If they cannot be read together, they are
    /// read one by one.
    fn entries(
        &self,
        arena: &Arena,
        first: u32,
        count: usize,
    ) -> Vec<Result<MapEntry, ReadFailure>> {
        let mut bytes = vec![0; count * MAP_ENTRY_BYTES as usize];
        let at = arena.info.map_at + u64::from(first) * MAP_ENTRY_BYTES;
        let all = self.space.read(at, &mut bytes);
        let (entries, _) = bytes.as_chunks::<4>();
        let of_sector = |(sector, entry): (u32, &[u8; 4])| match (arena.pending.get(&sector), &all)
        {
            (Some(Some(block)), _) => Ok(MapEntry { block: *block, kind: MapKind::Data }),
            (Some(None), _) => Err(ReadFailure::NotRecovered),
            (None, Ok(())) => Ok(decode_map(sector, u32::from_le_bytes(*entry))),
            (None, Err(_)) => read_map(self.space, &arena.info, sector).map_err(ReadFailure::Media),
        };
        (first..).zip(entries).map(of_sector).collect()
    }

    /// Returns the part that contains a sector, and the number of the sector in this part.
    fn locate(&self, sector: u64) -> (&ArenaSlot, u64) {
        let mut sector = sector;
        for slot in &self.arena_slots {
            if sector < slot.sectors() {
                return (slot, sector);
            }
            sector -= slot.sectors();
        }
        panic!("sector {sector} is after the end of the volume");
    }
}

impl ArenaSlot {
    fn sectors(&self) -> u64 {
        match self {
            ArenaSlot::Arena(arena) => u64::from(arena.info.sectors),
            ArenaSlot::Missing { sectors, .. } => *sectors,
        }
    }
}
