//! Engine that gives any number of threads access to the sectors of a BTT.
//!
//! - [`exchange`]: order of the steps of a write.
//! - [`bulk_load`]: bulk filling of an empty BTT with fewer flushes.
//! - [`readers`]: protection of blocks that are being read. Readers and writers never wait for each
//!   other.
//! - [`map`]: map entries, which change while their line is locked. Apart from these locks, writes
//!   with different lanes ([`lanes`]) share nothing. Releasing a lock ([`lock`]) does not wait for
//!   pending stores.
//! - [`discard`]: discards, which leave unwritten sectors unchanged if possible.
//! - [`live_blocks`], [`release`]: a discard in a thin volume releases space without live blocks,
//!   as far as the budget allows ([`release_budget`]).
//! - [`compaction`]: empties the units that [`compaction_plan`] chooses, so that they are released.
//! - [`arena`]: recovery at open, reading, and handling of damage.
//!
//! A write is durable when it returns, as far as the media supports it ([`crate::Durability`]),
//! because recovery redoes committed exchanges. Therefore, a flush only reports errors. A program
//! without this recovery may use the media after [`Engine::quiesce`].
//!
//! An unreadable sector is an error of that sector alone. The sector can be written, which gives it
//! another block. After a failed store or persist, the durability of writes is unknown, so the
//! arena becomes read-only. If the pool has no space for a hole of a thin volume, the write fails
//! before it stores anything, and the arena stays writable.
//!
//! An arena whose flog or map is inconsistent is read-only. Its info blocks record this, as the
//! format requires. All other arenas remain writable.
//!
//! If neither info block of an arena is whole, none of its sectors can be read. The number of these
//! sectors follows from the size of the arena. If that size is unknown ([`arena_walk`]), the volume
//! cannot be opened.
//!
//! An arena whose flog cannot be read at open refuses reads and writes. If the map entry of a
//! lane's last write is unreadable, the arena refuses writes, and reads of that sector.

mod arena;
mod bulk_load;
mod compaction;
mod compaction_plan;
mod cpu;
mod discard;
mod exchange;
mod failed_blocks;
mod lanes;
mod live_blocks;
mod lock;
mod map;
mod readers;
mod release;
mod release_budget;
#[cfg(test)]
pub(super) mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use thiserror::Error;
use uuid::Uuid;

use self::arena::Arena;
pub use self::bulk_load::BulkLoad;
use self::map::{LOCKS, LineLocks};
use self::readers::{Readers, SLOTS};
use self::release_budget::ReleaseBudget;
use super::arena::{InfoError, InfoSource};
use super::arena_walk::{self, MissingArena, arenas};
use super::check::Finding;
use super::error::BttError;
use super::layout::PAGE_BYTES;
use crate::media::Media;

/// Maximum number of arenas. The largest pool has space for 128 arenas of full size. A volume that
/// has grown often has smaller ones.
pub(super) const MAX_ARENAS: usize = 1024;

/// Open BTT. Any number of threads may use it. If writes to the same sector overlap, one of them
/// takes effect last.
pub struct Engine<S> {
    common: Common<S>,
    sector_bytes: u32,
    sectors: u64,
    arena_slots: Vec<ArenaSlot>,
}

/// State that all arenas share.
struct Common<S> {
    space: S,
    locks: LineLocks,
    readers: Readers,
    /// Budget for releases, and the start of its time.
    budget: Mutex<ReleaseBudget>,
    epoch: Instant,
    /// Bytes that compactions have moved.
    compacted_bytes: AtomicU64,
}

/// Arena of the volume, which may be missing.
enum ArenaSlot {
    Arena(Box<Arena>),
    Missing { arena: usize, start_bytes: u64, first_sector: u64, sectors: u64, reason: InfoError },
}

