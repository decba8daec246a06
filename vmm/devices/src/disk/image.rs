//! Raw image files and block devices.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pmem_volume::pool::Holder;
use pmem_volume::pool::ownership::{ClaimError, claim};
use pmem_volume::pool::signature::image_format;
use rustix::fs::{FallocateFlags, fallocate, ioctl_blkpbszget, ioctl_blksszget};
use thiserror::Error;
use tracing::{info, warn};
use vmm_sys_util::eventfd::EventFd;

use super::direct::{DirectIo, widest_range};
use super::range_locks::{Access, RangeGuard};
use super::uring::Uring;
use super::{BlockDevice, Executor, Geometry, ResizeError, Step};
use crate::disk::buffer::Buffers;
use crate::disk::range::{DiskRange, SECTOR_BYTES, Unmap};
use crate::guest_file::{self, GuestAccess, GuestFileError};

/// Block size of file systems and media if the real size is unknown.
const PAGE_BYTES: u32 = 4096;
/// Maximum physical block size. With larger blocks, file systems would leave gaps.
const PHYSICAL_BLOCK_BYTES_MAX: u32 = 1 << 20;
/// Length of each write where a range is zeroed by writing zeros.
const ZEROS_BYTES: usize = 1 << 20;

#[derive(Clone, Copy, Debug, Default)]
pub struct ImageOptions {
    pub readonly: bool,
    /// Bypass the page cache (O_DIRECT).
    pub direct: bool,
    /// Return the blocks of discarded ranges to the file system.
    pub sparse: bool,
    /// The user has declared the image as raw, so content of another format causes no warning.
    pub is_called_raw: bool,
    /// Size of the guest's logical blocks. `None` means 512 bytes for a file, and the logical block
    /// size of the device for a block device.
    pub guest_block_bytes: Option<u32>,
}

