//! Reading sectors of a volume that nobody writes: for checks, exports and tests.

use std::collections::BTreeMap;

use thiserror::Error;

use super::ReadAt;
use super::arena::{ArenaInfo, arenas};
use super::check::Finding;
use super::flog::{MapEntry, MapKind, decode_map, read_map, recover};
use super::layout::{ArenaLayout, MAP_ENTRY_BYTES, arena_places_from};
use crate::media::MediaError;

/// What a sector holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sector {
    /// The bytes that were read.
    Data,
    /// Nothing: it reads as zeros.
    Zeros,
    /// The media under it failed.
    Error,
}

/// Why a sector cannot be read.
#[derive(Debug, Error)]
pub enum Lost {
    /// Its map entry says so.
    #[error("marked as lost")]
    Marked,
    /// Its map entry names no block.
    #[error("mapped outside the arena")]
    Outside,
    /// Its arena has lost both info blocks, and nobody knows where its map is.
    #[error("in arena {0}, which is lost")]
    Arena(usize),
    /// The media under it, or under its map entry, failed.
    #[error("{}", in_full(.0))]
    Media(MediaError),
}

/// An error and its cause, in one line.
fn in_full(error: &MediaError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// What keeps an arena from being whole, and its sectors from being what they were.
#[derive(Debug, Error)]
pub enum Trouble {
    /// Something is wrong with its metadata.
    #[error(transparent)]
    Finding(#[from] Finding),
    /// Its log cannot be read.
    #[error("the flog cannot be read ({0})")]
    Media(Lost),
}

/// An arena, with what recovery would do to its map.
struct Arena {
    info: ArenaInfo,
    redo: BTreeMap<u32, u32>,
}

/// Sectors that belong together.
enum Part {
    Arena(Arena),
    /// An arena without info blocks: as many sectors as one has that is laid out in its place.
    Missing {
        arena: usize,
        sectors: u32,
    },
}

impl Part {
    fn sectors(&self) -> u32 {
        match self {
            Part::Arena(arena) => arena.info.sectors,
            Part::Missing { sectors, .. } => *sectors,
        }
    }
}

/// A BTT as it is after recovery, which is done in memory only.
pub struct Reader<'a, S> {
    space: &'a S,
    sector_bytes: u32,
    parts: Vec<Part>,
}

impl<'a, S: ReadAt> Reader<'a, S> {
    /// Finds the arenas and replays their flogs. An arena that is not whole is an error.
    pub fn open(space: &'a S) -> Result<Result<Self, Finding>, MediaError> {
        let (found, lacking) = arenas(space)?;
        if let Some((_, error)) = lacking {
            return Ok(Err(Finding::NoInfo(error)));
        }
        let sector_bytes = found.first().map_or(0, |(info, _)| info.sector_bytes);
        let mut parts = Vec::with_capacity(found.len());
        for (info, _) in found {
            let mut recovery = recover(space, &info)?;
            if let Some(finding) = recovery.findings.pop() {
                return Ok(Err(finding));
            }
            parts.push(Part::Arena(Arena { info, redo: recovery.redo }));
        }
        Ok(Ok(Self { space, sector_bytes, parts }))
    }

    /// The same, of whatever can be found: a damaged flog has nothing that a map lacks but writes that nobody was told
    /// are done. An arena without info blocks keeps its place, so that there are as many sectors as there were; none of
    /// them can be read. What is wrong is told with the arena.
    pub fn open_damaged(space: &'a S) -> Result<(Self, Vec<(usize, Trouble)>), MediaError> {
        // Info blocks that cannot be read are damaged like any others.
        let (found, lacking) = arenas(&Forgiving(space))?;
        let mut troubles = Vec::new();
        let sector_bytes = found.first().map_or(0, |(info, _)| info.sector_bytes);
        let mut reader = Self { space, sector_bytes, parts: Vec::with_capacity(found.len()) };
        for (number, (info, _)) in found.into_iter().enumerate() {
            let redo = match recover(space, &info) {
                Ok(recovery) => {
                    troubles.extend(recovery.findings.into_iter().map(|finding| (number, finding.into())));
                    recovery.redo
                }
                Err(error) => {
                    troubles.push((number, Trouble::Media(Lost::Media(error))));
                    BTreeMap::new()
                }
            };
            reader.parts.push(Part::Arena(Arena { info, redo }));
        }
        if let Some((start, error)) = lacking {
            let behind = reader.parts.len();
            // Without the first one nobody knows the size of a sector.
            if behind > 0 {
                reader.add_missing(start);
            }
            let lost = |arena| (arena, Trouble::from(Finding::NoInfo(error.clone())));
            troubles.extend((behind..reader.parts.len().max(behind + 1)).map(lost));
        }
        Ok((reader, troubles))
    }

    /// What follows an arena without info blocks cannot be found: up to the end, arenas as they would be laid out.
    fn add_missing(&mut self, start: u64) {
        let places = arena_places_from(start, self.space.len_bytes());
        for layout in places.iter().flat_map(|place| ArenaLayout::all(&[*place], self.sector_bytes)) {
            let sectors = layout.sectors() as u32;
            self.parts.push(Part::Missing { arena: self.parts.len(), sectors });
        }
    }

    /// How many sectors there are.
    pub fn sectors(&self) -> u64 {
        self.parts.iter().map(|part| u64::from(part.sectors())).sum()
    }

    /// Bytes of a sector, in the first arena and so in all. 0: there is no arena.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// Reads a sector into `bytes`, which has its size. `sector` is below [`Reader::sectors`].
    pub fn read(&self, sector: u64, bytes: &mut [u8]) -> Result<Sector, MediaError> {
        assert_eq!(bytes.len(), self.sector_bytes() as usize);
        let (Part::Arena(arena), sector) = self.place_of(sector) else { return Ok(Sector::Error) };
        let entry = match arena.redo.get(&sector) {
            Some(block) => MapEntry { block: *block, kind: MapKind::Data },
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
                self.space.read_at(arena.info.block_at(entry.block), bytes).map(|()| Sector::Data)
            }
        }
    }

    /// Reads sectors from `first` on, as many as fit `into`, and goes on behind what cannot be read: that is zeros, and
    /// `lost` hears of it. They all are below [`Reader::sectors`].
    pub fn read_many(&self, first: u64, into: &mut [u8], lost: &mut dyn FnMut(u64, Lost)) {
        let sector_bytes = self.sector_bytes() as usize;
        assert!(into.len().is_multiple_of(sector_bytes));
        let (mut first, mut rest) = (first, into);
        while !rest.is_empty() {
            let (part, within) = self.place_of(first);
            let count = ((part.sectors() - within) as usize).min(rest.len() / sector_bytes);
            let (now, later) = rest.split_at_mut(count * sector_bytes);
            match part {
                Part::Arena(arena) => self.read_many_in(arena, within, now, &mut |sector, why| {
                    lost(first + u64::from(sector - within), why);
                }),
                Part::Missing { arena, .. } => {
                    now.fill(0);
                    (first..first + count as u64).for_each(|sector| lost(sector, Lost::Arena(*arena)));
                }
            }
            (first, rest) = (first + count as u64, later);
        }
    }

    /// The same in one arena.
    fn read_many_in(&self, arena: &Arena, first: u32, into: &mut [u8], lost: &mut dyn FnMut(u32, Lost)) {
        into.fill(0);
        let sector_bytes = self.sector_bytes() as usize;
        let entries = self.entries(arena, first, into.len() / sector_bytes);
        // Runs of sectors whose blocks follow each other: the first, where it is, and how many.
        let mut runs: Vec<(u32, u64, u64)> = Vec::new();
        for (sector, entry) in (first..).zip(entries) {
            let block = match entry {
                Ok(MapEntry { kind: MapKind::Zeros, .. }) => continue,
                Ok(MapEntry { kind: MapKind::Error, .. }) => Err(Lost::Marked),
                Ok(entry) if entry.block >= arena.info.blocks => Err(Lost::Outside),
                Ok(entry) => Ok(entry.block),
                Err(error) => Err(Lost::Media(error)),
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
                Err(why) => lost(sector, why),
            }
        }
        for (start, from, count) in runs {
            let at = (start - first) as usize * sector_bytes;
            let bytes = &mut into[at..at + count as usize * sector_bytes];
            if self.space.read_at(from, bytes).is_ok() {
                continue;
            }
            for (number, bytes) in bytes.chunks_mut(sector_bytes).enumerate() {
                if let Err(error) = self.space.read_at(from + (number * sector_bytes) as u64, bytes) {
                    bytes.fill(0);
                    lost(start + number as u32, Lost::Media(error));
                }
            }
        }
    }

    /// Map entries as recovery leaves them; those that cannot be read by themselves if not all of them can together.
    fn entries(&self, arena: &Arena, first: u32, count: usize) -> Vec<Result<MapEntry, MediaError>> {
        let mut bytes = vec![0; count * MAP_ENTRY_BYTES as usize];
        let at = arena.info.map_at + u64::from(first) * MAP_ENTRY_BYTES;
        let all = self.space.read_at(at, &mut bytes);
        let (entries, _) = bytes.as_chunks::<4>();
        let of_sector = |(sector, entry): (u32, &[u8; 4])| match (arena.redo.get(&sector), &all) {
            (Some(block), _) => Ok(MapEntry { block: *block, kind: MapKind::Data }),
            (None, Ok(())) => Ok(decode_map(sector, u32::from_le_bytes(*entry))),
            (None, Err(_)) => read_map(self.space, &arena.info, sector),
        };
        (first..).zip(entries).map(of_sector).collect()
    }

    /// Whose a sector is, and its number there.
    fn place_of(&self, sector: u64) -> (&Part, u32) {
        let mut sector = sector;
        for part in &self.parts {
            let sectors = u64::from(part.sectors());
            if sector < sectors {
                return (part, sector as u32);
            }
            sector -= sectors;
        }
        panic!("sector {sector} is behind the end of the volume");
    }
}

/// What cannot be read is zeros.
struct Forgiving<'a, S>(&'a S);

impl<S: ReadAt> ReadAt for Forgiving<'_, S> {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        if self.0.read_at(offset_bytes, into).is_err() {
            into.fill(0);
        }
        Ok(())
    }
}
