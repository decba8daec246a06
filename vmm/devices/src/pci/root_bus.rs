//! Root bus with its slots. The root bus gives access to configuration space, and maps BARs at the
//! addresses that the guest sets.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use thiserror::Error;
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};

use super::config_space::BARS_END;
use super::host_bridge::HostBridge;
use super::{BarRange, PciDevice};
use crate::bus::{Bus, BusDevice};
use crate::log::rate_limited;
use crate::memory::layout::{MMIO32_LEN, MMIO32_START, PCI_SLOTS};

const SLOTS: usize = PCI_SLOTS as usize;
/// Offsets of the BARs in a type 0 header.
const BAR_REGISTERS: [u16; 6] = [0x10, 0x14, 0x18, 0x1c, 0x20, 0x24];
/// Command register and its memory space bit, which enables memory BARs (PCI Local Bus 3.0, 6.2.2).
const COMMAND: u16 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
/// Minimum alignment, so that no two BARs share a page.
const BAR_ALIGN_MIN: u64 = 0x1000;

#[derive(Debug, Error)]
pub enum PciError {
    #[error("PCI slot {slot} does not exist: slots are 1 to 31")]
    NoSuchSlot {
        /// Requested slot.
        slot: u8,
    },
    #[error("PCI slot {slot} is in use")]
    SlotTaken {
        /// Requested slot.
        slot: u8,
    },
    #[error("all 31 slots of the PCI bus are in use")]
    Full,
    #[error("BAR of {len:#x} bytes does not fit into the window {MMIO32_START:#x}+{MMIO32_LEN:#x}")]
    NoAddress {
        len: u64,
        #[source]
        source: vm_allocator::Error,
    },
}

struct Slot {
    device: Arc<dyn PciDevice>,
    /// Initial addresses of the BARs. They remain allocated until the slot is removed, even if the
    /// guest moves the BARs.
    given: Vec<RangeInclusive>,
    /// Locked while BARs move, which can take long, because a device may have to finish a flush
    /// first, and KVM is slow to move each ioeventfd. Other slots are not blocked meanwhile.
    mapped: Mutex<Mapped>,
    /// Set if a BAR of the slot may wait for an address that another BAR uses. The flag is set
    /// before the BAR is inserted into the memory bus. A thread that frees an address therefore
    /// either sees the flag, or has freed the address before the insertion.
    waits: AtomicBool,
}

/// BARs of a slot that are mapped on the memory bus.
#[derive(Default)]
struct Mapped {
    ranges: Vec<BarRange>,
    /// Set if the slot was removed. Concurrent writes that found the slot before must not map its
    /// BARs again.
    is_removed: bool,
}

impl Slot {
    fn new(device: Arc<dyn PciDevice>, given: Vec<RangeInclusive>) -> Arc<Self> {
        Arc::new(Self { device, given, mapped: Mutex::default(), waits: AtomicBool::new(false) })
    }
}

struct Slots {
    slots: [Option<Arc<Slot>>; SLOTS],
    /// Slots that are never chosen automatically.
    reserved: [bool; SLOTS],
    addresses: AddressAllocator,
}

/// Bus 0 of segment 0.
pub struct RootBus {
    /// Memory bus, on which BARs are mapped. The reference is weak, because the memory bus refers
    /// to this bus through the ECAM.
    memory: Weak<Bus>,
    /// Locked only while a slot is looked up, not while its device is called.
    slots: Mutex<Slots>,
}

impl RootBus {
    /// Creates a bus with only a host bridge. BARs will be mapped on `memory`.
    pub fn new(memory: &Arc<Bus>) -> Arc<Self> {
        let addresses =
            AddressAllocator::new(MMIO32_START, MMIO32_LEN).expect("a window that is not empty");
        let mut slots = [const { None }; SLOTS];
        slots[0] = Some(Slot::new(Arc::new(HostBridge::new()), Vec::new()));
        let slots = Slots { slots, reserved: [false; SLOTS], addresses };
        Arc::new(Self { memory: Arc::downgrade(memory), slots: Mutex::new(slots) })
    }

    /// Reserves `slot` for a device that requests this slot explicitly.
    pub fn reserve(&self, slot: u8) {
        if let Some(reserved) = self.slots.lock().reserved.get_mut(usize::from(slot)) {
            *reserved = true;
        }
    }

    /// Adds `device` in `slot`, or in the first free slot, and returns the slot. Assigns addresses
    /// to its BARs, because no firmware does so.
    pub fn add(&self, slot: Option<u8>, device: Arc<dyn PciDevice>) -> Result<u8, PciError> {
        let mut slots = self.slots.lock();
        let slot = match slot {
            Some(slot) if slot == 0 || usize::from(slot) >= SLOTS => {
                return Err(PciError::NoSuchSlot { slot });
            }
            Some(slot) if slots.slots[usize::from(slot)].is_some() => {
                return Err(PciError::SlotTaken { slot });
            }
            Some(slot) => slot,
            None => {
                let is_free = |at: &usize| slots.slots[*at].is_none() && !slots.reserved[*at];
                (0..SLOTS).find(is_free).ok_or(PciError::Full)? as u8
            }
        };
        let given = place_bars(&*device, &mut slots.addresses)?;
        slots.slots[usize::from(slot)] = Some(Slot::new(device, given));
        Ok(slot)
    }

