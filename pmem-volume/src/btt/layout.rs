//! Media format of a BTT, and calculation of its layout. Offsets in an info block are relative to
//! the start of its arena.

use std::mem::{offset_of, size_of};

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::BttError;
use crate::CHUNK_BYTES;
use crate::media::{MAX_MAPPED_BYTES, Media, MediaError};

/// First bytes of an info block.
pub(super) const SIGNATURE: [u8; 16] = *b"BTT_ARENA_INFO\0\0";
/// Version 1.1, which namespaces without labels use.
pub(super) const VERSION: (u16, u16) = (1, 1);
/// Offset of the first arena in a volume in version 1.1.
pub const START_BYTES: u64 = 4096;
/// Alignment of all regions except sectors.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Sector size of volumes that a pool creates.
pub const SECTOR_BYTES: u32 = 4096;
/// Minimum size of an arena.
pub const ARENA_MIN_BYTES: u64 = 16 << 20;
/// Maximum size of an arena.
pub const ARENA_MAX_BYTES: u64 = 512 << 30;
/// Minimum size of a volume with a BTT: the offset of the first arena plus its minimum size, in
/// whole chunks.
pub const MIN_VOLUME_BYTES: u64 = (START_BYTES + ARENA_MIN_BYTES).next_multiple_of(CHUNK_BYTES);
/// Number of lanes, which is also the number of free blocks. Linux requires 256.
pub(super) const LANES: u32 = 256;
/// The block size is the sector size rounded up to a multiple of this.
const BLOCK_ALIGNMENT: u32 = 64;

/// Size of a map entry in bytes.
pub(super) const MAP_ENTRY_BYTES: u64 = 4;
/// Bits of a map entry that contain the block.
pub(super) const MAP_BLOCK: u32 = (1 << 30) - 1;
/// Bit of a map entry: reads of the sector fail. With [`MAP_ZERO`] also set, the entry is an
/// ordinary one.
pub(super) const MAP_ERROR: u32 = 1 << 30;
/// Bit of a map entry: the sector reads as zeros. With [`MAP_ERROR`] also set, the entry is an
/// ordinary one.
pub(super) const MAP_ZERO: u32 = 1 << 31;
/// Flag in an info block: the arena has an error and is read-only.
pub(super) const FLAG_ERROR: u32 = 1;

/// Info block, which is stored at the start and at the end of an arena.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InfoBytes {
    pub(super) signature: [u8; 16],
    pub(super) uuid: [u8; 16],
    pub(super) parent_uuid: [u8; 16],
    pub(super) flags: U32,
    pub(super) version_major: U16,
    pub(super) version_minor: U16,
    pub(super) external_lbasize: U32,
    pub(super) external_nlba: U32,
    pub(super) internal_lbasize: U32,
    pub(super) internal_nlba: U32,
    pub(super) nfree: U32,
    pub(super) infosize: U32,
    pub(super) nextoff: U64,
    pub(super) dataoff: U64,
    pub(super) mapoff: U64,
    pub(super) logoff: U64,
    pub(super) info2off: U64,
    pub(super) reserved: [u8; 3968],
    pub(super) checksum: U64,
}

/// Entry of the flog.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct FlogEntryBytes {
    pub(super) lba: U32,
    pub(super) old_map: U32,
    pub(super) new_map: U32,
    pub(super) sequence: U32,
}

/// Part of the flog that belongs to a lane. Two of the four entries are used. Which ones depends on
/// the implementation that wrote the flog.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct FlogGroupBytes {
    pub(super) entries: [FlogEntryBytes; 4],
}

pub(super) const INFO_BYTES: u64 = size_of::<InfoBytes>() as u64;
pub(super) const FLOG_GROUP_BYTES: u64 = size_of::<FlogGroupBytes>() as u64;

