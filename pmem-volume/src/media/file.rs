//! Media in a file or device that is mapped with MAP_SHARED.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::fs::FallocateFlags;
use thiserror::Error;

use super::flush::{self, CACHE_LINE_BYTES, LineFlush};
use super::guarded::{Guard, PageLost};
use super::mapping::Mapping;
use super::media_kind::MediaKind;
use super::shared_sync::SharedSync;
use super::zeroing::{self, is_unsupported, write_zeros};
use super::{Durability, Media, MediaError, Pending, assert_inside, coalesce, holes, page_cache};
use crate::CHUNK_BYTES;
use crate::progress::{OnProgress, Task, ignore_progress, run_in_steps};

/// Number of bytes that are erased between two progress reports. Even a slow disk erases them in
/// less than a second.
const ERASE_STEP_BYTES: u64 = 32 * CHUNK_BYTES;

/// Number of bytes that are allocated between two progress reports. File systems allocate them
/// quickly, so larger steps would gain nothing.
const ALLOCATE_STEP_BYTES: u64 = 1 << 30;

/// Bulk stores of at least this length use a system call on tmpfs and in a page cache.
const MIN_PWRITE_BYTES: usize = 64 << 10;

/// Unit of msync() and sync_file_range().
const PAGE_BYTES: u64 = 4096;

/// File or device that is completely mapped with MAP_SHARED.
///
/// The whole file is one mapping. Therefore, an msync() of a range is a single fsync of that range,
/// even if the guest has its own mappings of the file. The mapping uses only address space, because
/// this process accesses only the pool's metadata through it.
pub struct FileMedia {
    file: File,
    mapping: Mapping,
    media_kind: MediaKind,
    durability: Durability,
    /// Free ranges are kept as holes, so erasing returns blocks to the file system.
    is_thin: bool,
    /// Erasing creates holes, because the pool is thin and the file system supports it.
    makes_holes: bool,
    line_flush: LineFlush,
    writable: bool,
    guard: Guard,
    sync: SharedSync,
}

/// Reason why an access to the mapping, or to a range of it, failed without an error from the
/// kernel.
#[derive(Debug, Error)]
enum MappingError {
    #[error("the file was truncated to {file_bytes:#x} bytes, but the media has {media_bytes:#x}")]
    Truncated { file_bytes: u64, media_bytes: u64 },
    #[error("SIGBUS: the memory failed, or the file system has no space for it")]
    LostPage,
}

impl FileMedia {
    /// Maps the first `len_bytes` of `file` and determines its durability. The file must have at
    /// least that length.
    pub fn new(file: File, len_bytes: u64, writable: bool) -> Result<Self, MediaError> {
        let failed = |operation, source| MediaError::Io {
            operation,
            offset_bytes: 0,
            length_bytes: len_bytes,
            source,
        };
        let media_kind =
            MediaKind::of(&file).map_err(|e| failed("inspection", io::Error::other(e)))?;
        let mapping = Mapping::new(&file, len_bytes, writable).map_err(|e| failed("mmap", e))?;
        let durability = match mapping.is_synchronous() {
            _ if media_kind.is_volatile() => Durability::Volatile,
            true => Durability::DaxSync,
            false => Durability::PageCache,
        };
        let (line_flush, guard) = (LineFlush::detect(), Guard::new());
        let sync = SharedSync::default();
        let (is_thin, makes_holes) = (false, false);
        let media = Self {
            file,
            mapping,
            media_kind,
            durability,
            is_thin,
            makes_holes,
            line_flush,
            writable,
            guard,
            sync,
        };
        Ok(media.thin(false))
    }

    /// Drops clean pages from the page cache, so that the first reads return the content of the
    /// disk. Does nothing without a page cache.
    pub fn forget_clean_pages(&self) {
        if self.durability == Durability::PageCache {
            page_cache::forget_clean_pages(
                &self.file,
                std::slice::from_ref(&(0..self.len_bytes())),
            );
        }
    }

    /// Makes erasing punch holes in a file on a disk if `is_thin`. Other kinds of media are either
    /// always or never thin.
    pub(crate) fn thin(mut self, is_thin: bool) -> Self {
        self.is_thin = is_thin;
        let wants_holes =
            self.media_kind == MediaKind::Memory || is_thin && self.media_kind == MediaKind::Disk;
        // Support for holes cannot be tested in a file that is open for reading. A reader erases
        // nothing anyway.
        self.makes_holes = wants_holes && (!self.writable || zeroing::makes_holes(&self.file));
        self
    }

    /// Returns true if erasing is cheap and returns blocks or pages to the host.
    pub(crate) fn makes_holes(&self) -> bool {
        self.makes_holes
    }