/// Reason why an arena refuses writes. If it is [`Fault::Unreadable`], the arena also refuses some
/// or all reads.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum Fault {
    #[error("its error flag is set")]
    ErrorFlag,
    /// The flog or the map is inconsistent.
    #[error("{0}")]
    Damaged(Finding),
    /// The flog or a part of the map could not be read at open, so recovery stored nothing. If it
    /// was the flog, all reads fail. Otherwise, only reads of sectors whose last write is unknown
    /// fail.
    #[error("{0}")]
    Unreadable(Finding),
    /// A store or persist failed.
    #[error("the media failed earlier ({0})")]
    Media(String),
}

/// State of an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaStatus {
    /// Offset of the arena in the volume.
    pub start_bytes: u64,
    /// Number of the arena's first sector in the volume.
    pub first_sector: u64,
    /// Number of sectors in the arena.
    pub sectors: u64,
    /// UUID of the BTT in this arena. `None` if the arena is missing.
    pub uuid: Option<Uuid>,
    /// Info block of the arena that was used.
    pub source: Option<InfoSource>,
    /// Reason why the arena refuses writes. A missing arena also refuses all reads. An arena with
    /// [`Fault::Unreadable`] refuses some or all reads.
    pub read_only: Option<String>,
}

impl<S: Media> Engine<S> {
    /// Opens the BTT in `space`, which must not be open elsewhere, and recovers it. Damage is
    /// reported by [`Engine::arenas`], and by operations that it affects.
    pub fn open(space: S) -> Result<Self, BttError> {
        let mut engine = Self {
            common: Common::new(space),
            sector_bytes: 0,
            sectors: 0,
            arena_slots: Vec::new(),
        };
        let found = arenas(&engine.common.space);
        engine.sector_bytes = Self::check(&found)?;
        found.into_iter().try_for_each(|arena| engine.open_next(arena))?;
        Ok(engine)
    }

    /// Checks that [`Engine::open`] finds a usable BTT. Stores nothing.
    pub fn check_servable(space: &S) -> Result<(), BttError> {
        Self::check(&arenas(space)).map(drop)
    }

    /// Checks that the arenas are usable, before anything is stored. Returns the sector size.
    fn check(found: &[arena_walk::ArenaResult]) -> Result<u32, BttError> {
        if found.len() > MAX_ARENAS {
            return Err(BttError::Arenas);
        }
        let sector_bytes = match &found[0] {
            Err(MissingArena { start_bytes, reason, .. }) => {
                return Err(BttError::NoBtt { start_bytes: *start_bytes, reason: reason.clone() });
            }
            Ok((info, _)) => info.sector_bytes,
        };
        if ![512, 4096].contains(&sector_bytes) {
            return Err(BttError::SectorSize { sector_bytes });
        }
        for (arena, result) in found.iter().enumerate() {
            if let Err(MissingArena { start_bytes, end_bytes: None, reason }) = result {
                let (start_bytes, reason) = (*start_bytes, reason.clone());
                return Err(BttError::Ambiguous { arena, start_bytes, reason });
            }
        }
        Ok(sector_bytes)
    }

    fn open_next(&mut self, result: arena_walk::ArenaResult) -> Result<(), BttError> {
        let (arena, first_sector) = (self.arena_slots.len(), self.sectors);
        let slot = match result {
            Ok((info, source)) => ArenaSlot::Arena(Box::new(Arena::open(
                &self.common,
                (arena, first_sector),
                (info, source),
            )?)),
            Err(missing) => {
                let sectors = missing
                    .sectors(self.sector_bytes)
                    .expect("the end of the arena was checked to be known");
                let MissingArena { start_bytes, reason, .. } = missing;
                ArenaSlot::Missing { arena, start_bytes, first_sector, sectors, reason }
            }
        };
        self.sectors = slot.sectors().end;
        self.arena_slots.push(slot);
        Ok(())
    }

