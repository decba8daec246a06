//! Info blocks that are damaged while their copy is whole.

use zerocopy::{FromZeros, IntoBytes};

use super::arena::{InfoSource, read_arena};
use super::check::Finding;
use super::layout::{ARENA_MAX_BYTES, ARENA_MIN_BYTES, INFO_BYTES, InfoBytes, START_BYTES};
use super::{ReadAt, WriteAt};
use crate::media::MediaError;

/// An info block to be written again from its copy.
#[derive(Debug)]
pub struct DamagedInfo {
    /// Arena, from 0.
    pub arena: usize,
    /// What is wrong.
    pub finding: Finding,
    at: u64,
    whole: InfoBytes,
}

/// Can the finding be mended from what the volume still has?
pub fn is_mendable(finding: &Finding) -> bool {
    matches!(finding, Finding::FirstInfo | Finding::SecondInfo | Finding::InfoDiffers)
}

/// Info blocks that are damaged, or differ from the first, which counts for Linux.
pub fn damaged_info(space: &impl ReadAt) -> Result<Vec<DamagedInfo>, MediaError> {
    let mut damaged = Vec::new();
    let (mut start, mut arena) = (START_BYTES, 0);
    loop {
        let room = space.len_bytes().saturating_sub(start);
        if room < ARENA_MIN_BYTES {
            return Ok(damaged);
        }
        let Ok((info, source)) = read_arena(space, start, room.min(ARENA_MAX_BYTES))? else {
            return Ok(damaged);
        };
        let second = info.copy_at;
        let pair = match source {
            InfoSource::Both => None,
            InfoSource::Differ => Some((Finding::InfoDiffers, start, second)),
            InfoSource::First => Some((Finding::SecondInfo, start, second)),
            InfoSource::Second => Some((Finding::FirstInfo, second, start)),
        };
        if let Some((finding, from, at)) = pair {
            let mut whole = InfoBytes::new_zeroed();
            space.read_at(from, whole.as_mut_bytes())?;
            damaged.push(DamagedInfo { arena, finding, at, whole });
        }
        match info.next_bytes {
            Some(next) => (start, arena) = (next, arena + 1),
            None => return Ok(damaged),
        }
    }
}

impl DamagedInfo {
    /// Writes the block again, durably. A crash in between leaves it damaged and its copy whole.
    pub fn write(&self, space: &impl WriteAt) -> Result<(), MediaError> {
        space.write_at(self.at, self.whole.as_bytes())?;
        space.persist(std::slice::from_ref(&(self.at..self.at + INFO_BYTES)))
    }
}
