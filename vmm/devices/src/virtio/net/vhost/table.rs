//! Memory table that the kernel's vhost-net receives (VHOST_SET_MEM_TABLE). This module makes no
//! system calls.

use vhost::VhostUserMemoryRegionInfo;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::VhostError;

/// Maximum number of ranges, unless the module parameter `max_mem_regions` changes it.
pub(super) const RANGES_MAX: usize = 64;

/// A range of guest memory and its address in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    guest: u64,
    len: u64,
    host: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Table(Vec<Range>);

impl Table {
    pub(super) fn new(memory: &GuestMemoryMmap) -> Result<Self, VhostError> {
        let range = |region: &vm_memory::GuestRegionMmap| Range {
            guest: region.start_addr().raw_value(),
            len: region.len(),
            host: region.as_ptr() as u64,
        };
        Self::of(memory.iter().map(range).collect())
    }

    fn of(ranges: Vec<Range>) -> Result<Self, VhostError> {
        match ranges.len() {
            1..=RANGES_MAX => Ok(Self(ranges)),
            ranges => Err(VhostError::Ranges { ranges }),
        }
    }

    /// Returns the address of a ring's part in this process. The part must be in one range.
    pub(super) fn find(
        &self,
        part: &'static str,
        address: u64,
        len: u64,
    ) -> Result<u64, VhostError> {
        let holds = |range: &&Range| {
            address >= range.guest
                && address.checked_add(len).is_some_and(|end| end - range.guest <= range.len)
        };
        let range = self.0.iter().find(holds).ok_or(VhostError::Ring { part, address, len })?;
        Ok(range.host + (address - range.guest))
    }

    /// Returns the table in the format of the kernel interface.
    pub(super) fn regions(&self) -> Vec<VhostUserMemoryRegionInfo> {
        let region = |range: &Range| VhostUserMemoryRegionInfo {
            guest_phys_addr: range.guest,
            memory_size: range.len,
            userspace_addr: range.host,
            mmap_offset: 0,
            mmap_handle: -1,
        };
        self.0.iter().map(region).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::GuestAddress;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// Returns a table whose first two ranges are adjacent in the guest but not in this process.
    fn table() -> Table {
        Table::of(vec![
            Range { guest: 0, len: GIB, host: 0x7000_0000_0000 },
            Range { guest: GIB, len: GIB, host: 0x6000_0000_0000 },
            Range { guest: 4 * GIB, len: 4096, host: 0x5000_0000_0000 },
        ])
        .unwrap()
    }

    #[test]
    fn table_contains_every_region() {
        let (first, second) = ((GuestAddress(0), 0x1000), (GuestAddress(0x8000), 0x2000));
        let memory = GuestMemoryMmap::from_ranges(&[first, second]).unwrap();
        let table = Table::new(&memory).unwrap();
        let regions = table.regions();
        assert_eq!(regions.len(), 2);
        for (region, (start, len)) in regions.iter().zip([first, second]) {
            assert_eq!((region.guest_phys_addr, region.memory_size), (start.0, len as u64));
            assert_eq!(region.userspace_addr, memory.get_host_address(start).unwrap() as u64);
        }
    }

    #[test]
    fn number_of_ranges_is_limited() {
        let ranges = |count| vec![Range { guest: 0, len: 1, host: 1 }; count];
        assert!(Table::of(ranges(RANGES_MAX)).is_ok());
        for count in [0, RANGES_MAX + 1] {
            let error = Table::of(ranges(count)).unwrap_err();
            assert!(matches!(error, VhostError::Ranges { ranges } if ranges == count));
        }
    }

    #[test]
    fn ring_must_be_in_one_range() {
        let table = table();
        assert_eq!(table.find("used ring", 0x1000, 70).unwrap(), 0x7000_0000_1000);
        assert_eq!(table.find("used ring", GIB - 70, 70).unwrap(), 0x7000_3fff_ffba);
        assert_eq!(table.find("used ring", GIB, 70).unwrap(), 0x6000_0000_0000);
        assert_eq!(table.find("used ring", 4 * GIB, 4096).unwrap(), 0x5000_0000_0000);
        for (address, len) in [
            (GIB - 69, 70),
            (2 * GIB, 1),
            (4 * GIB, 4097),
            (4 * GIB - 1, 2),
            (u64::MAX, 2),
            (8, u64::MAX),
        ] {
            let error = table.find("used ring", address, len).unwrap_err();
            assert!(matches!(error, VhostError::Ring { address: found, .. } if found == address));
        }
    }

    proptest! {
        #[test]
        fn found_address_is_in_its_range(address in 0..5 * GIB, len in 1..2 * GIB) {
            let table = table();
            let holder = table.0.iter().find(|range| (range.guest..range.guest + range.len).contains(&address));
            let fits = holder.filter(|range| address + len <= range.guest + range.len);
            let expected = fits.map(|range| range.host + address - range.guest);
            prop_assert_eq!(table.find("ring", address, len).ok(), expected);
        }
    }
}
