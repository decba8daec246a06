//! Errors of BTT operations.

use thiserror::Error;

use super::arena::InfoError;
use super::engine::{Fault, MAX_ARENAS};
use super::layout::MIN_VOLUME_BYTES;
use crate::media::MediaError;
use foreshore_types::size::Size;

/// Error of an operation on a BTT. Arenas are numbered from 0.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages describe variants and fields")]
pub enum BttError {
    /// There is no BTT, or its first arena is lost. In both cases, the sector size is unknown.
    #[error("arena 0, at {start_bytes:#x}: neither info block is intact ({reason})")]
    NoBtt { start_bytes: u64, reason: InfoError },
    #[error("sector size {sector_bytes} is not supported; supported sizes are 512 and 4096")]
    SectorSize { sector_bytes: u32 },
    /// An arena is missing, and the arenas after it cannot be found. Searching for them is not
    /// safe, because a guest's data may look like an arena.
    #[error(
        "arena {arena}, at {start_bytes:#x}, is missing ({reason}). Its end is unknown, and so are the numbers of the sectors after it. Sectors before it can be read"
    )]
    Ambiguous { arena: usize, start_bytes: u64, reason: InfoError },
    /// The BTT has more arenas than any volume needs. Each of them uses memory.
    #[error("the BTT has more than {MAX_ARENAS} arenas, the maximum")]
    Arenas,
    #[error(
        "volume size {size_bytes} ({}) is too small for a BTT, which needs at least {}",
        Size(*size_bytes).rounded(), Size(MIN_VOLUME_BYTES).rounded()
    )]
    TooSmall { size_bytes: u64 },
    /// An arena is damaged, so no other can be added.
    #[error("arena {arena} of the BTT is damaged ({reason})")]
    Damaged { arena: usize, reason: String },
    #[error(
        "cannot extend the BTT: it already has {limit} arenas, the maximum; copy the volume to a new one"
    )]
    NoArenaLeft { limit: usize },
    #[error(
        "volume size {size_bytes} ({}) leaves less than the 16 MiB that another arena of the BTT needs; the minimum size is {} ({})",
        Size(*size_bytes).rounded(), least_bytes, Size(*least_bytes).rounded()
    )]
    TooLittleGrowth { size_bytes: u64, least_bytes: u64 },
    #[error(
        "volume size {size_bytes} ({}) is too small: a BTT shrinks only by whole arenas without data at its end; the minimum size is {} ({})",
        Size(*size_bytes).rounded(), least_bytes, Size(*least_bytes).rounded()
    )]
    TooMuchShrink { size_bytes: u64, least_bytes: u64 },
    #[error("sectors {first} to {} are outside the volume, which has {sectors} sectors", end.saturating_sub(1))]
    Outside {
        first: u64,
        /// First sector after the requested range.
        end: u64,
        sectors: u64,
    },
    #[error("{length_bytes} bytes are not a multiple of the sector size, {sector_bytes}")]
    Length { length_bytes: usize, sector_bytes: u32 },
    #[error("arena {arena} is read-only: {reason}")]
    ReadOnly { arena: usize, reason: Fault },
    /// Recovery at open was impossible or incomplete.
    #[error("arena {arena} is not recovered: {reason}")]
    NotRecovered { arena: usize, reason: Fault },
    /// The last write of the sector is unknown. The arena is read-only.
    #[error("sector {sector} is not recovered: a part of the map could not be read")]
    SectorNotRecovered { sector: u64 },
    #[error("arena {arena} is missing: neither info block is intact ({reason})")]
    Missing { arena: usize, reason: InfoError },
    /// The sector cannot be read, but can be written.
    #[error("sector {sector} is marked as failed: its content is lost")]
    Sector { sector: u64 },
    /// The media of the sector failed. The sector can be written.
    #[error("sector {sector} cannot be read")]
    Unreadable {
        sector: u64,
        #[source]
        source: MediaError,
    },
    /// The failed operation has changed nothing in the sectors that need space. The engine stays
    /// writable.
    #[error("the pool has no space for the write")]
    Full(#[source] MediaError),
    #[error("the media failed")]
    Media(#[source] MediaError),
}
