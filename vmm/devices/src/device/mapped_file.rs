//! Files that are mapped into guest memory.

use std::sync::Arc;

use rustix::fs::fstat;

use super::{DeviceContext, SetupResult};
use crate::memory::holes::{ChunkAccess, EmulatedStores};
use crate::memory::layout::GuestRange;
use crate::memory::lost_memory::{RangeSource, WatchedRange};
use crate::memory::{FileMapping, MappedRange, Memory};

/// File, or part of a file, that is mapped into guest memory. Dropping it removes the file from
/// guest memory. Remove the device from the bus first.
pub struct MappedFile {
    // Dropped first, because a range that is being unmapped must not be reported as lost.
    _watched: WatchedRange,
    range: MappedRange,
}

impl MappedFile {
    /// Maps parts of a file and watches the file for truncation. Reports of lost memory identify
    /// the range by `source`.
    pub fn new(
        source: RangeSource,
        mapping: FileMapping<'_>,
        memory: &mut Memory,
        context: &DeviceContext,
    ) -> SetupResult<Self> {
        let file = mapping.file;
        let end = match &mapping.holes {
            // Losing bytes after the last part does not affect the device.
            None => mapping.parts.iter().map(|(_, part)| part.end).max().unwrap_or(0),
            // Any part of the file may be mapped into a hole. A device has length 0 here, and
            // cannot be truncated.
            Some(_) => fstat(file)?.st_size as u64,
        };
        let emulated_stores = mapping.holes.as_ref().map(EmulatedStores::new);
        let mut range = memory.add_file_range(mapping)?;
        if let Some(device) = emulated_stores {
            let GuestRange { start, len } = range.guest;
            range.hold_emulated_stores(context.mmio.attach(start, len, Arc::new(device))?);
        }
        let _watched = context.lost.watch_mapped(source, &range.reservation, file, end)?;
        Ok(Self { _watched, range })
    }

    /// Returns a handle that takes access to chunks from the guest, if the guest fills holes.
    pub fn chunk_access(&self) -> Option<ChunkAccess> {
        self.range.chunk_access()
    }

    /// Range of guest memory.
    pub fn guest(&self) -> GuestRange {
        self.range.guest
    }
}
