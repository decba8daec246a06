//! Read access to an incomplete volume, so that its remaining data can be copied elsewhere.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::{VolumeExtent, VolumeInfo, volume_info};
use crate::media::{Durability, FileMedia, Media, MediaError};
use crate::pool::format::chunk::{Run, runs};
use crate::pool::{OpenMode, Pool, PoolError};

/// Volume with missing chunks, in a pool that is open for reading. Reads of missing chunks fail.
pub struct DamagedVolume<M: Media = FileMedia> {
    pool: Arc<Pool<M>>,
    info: VolumeInfo,
    extents: Vec<VolumeExtent>,
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
        let mut extents: Vec<VolumeExtent> = Vec::new();
        for (index, chunk) in &entry.chunks {
            let run = runs(std::iter::once(*chunk))[0];
            match extents.last_mut() {
                Some(last)
                    if last.index + last.run.chunks == *index && last.run.end() == run.start =>
                {
                    last.run = Run { start: last.run.start, chunks: last.run.chunks + 1 };
                }
                _ => extents.push(VolumeExtent { index: *index, run }),
            }
        }
        let info = volume_info(entry);
        drop(state);
        Ok(DamagedVolume { pool: Arc::clone(self), info, extents })
    }
}

impl<M: Media> DamagedVolume<M> {
    /// Properties of the volume.
    pub fn info(&self) -> &VolumeInfo {
        &self.info
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
        assert!(offset_bytes + length_bytes <= self.len_bytes(), "a read outside the volume");
        let (mut at, mut rest) = (offset_bytes, into);
        while !rest.is_empty() {
            let number =
                self.extents.partition_point(|e| e.volume_offset_bytes() + e.len_bytes() <= at);
            let Some(extent) = self.extents.get(number).filter(|e| e.volume_offset_bytes() <= at)
            else {
                let source = io::Error::other("the volume lacks this chunk");
                return Err(MediaError::Io {
                    operation: "read",
                    offset_bytes: at,
                    length_bytes,
                    source,
                });
            };
            let within = at - extent.volume_offset_bytes();
            let bytes = (extent.len_bytes() - within).min(rest.len() as u64);
            let (now, later) = rest.split_at_mut(bytes as usize);
            self.pool.view().read(extent.offset_bytes() + within, now)?;
            (at, rest) = (at + bytes, later);
        }
        Ok(())
    }

    /// Treats a missing chunk as data, so that a read of it reports the error.
    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        let (mut at, view) = (range.start, self.pool.view());
        while at < range.end {
            let number =
                self.extents.partition_point(|e| e.volume_offset_bytes() + e.len_bytes() <= at);
            let Some(extent) = self.extents.get(number).filter(|e| e.volume_offset_bytes() <= at)
            else {
                let next = self.extents.get(number).map_or(range.end, |e| e.volume_offset_bytes());
                return Ok(Some(at..next.min(range.end)));
            };
            let within = at - extent.volume_offset_bytes();
            let bytes = (extent.len_bytes() - within).min(range.end - at);
            let start = extent.offset_bytes() + within;
            if let Some(data) = view.next_data(start..start + bytes)? {
                return Ok(Some(at + (data.start - start)..at + (data.end - start)));
            }
            at += bytes;
        }
        Ok(None)
    }
}
