//! Ranges of the VMM's address space that guest memory is mapped into.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use pmem_volume::media::{OnPageLost, TooManyRanges, Watch};

use super::HostNode;

/// A range of addresses that belongs to one part of guest memory for as long as the VM lives.
///
/// Whatever is not mapped in it is PROT_NONE and never unmapped, so that no other mapping of the
/// process can take the hole, which KVM would then show to the guest. Nobody makes Rust references
/// into it: guest memory is reached by volatile accesses, through the view.
#[derive(Debug)]
pub struct Reservation {
    addr: usize,
    len: usize,
    watch: OnceLock<Watch>,
    /// Where memory comes from.
    host_node: OnceLock<HostNode>,
    /// What is mapped is counted as taken.
    set_aside: OnceLock<()>,
    /// What is mapped is of a file that others may have mapped.
    shared: OnceLock<()>,
    /// Size of its pages, if they are of hugetlb.
    huge_page_bytes: OnceLock<u64>,
    /// Whether the next calls that map or unmap work; those after them do.
    #[cfg(test)]
    script: parking_lot::Mutex<std::collections::VecDeque<bool>>,
}

/// What the process may do with mapped pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only: a store is SIGSEGV here; in the guest, whose slot is read-only too, it is an exit
    /// that nobody answers.
    Read,
    ReadWrite,
    /// Read and write, and a page becomes writable only when the file system's own records of it
    /// are durable (MAP_SYNC): then a store is durable once it has left the CPU's caches. Fails
    /// where there is no DAX.
    ReadWriteSync,
    /// Read and write, but what is written stays in this process, page by page as it is written
    /// (MAP_PRIVATE).
    ReadWritePrivate,
}

