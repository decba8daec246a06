//! Shared mapping of a file or device that can grow while threads use it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use thiserror::Error;

use foreshore_types::size::Size;

/// Maximum length of a mapping. A process has 128 TiB of addresses (47 bits; Linux
/// Documentation/arch/x86/x86_64/mm.rst). The kernel loads a position-independent program at two
/// thirds of this space (Linux ELF_ET_DYN_BASE), so at most 85 TiB are contiguous. Mappings of
/// guest memory and volumes also need addresses.
pub(crate) const MAX_MAPPED_BYTES: u64 = 64 << 40;

/// The file is too large for a mapping.
#[derive(Debug, Error)]
#[error(
    "a mapping has at most {}, the limit of a process's address space",
    Size(MAX_MAPPED_BYTES).rounded()
)]
struct TooLarge;

/// Mapping of the first bytes of a file. When it grows, the file is mapped again as a whole. The
/// earlier mapping remains, because other threads may be using its addresses. It shares its pages
/// with the new one, so it only uses address space.
pub(super) struct Mapping {
    start: AtomicPtr<u8>,
    len_bytes: AtomicU64,
    is_writable: bool,
    /// MAP_SYNC or 0.
    sync: libc::c_int,
    /// All mappings, which are removed together.
    parts: Mutex<Vec<(NonNull<u8>, u64)>>,
}

// SAFETY: the mappings are shared memory that lives as long as the value. They are removed only
// when it is dropped.
unsafe impl Send for Mapping {}
// SAFETY: as above. Threads only read the address, and change the list under its lock.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len_bytes` of a file. The file must have at least that length.
    pub(super) fn new(file: &File, len_bytes: u64, is_writable: bool) -> io::Result<Self> {
        if len_bytes > MAX_MAPPED_BYTES {
            return Err(io::Error::other(TooLarge));
        }
        // MAP_SYNC succeeds only if a mapped store is durable once it has left the CPU's caches
        // (Linux Documentation/filesystems/dax.rst). Otherwise, the error is EOPNOTSUPP, or EINVAL
        // on kernels without MAP_SHARED_VALIDATE. devdax accepts MAP_SYNC even for volatile memory.
        let (map, sync) = match map_shared(file, len_bytes, is_writable, libc::MAP_SYNC) {
            Ok(map) => (map, libc::MAP_SYNC),
            Err(_) => (map_shared(file, len_bytes, is_writable, 0)?, 0),
        };
        Ok(Self {
            start: AtomicPtr::new(map.as_ptr()),
            len_bytes: AtomicU64::new(len_bytes),
            is_writable,
            sync,
            parts: Mutex::new(vec![(map, len_bytes)]),
        })
    }

    /// Maps a larger part of the same file.
    pub(super) fn grow(&self, file: &File, len_bytes: u64) -> io::Result<()> {
        if len_bytes > MAX_MAPPED_BYTES {
            return Err(io::Error::other(TooLarge));
        }
        let map = map_shared(file, len_bytes, self.is_writable, self.sync)?;
        self.parts.lock().expect("no code panics under this lock").push((map, len_bytes));
        // In this order, a thread that sees the new length also sees the new address.
        self.start.store(map.as_ptr(), Ordering::Release);
        self.len_bytes.store(len_bytes, Ordering::Release);
        Ok(())
    }

    /// Address of the first byte. At least [`Self::len_bytes`], read before, are mapped there.
    #[inline(always)]
    pub(super) fn start(&self) -> *mut u8 {
        self.start.load(Ordering::Acquire)
    }

    #[inline(always)]
    pub(super) fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    /// Returns true if a store is durable once it has left the CPU's caches.
    pub(super) fn is_synchronous(&self) -> bool {
        self.sync != 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for (map, len_bytes) in self.parts.get_mut().expect("as above").drain(..) {
            // SAFETY: called once, with the address and length of an unused mapping.
            let result = unsafe { libc::munmap(map.as_ptr().cast(), len_bytes as usize) };
            assert_eq!(result, 0, "munmap of a whole mapping cannot fail");
        }
    }
}

fn map_shared(
    file: &File,
    len_bytes: u64,
    writable: bool,
    sync: libc::c_int,
) -> io::Result<NonNull<u8>> {
    let length =
        usize::try_from(len_bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
    let kind = if sync == 0 { libc::MAP_SHARED } else { libc::MAP_SHARED_VALIDATE | sync };
    // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
    let map = unsafe { libc::mmap(ptr::null_mut(), length, protection, kind, file.as_raw_fd(), 0) };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // Core dumps must not contain memory or data of guests. A kernel without this advice includes
    // the mapping in core dumps.
    // SAFETY: the advice concerns only the new mapping, and changes no content.
    unsafe { libc::madvise(map, length, libc::MADV_DONTDUMP) };
    Ok(NonNull::new(map.cast()).expect("mmap returns null only on request"))
}
