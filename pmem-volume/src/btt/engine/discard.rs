//! Discards.
//!
//! A sector that was never written maps to the block with its own number. If this block is a hole,
//! the sector already reads as zeros, and a discard leaves it unchanged. Otherwise, the discard of
//! a whole volume, which `mkfs` programs perform, would allocate space for its map.
//!
//! The sectors that need no change are found without a lock on the map. If another thread writes
//! such a sector in the meantime, the discard precedes that write. If the block of an unwritten
//! sector is a hole later, it was also a hole when the entry was read, because no space is released
//! during a discard.

use std::mem;
use std::ops::Range;

use smallvec::SmallVec;

use super::arena::Arena;
use super::live_blocks::LiveBlocks;
use super::map::{self, LINE_SECTORS};
use super::{BttError, Common};
use crate::btt::map_reader::{MapReader, next_unwritten, stored_parts};
use crate::media::{Media, is_zero};

impl Arena {
    /// Makes sectors read as zeros, durably. At any time, each of them reads as before or as zeros.
    /// Returns sectors whose blocks are on failed media. The caller must write these instead,
    /// because a discarded entry has no error flag.
    pub(super) fn discard(
        &self,
        common: &Common<impl Media>,
        sectors: Range<u32>,
    ) -> Result<Vec<u32>, BttError> {
        let _prevented = self.live.as_deref().map(LiveBlocks::prevent_release);
        let failed = self.store_discarded(common, sectors.clone());
        // If the pool was full, the entries that were changed before must be durable too.
        if matches!(failed, Ok(_) | Err(BttError::Full(_))) {
            self.persist_discarded(&common.space, &sectors)?;
        }
        failed
    }

    /// Performs the first half of [`Arena::discard`]. From here on, other threads read zeros.
    pub(super) fn store_discarded(
        &self,
        common: &Common<impl Media>,
        sectors: Range<u32>,
    ) -> Result<Vec<u32>, BttError> {
        self.check_writable()?;
        let mut failed = Vec::new();
        self.visit_nonzero(&common.space, sectors, |part| {
            failed.extend(self.mark_as_zeros(common, part)?);
            Ok(())
        })?;
        Ok(failed)
    }

    /// Performs the second half of [`Arena::discard`]. If a sector is exchanged between the halves,
    /// the exchange itself makes the entry durable before it is committed.
    pub(super) fn persist_discarded(
        &self,
        space: &impl Media,
        sectors: &Range<u32>,
    ) -> Result<(), BttError> {
        self.latch(space.persist(&stored_parts(space, &self.map.word_range(sectors))))?;
        self.check_writable()
    }

    /// Changes the map entries of sectors to zeros, including those of sectors that were never
    /// written. Returns sectors whose blocks are on failed media, which are unchanged.
    pub(super) fn mark_as_zeros(
        &self,
        common: &Common<impl Media>,
        sectors: Range<u32>,
    ) -> Result<Vec<u32>, BttError> {
        self.check_writable()?;
        let space = &common.space;
        self.provision(space, self.map.word_range(&sectors))?;
        let mut failed = Vec::new();
        let mut first = sectors.start;
        while first < sectors.end {
            let end =
                (first / LINE_SECTORS * LINE_SECTORS).saturating_add(LINE_SECTORS).min(sectors.end);
            let locked = common.locks.lock(self.map.word_range(&(first..end)));
            let before = failed.len();
            let mut replaced = SmallVec::<[(u32, u32); LINE_SECTORS as usize]>::new();
            for sector in first..end {
                // No entry in the line has been stored yet.
                let entry = self.map.entry(space, sector).map_err(BttError::Media)?;
                match self.has_failed(sector, entry) {
                    true => failed.push(sector),
                    false => replaced.push((sector, entry)),
                }
            }
            let discarded = |sector, entry| match failed[before..].contains(&sector) {
                true => entry,
                false => map::discarded_entry(sector, entry),
            };
            self.latch(self.map.change(space, first..end, &locked, discarded))?;
            if let Some(live) = &self.live {
                replaced.iter().for_each(|(sector, entry)| live.discard(*sector, *entry));
            }
            first = end;
        }
        Ok(failed)
    }

    /// Calls `visit` with ranges that contain all of `sectors` except unwritten ones that read as
    /// zeros.
    pub(super) fn visit_nonzero(
        &self,
        space: &impl Media,
        sectors: Range<u32>,
        mut visit: impl FnMut(Range<u32>) -> Result<(), BttError>,
    ) -> Result<(), BttError> {
        if sectors.len() <= LINE_SECTORS as usize && self.are_written(space, &sectors)? {
            return visit(sectors);
        }
        let mut run = sectors.start..sectors.start;
        // Adjacent parts are visited together.
        let mut add = |part: Range<u32>| {
            if part.start == run.end {
                run.end = part.end;
                return Ok(());
            }
            let previous = mem::replace(&mut run, part);
            if previous.is_empty() { Ok(()) } else { visit(previous) }
        };
        let mut reader = MapReader::new(space, &self.info, sectors);
        while let Some(piece) = reader.read_next() {
            let piece = piece.map_err(BttError::Media)?;
            if piece.is_hole() {
                // A change would allocate space for the map.
                self.add_nonzero(space, piece.sectors(), &mut add)?;
                continue;
            }
            let entries: Vec<(u32, u32)> = piece.iter().collect();
            let is_unwritten = |entry: &(u32, u32)| map::is_unwritten(entry.1);
            for same in entries.chunk_by(|a, b| is_unwritten(a) == is_unwritten(b)) {
                let part = same[0].0..same[0].0 + same.len() as u32;
                match is_unwritten(&same[0]) {
                    true => self.add_with_blocks(space, part, &mut add)?,
                    false => add(part)?,
                }
            }
        }
        let empty = run.end..run.end;
        match mem::replace(&mut run, empty) {
            last if last.is_empty() => Ok(()),
            last => visit(last),
        }
    }

    /// Returns true if all sectors were written or discarded before. Faster than a search for holes
    /// if there are few sectors.
    fn are_written(&self, space: &impl Media, sectors: &Range<u32>) -> Result<bool, BttError> {
        for sector in sectors.clone() {
            let entry = self.map.entry(space, sector).map_err(BttError::Media)?;
            if map::is_unwritten(entry) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Calls `add` with the unwritten sectors in a range whose blocks are not holes.
    fn add_with_blocks(
        &self,
        space: &impl Media,
        mut sectors: Range<u32>,
        add: &mut impl FnMut(Range<u32>) -> Result<(), BttError>,
    ) -> Result<(), BttError> {
        while let Some(part) =
            next_unwritten(space, &self.info, sectors.clone()).map_err(BttError::Media)?
        {
            sectors.start = part.end;
            add(part)?;
        }
        Ok(())
    }

    /// Calls `add` with those of the given unwritten sectors whose blocks contain data. The blocks
    /// are read.
    pub(super) fn add_nonzero(
        &self,
        space: &impl Media,
        sectors: Range<u32>,
        add: &mut impl FnMut(Range<u32>) -> Result<(), BttError>,
    ) -> Result<(), BttError> {
        let mut bytes = vec![0; self.info.sector_bytes as usize];
        self.add_with_blocks(space, sectors, &mut |part| {
            for sector in part {
                let read = space.read(self.info.block_at(sector), &mut bytes);
                if read.is_err() || !is_zero(&bytes) {
                    add(sector..sector + 1)?;
                }
            }
            Ok(())
        })
    }
}
