//! An arena that is served: opened, recovered, and latched when something about it is wrong.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use zerocopy::{FromZeros, IntoBytes};

use super::failed::FailedBlocks;
use super::lanes::Lanes;
use super::map::{self, LINE_SECTORS, Map};
use super::{Common, EngineError, Fault};
use crate::btt::arena::{ArenaInfo, InfoSource};
use crate::btt::check::Finding;
use crate::btt::flog::{MapKind, Recovery, decode_map, recover};
use crate::btt::layout::{FLAG_ERROR, FLOG_GROUP_BYTES, INFO_BYTES, InfoBytes, checksum};
use crate::media::{Media, MediaError};

/// An arena whose info block is whole.
pub(super) struct Arena {
    /// Which one of the volume, from 0.
    pub(super) number: usize,
    /// The first of its sectors, as the volume counts them.
    pub(super) first_sector: u64,
    pub(super) info: ArenaInfo,
    pub(super) map: Map,
    pub(super) lanes: Lanes,
    /// Which slots the flog uses beside the first of each lane.
    pub(super) second_slot: usize,
    pub(super) source: InfoSource,
    /// Blocks of which a read has failed.
    failed: FailedBlocks,
    /// Blocks that recovery would store in the map if the arena were writable, by sector. `None`:
    /// the sector's last write is unknown.
    pending: BTreeMap<u32, Option<u32>>,
    /// Finding about a part of flog or map that recovery could not read. If the arena is damaged as
    /// well, `fault` holds the damage.
    unreadable: Option<Finding>,
    fault: OnceLock<Fault>,
}

impl Arena {
    /// Recovers an arena, durably, and makes it ready. A damaged arena gets its error flag and is
    /// read-only. If recovery cannot read the flog or the map, the arena is read-only until the
    /// next open, because the media may be readable then. Without its flog it also refuses reads.
    pub(super) fn open(
        common: &Common<impl Media>,
        (number, first_sector): (usize, u64),
        (info, source): (ArenaInfo, InfoSource),
    ) -> Result<Self, EngineError> {
        let space = &common.space;
        let mut recovery = recover(space, &info);
        let map = Map::new(&info);
        let mut findings = recovery.findings.iter();
        let unreadable = findings.clone().find(|finding| finding.is_unreadable()).cloned();
        let damage = findings.find(|finding| !finding.is_unreadable()).cloned();
        let damage = damage.or_else(|| recovery.block_twice());
        let fault = unreadable.clone().map(Fault::Unreadable);
        let fault = fault.or(info.has_error.then_some(Fault::ErrorFlag));
        if damage.is_none() && fault.is_none() {
            redo(common, &info, &map, &recovery).map_err(EngineError::Media)?;
            recovery.redo.clear();
        }
        let arena = Self {
            number,
            first_sector,
            map,
            pending: recovery.pending(),
            lanes: Lanes::new(recovery.lanes),
            second_slot: recovery.second_slot,
            source,
            failed: FailedBlocks::default(),
            unreadable,
            fault: OnceLock::new(),
            info,
        };
        match (damage, fault) {
            // Without its flag, a damaged arena would take writes of whoever opens it next.
            (Some(finding), _) => {
                let error = arena.damaged(space, finding);
                if matches!(error, EngineError::Media(_)) {
                    return Err(error);
                }
            }
            (None, Some(fault)) => drop(arena.fault.set(fault)),
            (None, None) => {}
        }
        Ok(arena)
    }

    /// Why it takes no writes, if it does not.
    pub(super) fn fault(&self) -> Option<&Fault> {
        self.fault.get()
    }

    #[inline]
    pub(super) fn check_writable(&self) -> Result<(), EngineError> {
        match self.fault.get() {
            Some(fault) => Err(EngineError::ReadOnly { arena: self.number, why: fault.clone() }),
            None => Ok(()),
        }
    }

    /// Fails if recovery was impossible or incomplete.
    pub(super) fn check_recovered(&self) -> Result<(), EngineError> {
        match self.unreadable.clone().map(Fault::Unreadable) {
            Some(why) => Err(EngineError::NotRecovered { arena: self.number, why }),
            None => Ok(()),
        }
    }

