//! Backing memory in the DRAM of the host.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use tracing::warn;

use super::reservation::PAGE_BYTES;
use super::segments::{Ledger, Source};
use super::source::DramSource;
use super::{Backing, BackingError, MappingBudget, Reservation};

/// Bytes that one call checks for present pages: the size that Linux unplugs in one request. The
/// result has a byte for each page.
const PROBE_BYTES: u64 = 128 << 20;

/// DRAM that backs a reservation.
#[derive(Debug)]
pub struct DramBacking {
    reservation: Arc<Reservation>,
    ledger: Ledger,
    source: DramSource,
    /// Ranges of the file that are unmapped but not yet released.
    detached: Vec<Range<u64>>,
}

impl DramBacking {
    /// Creates a backing for `reservation`, which has no mappings yet.
    pub fn new(
        reservation: Arc<Reservation>,
        budget: Arc<MappingBudget>,
        source: DramSource,
    ) -> Self {
        let ledger = Ledger::new(reservation.len_bytes(), budget);
        source.prepare(&reservation);
        Self { reservation, ledger, source, detached: Vec::new() }
    }

    /// Releases detached ranges. If a release fails, the range remains detached.
    fn give_back(&mut self) -> io::Result<()> {
        while let Some(range) = self.detached.last() {
            self.source.give_back(range.start, range.end - range.start)?;
            self.detached.pop();
        }
        Ok(())
    }
}

