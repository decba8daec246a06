//! Memory that a test borrows from a pool, as a VMM does. The memory consists of chunks that are
//! mapped from the pool's file or device.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

use anyhow::{Context, Result};
use pmem_volume::{Extent, Pool};

/// Byte that [`LentMemory::fill`] writes.
const CONTENT: u8 = 0x5a;

/// Mapped memory of a pool. Drop does not return it, so the next process that opens the pool has to
/// erase it.
#[derive(Debug)]
pub struct LentMemory {
    mappings: Vec<Mapping>,
    extents: Vec<Extent>,
}

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

impl LentMemory {
    pub fn take(pool: &Pool, size_bytes: u64) -> Result<Self> {
        let extents = pool.alloc_memory(size_bytes)?;
        let mappings =
            extents.iter().map(|extent| Mapping::new(pool, *extent)).collect::<Result<_>>()?;
        Ok(Self { mappings, extents })
    }

    /// Writes to all of the memory, and flushes it to the disk.
    pub fn fill(&mut self) -> Result<()> {
        for mapping in &mut self.mappings {
            // SAFETY: self owns this writable mapping, and no reference to it is created.
            unsafe { ptr::write_bytes(mapping.start.as_ptr(), CONTENT, mapping.length) };
            // SAFETY: self owns the mapping. The call does not change its content.
            let result = unsafe {
                libc::msync(mapping.start.as_ptr().cast(), mapping.length, libc::MS_SYNC)
            };
            let error = io::Error::last_os_error();
            // devdax does not support msync, and does not need it.
            if result != 0 && error.raw_os_error() != Some(libc::EINVAL) {
                return Err(error).context("Cannot sync the lent memory");
            }
        }
        Ok(())
    }

    /// Finds a byte that is not zero. Returns its offset in the pool and its value.
    pub fn find_content(&self) -> Option<(u64, u8)> {
        self.mappings.iter().zip(&self.extents).find_map(|(mapping, extent)| {
            // SAFETY: self owns the mapping, no one else uses it at this time, and it outlives the
            // slice.
            let bytes =
                unsafe { std::slice::from_raw_parts(mapping.start.as_ptr(), mapping.length) };
            // Compares whole words, because comparing single bytes is slow under emulation.
            let zero = bytes.chunks_exact(16).position(|words| words != [0; 16])?;
            Some((extent.offset_bytes() + zero as u64 * 16, bytes[zero * 16]))
        })
    }

    pub fn give_back(self, pool: &Pool) -> Result<()> {
        let Self { mappings, extents } = self;
        drop(mappings);
        Ok(pool.free_memory(&extents)?)
    }
}

impl Mapping {
    fn new(pool: &Pool, extent: Extent) -> Result<Self> {
        let length = usize::try_from(extent.len_bytes())?;
        let offset = libc::off_t::try_from(extent.offset_bytes())?;
        let (protection, descriptor) =
            (libc::PROT_READ | libc::PROT_WRITE, pool.file().as_raw_fd());
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, descriptor, offset)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).with_context(|| format!("Cannot map {extent}"));
        }
        Ok(Self { start: NonNull::new(start.cast()).context("mmap gave address 0")?, length })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the address and the length are those of a mapping that is no longer used.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