    /// Returns true for a file on a disk whose blocks must all be allocated.
    pub(crate) fn requires_blocks(&self) -> bool {
        self.media_kind == MediaKind::Disk && !self.is_thin
    }

    pub(crate) fn media_kind(&self) -> MediaKind {
        self.media_kind
    }

    /// Makes persists and erasures use the same instructions as on persistent memory (`dax-sync`):
    /// cache-line write-backs and non-temporal stores. Benchmarks use it with a file in DRAM, which
    /// remains volatile.
    #[doc(hidden)]
    pub fn with_dax_persists(mut self) -> Self {
        (self.durability, self.media_kind) = (Durability::DaxSync, MediaKind::Disk);
        self.thin(false)
    }

    /// Returns the file, for separate mappings by guest memory and volumes.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Adds a part of the same file or device to the media, durably. The part reads as zeros. Other
    /// threads may use the media in the meantime. After an error, the file may be longer, and the
    /// media of a device too.
    ///
    /// A file is extended. In a thin file, only the blocks of `reserved` are allocated. A device
    /// already has its length, so the part is erased.
    pub(crate) fn grow(
        &self,
        added: Range<u64>,
        reserved: Option<&Range<u64>>,
        progress: OnProgress<'_>,
    ) -> io::Result<()> {
        if !self.media_kind.is_device() {
            assert_eq!(added.start, self.len_bytes());
            allocate(&self.file, added.clone(), self.is_thin, progress)?;
            reserved.map_or(Ok(()), |range| self.reserve(range))?;
            self.file.sync_all()?;
            return self.mapping.grow(&self.file, added.end);
        }
        // Mapped first, because erasing may use the mapping.
        if self.len_bytes() < added.end {
            self.mapping.grow(&self.file, added.end)?;
        }
        self.erase_in_steps(added, progress).map_err(io::Error::other)
    }

    /// Erases a large range durably and in order, and reports the progress after each step. If
    /// `progress` panics, the rest of the range is unchanged.
    pub(crate) fn erase_in_steps(
        &self,
        range: Range<u64>,
        progress: OnProgress<'_>,
    ) -> Result<(), MediaError> {
        let erase = |step| self.erase(std::slice::from_ref(&step));
        run_in_steps(Task::Erase, range, ERASE_STEP_BYTES, progress, erase)
    }

    /// Allocates the blocks of a range in a thin file, so that stores of this process cannot find
    /// the disk full. The range must not have blocks yet.
    pub(crate) fn reserve(&self, range: &Range<u64>) -> io::Result<()> {
        if self.is_thin && self.media_kind == MediaKind::Disk {
            allocate_blocks(&self.file, range.clone(), &mut ignore_progress)
        } else {
            Ok(())
        }
    }

    #[inline]
    fn pointer(&self, offset_bytes: u64, length_bytes: u64) -> *mut u8 {
        assert_inside(offset_bytes, length_bytes, self.len_bytes());
        // SAFETY: the range is inside the mapping, and its offset fits into usize because mmap()
        // accepted the length. The address is read after the length.
        unsafe { self.mapping.start().add(offset_bytes as usize) }
    }

    #[inline]
    fn word(&self, offset_bytes: u64) -> *mut u64 {
        assert!(offset_bytes.is_multiple_of(8), "{offset_bytes:#x} is not aligned to a word");
        self.pointer(offset_bytes, 8).cast()
    }

    /// Returns true if a store through the mapping allocates memory: pages of tmpfs or of the page
    /// cache.
    fn allocates_pages(&self) -> bool {
        match self.durability {
            Durability::PageCache => true,
            Durability::Volatile => self.media_kind == MediaKind::Memory,
            Durability::DaxSync => false,
        }
    }

