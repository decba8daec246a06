//! Ranges of a disk.

/// Unit of a request's address and of the capacity, independent of the block size (5.2.6).
pub const SECTOR_BYTES: u64 = 512;

/// Part of the disk: whole blocks within its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRange {
    offset_bytes: u64,
    len_bytes: u64,
}

impl DiskRange {
    /// Range of `len_bytes` from an offset. The caller has checked that it consists of whole blocks
    /// of the disk.
    pub fn at(offset_bytes: u64, len_bytes: u64) -> Self {
        Self { offset_bytes, len_bytes }
    }

    /// Piece of the range behind its first `skip_bytes`, up to the next multiple of `piece_bytes`.
    /// This must be a multiple of all block sizes, because file systems deallocate whole blocks.
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
    /// The blocks must stay allocated, so that a later write does not fail for lack of space.
    Forbidden,
}
