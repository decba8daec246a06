//! Accesses the bytes of a volume in its pool's file while no VM uses the pool. Tests use it to
//! create BTTs that no command creates, and to verify the content that a guest has left.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use guest_tools::CorruptData;
use guest_tools::sectors::{Outcome, Shape};
use pmem_volume::btt::{ArenaInfo, InfoSource, Layout, Reader, Sector, arenas, check};
use pmem_volume::media::{Durability, Media, MediaError};
use pmem_volume::pool::VolumeExtent;
use pmem_volume::{OpenMode, Pool};
use uuid::Uuid;

/// Size of a lane's entries in the log (UEFI 2.10, 6.4.2).
const FLOG_GROUP_BYTES: u64 = 64;

#[derive(Debug)]
pub struct BttMedia {
    file: File,
    /// Pieces of the volume. The gaps of a thin volume are holes.
    extents: Vec<VolumeExtent>,
    len_bytes: u64,
}

impl BttMedia {
    pub fn open(pool: &crate::Pool, volume: &str) -> Result<Self> {
        let opened = Pool::open(pool.path(), OpenMode::ReadOnly).context("Cannot open the pool")?;
        let volume = opened.open_volume(volume).context("Cannot open the volume")?;
        let file = File::options().read(true).write(true).open(pool.path())?;
        Ok(Self { file, extents: volume.allocated_extents(), len_bytes: volume.size_bytes() })
    }

    pub fn format(&self, sector_bytes: u32) -> Result<()> {
        let zeros = vec![0; 1 << 20];
        for offset in (0..self.len_bytes()).step_by(zeros.len()) {
            self.store(offset, &zeros)?;
        }
        Ok(Layout::new(self.len_bytes(), sector_bytes, Uuid::new_v4())?.format(self)?)
    }

    /// Returns the dimensions of the disk as the guest sees them.
    pub fn shape(&self) -> Result<Shape> {
        let reader = Reader::open(self)?;
        Ok(Shape { sectors: reader.sectors(), sector_bytes: reader.sector_bytes() })
    }

    pub fn first_sectors(&self) -> Result<Vec<u64>> {
        let (mut firsts, mut next) = (Vec::new(), 0);
        for (info, _) in self.arenas()? {
            firsts.push(next);
            next += u64::from(info.sectors);
        }
        Ok(firsts)
    }

    /// Verifies that the BTT is consistent, and that each sector has the expected content.
    pub fn verify(&self, outcome: &Outcome) -> Result<()> {
        let findings: Vec<_> =
            check(self).arenas.into_iter().flat_map(|arena| arena.findings).collect();
        let is_clean = || {
            ensure!(findings.is_empty(), "The check has findings: {findings:?}");
            Ok(())
        };
        is_clean().context(CorruptData)?;
        let reader = Reader::open(self)?;
        outcome.check(|first, into| {
            for (sector, bytes) in
                (first..).zip(into.chunks_exact_mut(reader.sector_bytes() as usize))
            {
                ensure!(
                    reader.read(sector, bytes)? != Sector::Error,
                    "Sector {sector} is marked as bad"
                );
            }
            Ok(())
        })
    }

    /// Returns the arenas according to their info blocks, and which info blocks were used.
    pub fn arenas(&self) -> Result<Vec<(ArenaInfo, InfoSource)>> {
        arenas(self).into_iter().map(|place| Ok(place.map_err(|missing| missing.reason)?)).collect()
    }

    /// Damages an arena: the last write of a lane, and the block for its next write, become
    /// unknown.
    pub fn erase_lane(&self, arena: usize, lane: u32) -> Result<()> {
        let flog_at = self.arenas()?[arena].0.flog_at;
        Ok(self
            .store(flog_at + u64::from(lane) * FLOG_GROUP_BYTES, &[0; FLOG_GROUP_BYTES as usize])?)
    }

    fn hole_bytes(&self) -> u64 {
        self.len_bytes - self.extents.iter().map(|extent| extent.len_bytes()).sum::<u64>()
    }

    /// Returns the parts of a range of the volume that are no holes, each with its offset in the
    /// file.
    fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, u64)> {
        assert!(range.end <= self.len_bytes(), "{range:?} is outside the volume");
        self.extents.iter().filter_map(move |extent| {
            let first = extent.volume_offset_bytes();
            let start = range.start.max(first);
            let end = range.end.min(first + extent.len_bytes());
            (start < end).then(|| (start..end, extent.offset_bytes() + (start - first)))
        })
    }
}

impl Media for BttMedia {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn durability(&self) -> Durability {
        Durability::PageCache
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        into.fill(0);
        for (part, at) in self.parts(offset_bytes..offset_bytes + into.len() as u64) {
            let [start, end] = [part.start, part.end].map(|of| (of - offset_bytes) as usize);
            self.file
                .read_exact_at(&mut into[start..end], at)
                .map_err(|source| failure("read", &part, source))?;
        }
        Ok(())
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        assert_eq!(self.hole_bytes(), 0, "a store to a volume with holes");
        for (part, at) in self.parts(offset_bytes..offset_bytes + bytes.len() as u64) {
            let [start, end] = [part.start, part.end].map(|of| (of - offset_bytes) as usize);
            self.file
                .write_all_at(&bytes[start..end], at)
                .map_err(|source| failure("write", &part, source))?;
        }
        Ok(())
    }

    /// The next user of the pool reads the same page cache, so nothing need be flushed.
    fn persist(&self, _ranges: &[Range<u64>]) -> Result<(), MediaError> {
        Ok(())
    }
}

fn failure(operation: &'static str, range: &Range<u64>, source: io::Error) -> MediaError {
    let (offset_bytes, length_bytes) = (range.start, range.end - range.start);
    MediaError::Io { operation, offset_bytes, length_bytes, source }
}