const _: () = {
    assert!(size_of::<InfoBytes>() == 4096);
    assert!(offset_of!(InfoBytes, flags) == 48);
    assert!(offset_of!(InfoBytes, external_lbasize) == 56);
    assert!(offset_of!(InfoBytes, nfree) == 72);
    assert!(offset_of!(InfoBytes, nextoff) == 80);
    assert!(offset_of!(InfoBytes, info2off) == 112);
    assert!(offset_of!(InfoBytes, checksum) == 4088);
    assert!(size_of::<FlogGroupBytes>() == 64);
    assert!(MIN_VOLUME_BYTES == 18 << 20);
};

/// Computes the 64-bit Fletcher checksum of 32-bit words, with the checksum field set to zero.
pub(super) fn checksum(info: &InfoBytes) -> u64 {
    let (mut low, mut high) = (0u32, 0u32);
    let bytes = info.as_bytes();
    let (words, _) = bytes[..offset_of!(InfoBytes, checksum)].as_chunks::<4>();
    // Two additional zero words represent the checksum field itself.
    for word in words.iter().map(|w| u32::from_le_bytes(*w)).chain([0, 0]) {
        low = low.wrapping_add(word);
        high = high.wrapping_add(low);
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Layout for a new BTT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    sector_bytes: u32,
    uuid: Uuid,
    pub(super) arenas: Vec<ArenaLayout>,
}

/// Layout of an arena. All offsets except `start` are relative to the start of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArenaLayout {
    /// Offset of the arena in the volume.
    pub(super) start: u64,
    pub(super) internal_lbasize: u32,
    pub(super) internal_nlba: u32,
    pub(super) external_nlba: u32,
    pub(super) dataoff: u64,
    pub(super) mapoff: u64,
    pub(super) logoff: u64,
    pub(super) info2off: u64,
    pub(super) nextoff: u64,
}

/// Returns the start and size of each arena in a volume. They are the same for all sector sizes.
pub(super) fn arena_ranges(volume_bytes: u64) -> Vec<(u64, u64)> {
    arena_ranges_from(START_BYTES, volume_bytes)
}

/// Returns the start and size of each arena in the part of a volume that begins at `start`.
pub(super) fn arena_ranges_from(start: u64, volume_bytes: u64) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    let mut start = start;
    while volume_bytes.saturating_sub(start) >= ARENA_MIN_BYTES {
        let size = (volume_bytes - start).min(ARENA_MAX_BYTES) / PAGE_BYTES * PAGE_BYTES;
        ranges.push((start, size));
        start += size;
    }
    ranges
}

/// Returns the smallest volume size, in whole chunks, for which sectors of [`SECTOR_BYTES`] can
/// hold `data_bytes`. Returns `None` if no pool has space for it.
pub fn volume_bytes_for(data_bytes: u64) -> Option<u64> {
    let mut size_bytes = data_bytes.max(MIN_VOLUME_BYTES).checked_next_multiple_of(CHUNK_BYTES)?;
    while size_bytes <= MAX_MAPPED_BYTES {
        let layout = Layout::new(size_bytes, SECTOR_BYTES, Uuid::nil()).ok()?;
        match data_bytes.saturating_sub(layout.sectors() * u64::from(SECTOR_BYTES)) {
            0 => return Some(size_bytes),
            missing_bytes => size_bytes += missing_bytes.next_multiple_of(CHUNK_BYTES),
        }
    }
    None
}

impl Layout {
    /// Calculates the layout of a volume, as Linux would.
    pub fn new(volume_bytes: u64, sector_bytes: u32, uuid: Uuid) -> Result<Self, BttError> {
        if ![512, 4096].contains(&sector_bytes) {
            return Err(BttError::SectorSize { sector_bytes });
        }
        let ranges = arena_ranges(volume_bytes);
        if ranges.is_empty() {
            return Err(BttError::TooSmall { size_bytes: volume_bytes });
        }
        Ok(Self { sector_bytes, uuid, arenas: ArenaLayout::all(&ranges, sector_bytes) })
    }

