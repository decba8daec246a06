//! O_DIRECT transfers of any alignment.
//!
//! A host accepts direct transfers only in whole units, mostly of 512 bytes, or of 4096 on media
//! with such sectors. Test reads determine the unit, because statx() reports the unit that is fast
//! instead of the smallest that works. For example, XFS reports 4096 for a file that shares blocks
//! with a copy (`cp --reflink`), although 512 works. The unit may also grow while the file is open:
//! ext4 reads a hole at any alignment, but refuses unaligned transfers after data was written to
//! it.
//!
//! A transfer that does not consist of whole units is widened to whole units in a separate buffer.
//! A widened write first reads the units at its edges, under an exclusive lock. The bytes after the
//! last whole unit of a file are always transferred through the page cache.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::info;

use super::range_locks::{Access, RangeGuard, RangeLocks};
use crate::disk::buffer::Buffers;
use crate::disk::range::SECTOR_BYTES;

/// Largest unit that is tried.
pub(super) const UNIT_BYTES_MAX: u64 = 64 << 10;

/// Reads and writes at offsets, like [`FileExt`].
pub(super) trait ReadWriteAt {
    /// Reads up to `data.len()` bytes.
    fn read_at(&self, data: &mut [u8], offset_bytes: u64) -> io::Result<usize>;

    /// Fills `data`.
    fn read_exact_at(&self, data: &mut [u8], offset_bytes: u64) -> io::Result<()>;

    /// Writes all of `data`.
    fn write_all_at(&self, data: &[u8], offset_bytes: u64) -> io::Result<()>;
}

impl ReadWriteAt for File {
    fn read_at(&self, data: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        FileExt::read_at(self, data, offset_bytes)
    }

    fn read_exact_at(&self, data: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, data, offset_bytes)
    }

    fn write_all_at(&self, data: &[u8], offset_bytes: u64) -> io::Result<()> {
        FileExt::write_all_at(self, data, offset_bytes)
    }
}

/// File that is accessed through the page cache. It is opened with the image, because the seccomp
/// filters of the threads that serve queues allow no open().
#[derive(Debug)]
struct Buffered(File);

impl Buffered {
    /// Opens the file of `direct` again, without O_DIRECT.
    fn open(direct: &File, writable: bool) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", direct.as_raw_fd());
        Ok(Self(File::options().read(true).write(writable).open(path)?))
    }

    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, data: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        FileExt::read_exact_at(&self.0, data, offset_bytes)
    }

    fn write(&self, data: &[u8], offset_bytes: u64) -> io::Result<()> {
        FileExt::write_all_at(&self.0, data, offset_bytes)
    }
}

/// Direct I/O of any alignment to an image that is open with O_DIRECT.
#[derive(Debug)]
pub(super) struct DirectIo {
    /// Path of the image, for log lines.
    path: PathBuf,
    /// `None` for a block device, which always consists of whole units.
    buffered: Option<Buffered>,
    unit_bytes: AtomicU64,
    locks: Arc<RangeLocks>,
}

impl DirectIo {
    /// Determines the unit of `file`, which was opened from `path` with O_DIRECT and has
    /// `size_bytes`.
    pub(super) fn new(
        path: &Path,
        file: &File,
        is_file: bool,
        writable: bool,
        size_bytes: u64,
    ) -> io::Result<Self> {
        let buffered = is_file.then(|| Buffered::open(file, writable)).transpose()?;
        Ok(Self { path: path.to_owned(), ..Self::with_unit(buffered, probe(file, size_bytes)) })
    }

    fn with_unit(buffered: Option<Buffered>, unit_bytes: u64) -> Self {
        let path = PathBuf::new();
        Self { path, buffered, unit_bytes: AtomicU64::new(unit_bytes), locks: Arc::default() }
    }

    /// Unit of direct transfers, as far as it is known.
    pub(super) fn unit_bytes(&self) -> u64 {
        self.unit_bytes.load(Ordering::Relaxed)
    }

    /// Returns true if a transfer consists of whole units, so that it needs no widening.
    pub(super) fn is_aligned(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        (offset_bytes | len_bytes).is_multiple_of(self.unit_bytes())
    }

