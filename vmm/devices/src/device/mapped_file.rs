//! Files that are mapped into guest memory.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use super::{DeviceContext, SetupResult};
use crate::memory::backing::Access;
use crate::memory::layout::GuestRange;
use crate::memory::lost_memory::{RangeSource, WatchedRange};
use crate::memory::{MappedRange, Memory};

/// File, or part of a file, that is mapped into guest memory. Dropping it removes the file from
/// guest memory. Remove the device from the bus first.
pub struct MappedFile {
    // Dropped first, because a range that is being unmapped must not be reported as lost.
    _watched: WatchedRange,
    range: MappedRange,
}

impl MappedFile {
    /// Maps `extents` of `file` next to each other and watches the file for truncation. Reports of
    /// lost memory identify the range by `source`.
    pub fn new(
        source: RangeSource,
        (file, extents): (BorrowedFd<'_>, &[Range<u64>]),
        access: Access,
        memory: &mut Memory,
        context: &DeviceContext,
    ) -> SetupResult<Self> {
        let range = memory.add_file_range(file, extents, access)?;
        // Losing bytes after the last extent does not affect the device.
        let end = extents.iter().map(|extent| extent.end).max().unwrap_or(0);
        let _watched = context.lost.watch_mapped(source, &range.reservation, file, end)?;
        Ok(Self { _watched, range })
    }

    /// Range of guest memory.
    pub fn guest(&self) -> GuestRange {
        self.range.guest
    }
}
