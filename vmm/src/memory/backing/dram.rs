//! DRAM of the host: private and anonymous.

use std::io;
use std::sync::Arc;

use super::segments::{Ledger, Source};
use super::{Backing, BackingError, MappingBudget, Reservation};

/// DRAM behind a reservation.
#[derive(Debug)]
pub struct DramBacking {
    reservation: Arc<Reservation>,
    ledger: Ledger,
    huge_pages: bool,
}

impl DramBacking {
    /// Backs `reservation`, of which nothing is mapped yet.
    pub fn new(reservation: Arc<Reservation>, budget: Arc<MappingBudget>, huge_pages: bool) -> Self {
        let ledger = Ledger::new(reservation.len_bytes(), budget);
        Self { reservation, ledger, huge_pages }
    }
}

impl Backing for DramBacking {
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        let reservation = &self.reservation;
        self.ledger.map(1, |segments| {
            reservation.map_anonymous(offset, len).map_err(|source| BackingError::Map {
                offset,
                len,
                source,
            })?;
            segments.set(offset, len, Source::Anonymous);
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
        })
    }

    /// Anonymous memory is gone with its mapping.
    fn free_detached(&mut self) -> Result<(), BackingError> {
        Ok(())
    }

    fn is_populated(&self, offset: u64) -> bool {
        self.reservation.has_page(offset).unwrap_or(false)
    }

    fn populate(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.reservation.populate(offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::super::resident::resident_bytes;
    use super::*;

    const MIB: u64 = 1 << 20;
    const LEN: u64 = 64 * MIB;

    fn backing() -> (DramBacking, Arc<Reservation>) {
        let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
        let budget = Arc::new(MappingBudget::new(100));
        (DramBacking::new(Arc::clone(&reservation), budget, false), reservation)
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
        let (mut backing, reservation) = backing();
        let range = (reservation.addr(), reservation.len_bytes());
        backing.plug(0, LEN).unwrap();
        fill(&reservation, 0, LEN, 0xa5);
        assert_eq!(resident_bytes(&[[range]]).unwrap(), [LEN]);
        backing.detach(2 * MIB, 40 * MIB).unwrap();
        backing.free_detached().unwrap();
        assert_eq!(resident_bytes(&[[range]]).unwrap(), [LEN - 40 * MIB]);
        backing.plug(2 * MIB, 40 * MIB).unwrap();
        assert_eq!(byte_at(&reservation, 2 * MIB), 0);
        assert_eq!(byte_at(&reservation, 42 * MIB - 1), 0);
        assert_eq!(byte_at(&reservation, 42 * MIB), 0xa5);
    }

    #[test]
    fn pages_are_found_ahead_and_keep_what_is_in_them() {
        let (mut backing, reservation) = backing();
        backing.plug(0, 8 * MIB).unwrap();
        assert!(!backing.is_populated(2 * MIB));
        fill(&reservation, 2 * MIB, 1, 0xa5);
        assert!(backing.is_populated(2 * MIB) && !backing.is_populated(4 * MIB));
        backing.populate(2 * MIB, 4 * MIB).unwrap();
        let populated = [0, 2 * MIB, 4 * MIB, 6 * MIB - 4096, 6 * MIB].map(|at| backing.is_populated(at));
        assert_eq!(populated, [false, true, true, true, false]);
        assert_eq!((byte_at(&reservation, 2 * MIB), byte_at(&reservation, 2 * MIB + 1)), (0xa5, 0));
        // What is not plugged gets no pages.
        assert!(backing.populate(6 * MIB, 4 * MIB).is_err());
        assert!(!backing.is_populated(8 * MIB));
    }

    #[test]
    fn plugs_over_the_mapping_budget_are_refused() {
        let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
        let budget = Arc::new(MappingBudget::new(4));
        let mut backing = DramBacking::new(reservation, Arc::clone(&budget), false);
        backing.plug(4 * MIB, 2 * MIB).unwrap();
        assert!(matches!(backing.plug(12 * MIB, 2 * MIB), Err(BackingError::MappingBudget { .. })));
        assert_eq!(budget.used(), 3);
        backing.detach(4 * MIB, 2 * MIB).unwrap();
        assert_eq!(budget.used(), 1);
        backing.plug(12 * MIB, 2 * MIB).unwrap();
    }
}
