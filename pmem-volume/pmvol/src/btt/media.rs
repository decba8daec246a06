//! What a command of `pmvol btt` works on: a volume of a pool, what is left of one, or a file.

use std::ops::Deref;

use pmem_volume::btt;
use pmem_volume::btt_file::BttFile;
use pmem_volume::media::{self, MediaError, holds_bytes};
use pmem_volume::pool::DamagedVolume;
use pmem_volume::progress::OnProgress;
use pmem_volume::{OpenMode, Pool, PoolError, Volume, VolumeFormat};

use super::args::Place;

/// Returns true if the volume holds data. Import, split and delete need --force to discard it. A
/// raw volume holds data if a byte is not zero. A BTT that is damaged counts as data.
pub(crate) fn holds_data(media: &Media, progress: OnProgress<'_>) -> Result<bool, MediaError> {
    if media.is_raw() { holds_bytes(media, progress) } else { btt::holds_data(media) }
}

pub(crate) enum Media {
    Volume(Volume),
    /// Of a pool that is looked at. It may lack chunks.
    Part(DamagedVolume),
    File(BttFile),
}

impl Media {
    /// To look at while somebody else may change it.
    pub(super) fn peek(place: &Place) -> anyhow::Result<Self> {
        Self::open(place, OpenMode::Peek)
    }

    /// To look at: nobody changes it meanwhile.
    pub(super) fn look(place: &Place) -> anyhow::Result<Self> {
        Self::open(place, OpenMode::ReadOnly)
    }

    pub(super) fn change(place: &Place) -> anyhow::Result<Self> {
        Self::open(place, OpenMode::ReadWrite)
    }

    /// To copy out what is there.
    pub(super) fn salvage(place: &Place) -> anyhow::Result<Self> {
        match place {
            Place { pool: Some(pool), volume: Some(volume), .. } => {
                let pool = Pool::open(pool, OpenMode::ReadOnly)?;
                Ok(Media::Part(pool.open_damaged_volume(volume)?))
            }
            _ => Self::look(place),
        }
    }

    fn open(place: &Place, mode: OpenMode) -> anyhow::Result<Self> {
        match place {
            Place { pool: Some(pool), volume: Some(volume), .. } => {
                Ok(Media::Volume(Pool::open(pool, mode)?.open_volume(volume)?))
            }
            Place { file: Some(file), .. } => {
                Ok(Media::File(BttFile::open(file, mode == OpenMode::ReadWrite)?))
            }
            _ => unreachable!("clap asks for a pool and a volume, or a file"),
        }
    }

    /// Has it no BTT by what the pool says?
    pub(crate) fn is_raw(&self) -> bool {
        let info = match self {
            Media::Volume(volume) => volume.info(),
            Media::Part(volume) => volume.info(),
            Media::File(_) => return false,
        };
        info.format == VolumeFormat::Raw
    }

    pub(super) fn require_btt(&self) -> Result<(), PoolError> {
        match self {
            Media::Volume(volume) if self.is_raw() => {
                Err(PoolError::NotBtt { name: volume.info().name.clone() })
            }
            Media::Part(volume) if self.is_raw() => {
                Err(PoolError::NotBtt { name: volume.info().name.clone() })
            }
            _ => Ok(()),
        }
    }
}

impl Deref for Media {
    type Target = dyn media::Media;

    fn deref(&self) -> &Self::Target {
        match self {
            Media::Volume(volume) => volume,
            Media::Part(volume) => volume,
            Media::File(file) => file,
        }
    }
}
