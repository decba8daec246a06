//! Hotplug page: registers that the DSDT's methods access when a device is added to or removed from
//! a running guest.
//!
//! The layout is private to Foreshore because only its own AML accesses the page. All registers are
//! 4 bytes wide. Accesses of other widths read 0 and write nothing.
//!
//! | offset | access | content |
//! |---|---|---|
//! | 0x00 | read | PCI slots with an added device, bit n for slot n; reading clears them |
//! | 0x04 | read | PCI slots whose device is to be removed, likewise |
//! | 0x08 | write | PCI slots that the guest ejects |
//! | 0x20 to 0x2c | | vCPUs: see [`super::hotplug_cpus`] |
//! | 0x40 to 0x5c | | DIMMs: see [`super::dimms`] |

use std::fmt;
use std::sync::Arc;

use foreshore_devices::bus::BusDevice;
use foreshore_devices::memory::layout::PCI_SLOTS;
use parking_lot::Mutex;

use super::dimms::{DIMMS_LEN, DIMMS_OFFSET, DimmRegisters};
use super::hotplug_cpus::{CPUS_LEN, CPUS_OFFSET, CpuRegisters};

/// Offset of the register that lists slots with an added device.
pub(crate) const PCI_UP: u64 = 0x00;
/// Offset of the register that lists slots with a requested removal.
pub(crate) const PCI_DOWN: u64 = 0x04;
/// Offset of the register that ejects slots.
pub(crate) const PCI_EJECT: u64 = 0x08;
/// Length of the registers of PCI slots in bytes.
pub(crate) const REGISTERS_LEN: u64 = 0x0c;

/// PCI hotplug state: notifications that the guest has not read, and removals that it has not
/// completed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PciSlots {
    up: u32,
    down: u32,
    /// Slots with a requested removal, regardless of whether the guest has read the request.
    leaving: u32,
}

impl PciSlots {
    /// Adds a device to `slot`. Drops pending requests, because they concerned an earlier device.
    pub(crate) fn put(&mut self, slot: u8) {
        self.up |= bit(slot);
        self.down &= !bit(slot);
        self.leaving &= !bit(slot);
    }

    /// Requests the removal of the device in `slot`. A repeated request notifies the guest again.
    pub(crate) fn request_removal(&mut self, slot: u8) {
        self.down |= bit(slot);
        self.leaving |= bit(slot);
    }

    /// Returns true if a removal was requested and the guest has not ejected the device.
    #[cfg(test)]
    pub(crate) fn is_leaving(&self, slot: u8) -> bool {
        self.leaving & bit(slot) != 0
    }

    /// Reads a register for the guest, and clears the notifications that the register contains.
    pub(crate) fn read(&mut self, offset: u64) -> u32 {
        match offset {
            PCI_UP => std::mem::take(&mut self.up),
            PCI_DOWN => std::mem::take(&mut self.down),
            _ => 0,
        }
    }

    /// Writes a register for the guest, and returns the slots freed by the write.
    ///
    /// A guest can eject a device without a requested removal, for example by a write to the slot's
    /// `power` file. Such a device is not removed, and the guest finds it again.
    pub(crate) fn write(&mut self, offset: u64, value: u32) -> Vec<u8> {
        if offset != PCI_EJECT {
            return Vec::new();
        }
        let gone = value & self.leaving;
        self.leaving &= !gone;
        self.down &= !gone;
        self.up &= !gone;
        (0..PCI_SLOTS).filter(|&slot| gone & bit(slot) != 0).collect()
    }
}

fn bit(slot: u8) -> u32 {
    assert!(slot < PCI_SLOTS, "slot {slot} is not below {PCI_SLOTS}");
    1 << slot
}

/// Registers of PCI slots, DIMMs and vCPUs on the MMIO bus.
pub(crate) struct HotplugPage {
    slots: Mutex<PciSlots>,
    dimms: Mutex<DimmRegisters>,
    cpus: Option<Arc<CpuRegisters>>,
    eject: Box<dyn Fn(u8) + Send + Sync>,
}