#[derive(Debug, Error)]
pub enum ImageError {
    #[error("{path:?} cannot be {done}")]
    Io {
        path: PathBuf,
        done: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{path:?} is neither a file nor a block device")]
    Kind {
        /// Path of a file that is neither a regular file nor a block device.
        path: PathBuf,
    },
    #[error("{path:?} is in use by {holder}; only readonly=on images are shared")]
    InUse { path: PathBuf, holder: Holder },
    #[error("{path:?} is in use: {by}")]
    DeviceInUse { path: PathBuf, by: String },
    #[error(transparent)]
    Pool(#[from] GuestFileError),
    #[error("{path:?} has {size_bytes} bytes, less than a block of {block_bytes}")]
    Empty { path: PathBuf, size_bytes: u64, block_bytes: u32 },
}

/// Open and locked raw image.
#[derive(Debug)]
pub struct RawImage {
    path: PathBuf,
    file: File,
    geometry: Geometry,
    /// True for a regular file, which can grow. A block device cannot.
    is_file: bool,
    size_bytes: AtomicU64,
    /// `None` without O_DIRECT, because the page cache accepts transfers of any alignment.
    direct: Option<DirectIo>,
    /// Unit in which ranges can be discarded or zeroed.
    range_unit_bytes: u64,
}

impl RawImage {
    /// Opens and locks the image at `path`.
    pub fn open(path: &Path, options: ImageOptions) -> Result<Arc<Self>, ImageError> {
        let error = |done| move |source| ImageError::Io { path: path.to_owned(), done, source };
        // 1. Check the file type, because opening other types of files may have side effects.
        let is_image = |kind: fs::FileType| kind.is_file() || kind.is_block_device();
        let refuse_others = |metadata: fs::Metadata| match is_image(metadata.file_type()) {
            true => Ok(metadata.file_type()),
            false => Err(ImageError::Kind { path: path.to_owned() }),
        };
        refuse_others(fs::metadata(path).map_err(error("examined"))?)?;
        // 2. Open the image with its final flags, and lock it. All later checks use this open file.
        let flags = if options.direct { libc::O_DIRECT } else { 0 };
        let file =
            claim(path, !options.readonly, flags).map_err(|err| claim_error(path, options, err))?;
        let kind = refuse_others(file.metadata().map_err(error("examined"))?)?;
        // 3. Determine its properties.
        let size_bytes = (&file).seek(SeekFrom::End(0)).map_err(error("measured"))?;
        let device_block_bytes = kind.is_block_device().then(|| device_block_bytes(&file));
        let block_bytes =
            options.guest_block_bytes.or(device_block_bytes).unwrap_or(SECTOR_BYTES as u32);
        let physical_block_bytes = match kind.is_block_device() {
            true => ioctl_blkpbszget(&file).ok().map_or(PAGE_BYTES, usable_physical_bytes),
            false => PAGE_BYTES,
        };
        let physical_block_bytes = physical_block_bytes.max(block_bytes);
        let served_bytes = size_bytes - size_bytes % u64::from(block_bytes);
        if served_bytes == 0 {
            return Err(ImageError::Empty { path: path.to_owned(), size_bytes, block_bytes });
        }
        let access =
            GuestAccess { is_writable: !options.readonly, is_declared_raw: options.is_called_raw };
        guest_file::check(&file, path, access)?;
        if !options.is_called_raw && !guest_file::is_marked(&file) {
            warn_of_format(&file, path);
        }
        if served_bytes != size_bytes {
            warn!(
                ?path,
                size_bytes, block_bytes, "The last, partial block of the image is not served"
            );
        }
        let geometry = Geometry {
            block_bytes,
            physical_block_bytes,
            read_only: options.readonly,
            discard: options.sparse && !options.readonly,
            unmap: options.sparse && !options.readonly,
        };
        let direct = || DirectIo::new(path, &file, kind.is_file(), !options.readonly, size_bytes);
        let direct = options.direct.then(direct).transpose();
        let direct = direct.map_err(error("duplicated"))?;
        if !options.readonly {
            guest_file::mark(&file, path);
        }
        if let Some(unit_bytes) = direct.as_ref().map(DirectIo::unit_bytes)
            && unit_bytes > u64::from(block_bytes)
        {
            info!(
                ?path,
                block_bytes,
                unit_bytes,
                "The host requires larger transfers; smaller ones are extended"
            );
        }
        Ok(Arc::new(Self {
            path: path.to_owned(),
            file,
            geometry,
            is_file: kind.is_file(),
            size_bytes: AtomicU64::new(served_bytes),
            direct,
            range_unit_bytes: device_block_bytes.map_or(1, u64::from),
        }))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Returns true if a range may be zeroed by freeing its blocks, which is forbidden if the image
    /// must remain allocated.
    pub(super) fn unmaps(&self, unmap: Unmap) -> bool {
        self.geometry.unmap && unmap == Unmap::Allowed
    }

    /// Returns true if a step consists of whole units, so that it needs no read-modify-write cycle.
    pub(super) fn is_aligned(&self, step: &Step) -> bool {
        let is_transfer_aligned = |offset, len| {
            self.direct.as_ref().is_none_or(|direct| direct.is_aligned(offset, len as u64))
        };
        match step {
            Step::Read(offset, buffer) | Step::Write(offset, buffer) => {
                is_transfer_aligned(*offset, buffer.len())
            }
            Step::Discard(range) | Step::WriteZeroes(range, _) => {
                (range.offset_bytes() | range.len_bytes()).is_multiple_of(self.range_unit_bytes)
            }
            Step::Flush => true,
        }
    }

    /// Checks whether misalignment could have caused EINVAL for this step.
    pub(super) fn may_refuse(&self, step: &Step) -> bool {
        self.direct.is_some()
            && matches!(step, Step::Read(..) | Step::Write(..) | Step::WriteZeroes(..))
    }

    /// Makes the image treat every transfer as aligned, as if the host had not refused any yet.
    #[cfg(test)]
    pub fn forget_unit(&self) {
        self.direct.iter().for_each(|direct| direct.set_unit(SECTOR_BYTES));
    }

    /// Locks the range that an aligned step changes while the step is in flight. Locks nothing if
    /// the image needs no locks. The device's thread must not block. If the range is already
    /// locked, `event` is raised when the conflicting step has ended.
    pub(super) fn lock_aligned(
        &self,
        step: &Step,
        event: &Arc<EventFd>,
    ) -> Result<Option<RangeGuard>, RangeInUse> {
        let (Some(direct), Some((offset_bytes, len_bytes))) = (&self.direct, changed_range(step))
        else {
            return Ok(None);
        };
        let range = offset_bytes..offset_bytes + len_bytes;
        direct.locks().try_lock(range, Access::Shared, event).map(Some).ok_or(RangeInUse)
    }

    /// Executes a step of any alignment. Returns `None` if a step in flight changes the same
    /// blocks. `event` is then raised when such a step has ended.
    pub(super) fn carry_out_unaligned(
        &self,
        step: &mut Step,
        event: &Arc<EventFd>,
    ) -> Option<io::Result<()>> {
        let _guard = match (&self.direct, changed_range(step)) {
            (Some(direct), Some((offset_bytes, len_bytes))) => {
                let range = widest_range(offset_bytes, len_bytes);
                Some(direct.locks().try_lock(range, Access::Exclusive, event)?)
            }
            _ => None,
        };
        Some(match step {
            Step::Write(offset, buffer) => self.write_locked(*offset, buffer.bytes()),
            Step::WriteZeroes(range, unmap) => self.write_zeroes_locked(*range, *unmap),
            Step::Read(..) | Step::Flush | Step::Discard(_) => step.execute(self),
        })
    }

    /// Locks the range that a step of any alignment changes. Waits for other steps that change the
    /// range.
    pub(super) fn lock_unaligned(&self, offset_bytes: u64, len_bytes: u64) -> Option<RangeGuard> {
        self.direct.as_ref().map(|direct| direct.lock_exclusive(offset_bytes, len_bytes))
    }

    /// Writes `data`. The caller must have locked the blocks.
    fn write_locked(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        match &self.direct {
            Some(direct) => direct.write_locked(&self.file, offset_bytes, data),
            None => self.file.write_all_at(data, offset_bytes),
        }
    }

    /// Makes a range read as zeros. The caller must have locked the blocks.
    fn write_zeroes_locked(&self, range: DiskRange, unmap: Unmap) -> io::Result<()> {
        let modes: &[FallocateFlags] = if self.unmaps(unmap) { &[PUNCH, ZERO] } else { &[ZERO] };
        let (whole, end) = (self.whole_units(range), range.offset_bytes() + range.len_bytes());
        for mode in modes {
            match self.allocate(*mode, &whole) {
                Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => (),
                Err(err) => return Err(err),
                Ok(()) => {
                    self.write_out_zeroes(range.offset_bytes()..whole.start)?;
                    return self.write_out_zeroes(whole.end..end);
                }
            }
        }
        self.write_out_zeroes(range.offset_bytes()..end)
    }

    /// Largest part of a range that a block device accepts in `fallocate`. If no part is large
    /// enough, returns an empty range at the start of `range`.
    fn whole_units(&self, range: DiskRange) -> Range<u64> {
        let (start, end) = (range.offset_bytes(), range.offset_bytes() + range.len_bytes());
        let (first, last) =
            (start.next_multiple_of(self.range_unit_bytes), end - end % self.range_unit_bytes);
        if first < last { first..last } else { start..start }
    }

    /// Calls `fallocate`. Returns its error unchanged, because callers distinguish the causes.
    fn allocate(&self, mode: FallocateFlags, range: &Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        Ok(fallocate(&self.file, mode, range.start, range.end - range.start)?)
    }

    /// Writes zeros. Used for file systems without a faster method, such as tmpfs.
    fn write_out_zeroes(&self, range: Range<u64>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        // A new buffer is zeroed.
        let zeros = Buffers::default().take(ZEROS_BYTES);
        for offset in range.clone().step_by(ZEROS_BYTES) {
            let len = (range.end - offset).min(ZEROS_BYTES as u64) as usize;
            self.write_locked(offset, &zeros.bytes()[..len])?;
        }
        Ok(())
    }
}

/// Error if another step is changing the same blocks.
#[derive(Debug)]
pub(super) struct RangeInUse;

/// Offset and length of the range that a step changes.
fn changed_range(step: &Step) -> Option<(u64, u64)> {
    match step {
        Step::Write(offset, buffer) => Some((*offset, buffer.len() as u64)),
        Step::Discard(range) | Step::WriteZeroes(range, _) => {
            Some((range.offset_bytes(), range.len_bytes()))
        }
        Step::Read(..) | Step::Flush => None,
    }
}

/// `fallocate` modes.
pub(super) const PUNCH: FallocateFlags =
    FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
pub(super) const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);

impl BlockDevice for RawImage {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()> {
        match &self.direct {
            Some(direct) => direct.read(&self.file, offset_bytes, data),
            None => self.file.read_exact_at(data, offset_bytes),
        }
    }

    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        match &self.direct {
            Some(direct) => direct.write(&self.file, offset_bytes, data),
            None => self.file.write_all_at(data, offset_bytes),
        }
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// If the file system cannot free the blocks, they remain allocated, because a discard is only
    /// a hint (5.2.6.2). For the same reason, partial blocks at the edges of a range on a block
    /// device remain allocated.
    fn discard(&self, range: DiskRange) -> io::Result<()> {
        match self.allocate(PUNCH, &self.whole_units(range)) {
            Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            result => result,
        }
    }

    fn write_zeroes(&self, range: DiskRange, unmap: Unmap) -> io::Result<()> {
        let _guard = self.lock_unaligned(range.offset_bytes(), range.len_bytes());
        self.write_zeroes_locked(range, unmap)
    }

    fn start(self: Arc<Self>, depth: u16) -> Option<Box<dyn Executor>> {
        let path = &self.path;
        match Uring::new(Arc::clone(&self), depth) {
            Ok(uring) => Some(Box::new(uring)),
            Err(err) => {
                warn!(?path, %err, "io_uring is not available; each queue transfers one request at a time");
                None
            }
        }
    }

    fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError> {
        let size_bytes = self.size_bytes();
        let block_bytes = self.geometry.block_bytes;
        if !wanted_bytes.is_multiple_of(u64::from(block_bytes)) {
            return Err(ResizeError::PartOfBlock { wanted_bytes, block_bytes });
        }
        if wanted_bytes < size_bytes {
            return Err(ResizeError::Shrinks { size_bytes, wanted_bytes });
        }
        let failed = |source| ResizeError::Io { wanted_bytes, source };
        let now_bytes = (&self.file).seek(SeekFrom::End(0)).map_err(failed)?;
        // Another program may have resized the image already. This call then only announces the new
        // size.
        if now_bytes < wanted_bytes {
            if !self.is_file {
                let reason = format!("the device has {now_bytes} bytes, not {wanted_bytes}");
                return Err(ResizeError::Unsupported(reason));
            }
            if self.geometry.read_only {
                return Err(ResizeError::Unsupported("it is read-only".to_owned()));
            }
            self.file.set_len(wanted_bytes).map_err(failed)?;
        }
        self.size_bytes.store(wanted_bytes, Ordering::Release);
        Ok(())
    }
}

/// Warns if an image that is served as raw contains another format. The image is not refused,
/// because a guest can write such bytes to a raw image, and this must not prevent its next start.
fn warn_of_format(file: &File, path: &Path) {
    // Reads a whole aligned page, because O_DIRECT may refuse smaller transfers.
    let mut head = Buffers::default().take(PAGE_BYTES as usize);
    let format =
        file.read_at(head.bytes_mut(), 0).ok().and_then(|len| image_format(&head.bytes()[..len]));
    if let Some(format) = format {
        warn!(
            ?path,
            format,
            "Image looks like this format but is served as raw bytes; if no guest wrote it, convert it with \
             `qemu-img convert -O raw`; image_type=raw silences this warning"
        );
    }
}

fn claim_error(path: &Path, options: ImageOptions, err: ClaimError) -> ImageError {
    let path = path.to_owned();
    let done = match (options.direct, options.readonly) {
        (true, _) => "opened with direct=on",
        (false, true) => "opened",
        (false, false) => "opened for writing; to only read it, use readonly=on",
    };
    match err {
        ClaimError::Open(source) => ImageError::Io { path, done, source },
        ClaimError::Lock(source) => ImageError::Io { path, done: "locked", source },
        ClaimError::InUse { holder } => ImageError::InUse { path, holder },
        ClaimError::DeviceInUse { by } => ImageError::DeviceInUse { path, by },
    }
}

/// Logical block size of a block device, which is the unit of its partition table.
fn device_block_bytes(file: &File) -> u32 {
    let usable = |bytes: &u32| bytes.is_power_of_two() && (512..=PAGE_BYTES).contains(bytes);
    ioctl_blksszget(file).ok().filter(usable).unwrap_or(PAGE_BYTES)
}

/// Converts a device's physical block size to the size that partitions and file systems should
/// align to. It is at least a page, the unit of the host's page cache.
fn usable_physical_bytes(bytes: u32) -> u32 {
    if bytes.is_power_of_two() {
        bytes.clamp(PAGE_BYTES, PHYSICAL_BLOCK_BYTES_MAX)
    } else {
        PAGE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn physical_blocks_are_at_least_pages() {
        for (reported, used) in [
            (0, 4096),
            (512, 4096),
            (4096, 4096),
            (16384, 16384),
            (1 << 30, 1 << 20),
            (12288, 4096),
        ] {
            assert_eq!(usable_physical_bytes(reported), used, "{reported}");
        }
    }
}

#[cfg(test)]
#[path = "image_lock_tests.rs"]
mod lock_tests;
