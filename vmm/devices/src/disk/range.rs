//! Ranges of a disk.

/// Unit of request addresses and of the capacity, independent of the block size (5.2.6).
pub const SECTOR_BYTES: u64 = 512;

/// Range of the disk. The range consists of whole blocks within the capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRange {
    offset_bytes: u64,
    len_bytes: u64,
}

impl DiskRange {
    /// Creates a range of `len_bytes` at an offset. The caller must have checked that it consists
    /// of whole blocks of the disk.
    pub fn at(offset_bytes: u64, len_bytes: u64) -> Self {
        Self { offset_bytes, len_bytes }
    }

    /// Piece of the range that starts after the first `skip_bytes` and ends at the next multiple of
    /// `piece_bytes`, or at the end of the range. `piece_bytes` must be a multiple of all block
    /// sizes, because file systems deallocate only whole blocks.
    pub fn piece(&self, skip_bytes: u64, piece_bytes: u64) -> Self {
        let skip_bytes = skip_bytes.min(self.len_bytes);
        let offset_bytes = self.offset_bytes + skip_bytes;
        let len_bytes = (piece_bytes - offset_bytes % piece_bytes).min(self.len_bytes - skip_bytes);
        Self { offset_bytes, len_bytes }
    }

    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

/// Permission to deallocate blocks that are zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmap {
    Allowed,
    /// The blocks must remain allocated, so that a later write cannot fail for lack of space.
    Forbidden,
}