    /// Number of sectors that the guest sees.
    pub fn sectors(&self) -> u64 {
        self.arenas.iter().map(ArenaLayout::sectors).sum()
    }

    /// Writes an empty BTT. The space must read as zeros, like an unwritten map.
    pub fn format(&self, space: &impl Media) -> Result<(), MediaError> {
        write_arenas(space, &self.arenas, &self.common())
    }

    /// Returns an info block with the fields that all arenas share.
    fn common(&self) -> InfoBytes {
        let mut common = InfoBytes::new_zeroed();
        common.signature = SIGNATURE;
        common.uuid = self.uuid.into_bytes();
        // The parent is the namespace, which has no UUID without labels. A null UUID matches any
        // parent.
        common.version_major.set(VERSION.0);
        common.version_minor.set(VERSION.1);
        common.external_lbasize.set(self.sector_bytes);
        common
    }
}

/// Writes empty arenas. `common` contains their shared fields: UUIDs, version and sector size.
///
/// The last arena is written first, so that no arena is recognized until all are complete. For each
/// arena:
/// 1. Write the flog and the second info block, and persist them.
/// 2. Write the first info block and persist it.
pub(super) fn write_arenas(
    space: &impl Media,
    arenas: &[ArenaLayout],
    common: &InfoBytes,
) -> Result<(), MediaError> {
    for arena in arenas.iter().rev() {
        let flog = arena.initial_flog();
        let info = arena.info(common);
        let (flog_at, backup_at) = (arena.start + arena.logoff, arena.start + arena.info2off);
        space.store(flog_at, &flog)?;
        space.store(backup_at, info.as_bytes())?;
        space
            .persist(&[flog_at..flog_at + flog.len() as u64, backup_at..backup_at + INFO_BYTES])?;
        space.store(arena.start, info.as_bytes())?;
        space.persist(std::slice::from_ref(&(arena.start..arena.start + INFO_BYTES)))?;
    }
    Ok(())
}

impl ArenaLayout {
    /// Returns the layouts of arenas in `ranges`, each with its start and size. The last one is
    /// also the last arena of the BTT.
    pub(super) fn all(ranges: &[(u64, u64)], sector_bytes: u32) -> Vec<Self> {
        let last = ranges.len() - 1;
        let numbered = ranges.iter().enumerate();
        numbered
            .map(|(at, (start, size))| Self::new(*start, *size, sector_bytes, at == last))
            .collect()
    }

    /// Number of sectors.
    pub(super) fn sectors(&self) -> u64 {
        u64::from(self.external_nlba)
    }

    fn info(&self, common: &InfoBytes) -> InfoBytes {
        let mut info = common.clone();
        info.flags.set(0);
        info.external_nlba.set(self.external_nlba);
        info.internal_lbasize.set(self.internal_lbasize);
        info.internal_nlba.set(self.internal_nlba);
        info.nfree.set(LANES);
        info.infosize.set(INFO_BYTES as u32);
        info.nextoff.set(self.nextoff);
        info.dataoff.set(self.dataoff);
        info.mapoff.set(self.mapoff);
        info.logoff.set(self.logoff);
        info.info2off.set(self.info2off);
        let sum = checksum(&info);
        info.checksum.set(sum);
        info
    }

    fn new(start: u64, size: u64, sector_bytes: u32, is_last: bool) -> Self {
        let internal_lbasize = sector_bytes.next_multiple_of(BLOCK_ALIGNMENT);
        let log_bytes = (u64::from(LANES) * FLOG_GROUP_BYTES).next_multiple_of(PAGE_BYTES);
        let available = size - 2 * PAGE_BYTES - log_bytes;
        let blocks = (available - PAGE_BYTES) / (u64::from(internal_lbasize) + MAP_ENTRY_BYTES);
        let internal_nlba = u32::try_from(blocks).expect("an arena's size bounds its blocks");
        let external_nlba = internal_nlba - LANES;
        let map_bytes = (u64::from(external_nlba) * MAP_ENTRY_BYTES).next_multiple_of(PAGE_BYTES);
        let dataoff = PAGE_BYTES;
        let mapoff = dataoff + available - map_bytes;
        let logoff = mapoff + map_bytes;
        let info2off = logoff + log_bytes;
        let nextoff = if is_last { 0 } else { size };
        Self {
            start,
            internal_lbasize,
            internal_nlba,
            external_nlba,
            dataoff,
            mapoff,
            logoff,
            info2off,
            nextoff,
        }
    }