impl Reservation {
    /// Reserves `len` bytes at a multiple of `align`, a power of two: guest-physical, host-virtual
    /// and file addresses must be congruent modulo the page size for huge pages to be used.
    pub fn new(len: u64, align: u64) -> io::Result<Self> {
        assert!(align.is_power_of_two() && align >= 4096 && len > 0 && len.is_multiple_of(4096));
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let (len, align) = (usize::try_from(len).map_err(|_| invalid())?, align as usize);
        // mmap gives addresses aligned to 4 KiB: take more than needed, and trim.
        let padded = len
            .checked_add(align)
            .and_then(|sum| sum.checked_add(GUARD_BYTES))
            .ok_or_else(invalid)?;
        let raw = map(0, padded, libc::PROT_NONE, ANON | libc::MAP_NORESERVE, None)?;
        let addr = raw.next_multiple_of(align);
        let (head, tail) = (addr - raw, raw + padded - (addr + len + GUARD_BYTES));
        // SAFETY: both are parts of the mapping just made, which nobody else knows yet, outside of
        // what is kept.
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
        })
    }

    pub fn addr(&self) -> u64 {
        self.addr as u64
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// From now on `on_lost` is told of pages that are gone, whatever is mapped, and they read as
    /// zeros.
    ///
    /// # Panics
    /// If somebody is told of them already.
    pub fn watch(&self, on_lost: Arc<dyn OnPageLost>) -> Result<(), TooManyRanges> {
        // SAFETY: the range is ours alone, and the watch ends before it is unmapped (`drop`).
        // Nobody counts on a page that is gone: what replaces it is reached by volatile
        // accesses as well.
        let watch = unsafe { Watch::new(self.addr..self.addr + self.len, on_lost) }?;
        assert!(self.watch.set(watch).is_ok(), "a reservation is watched once");
        Ok(())
    }

    /// Memory that is mapped from now on comes from `node`.
    ///
    /// # Panics
    /// If it has been said before.
    pub fn bind_to(&self, node: HostNode) {
        assert!(self.host_node.set(node).is_ok(), "a reservation has one host node");
    }

    /// Memory that is mapped from now on is counted as taken when it is mapped, or refused.
    pub fn set_aside(&self) {
        let _ = self.set_aside.set(());
    }

    /// Files that are mapped from now on are memory: what is discarded is gone from them as well.
    pub fn share(&self) {
        let _ = self.shared.set(());
    }

    /// Records that memory mapped from now on consists of hugetlb pages. The host takes back only
    /// whole pages of these.
    pub fn has_huge_pages(&self, page_bytes: u64) {
        let _ = self.huge_page_bytes.set(page_bytes);
    }

    /// Unit in which the host takes memory back, in bytes. Transparent huge pages are split.
    pub fn discard_unit_bytes(&self) -> u64 {
        self.huge_page_bytes.get().copied().unwrap_or(PAGE_BYTES as u64)
    }

    /// Maps fresh zeroed memory at `offset`.
    pub fn map_anonymous(&self, offset: u64, len: u64) -> io::Result<()> {
        self.remap(offset, len, libc::PROT_READ | libc::PROT_WRITE, ANON, None)?;
        self.bind(offset, len)
    }

    /// Has what was just mapped at `offset` come from the node that it shall come from.
    fn bind(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(node) = self.host_node.get() else { return Ok(()) };
        // A policy is the mapping's: each new one needs it again.
        let addr = self.checked(offset, len);
        // SAFETY: just mapped, in our own range.
        let bound = unsafe { node.bind(addr, len as usize) };
        if bound.is_err() {
            self.unmap(offset, len)?;
        }
        bound
    }

    /// Maps `len` bytes of `file` from `file_offset` on at `offset`, shared unless `access` says
    /// otherwise.
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
            // Without VALIDATE a kernel or file system that does not know MAP_SYNC would ignore it
            // (mmap(2)).
            Access::ReadWriteSync => {
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC)
            }
            Access::ReadWritePrivate => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE),
        };
        self.remap(offset, len, prot, kind, Some((file, file_offset)))?;
        self.bind(offset, len)
    }

    /// Takes the pages at `offset` away: accesses fault, the memory is the host's again.
    pub fn unmap(&self, offset: u64, len: u64) -> io::Result<()> {
        self.remap(offset, len, libc::PROT_NONE, ANON, None)
    }

    /// Replaces what is at `offset`.
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
        if self.script.lock().pop_front() == Some(false) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let is_set_aside = prot != libc::PROT_NONE && self.set_aside.get().is_some();
        let reserve = if is_set_aside { 0 } else { libc::MAP_NORESERVE };
        map(addr, len as usize, prot, kind | reserve | libc::MAP_FIXED, file)?;
        if prot != libc::PROT_NONE
            && let Err(err) = self.advise(offset, len, libc::MADV_DONTDUMP)
        {
            tracing::debug!(%err, "A core dump would hold guest memory");
        }
        Ok(())
    }

    /// Says which of the next calls that map or unmap work. A test that breaks the kernel cannot do
    /// it otherwise.
    #[cfg(test)]
    pub(crate) fn script<const N: usize>(&self, works: [bool; N]) {
        *self.script.lock() = works.into();
    }

    /// Tells the kernel that huge pages are welcome in what is mapped at `offset`. Not every kernel
    /// has them; memory works without.
    pub fn advise_huge_pages(&self, offset: u64, len: u64) {
        if let Err(err) = self.advise(offset, len, libc::MADV_HUGEPAGE) {
            tracing::debug!(%err, "No transparent huge pages");
        }
    }

    /// Tells the kernel that they are not. One that has none need not be told.
    pub fn advise_small_pages(&self, offset: u64, len: u64) {
        if let Err(err) = self.advise(offset, len, libc::MADV_NOHUGEPAGE) {
            tracing::debug!(%err, "No transparent huge pages in any case");
        }
    }

    /// Tells the kernel that pages of the same content may be one page (KSM).
    pub fn advise_merging(&self, offset: u64, len: u64) {
        if let Err(err) = self.advise(offset, len, libc::MADV_MERGEABLE) {
            tracing::warn!(%err, "The host's kernel does not merge pages");
        }
    }

    /// Advice that changes no content.
    fn advise(&self, offset: u64, len: u64, advice: libc::c_int) -> io::Result<()> {
        let addr = self.checked(offset, len);
        // SAFETY: advice about our own range (checked above); the callers pass such as changes no
        // content.
        match unsafe { libc::madvise(addr as *mut _, len as usize, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Finds pages for what is mapped at `offset` now, as a store would: contents stay. Linux 5.14
    /// and later.
    pub fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        let addr = self.checked(offset, len);
        // SAFETY: our own range (checked above); faults are taken, contents are not changed.
        match unsafe { libc::madvise(addr as *mut _, len as usize, libc::MADV_POPULATE_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Gives the host the pages back that are at `offset`, where memory is mapped: it reads as
    /// zeros then, until it is written again.
    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let addr = self.checked(offset, len);
        // Pages of a file stay in it unless they are taken out of it.
        let advice =
            if self.shared.get().is_some() { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
        // SAFETY: our own range (checked above); guest memory is reached by volatile accesses, and
        // nobody relies on what was there.
        match unsafe { libc::madvise(addr as *mut _, len as usize, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// A byte for each page from `offset`, which is a page's: bit 0 tells whether it is there
    /// (mincore(2)).
    pub fn pages(&self, offset: u64, len: u64) -> io::Result<Vec<u8>> {
        let addr = self.checked(offset, len);
        let mut pages = vec![0u8; (len as usize).div_ceil(PAGE_BYTES)];
        // SAFETY: our own range (checked above), and a byte for each of its pages.
        match unsafe { libc::mincore(addr as *mut _, len as usize, pages.as_mut_ptr()) } {
            0 => Ok(pages),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The address of `offset`.
    ///
    /// # Panics
    /// If `offset..offset + len` is not in the reservation: an invariant of ours, never up to the
    /// guest.
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
        // SAFETY: the range is ours alone; whoever uses its addresses (view, slots, backings)
        // shares ownership of the reservation, so that none of them is left.
        unsafe { libc::munmap(self.addr as *mut _, self.len + GUARD_BYTES) };
    }
}

/// Behind each reservation a page stays PROT_NONE, so that mappings of two of them never become
/// one, and /proc/self/smaps tells them apart.
const GUARD_BYTES: usize = PAGE_BYTES;

/// x86-64's small page.
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
    // SAFETY: without MAP_FIXED the kernel picks a free range. With it, the caller passes a range
    // inside a reservation of its own (`Reservation::checked`), into which nobody holds
    // references.
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
    fn core_dumps_hold_no_guest_memory() {
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
    fn a_reservation_is_aligned_and_inaccessible_until_something_is_mapped() {
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
    fn what_is_not_dax_is_not_mapped_as_if_it_were() {
        use std::os::fd::AsFd;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(2 * MIB).unwrap();
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        let map = |access| reservation.map_file(0, 2 * MIB, file.as_fd(), 0, access);
        assert!(map(Access::ReadWriteSync).is_err());
        map(Access::ReadWrite).unwrap();
    }

    #[test]
    fn what_is_written_privately_does_not_reach_the_file() {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(2 * MIB).unwrap();
        let read_only = fs::File::open(file.path()).unwrap();
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        // No right to write is needed for it.
        assert!(reservation.map_file(0, 2 * MIB, read_only.as_fd(), 0, Access::ReadWrite).is_err());
        reservation.map_file(0, 2 * MIB, read_only.as_fd(), 0, Access::ReadWritePrivate).unwrap();
        // SAFETY: just mapped, and nobody else's.
        unsafe { std::ptr::write_volatile(reservation.addr() as *mut u8, 7) };
        let mut byte = [0xff];
        file.as_file().read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    #[should_panic(expected = "outside of a reservation")]
    fn nothing_is_mapped_outside_of_a_reservation() {
        let reservation = Reservation::new(2 * MIB, 4096).unwrap();
        let _ = reservation.map_anonymous(MIB, 2 * MIB);
    }
}
