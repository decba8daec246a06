//! Source of a part of DRAM: anonymous memory of this process, an unnamed file, or a file of the
//! user.
//!
//! An unnamed file is always mapped shared. A private mapping would use two pages for each page of
//! the guest: the page in the file, which a fault finds first, and the written copy.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use foreshore_types::size::Size;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::io::retry_on_intr;
use thiserror::Error;
use tracing::warn;

use super::zone_file::ZoneFile;
use super::{Access, BackingError, Reservation};
use crate::memory::populate::populate;
use crate::memory::zone::{HostMemory, HostPages};

#[derive(Debug, Error)]
pub enum DramError {
    #[error("cannot create a file for shared memory (memfd_create)")]
    NoFile(#[source] io::Error),
    #[error("the host has no huge pages of {}", Size(*page_bytes))]
    NoSuchSize {
        page_bytes: u64,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the host's huge page size (Hugepagesize in /proc/meminfo)")]
    Unknown(#[source] io::Error),
    #[error("size {} is not a multiple of the huge page size {}", Size(*len), Size(*page_bytes))]
    NotWhole { len: u64, page_bytes: u64 },
    #[error(
        "huge pages of {} are larger than the {} blocks of hotplug_method=virtio-mem",
        Size(*page_bytes),
        Size(*block_bytes)
    )]
    LargerThanBlock {
        page_bytes: u64,
        /// Unit of plugging.
        block_bytes: u64,
    },
}

/// Source of the memory of one reservation, and the options for mapping it.
#[derive(Clone, Debug)]
pub struct DramSource {
    file: Option<Mapped>,
    pages: Pages,
    /// Allocate pages when memory is plugged.
    prefault: bool,
    reserve: bool,
    mergeable: bool,
}

/// File that is mapped into the reservation. Offset 0 of the reservation maps to `offset` in the
/// file.
#[derive(Clone, Debug)]
struct Mapped {
    file: Arc<File>,
    offset: u64,
    access: Access,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pages {
    Transparent,
    Small,
    Huge(u64),
}

impl DramSource {
    /// Anonymous memory.
    pub fn anonymous(transparent_huge_pages: bool) -> Self {
        let pages = if transparent_huge_pages { Pages::Transparent } else { Pages::Small };
        Self { file: None, pages, prefault: false, reserve: false, mergeable: false }
    }

    /// Source that `host` describes, for a boot part of `len` bytes. `file` is the zone's file, if
    /// it has one, with the part's offset in the file.
    pub fn of_boot(
        host: &HostMemory,
        len: u64,
        file: Option<(&ZoneFile, u64)>,
    ) -> Result<Self, DramError> {
        // Pages of boot memory are allocated only after the kernel was loaded, because loading
        // releases some pages.
        let host = HostMemory { prefault: false, ..host.clone() };
        let Some((zone_file, offset)) = file else { return Self::new(&host, len) };
        let huge = zone_file.huge_page_bytes();
        if let Some(page_bytes) = huge.filter(|page_bytes| !len.is_multiple_of(*page_bytes)) {
            return Err(DramError::NotWhole { len, page_bytes });
        }
        let mapped =
            Mapped { file: Arc::clone(zone_file.file()), offset, access: zone_file.access() };
        let source = Self::new(&HostMemory { shared: false, ..host }, len)?;
        let pages = huge.map_or(source.pages, Pages::Huge);
        Ok(Self { file: Some(mapped), pages, ..source })
    }

    /// Source for a hotplug part of `len` bytes with blocks of `block_bytes`. All blocks are still
    /// unplugged.
    pub fn of_hotplug(host: &HostMemory, len: u64, block_bytes: u64) -> Result<Self, DramError> {
        let source = Self::new(host, len)?;
        match source.huge_page_bytes() {
            Some(page_bytes) if page_bytes > block_bytes => {
                Err(DramError::LargerThanBlock { page_bytes, block_bytes })
            }
            _ => Ok(source),
        }
    }

    /// Source for the DIMMs of a zone, with `len` bytes in total. DIMMs consist of whole pages and
    /// are never removed.
    pub fn of_dimms(host: &HostMemory, len: u64) -> Result<Self, DramError> {
        Self::new(host, len)
    }

    fn new(host: &HostMemory, len: u64) -> Result<Self, DramError> {
        let pages = match host.pages {
            HostPages::Transparent => Pages::Transparent,
            HostPages::Small => Pages::Small,
            HostPages::Huge(page_bytes) => Pages::Huge(page_bytes),
            HostPages::HugeAsUsual => {
                Pages::Huge(usual_huge_page_bytes().map_err(DramError::Unknown)?)
            }
        };
        let file = match pages {
            Pages::Huge(page_bytes) if !len.is_multiple_of(page_bytes) => {
                return Err(DramError::NotWhole { len, page_bytes });
            }
            Pages::Huge(page_bytes) => {
                // The base-2 logarithm of the size stands in the upper bits (memfd_create(2)).
                let size = page_bytes.trailing_zeros() << libc::MFD_HUGE_SHIFT;
                let flags = MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(size);
                let file = memory_file(len, flags);
                Some(file.map_err(|source| DramError::NoSuchSize { page_bytes, source })?)
            }
            _ if host.shared => {
                Some(memory_file(len, MemfdFlags::empty()).map_err(DramError::NoFile)?)
            }
            _ => None,
        };
        let file =
            file.map(|file| Mapped { file: Arc::new(file), offset: 0, access: Access::ReadWrite });
        let HostMemory { prefault, reserve, mergeable, .. } = *host;
        Ok(Self { file, pages, prefault, reserve, mergeable })
    }

