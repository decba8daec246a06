//! DRAM of the host: anonymous, or a memfd where another process shall share it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::sync::Arc;

use super::segments::{Ledger, Source};
use super::{Access, Backing, BackingError, MappingBudget, Reservation};

/// DRAM behind a reservation.
#[derive(Debug)]
pub struct DramBacking {
    reservation: Arc<Reservation>,
    ledger: Ledger,
    /// Memory that can be shared; without it, memory is private and anonymous.
    memfd: Option<File>,
    huge_pages: bool,
    /// Ranges of the memfd that are unmapped and still hold pages.
    detached: Vec<(u64, u64)>,
}

impl DramBacking {
    /// Backs `reservation`, of which nothing is mapped yet; by a memfd if it shall be `shared`.
    pub fn new(
        reservation: Arc<Reservation>,
        budget: Arc<MappingBudget>,
        shared: bool,
        huge_pages: bool,
    ) -> io::Result<Self> {
        let len = reservation.len_bytes();
        let memfd = if shared { Some(memfd(len)?) } else { None };
        Ok(Self { reservation, ledger: Ledger::new(len, budget), memfd, huge_pages, detached: Vec::new() })
    }

    /// The file behind shared memory, for whoever shares it.
    pub fn file(&self) -> Option<&File> {
        self.memfd.as_ref()
    }
}

impl Backing for DramBacking {
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        let (reservation, memfd) = (&self.reservation, &self.memfd);
        // Zeroed memory is promised: what could not be scrubbed so far must be, before it is mapped again.
        scrub(memfd.as_ref(), &mut self.detached).map_err(|source| BackingError::Map {
            offset,
            len,
            source,
        })?;
        self.ledger.map(1, |segments| {
            let mapped = match memfd {
                Some(file) => reservation
                    .map_file(offset, len, file.as_fd(), offset, Access::ReadWrite)
                    .map(|()| Source::File { offset }),
                None => reservation.map_anonymous(offset, len).map(|()| Source::Anonymous),
            };
            let source = mapped.map_err(|source| BackingError::Map { offset, len, source })?;
            segments.set(offset, len, source);
            Ok(())
        })?;
        if self.huge_pages {
            self.reservation.advise_huge_pages(offset, len);
        }
        Ok(())
    }

    fn detach(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        let reservation = &self.reservation;
        self.ledger.unmap(|segments| {
            reservation.unmap(offset, len).map_err(|source| BackingError::Map { offset, len, source })?;
            segments.set(offset, len, Source::Nothing);
            Ok(())
        })?;
        if self.memfd.is_some() {
            self.detached.push((offset, len));
        }
        Ok(())
    }

    fn free_detached(&mut self) -> Result<(), BackingError> {
        let (offset, len) = self.detached.last().copied().unwrap_or_default();
        scrub(self.memfd.as_ref(), &mut self.detached).map_err(|source| BackingError::Map {
            offset,
            len,
            source,
        })
    }
}

/// Gives the pages of `ranges` back to the host. Anonymous memory is gone with its mapping.
fn scrub(memfd: Option<&File>, ranges: &mut Vec<(u64, u64)>) -> io::Result<()> {
    let Some(file) = memfd else { return Ok(()) };
    while let Some(&(offset, len)) = ranges.last() {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a call on a file of our own; the range lies within its length, which fits in an off_t.
        let result =
            unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as libc::off_t, len as libc::off_t) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        ranges.pop();
    }
    Ok(())
}

fn memfd(len: u64) -> io::Result<File> {
    // SAFETY: the name is a C string; the descriptor returned is new and ours.
    let file = unsafe {
        let fd = libc::memfd_create(c"foreshore-dram".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(fd)
    };
    file.set_len(len)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::super::resident::resident_bytes;
    use super::*;

    const MIB: u64 = 1 << 20;
    const LEN: u64 = 64 * MIB;

    fn backing(shared: bool) -> (DramBacking, Arc<Reservation>) {
        let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
        let budget = Arc::new(MappingBudget::new(100));
        (DramBacking::new(Arc::clone(&reservation), budget, shared, false).unwrap(), reservation)
    }

    fn fill(reservation: &Reservation, offset: u64, len: u64, value: u8) {
        assert!(offset + len <= reservation.len_bytes());
        // SAFETY: the range is in the reservation, and the test has plugged it.
        unsafe { std::ptr::write_bytes((reservation.addr() + offset) as *mut u8, value, len as usize) };
    }

    fn byte_at(reservation: &Reservation, offset: u64) -> u8 {
        // SAFETY: the test has plugged the block that `offset` is in.
        unsafe { std::ptr::read_volatile((reservation.addr() + offset) as *const u8) }
    }

    #[test]
    fn unplugged_memory_leaves_the_process_and_comes_back_zeroed() {
        for shared in [false, true] {
            let (mut backing, reservation) = backing(shared);
            let range = (reservation.addr(), reservation.len_bytes());
            backing.plug(0, LEN).unwrap();
            fill(&reservation, 0, LEN, 0xa5);
            assert_eq!(resident_bytes(&[[range]]).unwrap(), [LEN]);
            backing.detach(2 * MIB, 40 * MIB).unwrap();
            backing.free_detached().unwrap();
            assert_eq!(resident_bytes(&[[range]]).unwrap(), [LEN - 40 * MIB]);
            if let Some(file) = backing.file() {
                assert_eq!(file.metadata().unwrap().blocks() * 512, LEN - 40 * MIB);
            }
            backing.plug(2 * MIB, 40 * MIB).unwrap();
            assert_eq!(byte_at(&reservation, 2 * MIB), 0);
            assert_eq!(byte_at(&reservation, 42 * MIB - 1), 0);
            assert_eq!(byte_at(&reservation, 42 * MIB), 0xa5);
        }
    }

    #[test]
    fn plugs_over_the_mapping_budget_are_refused() {
        let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
        let budget = Arc::new(MappingBudget::new(4));
        let mut backing = DramBacking::new(reservation, Arc::clone(&budget), false, false).unwrap();
        backing.plug(4 * MIB, 2 * MIB).unwrap();
        assert!(matches!(backing.plug(12 * MIB, 2 * MIB), Err(BackingError::MappingBudget { .. })));
        assert_eq!(budget.used(), 3);
        backing.detach(4 * MIB, 2 * MIB).unwrap();
        assert_eq!(budget.used(), 1);
        backing.plug(12 * MIB, 2 * MIB).unwrap();
    }
}