    /// Fails if the flog could not be read. It may hold writes of any sectors that the map lacks.
    /// The map entries of such sectors name blocks that may hold the data of other sectors.
    #[inline]
    fn check_readable(&self) -> Result<(), EngineError> {
        match self.unreadable {
            Some(Finding::FlogUnreadable(_)) => self.check_recovered(),
            _ => Ok(()),
        }
    }

    /// Passes a result of the media on, of stores and persists. The first failure makes the arena
    /// read-only: nobody knows what is durable since. A read that fails says nothing of that.
    #[inline]
    pub(super) fn latch<T>(&self, result: Result<T, MediaError>) -> Result<T, EngineError> {
        result.map_err(|error| {
            // Only the first fault is kept.
            let _ = self.fault.set(Fault::Media(foreshore_types::chain(&error)));
            EngineError::Media(error)
        })
    }

    /// Something on the media cannot be. From now on the arena is read-only, for whoever opens it
    /// later too.
    pub(super) fn damaged(&self, space: &impl Media, finding: Finding) -> EngineError {
        let why = Fault::Damaged(finding);
        if self.fault.set(why.clone()).is_ok()
            && let Err(error) = set_error_flag(space, &self.info, self.source)
        {
            return EngineError::Media(error);
        }
        EngineError::ReadOnly { arena: self.number, why }
    }

    /// Is what this sector has lost, because the media under its block failed?
    #[inline]
    pub(super) fn has_failed(&self, sector: u32, entry: u32) -> bool {
        let decoded = decode_map(sector, entry);
        decoded.kind == MapKind::Error || self.failed.contains(decoded.block)
    }

    /// Reads a sector. Never waits for a writer.
    ///
    /// Of a sector that the media cannot read, Linux marks the map entry, and nobody reads it again
    /// (drivers/nvdimm/btt.c, btt_read_pg). Here it is not marked, because it may be read at
    /// another time; its block is not written, either way.
    pub(super) fn read(
        &self,
        common: &Common<impl Media>,
        sector: u32,
        into: &mut [u8],
    ) -> Result<(), EngineError> {
        self.check_readable()?;
        let space = &common.space;
        let mut is_unwritten = false;
        let find = || {
            let entry = self.entry(space, sector)?;
            is_unwritten = map::is_unwritten(entry);
            let decoded = decode_map(sector, entry);
            match decoded.kind {
                MapKind::Zeros => return Ok(None),
                MapKind::Error => return Err(self.in_error(sector)),
                MapKind::Data => {}
            }
            let (block, bound) = (decoded.block, self.info.blocks);
            if block >= bound {
                drop(self.damaged(space, Finding::MapRange { sector, block, bound }));
                return Err(self.in_error(sector));
            }
            Ok(Some(self.info.block_at(block)))
        };
        let Some((at, _hold)) = common.readers.hold_found(find)? else {
            into.fill(0);
            return Ok(());
        };
        // What was never written may have no memory yet, and needs none to be read.
        let read = if is_unwritten { space.read(at, into) } else { space.load(at, into) };
        read.map_err(|source| {
            self.failed.add(((at - self.info.data_at) / u64::from(self.info.block_bytes)) as u32);
            EngineError::Unreadable { sector: self.first_sector + u64::from(sector), source }
        })
    }

    fn in_error(&self, sector: u32) -> EngineError {
        EngineError::Sector { sector: self.first_sector + u64::from(sector) }
    }

    fn entry(&self, space: &impl Media, sector: u32) -> Result<u32, EngineError> {
        match self.pending.get(&sector) {
            Some(Some(block)) => Ok(map::written(*block)),
            Some(None) => {
                let sector = self.first_sector + u64::from(sector);
                Err(EngineError::SectorNotRecovered { sector })
            }
            None => self.map.entry(space, sector).map_err(EngineError::Media),
        }
    }

    /// Makes durable what nobody would redo who went on with these lanes and knew nothing of them:
    /// the words of the map that they changed last. All others are durable, or are made so
    /// before an entry that counts forgets them.
    pub(super) fn settle(&self, space: &impl Media) -> Result<(), EngineError> {
        let changed =
            self.lanes.sectors().into_iter().map(|sector| self.map.words_of(&(sector..sector + 1)));
        self.latch(space.persist(&changed.collect::<Vec<_>>()))
    }

