//! Read access to an incomplete volume, so that its remaining data can be copied elsewhere.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::space::Piece;
use super::{Space, VolumeExtent, VolumeInfo, volume_info};
use crate::media::{Durability, FileMedia, Media, MediaError};
use crate::pool::{OpenMode, Pool, PoolError};

/// Volume with missing chunks, in a pool that is open for reading. Reads of missing chunks fail.
/// Reads of holes fail too if the owner of any chunk is unknown, because the chunk may belong to
/// this volume.
pub struct DamagedVolume<M: Media = FileMedia> {
    pool: Arc<Pool<M>>,
    info: VolumeInfo,
    extents: Vec<VolumeExtent>,
    /// True if all missing chunks are certainly holes.
    has_only_holes: bool,
}

impl<M: Media> Pool<M> {
    /// Opens a volume that may lack chunks, in a pool that is open for reading. A part of an
    /// unfinished split is refused, because it still contains the data of the split volume.
    pub fn open_damaged_volume(
        self: &Arc<Self>,
        name: &str,
    ) -> Result<DamagedVolume<M>, PoolError> {
        assert!(self.mode != OpenMode::ReadWrite, "a damaged volume is opened for reading only");
        let state = self.lock_state();
        let entry = &state.volumes[&state.require_volume(name)?];
        entry.check_finished()?;
        let extents = entry.extents();
        let info = volume_info(entry);
        let has_only_holes = info.thin && state.check_holes(entry).is_ok();
        drop(state);
        Ok(DamagedVolume { pool: Arc::clone(self), info, extents, has_only_holes })
    }
}

impl<M: Media> DamagedVolume<M> {
    /// Properties of the volume.
    pub fn info(&self) -> &VolumeInfo {
        &self.info
    }

    fn pieces(&self, range: Range<u64>) -> Vec<Piece> {
        Space::with_holes(self.pool.media(), &self.extents, self.info.size_bytes).pieces(range)
    }
}

impl<M: Media> Media for DamagedVolume<M> {
    fn len_bytes(&self) -> u64 {
        self.info.size_bytes
    }

    fn durability(&self) -> Durability {
        self.pool.durability()
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        let length_bytes = into.len() as u64;
        let (view, mut rest) = (self.pool.view(), into);
        for piece in self.pieces(offset_bytes..offset_bytes + length_bytes) {
            let (now, later) = rest.split_at_mut(piece.len_bytes() as usize);
            match piece.file_offset {
                Some(at) => view.read(at, now)?,
                None if self.has_only_holes => now.fill(0),
                None => {
                    let source = io::Error::other("the volume lacks this chunk");
                    let offset_bytes = piece.range.start;
                    let operation = "read";
                    return Err(MediaError::Io { operation, offset_bytes, length_bytes, source });
                }
            }
            rest = later;
        }
        Ok(())
    }

    /// Treats a missing chunk as data, so that a read of it reports the error.
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        let view = self.pool.view();
        for piece in self.pieces(range) {
            let Some(file) = piece.file_range() else {
                match self.has_only_holes {
                    true => continue,
                    false => return Ok(Some(piece.range)),
                }
            };
            let start = file.start;
            if let Some(data) = view.next_data(file)? {
                let offset = piece.range.start + (data.start - start);
                return Ok(Some(offset..offset + (data.end - data.start)));
            }
        }
        Ok(None)
    }
}