    /// Returns a flog in which each lane owns one of the blocks that follow the initial blocks of
    /// the sectors.
    fn initial_flog(&self) -> Vec<u8> {
        let mut flog = Vec::with_capacity((u64::from(LANES) * FLOG_GROUP_BYTES) as usize);
        for lane in 0..LANES {
            let block = U32::new(self.external_nlba + lane);
            let mut group = FlogGroupBytes::new_zeroed();
            group.entries[0] = FlogEntryBytes {
                lba: U32::new(lane),
                old_map: block,
                new_map: block,
                sequence: U32::new(1),
            };
            flog.extend_from_slice(group.as_bytes());
        }
        flog
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_of_a_256_mib_volume_is_that_of_linux() {
        let layout = Layout::new(256 << 20, 4096, Uuid::nil()).unwrap();
        let [arena] = layout.arenas[..] else { panic!("one arena") };
        let size = (256u64 << 20) - 4096;
        assert_eq!(u64::from(arena.internal_nlba), (size - 2 * 4096 - 16384 - 4096) / 4100);
        assert_eq!(arena.external_nlba, arena.internal_nlba - 256);
        assert_eq!(arena.info2off, size - 4096);
        assert_eq!(arena.logoff, size - 4096 - 16384);
        assert!(arena.dataoff + u64::from(arena.internal_nlba) * 4096 <= arena.mapoff);
        assert!(arena.mapoff + u64::from(arena.external_nlba) * 4 <= arena.logoff);
    }

    #[test]
    fn large_volumes_have_several_arenas_and_an_unused_rest() {
        let layout = Layout::new((1 << 40) + (8 << 20), 512, Uuid::nil()).unwrap();
        let shape: Vec<_> = layout.arenas.iter().map(|a| (a.start, a.nextoff)).collect();
        assert_eq!(shape, [(4096, 512 << 30), (4096 + (512 << 30), 0)]);
        assert_eq!(arena_ranges((1 << 40) + (18 << 20)).len(), 3);
    }

    #[test]
    fn volume_for_an_image_is_the_smallest_that_holds_it() {
        let holds = |size| Layout::new(size, SECTOR_BYTES, Uuid::nil()).unwrap().sectors() * 4096;
        let capacity = holds(64 << 20);
        let arena = holds(START_BYTES + ARENA_MAX_BYTES);
        for data in [capacity - 1, capacity, capacity + 1, arena, arena + 1, arena + (20 << 20)] {
            let size = volume_bytes_for(data).unwrap();
            assert!(size.is_multiple_of(CHUNK_BYTES) && holds(size) >= data, "{data}: {size}");
            assert!(holds(size - CHUNK_BYTES) < data, "{data}: {size}");
        }
        assert_eq!(volume_bytes_for(0), Some(MIN_VOLUME_BYTES));
        for data in [64 << 40, (1 << 63) + 1, u64::MAX] {
            assert_eq!(volume_bytes_for(data), None, "{data}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let refused = |size, sector| Layout::new(size, sector, Uuid::nil()).unwrap_err();
        let error = refused(16 << 20, 4096);
        assert!(matches!(error, BttError::TooSmall { size_bytes } if size_bytes == 16 << 20));
        assert!(matches!(refused(18 << 20, 520), BttError::SectorSize { sector_bytes: 520 }));
        assert!(Layout::new(MIN_VOLUME_BYTES, 4096, Uuid::nil()).is_ok());
    }
}
