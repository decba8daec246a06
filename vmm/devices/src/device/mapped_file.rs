//! Files in guest memory.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use super::{DeviceContext, SetupResult};
use crate::memory::backing::Access;
use crate::memory::layout::GuestRange;
use crate::memory::lost::WatchedRange;
use crate::memory::{MappedRange, Memory};

/// File in guest memory, or a part of one. Dropping it removes the file from guest memory. Take the
/// device that shows the file off the bus first.
pub struct MappedFile {
    // Dropped first: a range that the guest no longer has cannot be lost.
    _watched: WatchedRange,
    range: MappedRange,
}

impl MappedFile {
    /// Maps `extents` of `file` side by side and watches the file. `name` names the range in
    /// reports of lost memory.
    pub fn new(
        name: &str,
        (file, extents): (BorrowedFd<'_>, &[Range<u64>]),
        access: Access,
        memory: &mut Memory,
        context: &DeviceContext,
    ) -> SetupResult<Self> {
        let range = memory.add_file_range(file, extents, access)?;
        // A loss behind the last extent does not concern the device.
        let end = extents.iter().map(|extent| extent.end).max().unwrap_or(0);
        let _watched = context.lost.watch_mapped(name, &range.reservation, file, end)?;
        Ok(Self { _watched, range })
    }

    /// Range of guest memory.
    pub fn guest(&self) -> GuestRange {
        self.range.guest
    }
}
