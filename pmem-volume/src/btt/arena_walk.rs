//! Enumeration of the arenas in a volume.
//!
//! Each info block contains the offset of the next arena. If neither info block of an arena is
//! whole, the search for the next arena starts at the end of the volume. The last page of an arena
//! contains its second info block, from which the start of the arena follows. This page never
//! contains a sector. First info blocks cannot be used for the search, because a guest may have
//! written the same bytes to a sector.

use super::arena::{ArenaInfo, InfoError, InfoSource, read_arena, read_info};
use super::layout::{
    ARENA_MAX_BYTES, ARENA_MIN_BYTES, ArenaLayout, INFO_BYTES, PAGE_BYTES, SIGNATURE, START_BYTES,
    arena_ranges_from,
};
use crate::CHUNK_BYTES;
use crate::media::Media;

/// Existing arena with the info block that was used, or a missing arena.
pub type ArenaResult = Result<(ArenaInfo, InfoSource), MissingArena>;

/// Arena without a whole info block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingArena {
    /// Offset of the arena in the volume.
    pub start_bytes: u64,
    /// End of the arena in the volume, or `None` if it is unknown. In that case, everything after
    /// the arena is unknown too.
    pub end_bytes: Option<u64>,
    /// Reason why the arena is missing.
    pub reason: InfoError,
}

impl MissingArena {
    /// Returns the number of sectors of the given size, provided that the arena has the usual
    /// layout.
    pub fn sectors(&self, sector_bytes: u32) -> Option<u64> {
        let size_bytes =
            (self.end_bytes? - self.start_bytes).min(ARENA_MAX_BYTES) / PAGE_BYTES * PAGE_BYTES;
        Some(ArenaLayout::all(&[(self.start_bytes, size_bytes)], sector_bytes)[0].sectors())
    }
}

/// Returns true if a guest has replaced its BTT: the first info block is readable, but contains
/// something else. If it has the signature, for example because it is torn, or if it is unreadable,
/// the BTT is damaged instead.
pub fn is_replaced(space: &impl Media) -> bool {
    let mut signature = [0; SIGNATURE.len()];
    let has_block = space.len_bytes() >= START_BYTES + SIGNATURE.len() as u64;
    has_block && space.read(START_BYTES, &mut signature).is_ok() && signature != SIGNATURE
}

/// Finds the arenas of a volume, starting with the first. If the end of a missing arena is unknown,
/// that arena is the last element.
pub fn arenas(space: &impl Media) -> Vec<ArenaResult> {
    let mut arenas: Vec<ArenaResult> = Vec::new();
    let mut next = Some(START_BYTES);
    while let Some(start_bytes) = next {
        let room = space.len_bytes().saturating_sub(start_bytes);
        // Only the first arena can be too small, because each offset to a next arena is verified.
        if room < ARENA_MIN_BYTES {
            arenas.push(Err(MissingArena {
                start_bytes,
                end_bytes: None,
                reason: InfoError::Signature,
            }));
            break;
        }
        let size_bytes = room.min(ARENA_MAX_BYTES);
        let first = match arenas.first() {
            Some(Ok((first, _))) => Some(first),
            _ => None,
        };
        let arena = match (read_arena(space, start_bytes, size_bytes), first) {
            (Ok((info, _)), Some(first)) if info.sector_bytes != first.sector_bytes => {
                let value = u64::from(info.sector_bytes);
                let rule = "all arenas have sectors of one size";
                let reason = InfoError::Field { field: "external_lbasize", value, rule };
                next = info.next_bytes;
                Err(MissingArena {
                    start_bytes,
                    end_bytes: Some(next.unwrap_or(start_bytes + size_bytes)),
                    reason,
                })
            }
            (Ok((info, source)), _) => {
                next = info.next_bytes;
                Ok((info, source))
            }
            (Err(reason), first) => {
                let next_start = first.and_then(|first| arena_after(space, start_bytes, first));
                let end_bytes = first.and_then(|_| end_of_missing(space, start_bytes, next_start));
                next = next_start.filter(|_| end_bytes.is_some());
                Err(MissingArena { start_bytes, end_bytes, reason })
            }
        };
        arenas.push(arena);
    }
    arenas
}

/// Returns the end of the last arena that fits into the space from `start`.
fn last_end(space: &impl Media, start: u64) -> Option<u64> {
    arena_ranges_from(start, space.len_bytes()).last().map(|(start, size)| start + size)
}

/// Returns the start of the first arena after a missing one, found by following second info blocks
/// backwards from the end.
fn arena_after(space: &impl Media, missing_start: u64, first: &ArenaInfo) -> Option<u64> {
    let mut end = last_end(space, missing_start)?;
    let mut found = None;
    while let Some(start) = start_of_arena_ending_at(space, end, missing_start, found, first) {
        found = Some(start);
        end = start;
    }
    found
}

/// Returns the start of the arena that ends at `end`. Returns `None` if that arena does not belong
/// to this BTT, or if its next arena is not `next`.
fn start_of_arena_ending_at(
    space: &impl Media,
    end: u64,
    missing_start: u64,
    next: Option<u64>,
    first: &ArenaInfo,
) -> Option<u64> {
    let copy_at = end.checked_sub(INFO_BYTES)?;
    let copy = read_info(space, copy_at).ok().filter(|block| block.signature == SIGNATURE)?;
    let start = copy_at.checked_sub(copy.info2off.get())?;
    // There must be space for the missing arena. Reads must not begin before the volume.
    if start < missing_start + ARENA_MIN_BYTES || space.len_bytes() - start < ARENA_MIN_BYTES {
        return None;
    }
    let room = space.len_bytes() - start;
    let (info, source) = read_arena(space, start, room.min(ARENA_MAX_BYTES)).ok()?;
    // If the copy is not whole, only a first info block remains, which is not trustworthy.
    let is_predecessor = source != InfoSource::First
        && info.copy_at == copy_at
        && info.next_bytes == next
        && (info.uuid, info.sector_bytes) == (first.uuid, first.sector_bytes);
    is_predecessor.then_some(start)
}

/// Returns the end of a missing arena: the start of the next known arena, or the end of the volume.
/// Returns `None` if the space may have contained several arenas. Several arenas are possible if an
/// earlier end of the volume, where an arena could end, is unreadable or has traces of an info
/// block.
fn end_of_missing(space: &impl Media, start: u64, next_start: Option<u64>) -> Option<u64> {
    let end = next_start.or_else(|| last_end(space, start))?;
    let has_no_trace = |at: u64| {
        let mut signature = [0; SIGNATURE.len()];
        space.read(at, &mut signature).is_ok() && signature != SIGNATURE
    };
    let first = (start + ARENA_MIN_BYTES).next_multiple_of(CHUNK_BYTES);
    let mut borders = (first..=end - ARENA_MIN_BYTES).step_by(CHUNK_BYTES as usize);
    let is_single_arena = end - start <= ARENA_MAX_BYTES
        && borders.all(|border| has_no_trace(border) && has_no_trace(border - INFO_BYTES));
    is_single_arena.then_some(end)
}
