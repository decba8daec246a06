//! DRAM of the host: private and anonymous.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::reservation::PAGE_BYTES;
use super::segments::{Ledger, Source};
use super::{Backing, BackingError, MappingBudget, Reservation};

/// How much one call looks through for pages: as much as Linux unplugs at once, with a byte for each page.
const LOOK_BYTES: u64 = 128 << 20;

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

    fn populated_blocks(&self, run: &Range<u64>, block_bytes: u64) -> Vec<bool> {
        let mut populated = Vec::new();
        let look_bytes = LOOK_BYTES.max(block_bytes);
        for start in run.clone().step_by(look_bytes as usize) {
            let len = look_bytes.min(run.end - start);
            let pages = self.reservation.pages(start, len).unwrap_or_default();
            let firsts = (0..len / block_bytes).map(|block| (block * block_bytes) as usize / PAGE_BYTES);
            populated.extend(firsts.map(|page| pages.get(page).is_some_and(|page| page & 1 == 1)));
        }
        populated
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
        let populated = |backing: &DramBacking, run| backing.populated_blocks(&run, 2 * MIB);
        assert_eq!(populated(&backing, 0..8 * MIB), [false; 4]);
        fill(&reservation, 2 * MIB, 1, 0xa5);
        assert_eq!(populated(&backing, 0..8 * MIB), [false, true, false, false]);
        backing.populate(2 * MIB, 4 * MIB).unwrap();
        assert_eq!(populated(&backing, 0..8 * MIB), [false, true, true, false]);
        assert_eq!(populated(&backing, 4 * MIB..6 * MIB), [true]);
        assert_eq!((byte_at(&reservation, 2 * MIB), byte_at(&reservation, 2 * MIB + 1)), (0xa5, 0));
        // What is not plugged gets no pages.
        assert!(backing.populate(6 * MIB, 4 * MIB).is_err());
        assert_eq!(populated(&backing, 8 * MIB..10 * MIB), [false]);
    }

    #[test]
    fn pages_of_a_long_run_are_found_where_they_are() {
        const BLOCKS: u64 = 2 * LOOK_BYTES / (2 * MIB) + 3;
        let reservation = Arc::new(Reservation::new(BLOCKS * 2 * MIB, 2 * MIB).unwrap());
        let mut backing =
            DramBacking::new(Arc::clone(&reservation), Arc::new(MappingBudget::new(100)), false);
        backing.plug(0, BLOCKS * 2 * MIB).unwrap();
        // Around where one look ends and the next begins, and at the end.
        let touched = [1, BLOCKS / 2 - 2, BLOCKS / 2 - 1, BLOCKS - 4, BLOCKS - 3, BLOCKS - 1];
        for block in touched {
            fill(&reservation, block * 2 * MIB, 1, 0xa5);
        }
        // Not the first page: that is not looked at.
        fill(&reservation, 3 * 2 * MIB + MIB, 1, 0xa5);
        for first in [0, 1, 5] {
            let populated = backing.populated_blocks(&(first * 2 * MIB..BLOCKS * 2 * MIB), 2 * MIB);
            let expected: Vec<_> = (first..BLOCKS).map(|block| touched.contains(&block)).collect();
            assert_eq!(populated, expected, "from block {first}");
        }
    }

    #[test]
    fn memory_comes_from_the_node_that_it_is_bound_to_also_when_it_comes_back() {
        use super::super::HostNode;
        use super::super::host_node::tests::policy_at;
        let policy = |reservation: &Reservation| [0, 32 * MIB].map(|at| policy_at(reservation.addr() + at));
        let (mut backing, reservation) = backing();
        backing.plug(0, LEN).unwrap();
        assert_eq!(policy(&reservation), [(libc::MPOL_DEFAULT, 0); 2], "nobody has said a node");
        let (mut backing, reservation) = self::backing();
        reservation.bind_to(HostNode::find(0).unwrap());
        backing.plug(0, LEN).unwrap();
        assert_eq!(policy(&reservation), [(libc::MPOL_BIND, 1); 2]);
        backing.detach(32 * MIB, 2 * MIB).unwrap();
        assert_eq!(policy(&reservation), [(libc::MPOL_BIND, 1), (libc::MPOL_DEFAULT, 0)]);
        backing.plug(32 * MIB, 2 * MIB).unwrap();
        assert_eq!(policy(&reservation), [(libc::MPOL_BIND, 1); 2]);
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