    /// Opens the arenas that were linked into the BTT since it was opened. Their sectors follow the
    /// existing ones. After an error, the arenas before the failed one are open.
    pub(crate) fn open_added_arenas(&mut self) -> Result<(), BttError> {
        let found = arenas(&self.common.space);
        Self::check(&found)?;
        let open = self.arena_slots.len();
        found.into_iter().skip(open).try_for_each(|arena| self.open_next(arena))?;
        let units = release_units(&self.common.space);
        self.common.locked_budget().grow(units);
        Ok(())
    }

    /// Returns the media of the BTT, so that they can grow.
    pub(crate) fn space_mut(&mut self) -> &mut S {
        &mut self.common.space
    }

    /// Returns the media of the BTT.
    pub fn space(&self) -> &S {
        &self.common.space
    }

    /// Size of a sector in bytes: 512 or 4096.
    pub fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// Number of sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Returns the state of all arenas, in order.
    pub fn arenas(&self) -> Vec<ArenaStatus> {
        self.arena_slots.iter().map(ArenaSlot::status).collect()
    }

    /// Reads whole sectors. Each contains the data of a write that has returned or is in progress.
    pub fn read(&self, first_sector: u64, into: &mut [u8]) -> Result<(), BttError> {
        let mut rest = into;
        for (arena, sectors) in self.parts(self.whole_sectors(first_sector, rest.len())?) {
            let arena = arena?;
            let (now, later) = rest.split_at_mut(sectors.len() * self.sector_bytes as usize);
            for (sector, into) in sectors.zip(now.chunks_exact_mut(self.sector_bytes as usize)) {
                arena.read(&self.common, sector, into)?;
            }
            rest = later;
        }
        Ok(())
    }

    /// Writes whole sectors. After a crash, each sector is old or new. If the call succeeds, all
    /// sectors are new. After an error, some sectors may be new. After [`BttError::Full`], sectors
    /// can still be written if they need no further space.
    pub fn write(&self, first_sector: u64, bytes: &[u8]) -> Result<(), BttError> {
        let mut rest = bytes;
        for (arena, sectors) in self.parts(self.whole_sectors(first_sector, rest.len())?) {
            let arena = arena?;
            let (mut now, later) = rest.split_at(sectors.len() * self.sector_bytes as usize);
            let mut first = sectors.start;
            while !now.is_empty() {
                arena.map.prefetch(&self.common.space, first);
                let done =
                    exchange::exchange(&self.common, arena, first, now).or_else(|error| {
                        exchange::exchange_after(error, &self.common, arena, first, now)
                    })?;
                first += done as u32;
                now = &now[done * self.sector_bytes as usize..];
            }
            rest = later;
        }
        Ok(())
    }

    /// Makes sectors read as zeros, like [`Engine::write_zeroes`]. Then releases space of a thin
    /// volume that contains no data any more, durably. Space whose last data was overwritten
    /// earlier is released too.
    pub fn discard(&self, sectors: Range<u64>) -> Result<(), BttError> {
        self.write_zeroes(sectors.clone())?;
        self.parts(sectors).try_for_each(|(arena, _)| arena?.release_unused(&self.common))
    }

    /// Moves live blocks of a thin volume together, and releases the space that this empties. A
    /// call empties a limited part of each arena. At most half a byte is moved for each released
    /// byte. `on_moved` is called with the number of bytes moved since its last call, and returns
    /// false to end the work. Returns the number of released bytes. 0 means that another call would
    /// release nothing now.
    pub fn compact(&self, on_moved: &mut dyn FnMut(u64) -> bool) -> Result<u64, BttError> {
        let mut result = Ok(0);
        for slot in &self.arena_slots {
            if let ArenaSlot::Arena(arena) = slot
                && arena.check_writable().is_ok()
            {
                // A damaged arena does not prevent the compaction of others.
                let released = arena.compact(&self.common, on_moved);
                result = result.and_then(|sum| released.map(|bytes| sum + bytes));
            }
        }
        result
    }

