//! Ranges of the VMM's address space into which guest memory is mapped.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use pmem_volume::media::{OnPageLost, TooManyRanges, Watch};

use super::HostNode;

/// Address range that belongs to one part of guest memory for the lifetime of the VM.
///
/// Unmapped parts are PROT_NONE instead of free address space. Otherwise another mapping of the
/// process could use the hole, and KVM would expose it to the guest. No Rust references point into
/// the range, because guest memory is accessed through the view by volatile accesses.
#[derive(Debug)]
pub struct Reservation {
    addr: usize,
    len: usize,
    watch: OnceLock<Watch>,
    /// Host node on which memory is allocated.
    host_node: OnceLock<HostNode>,
    /// Set if mapped memory counts as committed.
    set_aside: OnceLock<()>,
    /// Set if mapped memory belongs to a file that other processes may map.
    shared: OnceLock<()>,
    /// Size of hugetlb pages, if any.
    huge_page_bytes: OnceLock<u64>,
    /// Scripted results of the next calls that map or unmap. Later calls succeed.
    #[cfg(test)]
    script: parking_lot::Mutex<std::collections::VecDeque<bool>>,
    /// Makes the next call of `populate` fail.
    #[cfg(test)]
    populate_fails: std::sync::atomic::AtomicBool,
}

/// Access rights of the process to mapped pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only. A store raises SIGSEGV in this process. The guest's slot is also read-only, and a
    /// store by the guest causes an exit that is ignored.
    Read,
    ReadWrite,
    /// Read and write. A page becomes writable only when the file system's metadata for it is
    /// durable (MAP_SYNC). A store is then durable as soon as it has left the CPU caches. Mapping
    /// fails without DAX.
    ReadWriteSync,
    /// Read and write, but written pages are private to this process (MAP_PRIVATE).
    ReadWritePrivate,
}

impl Reservation {
    /// Reserves `len` bytes at a multiple of `align`, a power of two. Huge pages require
    /// guest-physical, host-virtual and file addresses that are congruent modulo the page size.
    pub fn new(len: u64, align: u64) -> io::Result<Self> {
        assert!(align.is_power_of_two() && align >= 4096 && len > 0 && len.is_multiple_of(4096));
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let (len, align) = (usize::try_from(len).map_err(|_| invalid())?, align as usize);
        // mmap returns addresses aligned to only 4 KiB, so this maps more than needed and trims the
        // excess.
        let padded = len
            .checked_add(align)
            .and_then(|sum| sum.checked_add(GUARD_BYTES))
            .ok_or_else(invalid)?;
        let raw = map(0, padded, libc::PROT_NONE, ANON | libc::MAP_NORESERVE, None)?;
        let addr = raw.next_multiple_of(align);
        let (head, tail) = (addr - raw, raw + padded - (addr + len + GUARD_BYTES));
        // SAFETY: both are parts of the mapping just made, outside of the kept range, and have no
        // other users.
        unsafe {
            if head > 0 {
                libc::munmap(raw as *mut _, head);
            }
            if tail > 0 {
                libc::munmap((addr + len + GUARD_BYTES) as *mut _, tail);
            }
        }
        Ok(Self {
            addr,
            len,
            watch: OnceLock::new(),
            host_node: OnceLock::new(),
            set_aside: OnceLock::new(),
            shared: OnceLock::new(),
            huge_page_bytes: OnceLock::new(),
            #[cfg(test)]
            script: parking_lot::Mutex::default(),
            #[cfg(test)]
            populate_fails: Default::default(),
        })
    }