    /// Size of the reserved huge pages, if the source uses these.
    pub fn huge_page_bytes(&self) -> Option<u64> {
        match self.pages {
            Pages::Huge(page_bytes) => Some(page_bytes),
            Pages::Transparent | Pages::Small => None,
        }
    }

    /// Sets up `reservation`, which has no mappings yet, for this source.
    pub(super) fn prepare(&self, reservation: &Reservation) {
        let is_shared = self.file.as_ref().is_some_and(|mapped| mapped.access == Access::ReadWrite);
        if is_shared {
            reservation.share();
        }
        // Huge pages are always reserved, because a missing huge page would raise SIGBUS in the
        // guest instead of delaying it.
        if self.reserve || self.huge_page_bytes().is_some() {
            reservation.set_aside();
        }
        if let Some(page_bytes) = self.huge_page_bytes() {
            reservation.has_huge_pages(page_bytes);
        }
    }

    /// Maps the memory at `offset`.
    pub(super) fn map(&self, reservation: &Reservation, offset: u64, len: u64) -> io::Result<()> {
        match &self.file {
            None => reservation.map_anonymous(offset, len)?,
            Some(Mapped { file, offset: at, access }) => {
                reservation.map_file(offset, len, file.as_fd(), at + offset, *access)?;
            }
        }
        match self.pages {
            Pages::Transparent => reservation.advise_huge_pages(offset, len),
            Pages::Small => reservation.advise_small_pages(offset, len),
            Pages::Huge(_) => {}
        }
        if self.mergeable {
            reservation.advise_merging(offset, len);
        }
        if !self.prefault {
            return Ok(());
        }
        populate(reservation, offset, len).inspect_err(|_| {
            if let Err(err) = reservation.unmap(offset, len) {
                warn!(%err, offset, len, "Cannot unmap guest memory after a failed prefault");
            }
        })
    }

    /// Converts `err`, which mapping the memory at `offset` returned.
    pub(super) fn refusal(&self, offset: u64, len: u64, err: io::Error) -> BackingError {
        let lacks_pages = err.raw_os_error() == Some(libc::ENOMEM);
        match self.huge_page_bytes().filter(|_| lacks_pages) {
            Some(page_bytes) => BackingError::HugePages {
                wanted_bytes: len,
                page_bytes,
                available_bytes: free_huge_pages(page_bytes).unwrap_or(0) * page_bytes,
                source: err,
            },
            None => BackingError::Map { offset, len, source: err },
        }
    }

    /// Converts `offset` in the reservation to an offset in the file, if there is a file.
    pub(super) fn in_file(&self, offset: u64) -> Option<u64> {
        self.file.as_ref().map(|mapped| mapped.offset + offset)
    }

    #[cfg(test)]
    pub(super) fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref().map(|mapped| &mapped.file)
    }

    /// Punches a hole in the file for an unmapped range of the reservation, which then reads as
    /// zeros and uses no memory. Memory of other sources was already released when it was unmapped.
    pub(super) fn give_back(&self, offset: u64, len: u64) -> io::Result<()> {
        match &self.file {
            Some(Mapped { file, offset: at, .. }) => punch_hole(file, at + offset, len),
            None => Ok(()),
        }
    }
}

/// Creates an unnamed in-memory file.
fn memory_file(len: u64, flags: MemfdFlags) -> io::Result<File> {
    let file = File::from(memfd_create("foreshore-dram", MemfdFlags::CLOEXEC | flags)?);
    file.set_len(len)?;
    Ok(file)
}

/// Removes the pages in `offset..offset + len` from a file.
pub(super) fn punch_hole(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(retry_on_intr(|| fallocate(file, mode, offset, len))?)
}

/// Default size of huge pages on the host.
fn usual_huge_page_bytes() -> io::Result<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:")?.trim().strip_suffix("kB"));
    let kib =
        line.ok_or(io::ErrorKind::Unsupported)?.trim().parse::<u64>().map_err(io::Error::other)?;
    Ok(kib * 1024)
}

/// Number of huge pages of this size on the host that are free and not reserved, if known.
fn free_huge_pages(page_bytes: u64) -> Option<u64> {
    let folder = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes / 1024);
    let read = |name: &str| {
        fs::read_to_string(format!("{folder}/{name}")).ok()?.trim().parse::<u64>().ok()
    };
    // The number of free pages includes reserved pages.
    read("free_hugepages")?.checked_sub(read("resv_hugepages")?)
}
