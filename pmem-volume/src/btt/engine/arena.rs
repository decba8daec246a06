//! Open arena. It has been recovered, and becomes read-only when a defect is found.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, OnceLock};

use zerocopy::{FromZeros, IntoBytes};

use super::compaction::Compaction;
use super::failed_blocks::FailedBlocks;
use super::lanes::Lanes;
use super::live_blocks::LiveBlocks;
use super::map::{self, Map};
use super::{BttError, Common, Fault};
use crate::btt::arena::{ArenaInfo, InfoSource};
use crate::btt::check::Finding;
use crate::btt::flog::{MapKind, Recovery, decode_map, recover};
use crate::btt::layout::{
    FLAG_ERROR, FLOG_GROUP_BYTES, INFO_BYTES, InfoBytes, MAP_BLOCK, PAGE_BYTES, checksum,
};
use crate::btt::map_reader::stored_parts;
use crate::media::{Media, MediaError};

/// Arena with a whole info block.
pub(super) struct Arena {
    /// Index of the arena in the volume.
    pub(super) number: usize,
    /// Number of the arena's first sector in the volume.
    pub(super) first_sector: u64,
    pub(super) info: ArenaInfo,
    pub(super) map: Map,
    pub(super) lanes: Lanes,
    /// Second slot that the flog uses in addition to slot 0.
    pub(super) second_slot: usize,
    pub(super) source: InfoSource,
    /// Live blocks of a thin volume. `None` if nothing is ever released.
    pub(super) live: Option<Box<LiveBlocks>>,
    /// Locked during a compaction.
    pub(super) compaction: Mutex<Compaction>,
    /// Blocks whose reads have failed.
    failed: FailedBlocks,
    /// Blocks by sector that recovery would store in the map if the arena were writable. `None`
    /// means that the sector's last write is unknown.
    pending: BTreeMap<u32, Option<u32>>,
    /// Finding about a part of the flog or the map that recovery could not read. If the arena is
    /// damaged as well, `fault` contains the damage.
    unreadable: Option<Finding>,
    fault: OnceLock<Fault>,
}

impl Arena {
    /// Recovers an arena durably, and makes it available. If the arena is damaged, it gets its
    /// error flag and is read-only. If recovery cannot read the flog or the map, the arena is
    /// read-only until the next open, because the media may be readable by then. If the flog is
    /// unreadable, reads fail too.
    pub(super) fn open(
        common: &Common<impl Media>,
        (number, first_sector): (usize, u64),
        (info, source): (ArenaInfo, InfoSource),
    ) -> Result<Self, BttError> {
        let space = &common.space;
        let mut recovery = recover(space, &info);
        let map = Map::new(&info);
        let mut findings = recovery.findings.iter();
        let unreadable = findings.clone().find(|finding| finding.is_unreadable()).cloned();
        let damage = findings.find(|finding| !finding.is_unreadable()).cloned();
        let damage = damage.or_else(|| recovery.block_with_two_owners());
        let fault = unreadable.clone().map(Fault::Unreadable);
        let fault = fault.or(info.has_error.then_some(Fault::ErrorFlag));
        if damage.is_none() && fault.is_none() {
            redo(common, &info, &map, &recovery).map_err(BttError::Media)?;
            recovery.redo.clear();
        }
        let is_writable = damage.is_none() && fault.is_none();
        let live = is_writable.then(|| count_live(space, &info, &recovery)).flatten();
        let arena = Self {
            number,
            first_sector,
            map,
            pending: recovery.pending(),
            lanes: Lanes::new(recovery.lanes),
            second_slot: recovery.second_slot,
            source,
            failed: FailedBlocks::default(),
            live: live.map(Box::new),
            compaction: Mutex::default(),
            unreadable,
            fault: OnceLock::new(),
            info,
        };
        match (damage, fault) {
            // Without the flag, the next program that opens the damaged arena would write to it.
            (Some(finding), _) => {
                let error = arena.mark_damaged(space, finding);
                if matches!(error, BttError::Media(_)) {
                    return Err(error);
                }
            }
            (None, Some(fault)) => drop(arena.fault.set(fault)),
            (None, None) => {}
        }
        Ok(arena)
    }

