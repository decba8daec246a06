//! Volume of a PM pool as a disk. The VMM's own BTT engine serves the sectors at the speed of
//! memory.

use std::io;
use std::ops::Range;

use pmem_volume::btt::{BttError, Engine};
use pmem_volume::media::Media;
use pmem_volume::{Durability, Volume};

use crate::disk::range::{DiskRange, Unmap};
use crate::disk::{BlockDevice, Geometry, ResizeError};

/// Alignment for partitions and file systems, even on volumes with smaller sectors.
const PAGE_BYTES: u32 = 4096;

fn sector_of(engine: &Engine<Volume>, offset_bytes: u64) -> u64 {
    offset_bytes / u64::from(engine.sector_bytes())
}

/// Converts a range to sectors. Ranges consist of whole blocks, and a block is a sector here.
fn sectors_of(engine: &Engine<Volume>, range: DiskRange) -> Range<u64> {
    let end_bytes = range.offset_bytes() + range.len_bytes();
    sector_of(engine, range.offset_bytes())..sector_of(engine, end_bytes)
}

#[cold]
fn io_error(err: BttError) -> io::Error {
    match err {
        BttError::ReadOnly { .. } => io::Error::new(io::ErrorKind::ReadOnlyFilesystem, err),
        BttError::Full { .. } => io::Error::new(io::ErrorKind::StorageFull, err),
        err => io::Error::other(err),
    }
}

/// Error for a request to resize a volume that a VM uses.
pub(super) fn resize_needs_pmvol() -> ResizeError {
    ResizeError::Unsupported("resize a volume with pmvol while no VM uses its pool".to_owned())
}

impl BlockDevice for Engine<Volume> {
    fn geometry(&self) -> Geometry {
        let block_bytes = self.sector_bytes();
        Geometry {
            block_bytes,
            physical_block_bytes: block_bytes.max(PAGE_BYTES),
            read_only: false,
            discard: true,
            // A discard releases chunks of a thin volume.
            unmap: self.space().info().thin,
        }
    }

    fn is_memory(&self) -> bool {
        self.space().durability() != Durability::PageCache
    }

    fn size_bytes(&self) -> u64 {
        self.sectors() * u64::from(self.sector_bytes())
    }

    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()> {
        Engine::read(self, sector_of(self, offset_bytes), data).map_err(io_error)
    }

    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        Engine::write(self, sector_of(self, offset_bytes), data).map_err(io_error)
    }

    fn flush(&self) -> io::Result<()> {
        Engine::flush(self).map_err(io_error)
    }

    fn discard(&self, range: DiskRange) -> io::Result<()> {
        Engine::discard(self, sectors_of(self, range)).map_err(io_error)
    }

    fn write_zeroes(&self, range: DiskRange, unmap: Unmap) -> io::Result<()> {
        match unmap {
            Unmap::Allowed => BlockDevice::discard(self, range),
            Unmap::Forbidden => {
                Engine::write_zeroes(self, sectors_of(self, range)).map_err(io_error)
            }
        }
    }

    fn resize(&self, _: u64) -> Result<(), ResizeError> {
        Err(resize_needs_pmvol())
    }

    fn allocated_bytes(&self) -> Option<u64> {
        Some(self.space().allocated_bytes())
    }

    fn released_bytes(&self) -> Option<u64> {
        Some(self.space().released_bytes())
    }

    fn compact(&self, on_moved: &mut dyn FnMut(u64) -> bool) -> io::Result<u64> {
        Engine::compact(self, on_moved).map_err(io_error)
    }

    fn compacted_bytes(&self) -> Option<u64> {
        Some(Engine::compacted_bytes(self))
    }

    fn read_only_arenas(&self) -> usize {
        self.arenas().iter().filter(|arena| arena.read_only.is_some()).count()
    }
}
