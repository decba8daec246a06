//! A volume of a PM pool: sectors by the VMM's own BTT engine, at the speed of memory.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::blocking::{Blocking, Store};
use super::{Backend, Executor, Geometry, ResizeError};
use crate::virtio::block::request::{DiskRange, Unmap};
use crate::volume::sectors::{SectorError, Sectors};
use crate::volume::{FirstFailure, Persist, PersistError, Watched};

/// What partitions and file systems align to, also on volumes with small sectors.
const PAGE_BYTES: u32 = 4096;

/// A volume as what a disk is made of.
#[derive(Clone)]
pub struct VolumeDisk {
    sectors: Arc<dyn Sectors>,
    watched: Arc<Watched>,
    read_only: bool,
}

/// A flush of a volume's sectors, for who watches flushes.
struct Flush(Arc<dyn Sectors>);

impl Persist for Flush {
    fn persist(&self) -> Result<(), PersistError> {
        self.0.flush().map_err(|err| PersistError::Backing(Box::new(err)))
    }
}

impl VolumeDisk {
    /// The disk with these sectors.
    pub fn new(sectors: Arc<dyn Sectors>, read_only: bool) -> Self {
        let watched = Watched::new(Arc::new(Flush(Arc::clone(&sectors))));
        Self { sectors, watched, read_only }
    }

    /// Why a flush has failed, if one has.
    pub fn failure(&self) -> FirstFailure {
        self.watched.failure()
    }

    fn sector(&self, offset_bytes: u64) -> u64 {
        offset_bytes / u64::from(self.sectors.sector_bytes())
    }

    /// Ranges are whole blocks, which are sectors here.
    fn range(&self, range: DiskRange) -> Range<u64> {
        self.sector(range.offset_bytes())..self.sector(range.offset_bytes() + range.len_bytes())
    }
}

fn error(err: SectorError) -> io::Error {
    match err {
        SectorError::ReadOnly(_) => io::Error::new(io::ErrorKind::ReadOnlyFilesystem, err),
        SectorError::Failed(_) => io::Error::other(err),
    }
}

impl Store for VolumeDisk {
    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()> {
        self.sectors.read(self.sector(offset_bytes), data).map_err(error)
    }

    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.sectors.write(self.sector(offset_bytes), data).map_err(error)
    }

    fn flush(&self) -> io::Result<()> {
        self.watched.persist().map_err(io::Error::other)
    }

    fn discard(&self, range: DiskRange) -> io::Result<()> {
        self.sectors.discard(self.range(range)).map_err(error)
    }

    /// Whichever way, the sectors keep their blocks.
    fn write_zeroes(&self, range: DiskRange, _: Unmap) -> io::Result<()> {
        Store::discard(self, range)
    }
}

impl Backend for VolumeDisk {
    fn geometry(&self) -> Geometry {
        let block_bytes = self.sectors.sector_bytes();
        Geometry {
            block_bytes,
            physical_block_bytes: block_bytes.max(PAGE_BYTES),
            read_only: self.read_only,
            discard: !self.read_only,
            // A volume has room for all of its sectors.
            unmap: false,
        }
    }

    fn size_bytes(&self) -> u64 {
        self.sectors.sectors() * u64::from(self.sectors.sector_bytes())
    }

    fn start(&self, _: u16) -> io::Result<Box<dyn Executor>> {
        Ok(Box::new(Blocking::new(Arc::new(self.clone()))))
    }

    fn flush(&self) -> io::Result<()> {
        Store::flush(self)
    }

    fn resize(&self, _: u64) -> Result<(), ResizeError> {
        Err(ResizeError::NotHere("a volume is resized by pmvol, while no VM has its pool".to_owned()))
    }
}