    /// Stores bytes with a system call. A store through the mapping would cause a page fault for
    /// each page, and the kernel would fill each page before it is overwritten.
    #[cold]
    fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.check_writable()?;
        let range = offset_bytes..offset_bytes + bytes.len() as u64;
        assert_inside(offset_bytes, bytes.len() as u64, self.len_bytes());
        // If the file was truncated, pwrite() would extend it again.
        self.check_length()
            .and_then(|()| self.file.write_all_at(bytes, offset_bytes))
            .map_err(|source| io_error("write", &range, source))
    }

    /// Returns the error of an access to a lost page.
    #[cold]
    fn access_error(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> MediaError {
        let range = offset_bytes..offset_bytes + length_bytes;
        let source =
            self.check_length().err().unwrap_or_else(|| io::Error::other(MappingError::LostPage));
        io_error(operation, &range, source)
    }

    /// Checks that the file is as long as the mapping. Otherwise, operations on ranges past the
    /// end of the file would succeed or extend the file.
    fn check_length(&self) -> io::Result<()> {
        let metadata = self.file.metadata()?;
        let (file_bytes, media_bytes) = (metadata.len(), self.len_bytes());
        if metadata.is_file() && file_bytes < media_bytes {
            return Err(io::Error::other(MappingError::Truncated { file_bytes, media_bytes }));
        }
        Ok(())
    }

    #[inline]
    fn check_writable(&self) -> Result<(), MediaError> {
        if self.writable { Ok(()) } else { Err(MediaError::ReadOnly) }
    }

    /// Calls msync(), which writes the dirty pages of the range and the metadata of the inode, and
    /// issues a barrier to the device.
    fn msync(&self, range: &Range<u64>) -> Result<(), MediaError> {
        let length_bytes = range.end - range.start;
        let pointer = self.pointer(range.start, length_bytes);
        // SAFETY: the range is inside the mapping and starts at a page boundary.
        let result = unsafe { libc::msync(pointer.cast(), length_bytes as usize, libc::MS_SYNC) };
        if result != 0 {
            return Err(io_error("msync", range, io::Error::last_os_error()));
        }
        self.check_length().map_err(|source| io_error("msync", range, source))
    }

    fn persist_page_cache(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        let pages: Vec<_> = ranges
            .iter()
            .map(|r| {
                r.start / PAGE_BYTES * PAGE_BYTES
                    ..r.end.next_multiple_of(PAGE_BYTES).min(self.len_bytes())
            })
            .collect();
        let pages = coalesce(&pages);
        let Some((last, others)) = pages.split_last() else { return Ok(()) };
        // 1. Write the data of all ranges except the last in parallel, and wait until it is
        //    written.
        // 2. Write the data of the last range and the metadata of the inode, and issue the barrier.
        //    The barrier also covers step 1.
        let sync = || {
            if let Some(first) = others.first() {
                page_cache::write_pages(&self.file, others).map_err(|source| {
                    io_error("sync_file_range", &(first.start..last.start), source)
                })?;
            }
            self.msync(last)
        };
        // Each step consumes the pending error of the open file, even if the error belongs to
        // another caller.
        self.sync.run(sync, |missed_error| io_error("msync", last, io::Error::other(missed_error)))
    }

    /// Starts the write-back of cache lines. A fence completes it.
    #[inline]
    fn write_back(&self, range: &Range<u64>) -> Result<(), MediaError> {
        let length_bytes = range.end - range.start;
        let pointer = self.pointer(range.start, length_bytes);
        // SAFETY: pointer() has checked that the range is inside the mapping, and detect() has
        // found the instruction.
        unsafe { self.guard.write_back(self.line_flush, pointer, length_bytes as usize) }
            .map_err(|PageLost| self.access_error("write-back", range.start, length_bytes))
    }

    fn persist_cache_lines(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        ranges.iter().try_for_each(|range| self.write_back(range))?;
        flush::fence();
        Ok(())
    }

    fn erase_by_kernel(&self, range: &Range<u64>) -> Result<(), MediaError> {
        let (operation, result) = match self.makes_holes {
            true => ("hole punch", zeroing::punch(&self.file, range)),
            false => ("zeroing", zeroing::zero(&self.file, range)),
        };
        result.map_err(|source| io_error(operation, range, source))
    }
}