    #[cfg(test)]
    pub(super) fn set_unit(&self, unit_bytes: u64) {
        self.unit_bytes.store(unit_bytes, Ordering::Relaxed);
    }

    /// Locks of the ranges that are being written.
    pub(super) fn locks(&self) -> &Arc<RangeLocks> {
        &self.locks
    }

    /// Locks a range for a write that needs no widening.
    fn lock_shared(&self, offset_bytes: u64, len_bytes: u64) -> RangeGuard {
        self.locks.lock(offset_bytes..offset_bytes + len_bytes, Access::Shared)
    }

    /// Locks a range for a write of any alignment.
    pub(super) fn lock_exclusive(&self, offset_bytes: u64, len_bytes: u64) -> RangeGuard {
        self.locks.lock(widest_range(offset_bytes, len_bytes), Access::Exclusive)
    }

    /// Fills `data` from `offset_bytes` of `file`.
    pub(super) fn read(
        &self,
        file: &impl ReadWriteAt,
        offset_bytes: u64,
        data: &mut [u8],
    ) -> io::Result<()> {
        let result = self.with_growing_unit(|unit| self.read_wide(file, offset_bytes, data, unit));
        match &self.buffered {
            Some(buffered) if is_refusal(&result) => buffered.read(data, offset_bytes),
            _ => result,
        }
    }

    /// Writes `data` to `offset_bytes` of `file`. Waits for other writes to the same blocks.
    pub(super) fn write(
        &self,
        file: &impl ReadWriteAt,
        offset_bytes: u64,
        data: &[u8],
    ) -> io::Result<()> {
        let len_bytes = data.len() as u64;
        if self.is_aligned(offset_bytes, len_bytes) {
            let _guard = self.lock_shared(offset_bytes, len_bytes);
            let result = file.write_all_at(data, offset_bytes);
            if !is_refusal(&result) {
                return result;
            }
        }
        let _guard = self.lock_exclusive(offset_bytes, len_bytes);
        self.write_locked(file, offset_bytes, data)
    }

    /// Writes `data`. The caller must hold [`DirectIo::lock_exclusive`], or an exclusive lock of
    /// [`widest_range`].
    pub(super) fn write_locked(
        &self,
        file: &impl ReadWriteAt,
        offset_bytes: u64,
        data: &[u8],
    ) -> io::Result<()> {
        let result = self.with_growing_unit(|unit| self.write_wide(file, offset_bytes, data, unit));
        match &self.buffered {
            Some(buffered) if is_refusal(&result) => buffered.write(data, offset_bytes),
            _ => result,
        }
    }

    /// Retries `transfer` with larger units while the host refuses it, and records the first unit
    /// that the host accepts.
    fn with_growing_unit(&self, mut transfer: impl FnMut(u64) -> io::Result<()>) -> io::Result<()> {
        let mut unit_bytes = self.unit_bytes();
        loop {
            let result = transfer(unit_bytes);
            if is_refusal(&result) && unit_bytes < UNIT_BYTES_MAX {
                unit_bytes *= 2;
                continue;
            }
            if result.is_ok()
                && self.unit_bytes.fetch_max(unit_bytes, Ordering::Relaxed) < unit_bytes
            {
                let path = &self.path;
                info!(
                    ?path,
                    unit_bytes,
                    "The host requires larger transfers from now on; smaller ones are extended"
                );
            }
            return result;
        }
    }

    fn read_wide(
        &self,
        file: &impl ReadWriteAt,
        offset_bytes: u64,
        data: &mut [u8],
        unit_bytes: u64,
    ) -> io::Result<()> {
        let direct = self.direct_part(offset_bytes, data.len() as u64, unit_bytes)?;
        let (direct_data, tail) = data.split_at_mut((direct.end - direct.start) as usize);
        if !direct_data.is_empty() {
            let wide = widened(&direct, unit_bytes);
            if wide == direct {
                file.read_exact_at(direct_data, offset_bytes)?;
            } else {
                let mut buffer = Buffers::default().take((wide.end - wide.start) as usize);
                file.read_exact_at(buffer.bytes_mut(), wide.start)?;
                let skip = (direct.start - wide.start) as usize;
                direct_data.copy_from_slice(&buffer.bytes()[skip..][..direct_data.len()]);
            }
        }
        match &self.buffered {
            Some(buffered) if !tail.is_empty() => buffered.read(tail, direct.end),
            _ => Ok(()),
        }
    }