    /// Returns the reason why the arena is read-only.
    pub(super) fn fault(&self) -> Option<&Fault> {
        self.fault.get()
    }

    #[inline]
    pub(super) fn check_writable(&self) -> Result<(), BttError> {
        match self.fault.get() {
            Some(fault) => Err(BttError::ReadOnly { arena: self.number, reason: fault.clone() }),
            None => Ok(()),
        }
    }

    /// Fails if recovery was impossible or incomplete.
    pub(super) fn check_recovered(&self) -> Result<(), BttError> {
        match self.unreadable.clone().map(Fault::Unreadable) {
            Some(reason) => Err(BttError::NotRecovered { arena: self.number, reason }),
            None => Ok(()),
        }
    }

    /// Fails if the flog could not be read. The flog may contain writes that are missing in the
    /// map. The map entries of their sectors then name blocks that may contain data of other
    /// sectors.
    #[inline]
    fn check_readable(&self) -> Result<(), BttError> {
        match self.unreadable {
            Some(Finding::FlogUnreadable(_)) => self.check_recovered(),
            _ => Ok(()),
        }
    }

    /// Makes the arena read-only at the first failed store or persist, because the durability of
    /// writes is unknown from then on. Do not pass the results of reads, because they do not affect
    /// durability.
    #[inline]
    pub(super) fn latch<T>(&self, result: Result<T, MediaError>) -> Result<T, BttError> {
        result.map_err(|error| {
            // Only the first fault is recorded.
            let _ = self.fault.set(Fault::Media(foreshore_types::chain(&error)));
            BttError::Media(error)
        })
    }

    /// Allocates space for stores. If the pool is full, the arena stays writable, because nothing
    /// was stored.
    #[inline]
    pub(super) fn provision(&self, space: &impl Media, range: Range<u64>) -> Result<(), BttError> {
        match space.provision(range) {
            Err(full @ MediaError::Full { .. }) => Err(BttError::Full(full)),
            result => self.latch(result),
        }
    }

    /// Makes the arena read-only because its metadata is impossible. The error flag is stored
    /// durably.
    pub(super) fn mark_damaged(&self, space: &impl Media, finding: Finding) -> BttError {
        let reason = Fault::Damaged(finding);
        if self.fault.set(reason.clone()).is_ok()
            && let Err(error) = set_error_flag(space, &self.info, self.source)
        {
            return BttError::Media(error);
        }
        BttError::ReadOnly { arena: self.number, reason }
    }

    /// Returns true if the sector is lost because the media of its block failed.
    #[inline]
    pub(super) fn has_failed(&self, sector: u32, entry: u32) -> bool {
        let decoded = decode_map(sector, entry);
        decoded.kind == MapKind::Error || self.failed.contains(decoded.block)
    }

    /// Reads a sector. Never waits for a writer.
    ///
    /// Linux marks the map entry of an unreadable sector, which is then never read again
    /// (drivers/nvdimm/btt.c, btt_read_pg). It is not marked here, because it may become readable
    /// again. Its block is not written in either case.
    pub(super) fn read(
        &self,
        common: &Common<impl Media>,
        sector: u32,
        into: &mut [u8],
    ) -> Result<(), BttError> {
        self.check_readable()?;
        let space = &common.space;
        let mut is_unwritten = false;
        let find = || {
            let entry = self.entry(space, sector)?;
            is_unwritten = map::is_unwritten(entry);
            let decoded = decode_map(sector, entry);
            match decoded.kind {
                MapKind::Zeros => return Ok(None),
                MapKind::Error => return Err(self.sector_error(sector)),
                MapKind::Data => {}
            }
            let (block, bound) = (decoded.block, self.info.blocks);
            if block >= bound {
                drop(self.mark_damaged(space, Finding::MapRange { sector, block, bound }));
                return Err(self.sector_error(sector));
            }
            Ok(Some(self.info.block_at(block)))
        };
        let Some((at, _announcement)) = common.readers.announce_found(find)? else {
            into.fill(0);
            return Ok(());
        };
        // A sector that was never written may have no memory yet, and reading it must not allocate
        // any.
        let read = if is_unwritten { space.read(at, into) } else { space.load(at, into) };
        read.map_err(|source| self.block_error(sector, at, source))
    }