impl HotplugPage {
    /// `eject` removes the device in a slot, on the thread of the vCPU that writes the register.
    /// The guest continues only after `eject` returns, because it then scans the slot immediately.
    pub(crate) fn new(eject: impl Fn(u8) + Send + Sync + 'static) -> Self {
        Self {
            slots: Mutex::default(),
            dimms: Mutex::default(),
            cpus: None,
            eject: Box::new(eject),
        }
    }

    /// Adds the registers of vCPUs.
    pub(crate) fn with_cpus(self, cpus: Arc<CpuRegisters>) -> Self {
        Self { cpus: Some(cpus), ..self }
    }

    pub(crate) fn slots<T>(&self, act: impl FnOnce(&mut PciSlots) -> T) -> T {
        act(&mut self.slots.lock())
    }

    pub(crate) fn dimms<T>(&self, act: impl FnOnce(&mut DimmRegisters) -> T) -> T {
        act(&mut self.dimms.lock())
    }

    fn register(&self, offset: u64) -> u32 {
        match in_dimms(offset) {
            Some(offset) => self.dimms.lock().read(offset),
            None => self.slots.lock().read(offset),
        }
    }
}

/// Offset within the registers of DIMMs.
fn in_dimms(offset: u64) -> Option<u64> {
    offset.checked_sub(DIMMS_OFFSET).filter(|offset| *offset < DIMMS_LEN)
}

impl fmt::Debug for HotplugPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HotplugPage").field("slots", &self.slots).finish_non_exhaustive()
    }
}

/// Offset within the registers of vCPUs.
fn in_cpus(offset: u64) -> Option<u64> {
    offset.checked_sub(CPUS_OFFSET).filter(|offset| *offset < CPUS_LEN)
}

impl BusDevice for HotplugPage {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let (Some(offset), Some(cpus)) = (in_cpus(offset), &self.cpus) {
            return cpus.read(offset, data);
        }
        match <&mut [u8; 4]>::try_from(&mut *data) {
            Ok(register) => *register = self.register(offset).to_le_bytes(),
            Err(_) => data.fill(0),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (Some(offset), Some(cpus)) = (in_cpus(offset), &self.cpus) {
            return cpus.write(offset, data);
        }
        let Ok(value) = data.try_into() else { return };
        let value = u32::from_le_bytes(value);
        if let Some(offset) = in_dimms(offset) {
            return self.dimms.lock().write(offset, value);
        }
        let gone = self.slots.lock().write(offset, value);
        gone.into_iter().for_each(&self.eject);
    }
}

#[cfg(test)]
mod tests {
    use foreshore_devices::memory::layout::GuestRange;
    use proptest::prelude::*;

    use super::*;
    use crate::acpi::hotplug_cpus::{CPU_SELECT, CPU_STATUS};
    use crate::acpi::plug::Plug;

    #[test]
    fn page_dispatches_to_vcpu_registers() {
        let cpus = Arc::new(CpuRegisters::new(Plug::new(2, 2), |_| ()));
        let page = HotplugPage::new(|_| ()).with_cpus(Arc::clone(&cpus));
        page.slots(|slots| slots.request_removal(1));
        page.write(CPUS_OFFSET + CPU_SELECT, &[1, 0, 0, 0]);
        let mut register = [0; 4];
        page.read(CPUS_OFFSET + CPU_STATUS, &mut register);
        assert_eq!(register, [1, 0, 0, 0]);
        cpus.plug(|plug| plug.request_removal(1..2));
        page.write(CPUS_OFFSET + CPU_STATUS, &[1, 0, 0, 0]);
        assert!(!cpus.plug(|plug| plug.is_there(1)));
        assert!(page.slots(|slots| slots.is_leaving(1)), "the register names no slot");
    }

    #[test]
    fn notifications_are_cleared_by_reading() {
        let mut slots = PciSlots::default();
        slots.put(3);
        slots.put(31);
        slots.request_removal(5);
        assert_eq!((slots.read(PCI_UP), slots.read(PCI_UP)), (1 << 3 | 1 << 31, 0));
        assert_eq!((slots.read(PCI_DOWN), slots.read(PCI_DOWN)), (1 << 5, 0));
        assert!(slots.is_leaving(5) && !slots.is_leaving(3));
        // A request that the guest has not read or not completed is repeated.
        slots.request_removal(5);
        assert_eq!(slots.read(PCI_DOWN), 1 << 5);
        assert_eq!((slots.read(PCI_EJECT), slots.read(2), slots.read(0x100)), (0, 0, 0));
    }

