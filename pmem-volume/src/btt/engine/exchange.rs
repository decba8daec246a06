//! The exchange: how sectors are written so that each is the old one or the new one, whenever it ends.
//!
//! Each sector has a lane of its own. Up to [`MAX_SECTORS`] that follow each other are exchanged together, and share the
//! barriers:
//!
//! 1. Lanes are taken, whose free blocks nobody reads.
//! 2. The lines of the map are locked. First halves of the flog entries: sector, and the block that it has. The data, to
//!    the free blocks. **Persist**: both, and two kinds of words of the map: those of the sectors, and those that the lanes
//!    changed last. (The data comes behind the lock because a locked instruction waits until it has left the CPU, as the
//!    fence does that follows.)
//! 3. Second halves: new block, sequence number. From each of them on its exchange counts. **Persist**.
//! 4. The words of the map. Others see the sectors from here on. The lines are unlocked.
//!
//! What each order is for:
//!
//! - Data before second half: an exchange that counts has all of its data.
//! - First half before second half: an entry that counts is whole. Until then the older entry of the two is overwritten,
//!   which nobody looks at.
//! - Second half before map: a map that names a new block while the flog does not know of the exchange would leave that
//!   block to a lane as well, and the old block to nobody.
//! - Map before the next entry of the same lane: the map need not be durable when a write returns, because recovery redoes
//!   it from the lane's newest entry. It must be durable before another entry is the newest. Hence step 2 persists the word
//!   that the lane changed last.
//! - Map before the next entry for the same sector, which may be another lane's: recovery of the later exchange alone finds
//!   a map that names neither its old block nor its new one, and of the earlier one after it a map that names its old
//!   one. Hence step 2 persists the words of its sectors.
//!
//! That the old block is overwritten by the lane's next data, before the map is durable, is no harm: until the lane's next
//! entry counts, recovery redoes the map, which ceases to name it.
//!
//! Linux' driver has the same steps, and persists each (drivers/nvdimm/btt.c, btt_write_pg). So it takes the map that it
//! finds for durable (btt_freelist_init), and overwrites lanes whose word of the map is not: it opens what this leaves once
//! [`Engine::settle`](super::Engine::settle) has returned, or once recovery has been done here.

use std::ops::Range;

use smallvec::SmallVec;

use super::arena::Arena;
use super::lanes::Taken;
use super::map::{self, Locked};
use super::{Common, EngineError};
use crate::btt::Words;
use crate::btt::check::Finding;
use crate::btt::flog::decode_map;
use crate::btt::layout::MAP_ERROR;

/// As many at most: a quarter of the lanes, so that four threads find some.
pub(super) const MAX_SECTORS: usize = 64;

/// An exchange that is under way. Dropped before it is logged, it never was.
pub(super) struct Exchange<'a, S> {
    common: &'a Common<S>,
    arena: &'a Arena,
    sectors: Range<u32>,
    lanes: Taken<'a>,
    /// The blocks that the sectors have, as the flog names them, once their lines are locked.
    logged: Option<(Locked<'a>, SmallVec<[u32; 1]>)>,
}

/// Exchanges as many of the sectors from `first` on as there are lanes for. `bytes` is whole sectors. Returns how many.
pub(super) fn exchange(
    common: &Common<impl Words>,
    arena: &Arena,
    first: u32,
    bytes: &[u8],
) -> Result<usize, EngineError> {
    let wanted = bytes.len() / arena.info.sector_bytes as usize;
    let mut exchange = Exchange::begin(common, arena, first, wanted);
    let sectors = exchange.sectors();
    exchange.log(bytes)?;
    exchange.commit()?;
    exchange.publish()?;
    Ok(sectors)
}

impl<'a, S: Words> Exchange<'a, S> {
    /// Step 1, for as many of the wanted sectors as there are lanes.
    pub(super) fn begin(common: &'a Common<S>, arena: &'a Arena, first: u32, wanted: usize) -> Self {
        let lanes = arena.lanes.take(wanted.min(MAX_SECTORS), &arena.info, &common.readers);
        Self { common, arena, sectors: first..first + lanes.len() as u32, lanes, logged: None }
    }

