//! Registers of DIMMs in the hotplug page.
//!
//! | offset | access | content |
//! |---|---|---|
//! | 0x40 | read, write | selected DIMM, to which the next six registers belong |
//! | 0x44, 0x48 | read | guest-physical address, low and high half |
//! | 0x4c, 0x50 | read | length in bytes, low and high half |
//! | 0x54 | read | NUMA node |
//! | 0x58 | read | bit 0: the DIMM is present |
//! | 0x5c | read | next DIMM that the guest has not been notified of, or [`NONE`]; reading removes it from the list |

use std::collections::VecDeque;

use foreshore_devices::memory::dimms::MAX_DIMMS;
use foreshore_devices::memory::layout::GuestRange;

/// Offset of the registers in the hotplug page.
pub(crate) const DIMMS_OFFSET: u64 = 0x40;
pub(crate) const DIMMS_LEN: u64 = 0x20;
/// End of the list of added DIMMs.
pub(crate) const NONE: u32 = u32::MAX;

/// DIMMs of the guest, and the added DIMMs that the guest has not been notified of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DimmRegisters {
    dimms: Vec<GuestRange>,
    node: u32,
    selected: u32,
    untold: VecDeque<u32>,
}

impl DimmRegisters {
    /// Adds a DIMM in `node`.
    ///
    /// # Panics
    /// Panics if the guest already has [`MAX_DIMMS`].
    pub(crate) fn put(&mut self, dimm: GuestRange, node: u32) {
        assert!(self.dimms.len() < MAX_DIMMS, "a DIMM without a device");
        self.untold.push_back(self.dimms.len() as u32);
        self.dimms.push(dimm);
        self.node = node;
    }

    /// Reads the register at `offset` for the guest.
    pub(crate) fn read(&mut self, offset: u64) -> u32 {
        let dimm = usize::try_from(self.selected).ok().and_then(|index| self.dimms.get(index));
        let [start, len] = dimm.map_or([0, 0], |dimm| [dimm.start, dimm.len]);
        let (low, high) = (|value: u64| value as u32, |value: u64| (value >> 32) as u32);
        match offset {
            0x00 => self.selected,
            0x04 => low(start),
            0x08 => high(start),
            0x0c => low(len),
            0x10 => high(len),
            0x14 => self.node,
            0x18 => u32::from(dimm.is_some()),
            0x1c => self.untold.pop_front().unwrap_or(NONE),
            _ => 0,
        }
    }

    /// Writes the register at `offset` for the guest.
    pub(crate) fn write(&mut self, offset: u64, value: u32) {
        if offset == 0 {
            self.selected = value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(registers: &mut DimmRegisters, dimm: u32) -> [u32; 6] {
        registers.write(0, dimm);
        [0x04, 0x08, 0x0c, 0x10, 0x14, 0x18].map(|offset| registers.read(offset))
    }

    #[test]
    fn dimm_is_announced_once_and_readable_repeatedly() {
        let mut registers = DimmRegisters::default();
        assert_eq!((registers.read(0x1c), of(&mut registers, 0)), (NONE, [0; 6]));
        registers.put(GuestRange { start: 0x1_8000_0000, len: 0x800_0000 }, 0);
        registers.put(GuestRange { start: 0x1_8800_0000, len: 0x2_0000_0000 }, 0);
        assert_eq!([0x1c; 3].map(|offset| registers.read(offset)), [0, 1, NONE]);
        assert_eq!(of(&mut registers, 0), [0x8000_0000, 1, 0x800_0000, 0, 0, 1]);
        assert_eq!(of(&mut registers, 1), [0x8800_0000, 1, 0, 2, 0, 1]);
        for dimm in [2, MAX_DIMMS as u32, NONE] {
            assert_eq!(of(&mut registers, dimm), [0; 6], "DIMM {dimm}");
            assert_eq!(registers.read(0), dimm);
        }
        // The guest can write only the selection register. Other offsets read 0.
        let before = registers.clone();
        (1..0x40).for_each(|offset| registers.write(offset, 0));
        assert_eq!((registers.read(2), registers.read(0x20)), (0, 0));
        assert_eq!(registers, before);
    }
}
