//! A volume whose BTT cannot be served, shown as a disk.
//!
//! A guest that translates by itself can write anything to its volume, for example a file system
//! without a BTT. If the volume is then shown by virtio-blk, the old BTT's copy of its info block
//! may still be whole. The engine must not use it, because recovery and writes would go to the
//! places of the old map and blocks, which hold the guest's new content. The disk shows the bytes of
//! the volume, as the guest left them. It takes no writes, because the BTT may have been lost by
//! accident: then `pmvol btt repair` restores it.
//!
//! The bytes are also shown if the end of a damaged arena is unknown, and with it the numbers of
//! the sectors behind it.

use std::ops::Range;

use pmem_volume::Volume;
use pmem_volume::btt::ReadAt;

use crate::volume::sectors::{BttLoss, SectorError, Sectors};

/// Logical block of namespaces without a BTT (Linux drivers/nvdimm/pmem.c).
const SECTOR_BYTES: u32 = 512;

/// Bytes of a volume as sectors that can only be read.
pub(super) struct LostBtt {
    volume: Volume,
    loss: BttLoss,
}

impl LostBtt {
    /// The sectors of `volume`. Writes fail with the reason of `loss`.
    pub(super) fn new(volume: Volume, loss: BttLoss) -> Self {
        Self { volume, loss }
    }

    fn refuse(&self) -> Result<(), SectorError> {
        Err(SectorError::ReadOnly(self.loss.reason().to_owned()))
    }
}

impl Sectors for LostBtt {
    fn sector_bytes(&self) -> u32 {
        SECTOR_BYTES
    }

    fn sectors(&self) -> u64 {
        self.volume.size_bytes() / u64::from(SECTOR_BYTES)
    }

    fn read(&self, first_sector: u64, into: &mut [u8]) -> Result<(), SectorError> {
        let offset = first_sector.checked_mul(u64::from(SECTOR_BYTES)).filter(|offset| {
            offset.checked_add(into.len() as u64).is_some_and(|end| end <= self.volume.size_bytes())
        });
        let Some(offset) = offset else {
            let (bytes, sectors) = (into.len(), self.sectors());
            let why = format!(
                "{bytes} bytes from sector {first_sector} on are not inside the volume, which has {sectors} sectors"
            );
            return Err(SectorError::Failed(why.into()));
        };
        self.volume.read_at(offset, into).map_err(|err| SectorError::Failed(Box::new(err)))
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), SectorError> {
        self.refuse()
    }

    fn discard(&self, _: Range<u64>) -> Result<(), SectorError> {
        self.refuse()
    }

    fn read_only_arenas(&self) -> usize {
        0
    }

    fn btt_loss(&self) -> Option<&BttLoss> {
        Some(&self.loss)
    }

    fn flush(&self) -> Result<(), SectorError> {
        Ok(())
    }
}