    fn write_wide(
        &self,
        file: &impl ReadWriteAt,
        offset_bytes: u64,
        data: &[u8],
        unit_bytes: u64,
    ) -> io::Result<()> {
        let direct = self.direct_part(offset_bytes, data.len() as u64, unit_bytes)?;
        let (direct_data, tail) = data.split_at((direct.end - direct.start) as usize);
        if !direct_data.is_empty() {
            let wide = widened(&direct, unit_bytes);
            if wide == direct {
                file.write_all_at(direct_data, offset_bytes)?;
            } else {
                let mut buffer = Buffers::default().take((wide.end - wide.start) as usize);
                let unit = unit_bytes as usize;
                let last = buffer.len() - unit;
                if direct.start > wide.start || last == 0 {
                    file.read_exact_at(&mut buffer.bytes_mut()[..unit], wide.start)?;
                }
                if direct.end < wide.end && last > 0 {
                    file.read_exact_at(&mut buffer.bytes_mut()[last..], wide.end - unit_bytes)?;
                }
                let skip = (direct.start - wide.start) as usize;
                buffer.bytes_mut()[skip..][..direct_data.len()].copy_from_slice(direct_data);
                file.write_all_at(buffer.bytes(), wide.start)?;
            }
        }
        match &self.buffered {
            Some(buffered) if !tail.is_empty() => buffered.write(tail, direct.end),
            _ => Ok(()),
        }
    }

    /// Part of a transfer up to the end of the file's last whole unit. The rest is not written in
    /// whole units, because that would extend the file.
    fn direct_part(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        unit_bytes: u64,
    ) -> io::Result<Range<u64>> {
        let end = offset_bytes + len_bytes;
        let Some(buffered) = &self.buffered else { return Ok(offset_bytes..end) };
        let size_bytes = buffered.size_bytes()?;
        let units_end = size_bytes - size_bytes % unit_bytes;
        // A transfer that begins after the last whole unit has no direct part.
        Ok(offset_bytes..end.min(units_end.max(offset_bytes)))
    }
}

/// Range that a widened write may touch with any unit.
pub(super) fn widest_range(offset_bytes: u64, len_bytes: u64) -> Range<u64> {
    widened(&(offset_bytes..offset_bytes + len_bytes), UNIT_BYTES_MAX)
}

/// Smallest range of whole units that contains `range`.
fn widened(range: &Range<u64>, unit_bytes: u64) -> Range<u64> {
    range.start - range.start % unit_bytes..range.end.next_multiple_of(unit_bytes)
}

/// Returns true for EINVAL, with which the kernel refuses the alignment of a direct transfer.
pub(super) fn is_refusal(result: &io::Result<()>) -> bool {
    matches!(result, Err(err) if err.raw_os_error() == Some(libc::EINVAL))
}

/// Smallest unit in which the host reads an image of `size_bytes`. Reads at the start, in the
/// middle and at the end of the image, each time at an odd multiple of the unit. Errors other than
/// EINVAL are not caused by alignment.
fn probe(file: &impl ReadWriteAt, size_bytes: u64) -> u64 {
    let mut buffer = Buffers::default().take(UNIT_BYTES_MAX as usize);
    let mut takes = |unit_bytes: u64| {
        let units = size_bytes / unit_bytes;
        let odd = |unit: u64| unit.saturating_sub(1) | 1;
        let offsets = [0, 1, odd(units / 2), odd(units)].map(|unit| unit * unit_bytes);
        offsets.into_iter().filter(|offset| *offset < size_bytes).all(|offset| {
            let read = file.read_at(&mut buffer.bytes_mut()[..unit_bytes as usize], offset);
            !is_refusal(&read.map(drop))
        })
    };
    let units = std::iter::successors(Some(SECTOR_BYTES), |unit| Some(unit * 2));
    units
        .take_while(|unit| *unit < UNIT_BYTES_MAX)
        .find(|unit| takes(*unit))
        .unwrap_or(UNIT_BYTES_MAX)
}

#[cfg(test)]
#[path = "direct_tests.rs"]
mod tests;
