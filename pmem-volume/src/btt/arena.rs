//! Reads and verifies the info block of an arena.

use std::ops::Range;

use thiserror::Error;
use uuid::Uuid;
use zerocopy::{FromZeros, IntoBytes};

use super::layout::{
    ARENA_MIN_BYTES, FLAG_ERROR, FLOG_GROUP_BYTES, INFO_BYTES, InfoBytes, MAP_BLOCK,
    MAP_ENTRY_BYTES, PAGE_BYTES, SIGNATURE, VERSION, checksum,
};
use crate::CHUNK_BYTES;
use crate::media::Media;

/// Sector sizes that Linux supports. Sizes that are not a power of two include integrity data.
const SECTOR_SIZES: [u32; 7] = [512, 520, 528, 4096, 4104, 4160, 4224];
/// Maximum number of lanes, which is more than any implementation uses.
const MAX_LANES: u32 = 1 << 16;

/// Verified info block of an arena. Every region is inside the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaInfo {
    /// Offset of the arena in the volume.
    pub start_bytes: u64,
    /// Offset of the next arena in the volume, if there is one.
    pub next_bytes: Option<u64>,
    /// End of the arena in the volume, as Linux calculates it. For the last arena, it is the end of
    /// the second info block.
    pub end_bytes: u64,
    /// Size of a sector in bytes.
    pub sector_bytes: u32,
    /// Number of sectors that the guest sees.
    pub sectors: u32,
    /// UUID of the BTT.
    pub uuid: Uuid,
    /// True if the arena had an error, which makes it read-only.
    pub has_error: bool,
    /// Offset of the second info block in the volume.
    pub copy_at: u64,
    /// Size of a block in bytes. A block contains one sector.
    pub block_bytes: u32,
    /// Number of blocks, which is the number of sectors plus the number of lanes.
    pub blocks: u32,
    /// Number of lanes, which limits the number of concurrent writes.
    pub lanes: u32,
    /// Offset of the first block in the volume.
    pub data_at: u64,
    /// Offset of the map in the volume.
    pub map_at: u64,
    /// Offset of the log in the volume.
    pub flog_at: u64,
}

/// Info block of an arena that was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InfoSource {
    /// Both info blocks are whole and equal.
    Both,
    /// Both info blocks are whole but differ. The first one was used, as in Linux.
    Differ,
    /// Only the first info block is whole.
    First,
    /// Only the second info block is whole. Linux does not read it, and would find no BTT here.
    Second,
}

/// Reason why an info block is invalid. A separate error type, because reports of checks contain
/// it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum InfoError {
    #[error("cannot read it: {0}")]
    Media(String),
    #[error("no BTT signature")]
    Signature,
    #[error("the checksum is wrong")]
    Checksum,
    /// The version is 2.0 or unknown.
    #[error("version {0}.{1} is not 1.1")]
    Version(u16, u16),
    #[error("{field} is {value:#x}, but {rule}")]
    Field { field: &'static str, value: u64, rule: &'static str },
}

/// Reads the info block of an arena, or its copy. `size_bytes` is the length of the arena based on
/// the volume's size, and the copy is at its end. An unreadable info block is treated like a
/// damaged one.
pub(super) fn read_arena(
    space: &impl Media,
    start_bytes: u64,
    size_bytes: u64,
) -> Result<(ArenaInfo, InfoSource), InfoError> {
    let end_bytes = space.len_bytes();
    let parse = |info: &InfoBytes| ArenaInfo::parse(info, start_bytes, end_bytes);
    let first = read_info(space, start_bytes).and_then(|block| Ok((parse(&block)?, block)));
    // The first info block contains the offset of the second one. Without the first, the second one
    // is at the place that Linux would use. If the volume has grown, it may be at an earlier end of
    // the volume.
    let second = match &first {
        Ok((_, block)) => read_info(space, start_bytes + block.info2off.get()),
        Err(_) => {
            let last = start_bytes + size_bytes - INFO_BYTES;
            let ends = (start_bytes + ARENA_MIN_BYTES).next_multiple_of(CHUNK_BYTES);
            let former = (ends..=start_bytes + size_bytes).step_by(CHUNK_BYTES as usize);
            // The info block of a later arena contains a different offset. An info block with a
            // wrong offset is not used as the copy, because a repair would write to that offset.
            let copy_at = |at: u64| {
                let block = Some(at)
                    .filter(|at| has_signature(space, *at))
                    .map(|at| read_info(space, at))?
                    .ok()?;
                let is_copy = parse(&block).is_ok() && start_bytes + block.info2off.get() == at;
                is_copy.then_some(block)
            };
            std::iter::once(last)
                .chain(former.map(|end| end - INFO_BYTES))
                .find_map(copy_at)
                .ok_or(InfoError::Signature)
        }
    };
    let second = second.and_then(|block| Ok((parse(&block)?, block)));
    match (first, second) {
        (Ok((info, first)), Ok((_, second))) if first.as_bytes() == second.as_bytes() => {
            Ok((info, InfoSource::Both))
        }
        (Ok((info, _)), Ok(_)) => Ok((info, InfoSource::Differ)),
        (Ok((info, _)), Err(_)) => Ok((info, InfoSource::First)),
        (Err(_), Ok((info, _))) => Ok((info, InfoSource::Second)),
        (Err(error), Err(_)) => Err(error),
    }
}

