//! The root bus: slots, ways into configuration space, and BARs that follow what the guest writes.

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
use crate::log::sparsely;
use crate::memory::layout::{MMIO32_LEN, MMIO32_START, PCI_SLOTS};

/// Devices on a bus.
const SLOTS: usize = PCI_SLOTS as usize;
/// Registers of the BARs of a type 0 header.
const BAR_REGISTERS: [u16; 6] = [0x10, 0x14, 0x18, 0x1c, 0x20, 0x24];
/// The command register, and its bit that makes memory BARs answer (PCI Local Bus 3.0, 6.2.2).
const COMMAND: u16 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
/// A BAR smaller than a page would share its page with a neighbour.
const BAR_ALIGN_MIN: u64 = 0x1000;

/// Why a function cannot be put on the bus.
#[derive(Debug, Error)]
pub enum PciError {
    /// The slot does not exist.
    #[error("PCI slot {slot} does not exist: slots are 1 to 31")]
    NoSuchSlot {
        /// The slot asked for.
        slot: u8,
    },
    #[error("PCI slot {slot} is taken")]
    SlotTaken {
        /// The slot asked for.
        slot: u8,
    },
    #[error("All 31 slots of the PCI bus are taken")]
    Full,
    /// The window has no room for a BAR.
    #[error("A BAR of {len:#x} bytes does not fit in the window {MMIO32_START:#x}+{MMIO32_LEN:#x}")]
    NoAddress {
        /// The BAR's length in bytes.
        len: u64,
        /// What the allocator says.
        #[source]
        source: vm_allocator::Error,
    },
}

struct Slot {
    device: Arc<dyn PciDevice>,
    /// What its BARs were given: kept from others until it is removed, wherever the guest moves
    /// them.
    given: Vec<RangeInclusive>,
    /// The lock is held while BARs move: the device may have to finish a flush before it answers,
    /// and KVM takes its time over each ioeventfd, which concerns no other slot.
    mapped: Mutex<Mapped>,
    /// Whether a BAR of it is where another is, or may be. Set before the memory bus is asked, so
    /// that who frees a place there sees it, or the place was free in time.
    waits: AtomicBool,
}

/// The BARs of a slot that are on the memory bus.
#[derive(Default)]
struct Mapped {
    ranges: Vec<BarRange>,
    /// The slot has been removed: a write that found it before puts nothing back.
    is_removed: bool,
}

impl Slot {
    fn new(device: Arc<dyn PciDevice>, given: Vec<RangeInclusive>) -> Arc<Self> {
        Arc::new(Self { device, given, mapped: Mutex::default(), waits: AtomicBool::new(false) })
    }
}

struct Slots {
    slots: [Option<Arc<Slot>>; SLOTS],
    /// Not for who wants any.
    reserved: [bool; SLOTS],
    addresses: AddressAllocator,
}

/// Bus 0 of segment 0.
pub struct RootBus {
    /// Where BARs go. Weak: that bus holds this one, by its ECAM.
    memory: Weak<Bus>,
    /// Locked to find a slot, and not while its device does something.
    slots: Mutex<Slots>,
}

impl RootBus {
    /// A bus with nothing but a host bridge; BARs will appear on `memory`.
    pub fn new(memory: &Arc<Bus>) -> Arc<Self> {
        let addresses =
            AddressAllocator::new(MMIO32_START, MMIO32_LEN).expect("a window that is not empty");
        let mut slots = [const { None }; SLOTS];
        slots[0] = Some(Slot::new(Arc::new(HostBridge::new()), Vec::new()));
        let slots = Slots { slots, reserved: [false; SLOTS], addresses };
        Arc::new(Self { memory: Arc::downgrade(memory), slots: Mutex::new(slots) })
    }

    /// Keeps `slot` for a device that asks for it.
    pub fn reserve(&self, slot: u8) {
        if let Some(reserved) = self.slots.lock().reserved.get_mut(usize::from(slot)) {
            *reserved = true;
        }
    }

    /// Puts `device` in `slot`, or in the first free one, and gives its BARs addresses as firmware
    /// would: there is none. Returns the slot.
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