    #[test]
    fn only_requested_slots_are_ejected() {
        let mut slots = PciSlots::default();
        slots.request_removal(5);
        slots.request_removal(7);
        assert!(slots.write(PCI_EJECT, 1 << 6).is_empty());
        assert!(slots.write(PCI_DOWN, u32::MAX).is_empty());
        assert_eq!(slots.write(PCI_EJECT, u32::MAX), [5, 7]);
        assert!(slots.write(PCI_EJECT, u32::MAX).is_empty());
        assert_eq!(slots, PciSlots::default());
    }

    #[test]
    fn added_device_clears_earlier_removal_request() {
        let mut slots = PciSlots::default();
        slots.request_removal(5);
        slots.put(5);
        assert_eq!(
            (slots.is_leaving(5), slots.read(PCI_DOWN), slots.read(PCI_UP)),
            (false, 0, 1 << 5)
        );
        assert!(slots.write(PCI_EJECT, 1 << 5).is_empty());
    }

    #[test]
    fn eject_completes_within_a_full_width_write() {
        let gone = Arc::new(Mutex::new(Vec::new()));
        let page = HotplugPage::new({
            let gone = Arc::clone(&gone);
            move |slot| gone.lock().push(slot)
        });
        page.slots(|slots| {
            slots.put(1);
            slots.request_removal(2);
        });
        let mut byte = [0xff];
        page.read(PCI_UP, &mut byte);
        let mut long = [0xff; 8];
        page.read(PCI_UP, &mut long);
        assert_eq!((byte, long), ([0], [0; 8]));
        let mut register = [0xff; 4];
        page.read(PCI_UP, &mut register);
        assert_eq!(u32::from_le_bytes(register), 1 << 1);
        page.write(PCI_EJECT, &[4]);
        page.write(PCI_EJECT, &[4; 8]);
        assert!(gone.lock().is_empty());
        page.write(PCI_EJECT, &[4, 0, 0, 0]);
        assert_eq!(*gone.lock(), [2]);
    }

    #[test]
    fn page_dispatches_to_dimm_registers() {
        let page = HotplugPage::new(|_| ());
        page.dimms(|dimms| dimms.put(GuestRange { start: 1 << 32, len: 1 << 27 }, 0));
        page.slots(|slots| slots.put(1));
        let read = |offset| {
            let mut register = [0; 4];
            page.read(offset, &mut register);
            u32::from_le_bytes(register)
        };
        assert_eq!([0x5c, 0x5c, 0x48, 0x4c, 0x58].map(read), [0, u32::MAX, 1, 1 << 27, 1]);
        page.write(0x40, &7u32.to_le_bytes());
        assert_eq!([0x40, 0x58, 0x60, PCI_UP].map(read), [7, 0, 0, 2]);
    }

    proptest! {
        /// For any sequence of accesses, a slot is freed at most once for each requested removal.
        #[test]
        fn slot_is_freed_at_most_once_per_request(steps in prop::collection::vec((0u8..4, 0u64..0x10, any::<u32>()), 0..60)) {
            let mut slots = PciSlots::default();
            let mut requested = 0u32;
            for (kind, offset, value) in steps {
                let slot = (value % 32) as u8;
                match kind {
                    0 => { slots.put(slot); requested &= !(1 << slot); }
                    1 => { slots.request_removal(slot); requested |= 1 << slot; }
                    2 => drop(slots.read(offset)),
                    _ => for freed in slots.write(offset, value) {
                        prop_assert!(requested & 1 << freed != 0 && value & 1 << freed != 0);
                        requested &= !(1 << freed);
                    },
                }
                for slot in 0..32 {
                    prop_assert_eq!(slots.is_leaving(slot), requested & 1 << slot != 0);
                }
            }
        }
    }
}
