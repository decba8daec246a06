//! Sequential reader of a map, which skips holes, and search for parts that are not holes.

use std::ops::Range;

use super::arena::ArenaInfo;
use super::layout::{MAP_ENTRY_BYTES, PAGE_BYTES};
use crate::media::{Media, MediaError};

/// Minimum and maximum number of entries that are read at a time.
const PIECE_ENTRIES: Range<u32> = 1 << 10..1 << 16;

/// Reads the map entries of sectors in pieces.
pub(super) struct MapReader<'a, S> {
    space: &'a S,
    map_at: u64,
    /// Sectors that have not been read.
    rest: Range<u32>,
    bytes: Vec<u8>,
}

/// Map entries of adjacent sectors.
pub(super) struct MapPiece<'a> {
    sectors: Range<u32>,
    /// Entries, or `None` in a hole.
    entries: Option<&'a [[u8; MAP_ENTRY_BYTES as usize]]>,
}

/// Returns the parts of a range that are not holes, so that only they are persisted. A small range
/// is not searched, because a persist of a hole does nothing.
pub(super) fn stored_parts(space: &impl Media, range: &Range<u64>) -> Vec<Range<u64>> {
    if range.end - range.start <= PAGE_BYTES {
        return vec![range.clone()];
    }
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut rest = range.clone();
    while !rest.is_empty()
        && let Some(data) = next_data(space, rest.clone())
    {
        // Whole pages keep the list short.
        let end = data.end.next_multiple_of(PAGE_BYTES).min(range.end);
        match parts.last_mut() {
            Some(last) if last.end == data.start => last.end = end,
            _ => parts.push(data.start..end),
        }
        rest.start = end;
    }
    parts
}

/// Returns the first part of `sectors` whose blocks are not holes. The sectors were never written,
/// so their blocks have their numbers.
pub(super) fn next_unwritten(
    space: &impl Media,
    info: &ArenaInfo,
    sectors: Range<u32>,
) -> Result<Option<Range<u32>>, MediaError> {
    if sectors.is_empty() {
        return Ok(None);
    }
    let from = info.data_range(sectors.start).start;
    let blocks = from..info.data_range(sectors.end - 1).end;
    let block_bytes = u64::from(info.block_bytes);
    let sector_of = |at: u64| sectors.start + ((at - from) / block_bytes) as u32;
    let data = space.next_data(blocks)?;
    Ok(data.map(|data| sector_of(data.start)..sector_of(data.end - 1) + 1))
}

/// Returns the first part of a range that is not a hole. If the media cannot report holes, an
/// access to the range reports the reason.
fn next_data(space: &impl Media, range: Range<u64>) -> Option<Range<u64>> {
    space.next_data(range.clone()).unwrap_or(Some(range))
}

impl<'a, S: Media> MapReader<'a, S> {
    pub(super) fn new(space: &'a S, info: &ArenaInfo, sectors: Range<u32>) -> Self {
        Self { space, map_at: info.map_at, rest: sectors, bytes: Vec::new() }
    }

    /// Returns the next piece, until all sectors have been read. An unreadable piece is skipped by
    /// the next call.
    pub(super) fn read_next(&mut self) -> Option<Result<MapPiece<'_>, MediaError>> {
        let Range { start, end } = self.rest;
        if start >= end {
            return None;
        }
        let offset = |sector: u32| self.map_at + u64::from(sector) * MAP_ENTRY_BYTES;
        let data = next_data(self.space, offset(start)..offset(end));
        let entry_of = |at: u64| ((at - self.map_at) / MAP_ENTRY_BYTES) as u32;
        let data = data.map_or(end..end, |data| {
            entry_of(data.start)..entry_of(data.end.next_multiple_of(MAP_ENTRY_BYTES))
        });
        if data.start > start {
            self.rest.start = data.start;
            return Some(Ok(MapPiece { sectors: start..data.start, entries: None }));
        }
        let count = (data.end - start).clamp(PIECE_ENTRIES.start, PIECE_ENTRIES.end);
        let sectors = start..end.min(start.saturating_add(count));
        self.rest.start = sectors.end;
        self.bytes.resize(sectors.len() * MAP_ENTRY_BYTES as usize, 0);
        let read = self.space.read(offset(sectors.start), &mut self.bytes);
        let (entries, _) = self.bytes.as_chunks();
        Some(read.map(|()| MapPiece { sectors, entries: Some(entries) }))
    }
}

impl MapPiece<'_> {
    pub(super) fn sectors(&self) -> Range<u32> {
        self.sectors.clone()
    }

    /// Returns true if no entry was ever stored. The entries are zeros.
    pub(super) fn is_hole(&self) -> bool {
        self.entries.is_none()
    }

    /// Returns each sector with its entry.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        let entry =
            |index: usize| self.entries.map_or(0, |entries| u32::from_le_bytes(entries[index]));
        self.sectors.clone().enumerate().map(move |(index, sector)| (sector, entry(index)))
    }
}