impl Media for FileMedia {
    #[inline]
    fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes()
    }

    #[inline]
    fn durability(&self) -> Durability {
        self.durability
    }

    fn as_file(&self) -> Option<&FileMedia> {
        Some(self)
    }

    fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        assert_inside(offset_bytes, into.len() as u64, self.len_bytes());
        let length_bytes = into.len() as u64;
        if matches!(self.media_kind, MediaKind::DevDax { .. }) {
            let pointer = self.pointer(offset_bytes, length_bytes);
            // SAFETY: the source is inside the mapping, and the destination is ordinary memory, so
            // they do not overlap. The contract of `Media` allows torn reads during concurrent
            // stores.
            return unsafe { self.guard.copy(into.as_mut_ptr(), pointer, into.len()) }
                .map_err(|PageLost| self.access_error("read", offset_bytes, length_bytes));
        }
        // Uses pread() instead of the mapping, because it returns I/O errors. A read through the
        // mapping would also allocate pages for a hole in tmpfs. pread() is coherent with mappings
        // on all media that support it.
        let range = offset_bytes..offset_bytes + length_bytes;
        self.file
            .read_exact_at(into, offset_bytes)
            .map_err(|source| io_error("read", &range, source))
    }

    fn next_data(&self, range: Range<u64>) -> Result<Option<Range<u64>>, MediaError> {
        assert_inside(range.start, range.end - range.start, self.len_bytes());
        let all = Some(range.clone()).filter(|range| !range.is_empty());
        match self.media_kind {
            // The range past the end of a truncated file is not a hole, and reading it must
            // report the error.
            MediaKind::Memory | MediaKind::Disk if all.is_some() && self.check_length().is_ok() => {
                holes::next_data(&self.file, range.clone())
                    .map_err(|source| io_error("inspection", &range, source))
            }
            _ => Ok(all),
        }
    }

    // Always inlined, like [`Self::store_word`]. The result is as large as its error, so a call
    // would return it in memory instead of registers.
    #[inline(always)]
    fn load_word(&self, offset_bytes: u64) -> Result<u64, MediaError> {
        // SAFETY: word() has checked that the address is aligned and inside the mapping.
        let word = unsafe { self.guard.load(self.word(offset_bytes)) };
        word.map(u64::from_le).map_err(|PageLost| self.access_error("load", offset_bytes, 8))
    }

    #[inline(always)]
    fn prefetch_word(&self, offset_bytes: u64) {
        // SAFETY: SSE is part of x86-64. A prefetch has no effect that a program can observe, and
        // never faults (Intel SDM, volume 2, PREFETCHh).
        unsafe { _mm_prefetch::<_MM_HINT_T0>(self.word(offset_bytes).cast()) };
    }

    fn store(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.check_writable()?;
        let pointer = self.pointer(offset_bytes, bytes.len() as u64);
        // Recorded here and not in [`Guard::copy`], which also copies from mappings to other
        // memory.
        #[cfg(test)]
        flush::recorded_ops::record(flush::recorded_ops::RecordedOp::Stored(
            pointer as usize..pointer as usize + bytes.len(),
        ));
        // SAFETY: the destination is inside a writable mapping without concurrent stores to it
        // (contract of `Media`). The source is ordinary memory, so they do not overlap.
        unsafe { self.guard.copy(pointer, bytes.as_ptr(), bytes.len()) }
            .map_err(|PageLost| self.access_error("store", offset_bytes, bytes.len() as u64))
    }

    #[inline]
    fn load(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), MediaError> {
        let length_bytes = into.len() as u64;
        let pointer = self.pointer(offset_bytes, length_bytes);
        // SAFETY: the source is inside the mapping, and the destination is ordinary memory, so they
        // do not overlap. The contract of `Media` allows torn reads during concurrent stores.
        unsafe { self.guard.copy(into.as_mut_ptr(), pointer, into.len()) }
            .map_err(|PageLost| self.access_error("load", offset_bytes, length_bytes))
    }

    #[inline]
    fn store_bulk(
        &self,
        offset_bytes: u64,
        bytes: &[u8],
        pending: &mut Pending,
    ) -> Result<(), MediaError> {
        let line = CACHE_LINE_BYTES as u64;
        let in_lines =
            offset_bytes.is_multiple_of(line) && bytes.len().is_multiple_of(CACHE_LINE_BYTES);
        if bytes.len() >= MIN_PWRITE_BYTES && self.allocates_pages() {
            self.write(offset_bytes, bytes)?;
            return self.begin_persist(offset_bytes..offset_bytes + bytes.len() as u64, pending);
        }
        if self.durability == Durability::PageCache || !in_lines {
            self.store(offset_bytes, bytes)?;
            return self.begin_persist(offset_bytes..offset_bytes + bytes.len() as u64, pending);
        }
        self.check_writable()?;
        pending.has_non_temporal_stores = true;
        let pointer = self.pointer(offset_bytes, bytes.len() as u64);
        // SAFETY: as in store(). The mapping starts at a page boundary, so the pointer has the
        // alignment of the offset.
        unsafe { self.guard.stream(pointer, bytes.as_ptr(), bytes.len()) }
            .map_err(|PageLost| self.access_error("store", offset_bytes, bytes.len() as u64))
    }

    #[inline(always)]
    fn begin_persist(&self, range: Range<u64>, pending: &mut Pending) -> Result<(), MediaError> {
        match self.durability {
            Durability::Volatile => {}
            Durability::DaxSync => self.write_back(&range)?,
            Durability::PageCache => pending.add(range),
        }
        Ok(())
    }

    #[inline]
    fn end_persist(&self, pending: &Pending) -> Result<(), MediaError> {
        match self.durability {
            Durability::Volatile if pending.has_non_temporal_stores => flush::fence(),
            Durability::Volatile => compiler_fence(Ordering::SeqCst),
            // Completes the write-back of lines, and non-temporal stores.
            Durability::DaxSync => flush::fence(),
            Durability::PageCache => self.persist_page_cache(pending.ranges())?,
        }
        Ok(())
    }

    #[inline(always)]
    fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), MediaError> {
        self.check_writable()?;
        // SAFETY: word() has checked that the address is aligned and inside the mapping, which is
        // writable.
        unsafe { self.guard.store(self.word(offset_bytes), word.to_le()) }
            .map_err(|PageLost| self.access_error("store", offset_bytes, 8))
    }

    fn persist(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        match self.durability {
            // If the process dies, its stores remain in program order. The CPU preserves this
            // order, and the fence forces the compiler to preserve it.
            Durability::Volatile => compiler_fence(Ordering::SeqCst),
            Durability::DaxSync => self.persist_cache_lines(ranges)?,
            Durability::PageCache => self.persist_page_cache(ranges)?,
        }
        Ok(())
    }

    fn truncate_tail(&self) -> Result<(), MediaError> {
        self.check_writable()?;
        let cut = || {
            // On a device, the space after the pool is not used and remains unchanged.
            if !self.media_kind.is_device() && self.file.metadata()?.len() > self.len_bytes() {
                self.file.set_len(self.len_bytes())?;
                self.file.sync_all()?;
            }
            Ok(())
        };
        cut().map_err(|source| io_error("truncation", &(0..self.len_bytes()), source))
    }

    fn erase(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        self.check_writable()?;
        let ranges = coalesce(ranges);
        if let Some(first) = ranges.first() {
            self.check_length().map_err(|source| io_error("erasing", first, source))?;
        }
        for range in &ranges {
            let length_bytes = range.end - range.start;
            let pointer = self.pointer(range.start, length_bytes);
            match self.media_kind {
                MediaKind::Disk if self.is_thin || self.durability == Durability::PageCache => {
                    self.erase_by_kernel(range)?;
                }
                MediaKind::Memory | MediaKind::BlockDevice { .. } => self.erase_by_kernel(range)?,
                MediaKind::Disk | MediaKind::DevDax { .. } => {
                    // SAFETY: the range is inside a writable mapping. Erased chunks have no owner
                    // (contract of `Media`).
                    unsafe { self.guard.zero(pointer, length_bytes as usize) }.map_err(
                        |PageLost| self.access_error("zeroing", range.start, length_bytes),
                    )?;
                }
            }
        }
        match self.media_kind {
            // The holes are metadata of the file system, which must be durable as well.
            MediaKind::Disk if self.is_thin || self.durability == Durability::PageCache => {
                self.persist_page_cache(&ranges)
            }
            MediaKind::BlockDevice { .. } => self.persist_page_cache(&ranges),
            // A non-temporal store is durable after its fence.
            MediaKind::Memory | MediaKind::Disk | MediaKind::DevDax { .. } => Ok(()),
        }
    }
}