    /// Step 2. `bytes` has the sectors, and may have more.
    pub(super) fn log(&mut self, bytes: &[u8]) -> Result<(), EngineError> {
        let Self { common: Common { space, locks, .. }, arena, .. } = *self;
        let (info, map) = (&arena.info, &arena.map);
        let sector_bytes = info.sector_bytes as usize;
        let locked = locks.lock(map.words_of(&self.sectors));
        let olds = self.old_blocks()?;
        let by_range = space.persists_by_range();
        let mut ranges: SmallVec<[Range<u64>; 3]> = SmallVec::new();
        let mut blocks: SmallVec<[Range<u64>; 1]> = SmallVec::new();
        if by_range {
            ranges.reserve(2 * self.lanes.len() + 1);
            ranges.push(map.words_of(&self.sectors));
        }
        for ((lane, sector), old) in self.lanes.iter().zip(self.sectors.clone()).zip(&olds) {
            let at = lane.entry_at(info);
            let [first_half, _] = lane.halves(sector, *old);
            arena.latch(space.store_word(at, first_half))?;
            if by_range {
                ranges.push(at..at + 8);
                ranges.push(map.words_of(&(lane.sector..lane.sector + 1)));
            }
        }
        for (lane, data) in self.lanes.iter().zip(bytes.chunks_exact(sector_bytes)) {
            let at = info.block_at(lane.block);
            arena.latch(space.store_bulk(at, data))?;
            if by_range {
                blocks.push(at..at + sector_bytes as u64);
            }
        }
        arena.latch(space.persist_with_bulk(&ranges, &blocks))?;
        self.logged = Some((locked, olds));
        Ok(())
    }

    /// The blocks of the sectors, whose lines are locked, as the flog names them: one that failed has the flag, so that
    /// whoever opens the volume knows (Linux clears it then).
    fn old_blocks(&self) -> Result<SmallVec<[u32; 1]>, EngineError> {
        let Self { common: Common { space, .. }, arena, .. } = *self;
        let bound = arena.info.blocks;
        let mut olds = SmallVec::with_capacity(self.lanes.len());
        for sector in self.sectors.clone() {
            // Nothing is stored yet: what cannot be read leaves all as it was.
            let entry = arena.map.entry(space, sector).map_err(EngineError::Media)?;
            let block = decode_map(sector, entry).block;
            if block >= bound {
                return Err(arena.damaged(space, Finding::MapRange { sector, block, bound }));
            }
            olds.push(if arena.has_failed(sector, entry) { block | MAP_ERROR } else { block });
        }
        Ok(olds)
    }

    /// Step 3.
    pub(super) fn commit(&mut self) -> Result<(), EngineError> {
        let Self { common: Common { space, .. }, arena, .. } = *self;
        // Nothing counts any more once something has failed.
        arena.check_writable()?;
        let by_range = space.persists_by_range();
        let mut ranges: SmallVec<[Range<u64>; 1]> = SmallVec::new();
        for (lane, sector) in self.lanes.iter().zip(self.sectors.clone()) {
            let at = lane.entry_at(&arena.info) + 8;
            let [_, second_half] = lane.halves(sector, 0);
            arena.latch(space.store_word(at, second_half))?;
            if by_range {
                ranges.push(at..at + 8);
            }
        }
        arena.latch(space.persist(&ranges))
    }

    /// Step 4.
    pub(super) fn publish(mut self) -> Result<(), EngineError> {
        let (locked, olds) = self.logged.take().expect("it was logged before");
        let first = self.sectors.start;
        let lanes = &self.lanes;
        let new = |sector: u32, _| map::written(lanes[(sector - first) as usize].block);
        self.arena.latch(self.arena.map.change(&self.common.space, self.sectors.clone(), &locked, new))?;
        for ((lane, sector), old) in self.lanes.iter_mut().zip(self.sectors.clone()).zip(olds) {
            lane.advance(self.arena.second_slot, sector, old);
        }
        Ok(())
    }

    /// How many sectors it is of.
    pub(super) fn sectors(&self) -> usize {
        self.lanes.len()
    }
}
