//! Media of a `pmvol btt` command: a volume of a pool, the remains of a damaged volume, or a file.

use std::ops::Deref;

use pmem_volume::btt;
use pmem_volume::btt_file::BttFile;
use pmem_volume::media::{self, MediaError, holds_bytes};
use pmem_volume::pool::DamagedVolume;
use pmem_volume::progress::OnProgress;
use pmem_volume::{OpenMode, Pool, PoolError, Volume, VolumeFormat};

use super::args::Location;

/// Returns true if the volume holds data. Import, split and delete need --force to discard it. A
/// raw volume holds data if any byte is not zero. A damaged BTT is treated as data.
pub(crate) fn holds_data(media: &Media, progress: OnProgress<'_>) -> Result<bool, MediaError> {
    if media.is_raw() { holds_bytes(media, progress) } else { btt::holds_data(media) }
}

pub(crate) enum Media {
    Volume(Volume),
    /// Volume of a pool that is open for reading. The volume may lack chunks.
    Damaged(DamagedVolume),
    File(BttFile),
}

impl Media {
    /// Opens the media for reading, even while another process changes them.
    pub(super) fn open_peek(location: &Location) -> anyhow::Result<Self> {
        Self::open(location, OpenMode::Peek)
    }

    /// Opens the media for reading, and excludes writers.
    pub(super) fn open_read_only(location: &Location) -> anyhow::Result<Self> {
        Self::open(location, OpenMode::ReadOnly)
    }

    pub(super) fn open_read_write(location: &Location) -> anyhow::Result<Self> {
        Self::open(location, OpenMode::ReadWrite)
    }

    /// Opens the media to copy out what is readable.
    pub(super) fn open_damaged(location: &Location) -> anyhow::Result<Self> {
        match location {
            Location { pool: Some(pool), volume: Some(volume), .. } => {
                let pool = Pool::open(pool, OpenMode::ReadOnly)?;
                Ok(Media::Damaged(pool.open_damaged_volume(volume)?))
            }
            _ => Self::open_read_only(location),
        }
    }

    fn open(location: &Location, mode: OpenMode) -> anyhow::Result<Self> {
        match location {
            Location { pool: Some(pool), volume: Some(volume), .. } => {
                Ok(Media::Volume(Pool::open(pool, mode)?.open_volume(volume)?))
            }
            Location { file: Some(file), .. } => {
                Ok(Media::File(BttFile::open(file, mode == OpenMode::ReadWrite)?))
            }
            _ => unreachable!("clap asks for a pool and a volume, or a file"),
        }
    }

    /// Returns true if the pool records the volume as raw.
    pub(crate) fn is_raw(&self) -> bool {
        let info = match self {
            Media::Volume(volume) => volume.info(),
            Media::Damaged(volume) => volume.info(),
            Media::File(_) => return false,
        };
        info.format == VolumeFormat::Raw
    }

    pub(super) fn require_btt(&self) -> Result<(), PoolError> {
        match self {
            Media::Volume(volume) if self.is_raw() => {
                Err(PoolError::NotBtt { name: volume.info().name.clone() })
            }
            Media::Damaged(volume) if self.is_raw() => {
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
            Media::Damaged(volume) => volume,
            Media::File(file) => file,
        }
    }
}
