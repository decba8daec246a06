//! Disk with the raw bytes of a volume whose BTT cannot be served.
//!
//! A guest that translates sectors itself can write anything to its volume, for example a file
//! system without a BTT. If the volume is later presented as a virtio-blk disk, the second info
//! block of the old BTT may still be intact. The engine must not use it, because recovery and
//! writes would overwrite the guest's new content where the old map and blocks were. Instead, the
//! disk contains the bytes of the volume as the guest left them. It refuses writes, because the BTT
//! may have been lost by accident, and `pmvol btt repair` can then restore it.
//!
//! The raw bytes are also served if the end of a damaged arena is unknown. The numbers of the
//! sectors after this arena are then unknown, too.

use std::io;

use pmem_volume::Volume;
use pmem_volume::media::Media;

use crate::disk::range::{DiskRange, Unmap};
use crate::disk::{BlockDevice, Geometry, ResizeError};

/// Logical block size of namespaces without a BTT (Linux drivers/nvdimm/pmem.c).
const SECTOR_BYTES: u32 = 512;
/// Alignment for partitions and file systems.
const PAGE_BYTES: u32 = 4096;

/// Raw bytes of a volume as a read-only device.
pub(super) struct LostBtt {
    volume: Volume,
    reason: String,
}

impl LostBtt {
    /// Creates a device with the bytes of `volume`. Writes fail with `reason`.
    pub(super) fn new(volume: Volume, reason: String) -> Self {
        Self { volume, reason }
    }

    fn refuse(&self) -> io::Result<()> {
        Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, self.reason.clone()))
    }
}

impl BlockDevice for LostBtt {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: SECTOR_BYTES,
            physical_block_bytes: PAGE_BYTES,
            read_only: true,
            discard: false,
            unmap: false,
        }
    }

    fn size_bytes(&self) -> u64 {
        self.volume.size_bytes()
    }

    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()> {
        let (len_bytes, size_bytes) = (data.len(), self.volume.size_bytes());
        if offset_bytes.checked_add(len_bytes as u64).is_none_or(|end| end > size_bytes) {
            return Err(io::Error::other(format!(
                "range {offset_bytes}+{len_bytes} ends beyond the volume of {size_bytes} bytes"
            )));
        }
        self.volume.read(offset_bytes, data).map_err(io::Error::other)
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        self.refuse()
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: DiskRange) -> io::Result<()> {
        self.refuse()
    }

    fn write_zeroes(&self, _: DiskRange, _: Unmap) -> io::Result<()> {
        self.refuse()
    }

    fn resize(&self, _: u64) -> Result<(), ResizeError> {
        Err(ResizeError::Unsupported(format!("the volume has no BTT to grow: {}", self.reason)))
    }

    fn allocated_bytes(&self) -> Option<u64> {
        Some(self.volume.allocated_bytes())
    }

    fn extents(&self) -> usize {
        self.volume.allocated_extents().len()
    }
}
