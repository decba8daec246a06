//! Ranges of a disk.

/// The unit of a request's address and of the capacity, whatever the block size is (5.2.6).
pub const SECTOR_BYTES: u64 = 512;

/// A part of the disk: whole blocks within its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRange {
    offset_bytes: u64,
    len_bytes: u64,
}

impl DiskRange {
    /// Range of `len_bytes` from an offset. The caller has checked that it is whole blocks of the
    /// disk.
    pub fn at(offset_bytes: u64, len_bytes: u64) -> Self {
        Self { offset_bytes, len_bytes }
    }

    /// What of it lies behind its first `skip_bytes`, up to the next multiple of `piece_bytes`,
    /// which is one of all block sizes: file systems give whole blocks away.
    pub fn piece(&self, skip_bytes: u64, piece_bytes: u64) -> Self {
        let skip_bytes = skip_bytes.min(self.len_bytes);
        let offset_bytes = self.offset_bytes + skip_bytes;
        let len_bytes = (piece_bytes - offset_bytes % piece_bytes).min(self.len_bytes - skip_bytes);
        Self { offset_bytes, len_bytes }
    }

    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// How long it is.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

/// Whether blocks that are to be zero may be given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmap {
    Allowed,
    /// They must stay: a later write must not fail for want of room.
    Forbidden,
}