/// Reads a block that may be an info block.
pub(super) fn read_info(space: &impl Media, at: u64) -> Result<InfoBytes, InfoError> {
    let mut info = InfoBytes::new_zeroed();
    space
        .read(at, info.as_mut_bytes())
        .map_err(|error| InfoError::Media(foreshore_types::chain(&error)))?;
    Ok(info)
}

/// Checks for the signature of an info block. An unreadable block has no signature.
fn has_signature(space: &impl Media, at: u64) -> bool {
    let mut signature = [0; SIGNATURE.len()];
    space.read(at, &mut signature).is_ok() && signature == SIGNATURE
}

impl ArenaInfo {
    /// Verifies an info block of an arena at `start` in a volume that ends at `end`.
    pub(super) fn parse(info: &InfoBytes, start: u64, end: u64) -> Result<Self, InfoError> {
        if info.signature != SIGNATURE {
            return Err(InfoError::Signature);
        }
        if info.checksum.get() != checksum(info) {
            return Err(InfoError::Checksum);
        }
        let version = (info.version_major.get(), info.version_minor.get());
        if version != VERSION {
            return Err(InfoError::Version(version.0, version.1));
        }
        let next = info.nextoff.get();
        let room = end - start;
        let next_is_inside = ARENA_MIN_BYTES <= next && next <= room - ARENA_MIN_BYTES.min(room);
        let next_fits = next == 0 || next_is_inside && next.is_multiple_of(512);
        check_geometry(info)?;
        require("nextoff", next, next_fits, "the next arena is inside the volume, aligned to 512")?;
        check_regions(info, if next == 0 { room } else { next })?;
        Ok(Self {
            start_bytes: start,
            next_bytes: (next != 0).then_some(start + next),
            end_bytes: start + if next == 0 { info.info2off.get() + INFO_BYTES } else { next },
            sector_bytes: info.external_lbasize.get(),
            sectors: info.external_nlba.get(),
            uuid: Uuid::from_bytes(info.uuid),
            has_error: info.flags.get() & FLAG_ERROR != 0,
            copy_at: start + info.info2off.get(),
            block_bytes: info.internal_lbasize.get(),
            blocks: info.internal_nlba.get(),
            lanes: info.nfree.get(),
            data_at: start + info.dataoff.get(),
            map_at: start + info.mapoff.get(),
            flog_at: start + info.logoff.get(),
        })
    }

    /// Returns the range in which a block contains its sector. The block must be inside the arena.
    #[inline]
    pub(super) fn data_range(&self, block: u32) -> Range<u64> {
        // Wrapping, so that the compiler removes this computation from writes to media without
        // holes, which ignores the range.
        let start = self.data_at.wrapping_add(u64::from(block) * u64::from(self.block_bytes));
        start..start.wrapping_add(u64::from(self.sector_bytes))
    }

    /// Returns the offset of a block in the volume.
    #[inline]
    pub(super) fn block_at(&self, block: u32) -> u64 {
        assert!(block < self.blocks);
        self.data_at + u64::from(block) * u64::from(self.block_bytes)
    }
}

/// Checks the numbers of sectors, blocks and lanes.
fn check_geometry(info: &InfoBytes) -> Result<(), InfoError> {
    let number = u64::from;
    let sector = info.external_lbasize.get();
    let is_known_size = SECTOR_SIZES.contains(&sector);
    require(
        "external_lbasize",
        number(sector),
        is_known_size,
        "supported sizes are 512, 4096 and those with integrity data",
    )?;
    let block = info.internal_lbasize.get();
    let holds = (sector..=2 * PAGE_BYTES as u32).contains(&block);
    require("internal_lbasize", number(block), holds, "a block holds a sector and little more")?;
    let (sectors, blocks, lanes) =
        (info.external_nlba.get(), info.internal_nlba.get(), info.nfree.get());
    require(
        "nfree",
        number(lanes),
        lanes > 0 && lanes <= MAX_LANES,
        "an arena has 1 to 65536 lanes",
    )?;
    require(
        "internal_nlba",
        number(blocks),
        blocks <= MAP_BLOCK,
        "a map entry has 30 bits for a block",
    )?;
    let spare = sectors > 0 && sectors.checked_add(lanes).is_some_and(|sum| sum <= blocks);
    require("external_nlba", number(sectors), spare, "each sector and each lane has a block")
}

/// Checks the offsets of the regions. The geometry must be checked first.
fn check_regions(info: &InfoBytes, arena_bytes: u64) -> Result<(), InfoError> {
    let number = u64::from;
    let data_bytes = number(info.internal_nlba.get()) * number(info.internal_lbasize.get());
    let regions = [
        ("dataoff", info.dataoff.get(), data_bytes),
        ("mapoff", info.mapoff.get(), number(info.external_nlba.get()) * MAP_ENTRY_BYTES),
        ("logoff", info.logoff.get(), number(info.nfree.get()) * FLOG_GROUP_BYTES),
        ("info2off", info.info2off.get(), INFO_BYTES),
    ];
    let mut free_from = INFO_BYTES;
    for (field, offset, length) in regions {
        let region_end = offset.checked_add(length).filter(|region_end| *region_end <= arena_bytes);
        let aligned = offset.is_multiple_of(512);
        let rule = "regions follow each other inside the arena, aligned to 512";
        require(field, offset, aligned && offset >= free_from && region_end.is_some(), rule)?;
        free_from = offset + length;
    }
    Ok(())
}

fn require(
    field: &'static str,
    value: u64,
    holds: bool,
    rule: &'static str,
) -> Result<(), InfoError> {
    if holds { Ok(()) } else { Err(InfoError::Field { field, value, rule }) }
}