    /// Returns the number of bytes that [`Engine::compact`] has moved since the BTT was opened.
    pub fn compacted_bytes(&self) -> u64 {
        self.common.compacted_bytes.load(Ordering::Relaxed)
    }

    /// Makes sectors read as zeros, durably, by setting a flag in their map entries. The sectors
    /// keep their blocks. Sectors that were never written are unchanged if their blocks are holes.
    ///
    /// Sectors smaller than a page are written instead. The Linux driver reads several of them into
    /// one page. At an entry for zeros, it stops and reports success (drivers/nvdimm/btt.c,
    /// btt_read_pg), so it would skip the following sectors.
    pub fn write_zeroes(&self, sectors: Range<u64>) -> Result<(), BttError> {
        for (arena, sectors) in self.parts(self.inside(sectors)?) {
            let arena = arena?;
            if u64::from(self.sector_bytes) < PAGE_BYTES {
                arena.check_writable()?;
                arena.visit_nonzero(&self.common.space, sectors, |part| {
                    let [start, end] = [part.start, part.end].map(u64::from);
                    self.write_zero_bytes(arena.first_sector + start..arena.first_sector + end)
                })?;
                continue;
            }
            for sector in arena.discard(&self.common, sectors)? {
                exchange::exchange(&self.common, arena, sector, &[0; PAGE_BYTES as usize])?;
            }
        }
        Ok(())
    }

    fn write_zero_bytes(&self, sectors: Range<u64>) -> Result<(), BttError> {
        let zeros = [0; exchange::MAX_SECTORS * 512];
        let mut rest = self.inside(sectors)?;
        while !rest.is_empty() {
            let count =
                (rest.end - rest.start).min(zeros.len() as u64 / u64::from(self.sector_bytes));
            self.write(rest.start, &zeros[..count as usize * self.sector_bytes as usize])?;
            rest.start += count;
        }
        Ok(())
    }

    /// Bytes of all sectors that were written and not discarded since. `None` if they are not
    /// counted, because the media never releases space or an arena is damaged.
    pub fn live_bytes(&self) -> Option<u64> {
        let sectors = self.arena_slots.iter().map(|slot| match slot {
            ArenaSlot::Arena(arena) => arena.live.as_ref().map(|live| live.sectors()),
            ArenaSlot::Missing { .. } => None,
        });
        Some(sectors.sum::<Option<u64>>()? * u64::from(self.sector_bytes))
    }

    /// Returns when all earlier writes are durable, as far as the media supports it. Each write was
    /// already durable when it returned. An arena in which a write has failed returns an error. An
    /// arena that could not be read at open accepts no writes, so it does not prevent a flush of
    /// the others.
    pub fn flush(&self) -> Result<(), BttError> {
        for slot in &self.arena_slots {
            if let ArenaSlot::Arena(arena) = slot
                && let Some(reason @ Fault::Media(_)) = arena.fault()
            {
                return Err(BttError::ReadOnly { arena: arena.number, reason: reason.clone() });
            }
        }
        self.common.space.persist(&[]).map_err(BttError::Media)
    }

    /// Flushes like [`Engine::flush`], and also makes the map durable, so that a recovery has
    /// nothing to redo. Call it before a driver uses the media that assumes a durable map, such as
    /// the Linux driver. If an arena fails, or could not be read at open, the others are still
    /// quiesced.
    pub fn quiesce(&self) -> Result<(), BttError> {
        let mut refused = Ok(());
        for slot in &self.arena_slots {
            if let ArenaSlot::Arena(arena) = slot {
                let quiesced = arena.quiesce(&self.common.space);
                refused = refused.and(arena.check_recovered()).and(quiesced);
            }
        }
        let flushed = self.flush();
        refused.and(flushed)
    }

