//! What a command of `pmvol btt` works on: a volume of a pool, what is left of one, or a file.

use std::ops::Range;

use pmem_volume::btt::{Pending, PlainFile, ReadAt, Words, WriteAt};
use pmem_volume::media::MediaError;
use pmem_volume::pool::DamagedVolume;
use pmem_volume::{OpenMode, Pool, PoolError, Volume, VolumeFormat};

use super::args::Place;

pub(super) enum Media {
    Volume(Volume),
    /// Of a pool that is looked at. It may lack chunks.
    Part(DamagedVolume),
    File(PlainFile),
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

    /// To change.
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
                Ok(Media::File(PlainFile::open(file, mode == OpenMode::ReadWrite)?))
            }
            _ => unreachable!("clap asks for a pool and a volume, or a file"),
        }
    }

    /// Has it no BTT by what the pool says?
    pub(super) fn is_raw(&self) -> bool {
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

const READ_ONLY: &str = "what is left of a volume is opened to be read";

impl ReadAt for Media {
    fn len_bytes(&self) -> u64 {
        match self {
            Media::Volume(volume) => volume.len_bytes(),
            Media::Part(volume) => volume.len_bytes(),
            Media::File(file) => file.len_bytes(),
        }
    }

    fn read_at(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        match self {
            Media::Volume(volume) => volume.read_at(offset_bytes, into),
            Media::Part(volume) => volume.read_at(offset_bytes, into),
            Media::File(file) => file.read_at(offset_bytes, into),
        }
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        match self {
            Media::Volume(volume) => volume.next_data(range),
            Media::Part(volume) => volume.next_data(range),
            Media::File(file) => file.next_data(range),
        }
    }
}

impl WriteAt for Media {
    fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        match self {
            Media::Volume(volume) => volume.write_at(offset_bytes, bytes),
            Media::File(file) => file.write_at(offset_bytes, bytes),
            Media::Part(_) => unreachable!("{READ_ONLY}"),
        }
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        match self {
            Media::Volume(volume) => volume.persist(ranges),
            Media::File(file) => file.persist(ranges),
            Media::Part(_) => unreachable!("{READ_ONLY}"),
        }
    }
}

impl Words for Media {
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        match self {
            Media::Volume(volume) => volume.load_word(offset_bytes),
            Media::File(file) => file.load_word(offset_bytes),
            Media::Part(_) => unreachable!("{READ_ONLY}"),
        }
    }

    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        match self {
            Media::Volume(volume) => volume.store_word(offset_bytes, word),
            Media::File(file) => file.store_word(offset_bytes, word),
            Media::Part(_) => unreachable!("{READ_ONLY}"),
        }
    }

    fn store_bulk(&self, offset_bytes: u64, bytes: &[u8], pending: &mut Pending) -> Result<(), MediaError> {
        match self {
            Media::Volume(volume) => volume.store_bulk(offset_bytes, bytes, pending),
            Media::File(file) => file.store_bulk(offset_bytes, bytes, pending),
            Media::Part(_) => unreachable!("{READ_ONLY}"),
        }
    }

    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        match self {
            Media::Volume(volume) => volume.begin_persist(range, pending),
            Media::File(file) => file.begin_persist(range, pending),
            Media::Part(_) => unreachable!("{READ_ONLY}"),
        }
    }

    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        match self {
            Media::Volume(volume) => volume.end_persist(pending),
            Media::File(file) => file.end_persist(pending),
            Media::Part(_) => unreachable!("{READ_ONLY}"),
        }
    }
}