fn io_error(operation: &'static str, range: &Range<u64>, source: io::Error) -> MediaError {
    MediaError::Io {
        operation,
        offset_bytes: range.start,
        length_bytes: range.end - range.start,
        source,
    }
}

/// Extends a file to the end of the range, and allocates the range's blocks if the file is on a
/// disk. Otherwise, a guest's store to a hole in a full file system would kill the guest. Thin
/// files and files on tmpfs remain sparse, so their blocks or memory are allocated on use and can
/// be returned later. The range must be past the end of the file.
pub(crate) fn allocate(
    file: &File,
    range: Range<u64>,
    is_thin: bool,
    progress: OnProgress<'_>,
) -> io::Result<()> {
    file.set_len(range.end)?;
    if is_thin || MediaKind::of(file).map_err(io::Error::other)? == MediaKind::Memory {
        return Ok(());
    }
    allocate_blocks(file, range, progress)
}

fn allocate_blocks(file: &File, range: Range<u64>, progress: OnProgress<'_>) -> io::Result<()> {
    let fallocate = |step| page_cache::fallocate(file, FallocateFlags::empty(), &step);
    match run_in_steps(Task::Allocate, range.clone(), ALLOCATE_STEP_BYTES, progress, fallocate) {
        Err(error) if is_unsupported(&error) => {}
        result => return result,
    }
    // The fallback of writing zeros is slower. Each step is synced because some file systems report
    // only then that they are full. The sync also makes the reported progress accurate.
    run_in_steps(Task::Allocate, range, ERASE_STEP_BYTES, progress, |step| {
        write_zeros(file, &step)?;
        file.sync_data()
    })
}

#[cfg(test)]
mod tests;