    /// Removes the function from `slot`, and returns it. The slot and its addresses are then free.
    /// Accesses in progress may still reach the function until it is dropped. Do not drop it on a
    /// vCPU thread, because this may take time. Returns `None` for an empty slot and for the host
    /// bridge.
    pub fn remove(&self, slot: u8) -> Option<Arc<dyn PciDevice>> {
        let removed = {
            let mut slots = self.slots.lock();
            let removed = slots.slots[1..].get_mut(usize::from(slot).checked_sub(1)?)?.take()?;
            free(&mut slots.addresses, &removed.given);
            removed
        };
        removed.mapped.lock().is_removed = true;
        self.follow(&removed);
        Some(Arc::clone(&removed.device))
    }

    /// Enables memory decoding in every function, as firmware would. Kernels enable it themselves
    /// and need no call. They first disable decoding to determine the sizes of BARs, and disabling
    /// is cheaper if the BARs are not mapped yet.
    pub fn decode_memory(&self) {
        for slot in 1..PCI_SLOTS {
            let command = FunctionAddress { slot, function: 0, register: COMMAND };
            let mut value = [0; 2];
            self.read_config(command, &mut value);
            let value = u16::from_le_bytes(value) | COMMAND_MEMORY;
            self.write_config(command, &value.to_le_bytes());
        }
    }

    /// Returns true if exactly this `device` is in `slot`.
    pub fn has(&self, slot: u8, device: &dyn PciDevice) -> bool {
        let slots = self.slots.lock();
        let found = slots.slots.get(usize::from(slot)).and_then(Option::as_ref);
        found.is_some_and(|slot| ptr::addr_eq(&raw const *slot.device, device))
    }

    /// Number of slots with a function, including the host bridge.
    pub fn used(&self) -> usize {
        self.slots.lock().slots.iter().flatten().count()
    }

    /// PCI Express configuration space (ECAM), to be inserted into the memory bus at ECAM_START.
    pub fn ecam(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(Ecam(Arc::clone(self)))
    }

    /// Legacy access to configuration space, to be inserted into the port bus: 8 ports at 0xcf8.
    pub fn ports(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(Ports { bus: Arc::clone(self), address: Mutex::new(0) })
    }

    fn slot(&self, function: FunctionAddress) -> Option<Arc<Slot>> {
        // Software does not probe other functions if function 0 is a single-function device.
        let slots = self.slots.lock();
        (function.function == 0).then(|| slots.slots[usize::from(function.slot)].clone()).flatten()
    }

    fn read_config(&self, at: FunctionAddress, data: &mut [u8]) {
        match self.slot(at) {
            Some(slot) if at.holds(data.len()) => slot.device.read_config(at.register, data),
            _ => data.fill(0xff),
        }
    }

    fn write_config(&self, at: FunctionAddress, data: &[u8]) {
        let Some(slot) = self.slot(at).filter(|_| at.holds(data.len())) else { return };
        slot.device.write_config(at.register, data);
        if at.register < BARS_END {
            self.follow(&slot);
        }
    }

    /// Updates the mappings of the BARs in `slot`, and then of BARs in other slots that wait for a
    /// free address. A guest that moves several BARs one by one may move a BAR to an address that
    /// another BAR still uses.
    fn follow(&self, slot: &Slot) {
        let mut freed = self.remap(slot);
        while freed {
            freed = false;
            for waiting in self.waiting() {
                freed |= self.remap(&waiting);
            }
        }
    }

    fn waiting(&self) -> Vec<Arc<Slot>> {
        let slots = self.slots.lock();
        slots
            .slots
            .iter()
            .flatten()
            .filter(|slot| slot.waits.load(Ordering::SeqCst))
            .cloned()
            .collect()
    }

    /// Updates the mappings of the BARs in `slot`. Returns true if an address has become free. The
    /// slot is locked throughout, so that the last of two concurrent writes wins. If BARs of two
    /// slots move to the same address concurrently, the memory bus accepts the first.
    fn remap(&self, slot: &Slot) -> bool {
        let Some(memory) = self.memory.upgrade() else { return false };
        let mut mapped = slot.mapped.lock();
        let mut freed = false;
        let decoded = if mapped.is_removed { Vec::new() } else { slot.device.decoded_bars() };
        let wanted: Vec<BarRange> = decoded.into_iter().filter(in_window).collect();
        // Removes old ranges first, because the new range of a BAR may overlap its old range.
        for gone in mapped.ranges.extract_if(.., |range| !wanted.contains(range)) {
            // The range becomes free only after the device has released it.
            slot.device.bar_moved(gone.bar, None);
            memory.remove(gone.base);
            freed = true;
        }
        let mut waits = false;
        slot.waits.store(waits, Ordering::SeqCst);
        for range in wanted {
            if mapped.ranges.contains(&range) {
                continue;
            }
            let window = Arc::new(BarWindow { device: Arc::clone(&slot.device), bar: range.bar });
            slot.waits.store(true, Ordering::SeqCst);
            let inserted = memory.insert(range.base, range.len, window);
            waits |= inserted.is_err();
            slot.waits.store(waits, Ordering::SeqCst);
            match inserted {
                Ok(()) => {
                    mapped.ranges.push(range);
                    slot.device.bar_moved(range.bar, Some(range.base));
                }
                Err(err) => {
                    rate_limited!(info, %err, bar = range.bar, "Guest moved the BAR of a device to an invalid address")
                }
            }
        }
        freed
    }
}