    /// Takes the function out of `slot`: from now on the guest finds nothing there, and the slot
    /// and the addresses are free for another. An access that was under way may still reach the
    /// function, which is whole until it is dropped; that may take time, and is not for a
    /// vCPU's thread. `None`: there is nothing, or the host bridge.
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

    /// Makes the BARs of every function answer, as a firmware would leave them. A kernel does that
    /// by itself, and takes them away while it looks how large they are, which costs the less
    /// if they are not there yet.
    pub fn decode_memory(&self) {
        for slot in 1..PCI_SLOTS {
            let command = FunctionAddress { slot, function: 0, register: COMMAND };
            let mut value = [0; 2];
            self.read_config(command, &mut value);
            let value = u16::from_le_bytes(value) | COMMAND_MEMORY;
            self.write_config(command, &value.to_le_bytes());
        }
    }

    /// Whether that very `device` is in `slot`.
    pub fn has(&self, slot: u8, device: &dyn PciDevice) -> bool {
        let slots = self.slots.lock();
        let found = slots.slots.get(usize::from(slot)).and_then(Option::as_ref);
        found.is_some_and(|slot| ptr::addr_eq(&raw const *slot.device, device))
    }

    /// How many slots have a function, the host bridge among them.
    pub fn used(&self) -> usize {
        self.slots.lock().slots.iter().flatten().count()
    }

    /// Configuration space for PCI Express: put it on the memory bus at ECAM_START.
    pub fn ecam(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(Ecam(Arc::clone(self)))
    }

    /// The legacy way: put it on the port bus at 0xcf8, 8 ports.
    pub fn ports(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(Ports { bus: Arc::clone(self), address: Mutex::new(0) })
    }

    fn slot(&self, function: FunctionAddress) -> Option<Arc<Slot>> {
        // Functions other than 0 are not looked for where function 0 says that it is the only one.
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

    /// Makes the memory bus agree with the BARs of `slot`, and then with those of others that had
    /// to wait for a place: who moves several BARs, one by one, may have put one where another
    /// still was.
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

    /// Makes the memory bus agree with the BARs of `slot`. The slot is locked throughout, so that
    /// the last of two concurrent writes is the one that counts. Two slots that move at once
    /// onto one address meet on the memory bus, which takes the first. Returns whether a place
    /// on the memory bus has become free.
    fn remap(&self, slot: &Slot) -> bool {
        let Some(memory) = self.memory.upgrade() else { return false };
        let mut mapped = slot.mapped.lock();
        let mut freed = false;
        let decoded = if mapped.is_removed { Vec::new() } else { slot.device.decoded_bars() };
        let wanted: Vec<BarRange> = decoded.into_iter().filter(in_window).collect();
        // What goes, goes first: a BAR may move onto its own old place.
        for gone in mapped.ranges.extract_if(.., |range| !wanted.contains(range)) {
            // Nobody has the place before the device has let it go.
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
                    sparsely!(info, %err, bar = range.bar, "The guest has put a BAR where it cannot be")
                }
            }
        }
        freed
    }
}

/// The bridge forwards nothing outside its window: a BAR elsewhere is unreachable.
fn in_window(range: &BarRange) -> bool {
    range.base >= MMIO32_START && range.base + range.len <= MMIO32_START + MMIO32_LEN
}

/// Finds the BARs by their size bits and writes an address to each. All get one, or none is taken.
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
        addresses.free(range).expect("an address that was given");
    }
}

/// A register of a function of this bus.
#[derive(Clone, Copy)]
struct FunctionAddress {
    slot: u8,
    function: u8,
    register: u16,
}

impl FunctionAddress {
    /// Whether an access of `len` bytes stays in the function's 4 KiB.
    fn holds(self, len: usize) -> bool {
        usize::from(self.register) + len <= 0x1000
    }
}

/// PCI Express 5.0, 7.2.2: the address has bus, device, function, register.
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

/// CONFIG_ADDRESS and CONFIG_DATA (PCI Local Bus 3.0, 3.2.2.3.2).
struct Ports {
    bus: Arc<RootBus>,
    address: Mutex<u32>,
}

const CONFIG_ENABLE: u32 = 1 << 31;
const CONFIG_WRITABLE: u32 = 0x80ff_fffc;

impl Ports {
    /// What an access to CONFIG_DATA at port `offset` means.
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

/// A BAR as the memory bus sees it.
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