    /// Reads a live sector whose map line is locked.
    pub(super) fn load(
        &self,
        common: &Common<impl Media>,
        sector: u32,
        entry: u32,
        into: &mut [u8],
    ) -> Result<(), BttError> {
        if self.has_failed(sector, entry) {
            return Err(self.sector_error(sector));
        }
        let at = self.info.block_at(entry & MAP_BLOCK);
        common.space.load(at, into).map_err(|source| self.block_error(sector, at, source))
    }

    /// Records that the media of a sector's block has failed.
    fn block_error(&self, sector: u32, at: u64, source: MediaError) -> BttError {
        self.failed.add(((at - self.info.data_at) / u64::from(self.info.block_bytes)) as u32);
        BttError::Unreadable { sector: self.first_sector + u64::from(sector), source }
    }

    /// Records a block whose media has failed.
    #[cfg(test)]
    pub(super) fn add_failed(&self, block: u32) {
        self.failed.add(block);
    }

    fn sector_error(&self, sector: u32) -> BttError {
        BttError::Sector { sector: self.first_sector + u64::from(sector) }
    }

    fn entry(&self, space: &impl Media, sector: u32) -> Result<u32, BttError> {
        match self.pending.get(&sector) {
            Some(Some(block)) => Ok(map::written_entry(*block)),
            Some(None) => {
                let sector = self.first_sector + u64::from(sector);
                Err(BttError::SectorNotRecovered { sector })
            }
            None => self.map.entry(space, sector).map_err(BttError::Media),
        }
    }

    /// Makes the map words that the lanes changed last durable. Another program that uses the lanes
    /// without recovery would not redo them. All other words are already durable, or become durable
    /// before a later exchange that depends on them is committed.
    pub(super) fn quiesce(&self, space: &impl Media) -> Result<(), BttError> {
        let changed = self
            .lanes
            .sectors()
            .into_iter()
            .map(|sector| self.map.word_range(&(sector..sector + 1)));
        self.latch(space.persist(&changed.collect::<Vec<_>>()))
    }
}

/// Counts the live blocks, if the space of an arena can be released. Sectors smaller than a page
/// are never discarded. If a part of the map cannot be read, nothing is released.
fn count_live(space: &impl Media, info: &ArenaInfo, recovery: &Recovery) -> Option<LiveBlocks> {
    if u64::from(info.sector_bytes) < PAGE_BYTES {
        return None;
    }
    let failed = recovery.lanes.iter().filter(|lane| lane.has_failed).map(|lane| lane.block);
    LiveBlocks::count(space, info, failed).ok().flatten()
}

/// Completes the exchanges that a crash interrupted. Stores of a killed process are visible but not
/// necessarily durable, which requires two steps:
///
/// 1. Persist the flog, because the redone exchanges must remain committed.
/// 2. Persist the whole map except its holes. The lanes are reused, so their current entries will
///    not be redone again. Besides, a discard that was once visible must not be undone.
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
        let locked = common.locks.lock(map.word_range(&sectors));
        map.change(space, sectors, &locked, |_, _| map::written_entry(*block))?;
    }
    space.persist(&stored_parts(space, &map.word_range(&(0..info.sectors))))
}

/// Sets the error flag in both info blocks. The info block in use is written last, so one of them
/// is whole after a crash.
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