    #[inline]
    fn whole_sectors(&self, first: u64, length_bytes: usize) -> Result<Range<u64>, BttError> {
        let sector_bytes = self.sector_bytes;
        if !length_bytes.is_multiple_of(sector_bytes as usize) {
            return Err(BttError::Length { length_bytes, sector_bytes });
        }
        let end = first.saturating_add(length_bytes as u64 / u64::from(sector_bytes));
        self.inside(first..end)
    }

    #[inline]
    fn inside(&self, sectors: Range<u64>) -> Result<Range<u64>, BttError> {
        if sectors.start <= sectors.end && sectors.end <= self.sectors {
            return Ok(sectors);
        }
        Err(BttError::Outside { first: sectors.start, end: sectors.end, sectors: self.sectors })
    }

    /// Divides a range of sectors in the volume into ranges in its arenas.
    #[inline]
    fn parts(
        &self,
        mut rest: Range<u64>,
    ) -> impl Iterator<Item = (Result<&Arena, BttError>, Range<u32>)> {
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let slot = match &self.arena_slots[..] {
                // Most volumes have a single arena.
                [only] => only,
                arena_slots => {
                    &arena_slots
                        [arena_slots.partition_point(|slot| slot.sectors().end <= rest.start)]
                }
            };
            let all = slot.sectors();
            let end = rest.end.min(all.end);
            let part = (rest.start - all.start) as u32..(end - all.start) as u32;
            rest.start = end;
            Some((slot.arena(), part))
        })
    }
}

/// Number of units that the media can release.
fn release_units(space: &impl Media) -> u64 {
    space.release_unit_bytes().map_or(0, |unit| space.len_bytes() / unit)
}

impl<S: Media> Common<S> {
    fn new(space: S) -> Self {
        let budget = ReleaseBudget::new(release_units(&space));
        Self {
            space,
            locks: LineLocks::new(LOCKS),
            readers: Readers::new(SLOTS),
            budget: Mutex::new(budget),
            epoch: Instant::now(),
            compacted_bytes: AtomicU64::new(0),
        }
    }

    /// Returns the number of units that may be released now, up to `max`.
    fn releasable_units(&self, max: u64) -> u64 {
        let mut budget = self.locked_budget();
        let units = budget.take(max, self.epoch.elapsed());
        budget.give_back(units);
        units
    }

    fn locked_budget(&self) -> MutexGuard<'_, ReleaseBudget> {
        self.budget.lock().expect("no code panics while holding the budget")
    }
}

impl ArenaSlot {
    /// Returns the range of the arena's sectors in the volume.
    #[inline]
    fn sectors(&self) -> Range<u64> {
        match self {
            ArenaSlot::Arena(arena) => {
                arena.first_sector..arena.first_sector + u64::from(arena.info.sectors)
            }
            ArenaSlot::Missing { first_sector, sectors, .. } => {
                *first_sector..first_sector + sectors
            }
        }
    }

    #[inline]
    fn arena(&self) -> Result<&Arena, BttError> {
        match self {
            ArenaSlot::Arena(arena) => Ok(arena),
            ArenaSlot::Missing { arena, reason, .. } => {
                Err(BttError::Missing { arena: *arena, reason: reason.clone() })
            }
        }
    }

    fn status(&self) -> ArenaStatus {
        let Range { start: first_sector, end } = self.sectors();
        let sectors = end - first_sector;
        match self {
            ArenaSlot::Arena(arena) => ArenaStatus {
                start_bytes: arena.info.start_bytes,
                first_sector,
                sectors,
                uuid: Some(arena.info.uuid),
                source: Some(arena.source),
                read_only: arena.fault().map(Fault::to_string),
            },
            ArenaSlot::Missing { start_bytes, reason, .. } => ArenaStatus {
                start_bytes: *start_bytes,
                first_sector,
                sectors,
                uuid: None,
                source: None,
                read_only: Some(format!("neither info block is intact ({reason})")),
            },
        }
    }
}

impl<S> std::fmt::Debug for Engine<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("sectors", &self.sectors).finish_non_exhaustive()
    }
}
