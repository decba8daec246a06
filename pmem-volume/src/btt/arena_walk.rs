//! The arenas of a volume, one after the other.
//!
//! Each says where the next one is. Behind one of which no info block is whole, the next one is
//! looked for from the volume's end: the last page of an arena is its second info block, at a place
//! where no sector ever lies, and says where its arena starts. A first info block would not do:
//! what looks like one may be what a guest has written to a sector.

use super::arena::{ArenaInfo, InfoError, InfoSource, read_arena, read_info};
use super::layout::{
    ARENA_MAX_BYTES, ARENA_MIN_BYTES, ArenaLayout, INFO_BYTES, PAGE_BYTES, SIGNATURE, START_BYTES,
    arena_places_from,
};
use crate::CHUNK_BYTES;
use crate::media::Media;

/// What lies at the place of an arena: itself, with the info block that was used, or nothing that
/// can be.
pub type Place = Result<(ArenaInfo, InfoSource), Missing>;

/// A place where an arena should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Where it starts in the volume.
    pub start_bytes: u64,
    /// Where it ends. `None`: nobody knows, nor what lies behind it.
    pub end_bytes: Option<u64>,
    /// What is there instead.
    pub why: InfoError,
}

impl Missing {
    /// How many sectors it had, of so many bytes, if it was laid out as all are.
    pub fn sectors(&self, sector_bytes: u32) -> Option<u64> {
        let size_bytes =
            (self.end_bytes? - self.start_bytes).min(ARENA_MAX_BYTES) / PAGE_BYTES * PAGE_BYTES;
        Some(ArenaLayout::all(&[(self.start_bytes, size_bytes)], sector_bytes)[0].sectors())
    }
}

/// Returns true if the block of the first info block can be read and has other content, as after a
/// guest has replaced its BTT. A block with the signature, for example a torn one, and a block that
/// cannot be read are damage of the BTT.
pub fn is_replaced(space: &impl Media) -> bool {
    let mut signature = [0; SIGNATURE.len()];
    let has_block = space.len_bytes() >= START_BYTES + SIGNATURE.len() as u64;
    has_block && space.read(START_BYTES, &mut signature).is_ok() && signature != SIGNATURE
}

/// Finds the arenas of a volume, from the first on. Where one is missing and its end is not known,
/// that is the last place.
pub fn arenas(space: &impl Media) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    let mut next = Some(START_BYTES);
    while let Some(start_bytes) = next {
        let room = space.len_bytes().saturating_sub(start_bytes);
        // Only the first arena can be without room: a later one was checked to have it by the one
        // before.
        if room < ARENA_MIN_BYTES {
            places.push(Err(Missing { start_bytes, end_bytes: None, why: InfoError::Signature }));
            break;
        }
        let size_bytes = room.min(ARENA_MAX_BYTES);
        let first = match places.first() {
            Some(Ok((first, _))) => Some(first),
            _ => None,
        };
        let place = match (read_arena(space, start_bytes, size_bytes), first) {
            (Ok((info, _)), Some(first)) if info.sector_bytes != first.sector_bytes => {
                let value = u64::from(info.sector_bytes);
                let rule = "all arenas have sectors of one size";
                let why = InfoError::Field { field: "external_lbasize", value, rule };
                next = info.next_bytes;
                Err(Missing {
                    start_bytes,
                    end_bytes: Some(next.unwrap_or(start_bytes + size_bytes)),
                    why,
                })
            }
            (Ok((info, source)), _) => {
                next = info.next_bytes;
                Ok((info, source))
            }
            (Err(why), first) => {
                let behind = first.and_then(|first| behind(space, start_bytes, first));
                let end_bytes = first.and_then(|_| end_of_missing(space, start_bytes, behind));
                next = behind.filter(|_| end_bytes.is_some());
                Err(Missing { start_bytes, end_bytes, why })
            }
        };
        places.push(place);
    }
    places
}

/// Where the last arena ends that the space from `start` on has room for.
fn last_end(space: &impl Media, start: u64) -> Option<u64> {
    arena_places_from(start, space.len_bytes()).last().map(|(start, size)| start + size)
}

/// Where the first of the arenas starts that lie behind a missing one, as far as they can be
/// followed from the end.
fn behind(space: &impl Media, missing_start: u64, first: &ArenaInfo) -> Option<u64> {
    let mut end = last_end(space, missing_start)?;
    let mut found = None;
    while let Some(start) = start_of_arena_to(space, end, missing_start, found, first) {
        found = Some(start);
        end = start;
    }
    found
}

/// Where the arena starts that ends there, if it does, is one of this BTT, and says that `next`
/// follows it.
fn start_of_arena_to(
    space: &impl Media,
    end: u64,
    missing_start: u64,
    next: Option<u64>,
    first: &ArenaInfo,
) -> Option<u64> {
    let copy_at = end.checked_sub(INFO_BYTES)?;
    let copy = read_info(space, copy_at).ok().filter(|block| block.signature == SIGNATURE)?;
    let start = copy_at.checked_sub(copy.info2off.get())?;
    // The missing one needs its room; and nothing is read in front of the volume.
    if start < missing_start + ARENA_MIN_BYTES || space.len_bytes() - start < ARENA_MIN_BYTES {
        return None;
    }
    let room = space.len_bytes() - start;
    let (info, source) = read_arena(space, start, room.min(ARENA_MAX_BYTES)).ok()?;
    // With a copy that is not whole there is nothing but a first block to believe.
    let is_it = source != InfoSource::First
        && info.copy_at == copy_at
        && info.next_bytes == next
        && (info.uuid, info.sector_bytes) == (first.uuid, first.sector_bytes);
    is_it.then_some(start)
}

/// Where a missing arena ends: where the next one starts that was found, or with the volume. `None`
/// if it may have been several: arenas end where a volume ended once, and at some such place there
/// is a trace of an info block, or nobody can read what is there.
fn end_of_missing(space: &impl Media, start: u64, behind: Option<u64>) -> Option<u64> {
    let end = behind.or_else(|| last_end(space, start))?;
    let has_no_trace = |at: u64| {
        let mut signature = [0; SIGNATURE.len()];
        space.read(at, &mut signature).is_ok() && signature != SIGNATURE
    };
    let first = (start + ARENA_MIN_BYTES).next_multiple_of(CHUNK_BYTES);
    let mut borders = (first..=end - ARENA_MIN_BYTES).step_by(CHUNK_BYTES as usize);
    let is_one = end - start <= ARENA_MAX_BYTES
        && borders.all(|border| has_no_trace(border) && has_no_trace(border - INFO_BYTES));
    is_one.then_some(end)
}