    /// Makes sectors read as zeros. Durable at return, and each of them before it or after it at
    /// any time. Returns those that are to be written instead, because the media under their
    /// blocks failed: they would keep them, and nobody would know.
    pub(super) fn discard(
        &self,
        common: &Common<impl Media>,
        sectors: Range<u32>,
    ) -> Result<Vec<u32>, EngineError> {
        let failed = self.store_discarded(common, sectors.clone())?;
        self.persist_discarded(&common.space, &sectors)?;
        Ok(failed)
    }

    /// The first half of [`Arena::discard`]: from here on others see zeros.
    pub(super) fn store_discarded(
        &self,
        common: &Common<impl Media>,
        sectors: Range<u32>,
    ) -> Result<Vec<u32>, EngineError> {
        self.check_writable()?;
        let space = &common.space;
        let mut failed = Vec::new();
        let mut first = sectors.start;
        while first < sectors.end {
            let end =
                (first / LINE_SECTORS * LINE_SECTORS).saturating_add(LINE_SECTORS).min(sectors.end);
            let locked = common.locks.lock(self.map.words_of(&(first..end)));
            let before = failed.len();
            for sector in first..end {
                // Nothing of the line is stored yet.
                let entry = self.map.entry(space, sector).map_err(EngineError::Media)?;
                failed.extend(Some(sector).filter(|_| self.has_failed(sector, entry)));
            }
            let discarded = |sector, entry| match failed[before..].contains(&sector) {
                true => entry,
                false => map::discarded(sector, entry),
            };
            self.latch(self.map.change(space, first..end, &locked, discarded))?;
            first = end;
        }
        Ok(failed)
    }

    /// The second half. An exchange of the same sector that comes in between makes the entry
    /// durable itself, before it counts.
    pub(super) fn persist_discarded(
        &self,
        space: &impl Media,
        sectors: &Range<u32>,
    ) -> Result<(), EngineError> {
        self.latch(space.persist(std::slice::from_ref(&self.map.words_of(sectors))))?;
        self.check_writable()
    }
}

/// Does what a crash kept from being done. Whoever wrote this may have been killed a moment ago,
/// and then nothing of what is seen need be durable yet:
///
/// 1. The flog, persist: what is redone now must be known to have happened, whatever comes next.
/// 2. The map, persist, and all of it. The lanes are used again, and then nobody redoes what their
///    newest entries say; and a discard that was seen once must not be undone.
fn redo(
    common: &Common<impl Media>,
    info: &ArenaInfo,
    map: &Map,
    recovery: &Recovery,
) -> Result<(), MediaError> {
    let space = &common.space;
    let flog_bytes = u64::from(info.lanes) * FLOG_GROUP_BYTES;
    space.persist(std::slice::from_ref(&(info.flog_at..info.flog_at + flog_bytes)))?;
    for (sector, block) in &recovery.redo {
        let sectors = *sector..*sector + 1;
        let locked = common.locks.lock(map.words_of(&sectors));
        map.change(space, sectors, &locked, |_, _| map::written(*block))?;
    }
    space.persist(std::slice::from_ref(&map.words_of(&(0..info.sectors))))
}

/// Sets the error flag in both info blocks, in the one that counts last: a crash in between leaves
/// one of them whole.
fn set_error_flag(
    space: &impl Media,
    info: &ArenaInfo,
    source: InfoSource,
) -> Result<(), MediaError> {
    let (from, other) = match source {
        InfoSource::Second => (info.copy_at, info.start_bytes),
        InfoSource::Both | InfoSource::Differ | InfoSource::First => {
            (info.start_bytes, info.copy_at)
        }
    };
    let mut block = InfoBytes::new_zeroed();
    space.read(from, block.as_mut_bytes())?;
    block.flags.set(block.flags.get() | FLAG_ERROR);
    let sum = checksum(&block);
    block.checksum.set(sum);
    for at in [other, from] {
        space.store(at, block.as_bytes())?;
        space.persist(std::slice::from_ref(&(at..at + INFO_BYTES)))?;
    }
    Ok(())
}