    pub fn addr(&self) -> u64 {
        self.addr as u64
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// Notifies `on_lost` of lost pages in all later mappings. Lost pages then read as zeros.
    ///
    /// # Panics
    /// If the reservation is already watched.
    pub fn watch(&self, on_lost: Arc<dyn OnPageLost>) -> Result<(), TooManyRanges> {
        // SAFETY: the range belongs to this reservation, and the watch ends before it is unmapped
        // (`drop`). No code relies on the content of a lost page, and its replacement is also
        // accessed only by volatile accesses.
        let watch = unsafe { Watch::new(self.addr..self.addr + self.len, on_lost) }?;
        assert!(self.watch.set(watch).is_ok(), "the reservation is already watched");
        Ok(())
    }

    /// Allocates the memory of later mappings on `node`.
    ///
    /// # Panics
    /// If this was called before.
    pub fn bind_to(&self, node: HostNode) {
        assert!(self.host_node.set(node).is_ok(), "the reservation already has a host node");
    }

    /// Makes later mappings count as committed, so that they fail if memory is short.
    pub fn set_aside(&self) {
        let _ = self.set_aside.set(());
    }

    /// Records that later mappings belong to a file that serves as memory. A discard then also
    /// removes pages from the file.
    pub fn share(&self) {
        let _ = self.shared.set(());
    }

    /// Records that memory mapped from now on consists of hugetlb pages. The host can reclaim only
    /// whole hugetlb pages.
    pub fn has_huge_pages(&self, page_bytes: u64) {
        let _ = self.huge_page_bytes.set(page_bytes);
    }

    /// Smallest unit in which the host can reclaim memory, in bytes. The host splits transparent
    /// huge pages.
    pub fn discard_unit_bytes(&self) -> u64 {
        self.huge_page_bytes.get().copied().unwrap_or(PAGE_BYTES as u64)
    }

    /// Maps zeroed memory at `offset`.
    pub fn map_anonymous(&self, offset: u64, len: u64) -> io::Result<()> {
        self.remap(offset, len, libc::PROT_READ | libc::PROT_WRITE, ANON, None)?;
        self.bind(offset, len)
    }

    /// Binds the new mapping at `offset` to the host node, if one is set.
    fn bind(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(node) = self.host_node.get() else { return Ok(()) };
        // A policy belongs to a mapping, so each new mapping must be bound again.
        let addr = self.checked(offset, len);
        // SAFETY: the range was just mapped and is inside the reservation.
        let bound = unsafe { node.bind(addr, len as usize) };
        if bound.is_err() {
            self.unmap(offset, len)?;
        }
        bound
    }

    /// Maps `len` bytes of `file` from `file_offset` at `offset`. The mapping is shared unless
    /// `access` requests a private one.
    pub fn map_file(
        &self,
        offset: u64,
        len: u64,
        file: BorrowedFd<'_>,
        file_offset: u64,
        access: Access,
    ) -> io::Result<()> {
        let (prot, kind) = match access {
            Access::Read => (libc::PROT_READ, libc::MAP_SHARED),
            Access::ReadWrite => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED),
            // MAP_SHARED_VALIDATE is required. Without it, a kernel or file system that does not
            // support MAP_SYNC would ignore the flag (mmap(2)).
            Access::ReadWriteSync => {
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC)
            }
            Access::ReadWritePrivate => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE),
        };
        self.remap(offset, len, prot, kind, Some((file, file_offset)))?;
        self.bind(offset, len)
    }

    /// Unmaps the pages at `offset` and returns their memory to the host. Later accesses fault.
    pub fn unmap(&self, offset: u64, len: u64) -> io::Result<()> {
        self.remap(offset, len, libc::PROT_NONE, ANON, None)
    }

    /// Replaces the mapping at `offset` by that of `from`, including its registration with
    /// userfaultfd. `from` must be anonymous and empty, and remains mapped.
    pub(super) fn replace_by(&self, offset: u64, from: &Reservation) -> io::Result<()> {
        let addr = self.checked(offset, from.len_bytes());
        #[cfg(test)]
        self.scripted()?;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let (old, len) = (from.addr as *mut libc::c_void, from.len);
        // SAFETY: both ranges are inside their reservations, into which no references point.
        match unsafe { libc::mremap(old, len, len, flags, addr) } {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    #[cfg(test)]
    fn scripted(&self) -> io::Result<()> {
        match self.script.lock().pop_front() {
            Some(false) => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
            _ => Ok(()),
        }
    }

    /// Replaces the mapping at `offset`.
    fn remap(
        &self,
        offset: u64,
        len: u64,
        prot: libc::c_int,
        kind: libc::c_int,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> io::Result<()> {
        let addr = self.checked(offset, len);
        #[cfg(test)]
        self.scripted()?;
        let is_set_aside = prot != libc::PROT_NONE && self.set_aside.get().is_some();
        let reserve = if is_set_aside { 0 } else { libc::MAP_NORESERVE };
        map(addr, len as usize, prot, kind | reserve | libc::MAP_FIXED, file)?;
        if prot != libc::PROT_NONE
            && let Err(err) = self.advise(offset, len, libc::MADV_DONTDUMP)
        {
            tracing::debug!(%err, "Cannot exclude guest memory from core dumps");
        }
        Ok(())
    }

    /// Sets the results of the next calls that map or unmap, because a test cannot make these
    /// kernel calls fail.
    #[cfg(test)]
    pub(crate) fn script<const N: usize>(&self, works: [bool; N]) {
        *self.script.lock() = works.into();
    }

    #[cfg(test)]
    pub(crate) fn fail_next_populate(&self) {
        self.populate_fails.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// Advises the kernel to use huge pages at `offset`. A failure is harmless, because not every
    /// kernel supports huge pages.
    pub fn advise_huge_pages(&self, offset: u64, len: u64) {
        if let Err(err) = self.advise(offset, len, libc::MADV_HUGEPAGE) {
            tracing::debug!(%err, "Cannot enable transparent huge pages");
        }
    }

    /// Advises the kernel not to use huge pages. A kernel without them rejects the advice.
    pub fn advise_small_pages(&self, offset: u64, len: u64) {
        if let Err(err) = self.advise(offset, len, libc::MADV_NOHUGEPAGE) {
            tracing::debug!(%err, "Cannot disable transparent huge pages");
        }
    }

    /// Allows the kernel to merge pages of equal content (KSM).
    pub fn advise_merging(&self, offset: u64, len: u64) {
        if let Err(err) = self.advise(offset, len, libc::MADV_MERGEABLE) {
            tracing::warn!(
                %err,
                "mergeable=on has no effect, because the host's kernel cannot merge pages (KSM)"
            );
        }
    }

    /// Passes advice to the kernel. The advice must not change the content of memory.
    fn advise(&self, offset: u64, len: u64, advice: libc::c_int) -> io::Result<()> {
        let addr = self.checked(offset, len);
        // SAFETY: advice about a range inside the reservation (checked above). The callers pass
        // only advice that changes no content.
        match unsafe { libc::madvise(addr as *mut _, len as usize, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Allocates pages for the mapping at `offset` now, as a store would, and thus copies all pages
    /// of a private mapping. Existing contents are preserved. Requires Linux 5.14.
    pub fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        let addr = self.checked(offset, len);
        #[cfg(test)]
        if self.populate_fails.swap(false, std::sync::atomic::Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        // SAFETY: a range inside the reservation (checked above). Faults are handled, and contents
        // do not change.
        match unsafe { libc::madvise(addr as *mut _, len as usize, libc::MADV_POPULATE_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Maps zeros for each page of the anonymous mapping at `offset`. Requires Linux 5.14.
    pub fn populate_zeros(&self, offset: u64, len: u64) -> io::Result<()> {
        self.advise(offset, len, libc::MADV_POPULATE_READ)
    }

    /// Allows or forbids stores to mapped memory. The content does not change.
    pub fn allow_stores(&self, offset: u64, len: u64, are_allowed: bool) -> io::Result<()> {
        let addr = self.checked(offset, len);
        let prot = libc::PROT_READ | if are_allowed { libc::PROT_WRITE } else { 0 };
        // SAFETY: a range inside the reservation (checked above), to which no references exist.
        match unsafe { libc::mprotect(addr as *mut _, len as usize, prot) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the mapped pages at `offset` to the host. They read as zeros until they are written
    /// again.
    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let addr = self.checked(offset, len);
        // Pages of a shared file remain allocated unless they are removed from the file.
        let advice =
            if self.shared.get().is_some() { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
        // SAFETY: a range inside the reservation (checked above). Guest memory is only accessed by
        // volatile accesses, and no code relies on its old content.
        match unsafe { libc::madvise(addr as *mut _, len as usize, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns one byte for each page from `offset`, which must be page-aligned. Bit 0 is set if
    /// the page is present (mincore(2)).
    pub fn pages(&self, offset: u64, len: u64) -> io::Result<Vec<u8>> {
        let addr = self.checked(offset, len);
        let mut pages = vec![0u8; (len as usize).div_ceil(PAGE_BYTES)];
        // SAFETY: a range inside the reservation (checked above), and a byte for each of its pages.
        match unsafe { libc::mincore(addr as *mut _, len as usize, pages.as_mut_ptr()) } {
            0 => Ok(pages),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Address of `offset`.
    ///
    /// # Panics
    /// If `offset..offset + len` is outside of the reservation. This is an invariant of the VMM,
    /// and the guest cannot break it.
    fn checked(&self, offset: u64, len: u64) -> usize {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len as u64);
        assert!(
            inside && len > 0,
            "{offset:#x}+{len:#x} is outside of a reservation of {:#x}",
            self.len
        );
        self.addr + offset as usize
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        drop(self.watch.take());
        // SAFETY: the range belongs to this reservation. All users of its addresses (view, slots,
        // backings) share ownership of the reservation, so no user is left.
        unsafe { libc::munmap(self.addr as *mut _, self.len + GUARD_BYTES) };
    }
}

/// The page after each reservation is always PROT_NONE. Mappings of two reservations therefore
/// never merge, and /proc/self/smaps lists them separately.
const GUARD_BYTES: usize = PAGE_BYTES;

/// Size of a small page on x86-64.
pub(super) const PAGE_BYTES: usize = 4096;

const ANON: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

fn map(
    addr: usize,
    len: usize,
    prot: libc::c_int,
    flags: libc::c_int,
    file: Option<(BorrowedFd<'_>, u64)>,
) -> io::Result<usize> {
    let (fd, offset) = match file {
        Some((fd, offset)) => {
            let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
            (fd.as_raw_fd(), offset)
        }
        None => (-1, 0),
    };
    // SAFETY: without MAP_FIXED, the kernel picks a free range. With it, the caller passes a range
    // inside its own reservation (`Reservation::checked`), and no references into this range exist.
    let result = unsafe { libc::mmap(addr as *mut _, len, prot, flags, fd, offset) };
    if result == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn permissions_at(addr: u64) -> String {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| {
            let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let parse = |hex| u64::from_str_radix(hex, 16).unwrap();
            (parse(start)..parse(end)).contains(&addr)
        });
        line.unwrap().split(' ').nth(1).unwrap().to_owned()
    }

    #[test]
    fn core_dumps_exclude_guest_memory() {
        use std::os::fd::AsFd;
        let reservation = Reservation::new(4 * MIB, MIB).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * MIB).unwrap();
        reservation.map_file(0, 2 * MIB, file.as_fd(), 0, Access::ReadWrite).unwrap();
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = smaps.find(&format!("{:x}-", reservation.addr())).unwrap();
        let flags = smaps[begin..].lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn reservation_is_aligned_and_inaccessible_until_mapped() {
        let reservation = Reservation::new(8 * MIB, 1 << 30).unwrap();
        assert!(reservation.addr().is_multiple_of(1 << 30));
        assert_eq!(permissions_at(reservation.addr() + 4 * MIB), "---p");
        reservation.map_anonymous(4 * MIB, 2 * MIB).unwrap();
        assert_eq!(permissions_at(reservation.addr() + 4 * MIB), "rw-p");
        assert_eq!(permissions_at(reservation.addr() + 6 * MIB), "---p");
        reservation.unmap(4 * MIB, 2 * MIB).unwrap();
        assert_eq!(permissions_at(reservation.addr() + 4 * MIB), "---p");
    }

    #[test]
    fn map_sync_fails_without_dax() {
        use std::os::fd::AsFd;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(2 * MIB).unwrap();
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        let map = |access| reservation.map_file(0, 2 * MIB, file.as_fd(), 0, access);
        assert!(map(Access::ReadWriteSync).is_err());
        map(Access::ReadWrite).unwrap();
    }

    #[test]
    fn private_writes_do_not_reach_the_file() {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(2 * MIB).unwrap();
        let read_only = fs::File::open(file.path()).unwrap();
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        // A private mapping needs no write permission.
        assert!(reservation.map_file(0, 2 * MIB, read_only.as_fd(), 0, Access::ReadWrite).is_err());
        reservation.map_file(0, 2 * MIB, read_only.as_fd(), 0, Access::ReadWritePrivate).unwrap();
        // SAFETY: just mapped, and used by this test only.
        unsafe { std::ptr::write_volatile(reservation.addr() as *mut u8, 7) };
        let mut byte = [0xff];
        file.as_file().read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    #[should_panic(expected = "outside of a reservation")]
    fn mapping_outside_of_a_reservation_panics() {
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        let _ = reservation.map_anonymous(MIB, 2 * MIB);
    }
}
