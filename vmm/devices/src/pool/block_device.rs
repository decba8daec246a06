//! Volume of a PM pool as a disk. The VMM's own BTT engine serves the sectors at the speed of
//! memory.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use pmem_volume::btt::{BttError, Engine};
use pmem_volume::media::Media;
use pmem_volume::{Durability, PoolError, Volume, VolumeSize};

use crate::disk::range::{DiskRange, Unmap};
use crate::disk::{BlockDevice, Geometry, ResizeError};
use crate::pool::sharded_lock::ShardedLock;

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

/// Volume whose sectors the BTT engine serves. Its requests wait while it grows.
pub(super) struct ServedVolume {
    engine: ShardedLock<Engine<Volume>>,
}

impl ServedVolume {
    pub(super) fn new(engine: Engine<Volume>) -> Self {
        Self { engine: ShardedLock::new(engine) }
    }

    /// Erases most of the space that a thick volume will get, so that requests wait only for the
    /// rest. Then grows the volume.
    fn grow(&self, wanted_bytes: u64) -> Result<(), PoolError> {
        let (pool, info) = self.engine.read(|engine| {
            let volume = engine.space();
            (Arc::clone(volume.pool()), volume.info().clone())
        });
        if !info.thin && wanted_bytes > info.size_bytes {
            let added_bytes = wanted_bytes.saturating_sub(info.size_bytes);
            pool.scrub_for(VolumeSize::Bytes(added_bytes), &mut |_| {})?;
        }
        self.engine.change(|engine| engine.grow(VolumeSize::Bytes(wanted_bytes)))
    }
}

impl BlockDevice for ServedVolume {
    fn geometry(&self) -> Geometry {
        self.engine.read(|engine| {
            let block_bytes = engine.sector_bytes();
            Geometry {
                block_bytes,
                physical_block_bytes: block_bytes.max(PAGE_BYTES),
                read_only: false,
                discard: true,
                // Only a discard of a thin volume releases chunks.
                unmap: engine.space().info().thin,
            }
        })
    }

    fn is_memory(&self) -> bool {
        self.engine.read(|engine| engine.space().durability() != Durability::PageCache)
    }

    fn size_bytes(&self) -> u64 {
        self.engine.read(|engine| engine.sectors() * u64::from(engine.sector_bytes()))
    }

    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()> {
        self.engine
            .read(|engine| engine.read(sector_of(engine, offset_bytes), data))
            .map_err(io_error)
    }

    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.engine
            .read(|engine| engine.write(sector_of(engine, offset_bytes), data))
            .map_err(io_error)
    }

    fn flush(&self) -> io::Result<()> {
        self.engine.read(Engine::flush).map_err(io_error)
    }

    fn discard(&self, range: DiskRange) -> io::Result<()> {
        self.engine.read(|engine| engine.discard(sectors_of(engine, range))).map_err(io_error)
    }

    fn write_zeroes(&self, range: DiskRange, unmap: Unmap) -> io::Result<()> {
        match unmap {
            Unmap::Allowed => BlockDevice::discard(self, range),
            Unmap::Forbidden => self
                .engine
                .read(|engine| engine.write_zeroes(sectors_of(engine, range)))
                .map_err(io_error),
        }
    }

    fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError> {
        self.grow(wanted_bytes).map_err(|error| match error {
            PoolError::Media(_)
            | PoolError::Latched { .. }
            | PoolError::Btt(BttError::Media(_)) => {
                ResizeError::Io { wanted_bytes, source: io::Error::other(error) }
            }
            refusal => ResizeError::Unsupported(foreshore_types::chain(&refusal)),
        })
    }

    fn reserve_bytes(&self) -> Option<u64> {
        Some(self.engine.read(|engine| engine.space().info().reserve_bytes))
    }

    fn allocated_bytes(&self) -> Option<u64> {
        Some(self.engine.read(|engine| engine.space().allocated_bytes()))
    }

    fn live_bytes(&self) -> Option<u64> {
        self.engine.read(|engine| engine.live_bytes())
    }

    fn extents(&self) -> usize {
        self.engine.read(|engine| engine.space().allocated_extents().len())
    }

    fn released_bytes(&self) -> Option<u64> {
        Some(self.engine.read(|engine| engine.space().released_bytes()))
    }

    fn compact(&self, on_moved: &mut dyn FnMut(u64) -> bool) -> io::Result<u64> {
        self.engine.read(|engine| {
            // A pass takes seconds, and requests would wait with the change.
            let mut is_changed = false;
            let released_bytes = engine.compact(&mut |bytes| {
                is_changed = self.engine.is_change_wanted();
                !is_changed && on_moved(bytes)
            });
            if is_changed {
                return Err(io::ErrorKind::Interrupted.into());
            }
            released_bytes.map_err(io_error)
        })
    }

    fn compacted_bytes(&self) -> Option<u64> {
        Some(self.engine.read(Engine::compacted_bytes))
    }

    fn has_space(&self) -> bool {
        self.engine.read(|engine| engine.space().has_space())
    }

    fn read_only_arenas(&self) -> usize {
        self.engine
            .read(|engine| engine.arenas().iter().filter(|arena| arena.read_only.is_some()).count())
    }
}
