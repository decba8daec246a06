//! Reading sectors of a volume that nobody writes: for checks, exports and tests.

use super::ReadAt;
use super::arena::{ArenaInfo, InfoError, read_arena};
use super::check::Finding;
use super::flog::{MapEntry, MapKind, read_map, recover};
use super::layout::{ARENA_MAX_BYTES, ARENA_MIN_BYTES, START_BYTES};
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

/// A BTT as it is after recovery, which is done in memory only.
pub struct Reader<'a, S> {
    space: &'a S,
    arenas: Vec<(ArenaInfo, std::collections::BTreeMap<u32, u32>)>,
}

impl<'a, S: ReadAt> Reader<'a, S> {
    /// Finds the arenas and replays their flogs. An arena that is not whole is an error.
    pub fn open(space: &'a S) -> Result<Result<Self, Finding>, MediaError> {
        let mut arenas = Vec::new();
        let mut next = Some(START_BYTES);
        while let Some(start) = next {
            let room = space.len_bytes().saturating_sub(start);
            if room < ARENA_MIN_BYTES {
                return Ok(Err(Finding::NoInfo(InfoError::Signature)));
            }
            let info = match read_arena(space, start, room.min(ARENA_MAX_BYTES))? {
                Ok((info, _)) => info,
                Err(error) => return Ok(Err(Finding::NoInfo(error))),
            };
            let mut recovery = recover(space, &info)?;
            if let Some(finding) = recovery.findings.pop() {
                return Ok(Err(finding));
            }
            next = info.next_bytes;
            arenas.push((info, recovery.redo));
        }
        Ok(Ok(Self { space, arenas }))
    }

    /// How many sectors there are.
    pub fn sectors(&self) -> u64 {
        self.arenas.iter().map(|(info, _)| u64::from(info.sectors)).sum()
    }

    /// Bytes of a sector, in the first arena and so in all.
    pub fn sector_bytes(&self) -> u32 {
        self.arenas[0].0.sector_bytes
    }

    /// Reads a sector into `bytes`, which has its size. `sector` is below [`Reader::sectors`].
    pub fn read(&self, sector: u64, bytes: &mut [u8]) -> Result<Sector, MediaError> {
        let mut sector = sector;
        for (info, redo) in &self.arenas {
            if sector < u64::from(info.sectors) {
                return self.read_in(info, redo.get(&(sector as u32)).copied(), sector as u32, bytes);
            }
            sector -= u64::from(info.sectors);
        }
        panic!("sector {sector} is behind the end of the volume");
    }

    fn read_in(
        &self,
        info: &ArenaInfo,
        redone: Option<u32>,
        sector: u32,
        bytes: &mut [u8],
    ) -> Result<Sector, MediaError> {
        assert_eq!(bytes.len(), info.sector_bytes as usize);
        let entry = match redone {
            Some(block) => MapEntry { block, kind: MapKind::Data },
            None => read_map(self.space, info, sector)?,
        };
        match entry.kind {
            MapKind::Error => Ok(Sector::Error),
            MapKind::Zeros => {
                bytes.fill(0);
                Ok(Sector::Zeros)
            }
            MapKind::Data if entry.block >= info.blocks => Ok(Sector::Error),
            MapKind::Data => self.space.read_at(info.block_at(entry.block), bytes).map(|()| Sector::Data),
        }
    }
}