impl Backing for DramBacking {
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        // First punches holes for detached ranges, so that plugged memory reads as zeros.
        self.give_back().map_err(|source| BackingError::Map { offset, len, source })?;
        let (reservation, source) = (&self.reservation, &self.source);
        let plugged = self.ledger.map(1, |segments| {
            source.map(reservation, offset, len).map_err(|err| source.refusal(offset, len, err))?;
            let of =
                source.in_file(offset).map_or(Source::Anonymous, |offset| Source::File { offset });
            segments.set(offset, len, of);
            Ok(())
        });
        // On an error, the file still contains the pages that were already allocated.
        if plugged.is_err() && self.source.in_file(offset).is_some() {
            self.detached.push(offset..offset + len);
            if let Err(err) = self.give_back() {
                warn!(
                    %err,
                    offset,
                    len,
                    "Cannot return DRAM of a failed plug to the host; the next plug retries"
                );
            }
        }
        plugged
    }

    fn detach(&mut self, offset: u64, len: u64) -> Result<(), BackingError> {
        let reservation = &self.reservation;
        self.ledger.unmap(|segments| {
            reservation.unmap(offset, len).map_err(|source| BackingError::Map {
                offset,
                len,
                source,
            })?;
            segments.set(offset, len, Source::Nothing);
            Ok(())
        })?;
        if self.source.in_file(offset).is_some() {
            self.detached.push(offset..offset + len);
        }
        Ok(())
    }

    /// Only files need this. Anonymous memory was already released when it was unmapped.
    fn free_detached(&mut self) -> Result<(), BackingError> {
        let Some(Range { start: offset, end }) = self.detached.last().cloned() else {
            return Ok(());
        };
        self.give_back().map_err(|source| BackingError::Map { offset, len: end - offset, source })
    }

    fn populated_blocks(&self, run: &Range<u64>, block_bytes: u64) -> Vec<bool> {
        let mut populated = Vec::new();
        let probe_bytes = PROBE_BYTES.max(block_bytes);
        for start in run.clone().step_by(probe_bytes as usize) {
            let len = probe_bytes.min(run.end - start);
            let pages = self.reservation.pages(start, len).unwrap_or_default();
            let firsts =
                (0..len / block_bytes).map(|block| (block * block_bytes) as usize / PAGE_BYTES);
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
    use crate::memory::zone::{HostMemory, HostPages};

    const MIB: u64 = 1 << 20;
    const LEN: u64 = 64 * MIB;

    fn backing() -> (DramBacking, Arc<Reservation>) {
        let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
        let budget = Arc::new(MappingBudget::new(100));
        (
            DramBacking::new(Arc::clone(&reservation), budget, DramSource::anonymous(false)),
            reservation,
        )
    }

    fn fill(reservation: &Reservation, offset: u64, len: u64, value: u8) {
        assert!(offset + len <= reservation.len_bytes());
        // SAFETY: the range is in the reservation, and the test has plugged it.
        unsafe {
            std::ptr::write_bytes((reservation.addr() + offset) as *mut u8, value, len as usize)
        };
    }

    fn byte_at(reservation: &Reservation, offset: u64) -> u8 {
        // SAFETY: the test has plugged the block that `offset` is in.
        unsafe { std::ptr::read_volatile((reservation.addr() + offset) as *const u8) }
    }

    #[test]
    fn unplugged_memory_is_released_and_zeroed_on_the_next_plug() {
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
    fn populate_allocates_pages_and_keeps_their_content() {
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
        // No pages are allocated for unplugged memory.
        assert!(backing.populate(6 * MIB, 4 * MIB).is_err());
        assert_eq!(populated(&backing, 8 * MIB..10 * MIB), [false]);
    }

    #[test]
    fn populated_blocks_of_a_long_run_are_reported() {
        const BLOCKS: u64 = 2 * PROBE_BYTES / (2 * MIB) + 3;
        let reservation = Arc::new(Reservation::new(BLOCKS * 2 * MIB, 2 * MIB).unwrap());
        let mut backing = DramBacking::new(
            Arc::clone(&reservation),
            Arc::new(MappingBudget::new(100)),
            DramSource::anonymous(false),
        );
        backing.plug(0, BLOCKS * 2 * MIB).unwrap();
        // Blocks at the boundary between two calls of `pages`, and at the end.
        let touched = [1, BLOCKS / 2 - 2, BLOCKS / 2 - 1, BLOCKS - 4, BLOCKS - 3, BLOCKS - 1];
        for block in touched {
            fill(&reservation, block * 2 * MIB, 1, 0xa5);
        }
        // Touches a page that is not the first of its block. Only first pages are examined.
        fill(&reservation, 3 * 2 * MIB + MIB, 1, 0xa5);
        for first in [0, 1, 5] {
            let populated = backing.populated_blocks(&(first * 2 * MIB..BLOCKS * 2 * MIB), 2 * MIB);
            let expected: Vec<_> = (first..BLOCKS).map(|block| touched.contains(&block)).collect();
            assert_eq!(populated, expected, "from block {first}");
        }
    }

    #[test]
    fn replugged_memory_is_bound_to_its_host_node() {
        use super::super::HostNode;
        use super::super::host_node::tests::policy_at;
        let policy =
            |reservation: &Reservation| [0, 32 * MIB].map(|at| policy_at(reservation.addr() + at));
        let (mut backing, reservation) = backing();
        backing.plug(0, LEN).unwrap();
        assert_eq!(policy(&reservation), [(libc::MPOL_DEFAULT, 0); 2], "no node was configured");
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
        let mut backing =
            DramBacking::new(reservation, Arc::clone(&budget), DramSource::anonymous(false));
        backing.plug(4 * MIB, 2 * MIB).unwrap();
        assert!(matches!(backing.plug(12 * MIB, 2 * MIB), Err(BackingError::MappingBudget { .. })));
        assert_eq!(budget.used(), 3);
        backing.detach(4 * MIB, 2 * MIB).unwrap();
        assert_eq!(budget.used(), 1);
        backing.plug(12 * MIB, 2 * MIB).unwrap();
    }
    /// Backing with a file, as for shared memory.
    fn shared() -> (DramBacking, Arc<Reservation>) {
        let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
        let host = HostMemory { shared: true, ..HostMemory::default() };
        let source = DramSource::of_hotplug(&host, LEN, 2 * MIB).unwrap();
        (
            DramBacking::new(Arc::clone(&reservation), Arc::new(MappingBudget::new(100)), source),
            reservation,
        )
    }

    #[test]
    fn shared_memory_counts_once_and_leaves_its_file_on_unplug() {
        use std::os::unix::fs::MetadataExt;
        let (mut backing, reservation) = shared();
        let file = Arc::clone(backing.source.file().unwrap());
        let file_bytes = || file.metadata().unwrap().blocks() * 512;
        let range = (reservation.addr(), reservation.len_bytes());
        backing.plug(0, LEN).unwrap();
        assert_eq!(file_bytes(), 0);
        fill(&reservation, 0, LEN, 0xa5);
        assert_eq!((file_bytes(), resident_bytes(&[[range]]).unwrap()), (LEN, vec![LEN]));
        backing.detach(2 * MIB, 40 * MIB).unwrap();
        backing.free_detached().unwrap();
        assert_eq!(
            (file_bytes(), resident_bytes(&[[range]]).unwrap()),
            (LEN - 40 * MIB, vec![LEN - 40 * MIB])
        );
        backing.plug(2 * MIB, 40 * MIB).unwrap();
        assert_eq!((byte_at(&reservation, 2 * MIB), byte_at(&reservation, 42 * MIB)), (0, 0xa5));
        // Pages that a balloon takes are also removed from the file.
        let before = file_bytes();
        reservation.discard(42 * MIB, 4 * MIB).unwrap();
        assert_eq!((before - file_bytes(), byte_at(&reservation, 42 * MIB)), (4 * MIB, 0));
    }

    #[test]
    fn failed_plug_releases_the_pages_it_allocated() {
        use std::os::unix::fs::MetadataExt;
        let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
        let host = HostMemory { shared: true, prefault: true, ..HostMemory::default() };
        let source = DramSource::of_hotplug(&host, LEN, 2 * MIB).unwrap();
        let mut backing = DramBacking::new(reservation, Arc::new(MappingBudget::new(100)), source);
        let file = Arc::clone(backing.source.file().unwrap());
        // Allocation fails at the end of the file, after it has allocated the pages before the end.
        file.set_len(4 * MIB).unwrap();
        backing.plug(0, 8 * MIB).unwrap_err();
        assert_eq!(file.metadata().unwrap().blocks(), 0);
        backing.plug(0, 4 * MIB).unwrap();
    }

    #[test]
    fn detached_memory_is_zeroed_before_the_next_plug() {
        let (mut backing, reservation) = shared();
        backing.plug(0, 4 * MIB).unwrap();
        fill(&reservation, 0, 4 * MIB, 0xa5);
        backing.detach(0, 4 * MIB).unwrap();
        backing.plug(2 * MIB, 2 * MIB).unwrap();
        assert_eq!(byte_at(&reservation, 2 * MIB), 0);
    }

    #[test]
    fn prefault_allocates_pages_on_plug() {
        for shared in [false, true] {
            let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
            let host =
                HostMemory { shared, prefault: true, reserve: true, ..HostMemory::default() };
            let source = DramSource::of_hotplug(&host, LEN, 2 * MIB).unwrap();
            let mut backing = DramBacking::new(
                Arc::clone(&reservation),
                Arc::new(MappingBudget::new(100)),
                source,
            );
            backing.plug(4 * MIB, 8 * MIB).unwrap();
            let range = (reservation.addr(), reservation.len_bytes());
            assert_eq!(resident_bytes(&[[range]]).unwrap(), [8 * MIB]);
        }
    }

    /// Flags of the mapping at `addr` in /proc/self/smaps.
    fn flags_at(addr: u64) -> Vec<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{addr:x}-")));
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        flags.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn memory_options_are_passed_to_the_kernel() {
        for (host, has, has_not) in [
            (HostMemory { reserve: true, ..HostMemory::default() }, "ac", "nr"),
            (HostMemory::default(), "nr", "mg"),
            (HostMemory { pages: HostPages::Small, ..HostMemory::default() }, "nh", "hg"),
            (HostMemory { mergeable: true, ..HostMemory::default() }, "mg", "nh"),
        ] {
            // A kernel without transparent huge pages or KSM rejects the advice.
            let is_known = match has {
                "nh" => std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists(),
                "mg" => std::path::Path::new("/sys/kernel/mm/ksm").exists(),
                _ => true,
            };
            if !is_known {
                continue;
            }
            let reservation = Arc::new(Reservation::new(LEN, 2 * MIB).unwrap());
            let source = DramSource::of_hotplug(&host, LEN, 2 * MIB).unwrap();
            let mut backing = DramBacking::new(
                Arc::clone(&reservation),
                Arc::new(MappingBudget::new(100)),
                source,
            );
            backing.plug(4 * MIB, 8 * MIB).unwrap();
            let flags = flags_at(reservation.addr() + 4 * MIB);
            let is_set = |flag: &str| flags.iter().any(|other| other == flag);
            assert!(is_set(has) && !is_set(has_not), "{host:?}: {flags:?}");
        }
    }

    #[test]
    fn unavailable_huge_pages_are_refused() {
        let huge =
            |page_bytes| HostMemory { pages: HostPages::Huge(page_bytes), ..HostMemory::default() };
        let error = |page_bytes, len| {
            DramSource::of_hotplug(&huge(page_bytes), len, 2 * MIB).unwrap_err().to_string()
        };
        assert_eq!(
            error(2 * MIB, 3 * MIB),
            "size 3 MiB is not a multiple of the huge page size 2 MiB"
        );
        // More huge pages than any host that runs this test has reserved.
        let len = 64 << 30;
        let reservation = Arc::new(Reservation::new(len, 2 * MIB).unwrap());
        let source = DramSource::of_hotplug(&huge(2 * MIB), len, 2 * MIB).unwrap();
        let mut backing = DramBacking::new(reservation, Arc::new(MappingBudget::new(100)), source);
        let err = backing.plug(0, len).unwrap_err();
        let BackingError::HugePages { wanted_bytes, available_bytes, .. } = err else {
            panic!("{err:?}")
        };
        assert!(
            wanted_bytes == len && available_bytes < len,
            "{available_bytes} of {wanted_bytes}"
        );
        // x86-64 has no huge pages of this size.
        assert_eq!(error(32 * MIB, LEN), "the host has no huge pages of 32 MiB");
    }
}