/// Returns true if a BAR is in the host bridge's window. A BAR outside of it is unreachable,
/// because the bridge does not forward accesses to it.
fn in_window(range: &BarRange) -> bool {
    range.base >= MMIO32_START && range.base + range.len <= MMIO32_START + MMIO32_LEN
}

/// Finds the BARs by their size bits, and assigns an address to each. Assigns no addresses if one
/// BAR does not fit.
fn place_bars(
    device: &dyn PciDevice,
    addresses: &mut AddressAllocator,
) -> Result<Vec<RangeInclusive>, PciError> {
    let mut given = Vec::new();
    for register in BAR_REGISTERS {
        let mut mask = [0; 4];
        device.write_config(register, &[0xff; 4]);
        device.read_config(register, &mut mask);
        let len = u64::from((!(u32::from_le_bytes(mask) & !0xf)).wrapping_add(1));
        if len == 0 {
            continue;
        }
        let (size, policy) = (len.max(BAR_ALIGN_MIN), AllocPolicy::FirstMatch);
        let range = match addresses.allocate(size, size, policy) {
            Ok(range) => range,
            Err(source) => {
                free(addresses, &given);
                return Err(PciError::NoAddress { len, source });
            }
        };
        given.push(range);
        let base = u32::try_from(range.start()).expect("an address in the 32-bit window");
        device.write_config(register, &base.to_le_bytes());
    }
    Ok(given)
}

fn free(addresses: &mut AddressAllocator, given: &[RangeInclusive]) {
    for range in given {
        addresses.free(range).expect("an allocated address");
    }
}

/// Address of a register in a function on this bus.
#[derive(Clone, Copy)]
struct FunctionAddress {
    slot: u8,
    function: u8,
    register: u16,
}

impl FunctionAddress {
    /// Returns true if an access of `len` bytes is within the function's 4 KiB.
    fn holds(self, len: usize) -> bool {
        usize::from(self.register) + len <= 0x1000
    }
}

/// ECAM (PCI Express 5.0, 7.2.2). An address consists of bus, device, function and register.
struct Ecam(Arc<RootBus>);

impl Ecam {
    fn address(offset: u64) -> FunctionAddress {
        FunctionAddress {
            slot: (offset >> 15 & 0x1f) as u8,
            function: (offset >> 12 & 7) as u8,
            register: (offset & 0xfff) as u16,
        }
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.0.read_config(Self::address(offset), data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.write_config(Self::address(offset), data);
    }
}

/// Ports CONFIG_ADDRESS and CONFIG_DATA (PCI Local Bus 3.0, 3.2.2.3.2).
struct Ports {
    bus: Arc<RootBus>,
    address: Mutex<u32>,
}

const CONFIG_ENABLE: u32 = 1 << 31;
const CONFIG_WRITABLE: u32 = 0x80ff_fffc;

impl Ports {
    /// Register that an access to port `offset` of CONFIG_DATA refers to.
    fn target(&self, offset: u64, len: usize) -> Option<FunctionAddress> {
        let address = *self.address.lock();
        let on_bus_0 = address & CONFIG_ENABLE != 0 && address >> 16 & 0xff == 0;
        let in_data = (4..8).contains(&offset) && offset + len as u64 <= 8;
        (on_bus_0 && in_data).then(|| FunctionAddress {
            slot: (address >> 11 & 0x1f) as u8,
            function: (address >> 8 & 7) as u8,
            register: (address & 0xfc) as u16 + (offset - 4) as u16,
        })
    }
}

impl BusDevice for Ports {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.target(offset, data.len()) {
            Some(at) => self.bus.read_config(at, data),
            None if offset == 0 && data.len() == 4 => {
                data.copy_from_slice(&self.address.lock().to_le_bytes())
            }
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(at) = self.target(offset, data.len()) {
            self.bus.write_config(at, data);
        } else if let (0, Ok(value)) = (offset, data.try_into()) {
            *self.address.lock() = u32::from_le_bytes(value) & CONFIG_WRITABLE;
        }
    }
}

/// BAR that is mapped on the memory bus.
struct BarWindow {
    device: Arc<dyn PciDevice>,
    bar: u8,
}

impl BusDevice for BarWindow {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.device.read_bar(self.bar, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.device.write_bar(self.bar, offset, data);
    }
}

#[cfg(test)]
#[path = "root_bus_tests.rs"]
mod tests;
