//! The root bus: slots, ways into configuration space, and BARs that follow what the guest writes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use thiserror::Error;
use vm_allocator::{AddressAllocator, AllocPolicy};

use super::config_space::BARS_END;
use super::host_bridge::HostBridge;
use super::{BarRange, PciDevice};
use crate::bus::{Bus, BusDevice};
use crate::log::sparsely;
use crate::memory::layout::{MMIO32_LEN, MMIO32_START};

/// Devices on a bus.
const SLOTS: usize = 32;
/// Registers of the BARs of a type 0 header.
const BAR_REGISTERS: [u16; 6] = [0x10, 0x14, 0x18, 0x1c, 0x20, 0x24];
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
    /// The slot has a function already.
    #[error("PCI slot {slot} is taken")]
    SlotTaken {
        /// The slot asked for.
        slot: u8,
    },
    /// All slots are taken.
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
    /// The BARs that are on the memory bus. The lock is held while they move: the device may have to finish a flush
    /// before it answers, and KVM takes its time over each ioeventfd, which concerns no other slot.
    mapped: Mutex<Vec<BarRange>>,
    /// Whether a BAR of it is where another is, or may be. Set before the memory bus is asked, so that who frees a place
    /// there sees it, or the place was free in time.
    waits: AtomicBool,
}

impl Slot {
    fn new(device: Arc<dyn PciDevice>) -> Arc<Self> {
        Arc::new(Self { device, mapped: Mutex::default(), waits: AtomicBool::new(false) })
    }
}

struct Slots {
    slots: [Option<Arc<Slot>>; SLOTS],
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
        let addresses = AddressAllocator::new(MMIO32_START, MMIO32_LEN).expect("a window that is not empty");
        let mut slots = [const { None }; SLOTS];
        slots[0] = Some(Slot::new(Arc::new(HostBridge::new())));
        Arc::new(Self { memory: Arc::downgrade(memory), slots: Mutex::new(Slots { slots, addresses }) })
    }

    /// Puts `device` in `slot`, or in the first free one, and gives its BARs addresses as firmware would: there is
    /// none. Returns the slot.
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
            None => slots.slots.iter().position(Option::is_none).ok_or(PciError::Full)? as u8,
        };
        place_bars(&*device, &mut slots.addresses)?;
        slots.slots[usize::from(slot)] = Some(Slot::new(device));
        Ok(slot)
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

    /// Makes the memory bus agree with the BARs of `slot`, and then with those of others that had to wait for a place:
    /// who moves several BARs, one by one, may have put one where another still was.
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
        slots.slots.iter().flatten().filter(|slot| slot.waits.load(Ordering::SeqCst)).cloned().collect()
    }

    /// Makes the memory bus agree with the BARs of `slot`. The slot is locked throughout, so that the last of two
    /// concurrent writes is the one that counts. Two slots that move at once onto one address meet on the memory
    /// bus, which takes the first. Returns whether a place on the memory bus has become free.
    fn remap(&self, slot: &Slot) -> bool {
        let Some(memory) = self.memory.upgrade() else { return false };
        let mut mapped = slot.mapped.lock();
        let mut freed = false;
        let wanted: Vec<BarRange> = slot.device.decoded_bars().into_iter().filter(in_window).collect();
        // What goes, goes first: a BAR may move onto its own old place.
        for gone in mapped.extract_if(.., |range| !wanted.contains(range)) {
            // Nobody has the place before the device has let it go.
            slot.device.bar_moved(gone.bar, None);
            memory.remove(gone.base);
            freed = true;
        }
        let mut waits = false;
        slot.waits.store(waits, Ordering::SeqCst);
        for range in wanted {
            if mapped.contains(&range) {
                continue;
            }
            let window = Arc::new(BarWindow { device: Arc::clone(&slot.device), bar: range.bar });
            slot.waits.store(true, Ordering::SeqCst);
            let inserted = memory.insert(range.base, range.len, window);
            waits |= inserted.is_err();
            slot.waits.store(waits, Ordering::SeqCst);
            match inserted {
                Ok(()) => {
                    mapped.push(range);
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

/// Finds the BARs by their size bits and writes an address to each.
fn place_bars(device: &dyn PciDevice, addresses: &mut AddressAllocator) -> Result<(), PciError> {
    for register in BAR_REGISTERS {
        let mut mask = [0; 4];
        device.write_config(register, &[0xff; 4]);
        device.read_config(register, &mut mask);
        let len = u64::from((!(u32::from_le_bytes(mask) & !0xf)).wrapping_add(1));
        if len == 0 {
            continue;
        }
        let range = addresses
            .allocate(len.max(BAR_ALIGN_MIN), len.max(BAR_ALIGN_MIN), AllocPolicy::FirstMatch)
            .map_err(|source| PciError::NoAddress { len, source })?;
        let base = u32::try_from(range.start()).expect("an address in the 32-bit window");
        device.write_config(register, &base.to_le_bytes());
    }
    Ok(())
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
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::super::{ConfigSpace, FunctionIds};
    use super::*;
    use crate::memory::layout::{ECAM_LEN, ECAM_START};

    const BAR_LEN: u32 = 0x2000;

    /// A function with one BAR that reads as the offset's low byte.
    struct Function {
        config: Mutex<ConfigSpace>,
        base: Mutex<Option<u64>>,
    }

    impl Function {
        fn new(device: u16) -> Arc<Self> {
            let mut config = ConfigSpace::new(&FunctionIds {
                vendor: 0x1af4,
                device,
                revision: 1,
                class: 0,
                subsystem_vendor: 0,
                subsystem: 0,
            });
            config.add_bar(0, BAR_LEN);
            Arc::new(Self { config: Mutex::new(config), base: Mutex::new(None) })
        }
    }

    impl PciDevice for Function {
        fn read_config(&self, offset: u16, data: &mut [u8]) {
            self.config.lock().read(offset, data);
        }
        fn write_config(&self, offset: u16, data: &[u8]) {
            self.config.lock().write(offset, data);
        }
        fn decoded_bars(&self) -> Vec<BarRange> {
            self.config.lock().decoded_bars()
        }
        fn read_bar(&self, _: u8, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write_bar(&self, _: u8, _: u64, _: &[u8]) {}
        fn bar_moved(&self, _: u8, base: Option<u64>) {
            *self.base.lock() = base;
        }
    }

    struct Machine {
        memory: Arc<Bus>,
        ports: Arc<Bus>,
        root: Arc<RootBus>,
    }

    impl Machine {
        fn new() -> Self {
            let (memory, ports) = (Arc::new(Bus::default()), Arc::new(Bus::default()));
            let root = RootBus::new(&memory);
            memory.insert(ECAM_START, ECAM_LEN, root.ecam()).unwrap();
            ports.insert(0xcf8, 8, root.ports()).unwrap();
            Self { memory, ports, root }
        }

        fn read(&self, slot: u64, register: u64) -> u32 {
            let mut data = [0; 4];
            self.memory.read(ECAM_START + (slot << 15) + register, &mut data);
            u32::from_le_bytes(data)
        }

        fn write(&self, slot: u64, register: u64, value: u32) {
            self.memory.write(ECAM_START + (slot << 15) + register, &value.to_le_bytes());
        }

        fn read_by_ports(&self, address: u32) -> u32 {
            let mut data = [0; 4];
            self.ports.write(0xcf8, &address.to_le_bytes());
            self.ports.read(0xcfc, &mut data);
            u32::from_le_bytes(data)
        }

        fn answers(&self, address: u64) -> bool {
            self.memory.read(address, &mut [0])
        }
    }

    #[test]
    fn both_ways_into_configuration_space_find_the_same_functions() {
        let machine = Machine::new();
        assert_eq!(machine.root.add(Some(3), Function::new(0x1044)).unwrap(), 3);
        assert_eq!(machine.read(0, 8) >> 16, 0x0600);
        assert_eq!(machine.read(3, 0), 0x1044_1af4);
        assert_eq!(machine.read(4, 0), u32::MAX);
        assert_eq!(machine.read(3, 0x1000), u32::MAX, "function 1");
        assert_eq!(machine.read(3, 0x100), 0, "no extended capability");
        assert_eq!(machine.read_by_ports(0x8000_1800), 0x1044_1af4);
        assert_eq!(machine.read_by_ports(0x0000_1800), u32::MAX, "not enabled");
        assert_eq!(machine.read_by_ports(0x8001_1800), u32::MAX, "bus 1");
        let mut address = [0; 4];
        machine.ports.read(0xcf8, &mut address);
        assert_eq!(u32::from_le_bytes(address), 0x8001_1800);
    }

    #[test]
    fn slots_are_taken_once_and_in_order() {
        let machine = Machine::new();
        assert_eq!(machine.root.add(None, Function::new(1)).unwrap(), 1);
        assert!(matches!(machine.root.add(Some(1), Function::new(2)), Err(PciError::SlotTaken { slot: 1 })));
        for slot in [0, 32, 255] {
            let error = machine.root.add(Some(slot), Function::new(2)).unwrap_err();
            assert!(matches!(error, PciError::NoSuchSlot { .. }));
        }
        for slot in 2..32 {
            assert_eq!(machine.root.add(None, Function::new(2)).unwrap(), slot);
        }
        assert!(matches!(machine.root.add(None, Function::new(2)), Err(PciError::Full)));
    }

    #[test]
    fn bars_get_disjoint_addresses_and_answer_once_decoding_is_on() {
        let machine = Machine::new();
        for slot in 1..=2 {
            machine.root.add(None, Function::new(slot)).unwrap();
        }
        let bases = [1, 2].map(|slot| u64::from(machine.read(slot, 0x10)));
        assert_eq!(bases[0] % u64::from(BAR_LEN), 0);
        assert!(bases[0].abs_diff(bases[1]) >= u64::from(BAR_LEN));
        assert!(!machine.answers(bases[0]));
        machine.write(1, 4, 2);
        assert!(machine.answers(bases[0]) && machine.answers(bases[0] + u64::from(BAR_LEN) - 1));
        assert!(!machine.answers(bases[1]));
        machine.write(1, 4, 0);
        assert!(!machine.answers(bases[0]));
    }

    #[test]
    fn a_bar_moves_with_its_register_but_not_out_of_the_window_or_onto_another() {
        let machine = Machine::new();
        let function = Function::new(1);
        machine.root.add(None, function.clone()).unwrap();
        machine.root.add(None, Function::new(2)).unwrap();
        machine.write(1, 4, 2);
        machine.write(2, 4, 2);
        let other = machine.read(2, 0x10);

        machine.write(1, 0x10, 0xd000_0000);
        assert_eq!(*function.base.lock(), Some(0xd000_0000));
        assert!(machine.answers(0xd000_0000));
        for bad in [0, 0x1000, 0xdfff_f000 + 0x1000, 0xe910_0000, 0xffff_ffff, other] {
            machine.write(1, 0x10, bad);
            assert_eq!(*function.base.lock(), None, "{bad:#x}");
            assert!(!machine.answers(0xd000_0000));
        }
        machine.write(1, 0x10, 0xd000_0000);
        assert!(machine.answers(0xd000_0000) && machine.answers(other.into()));
    }

    /// As who moves the BARs of several functions does, one after the other, with decoding on (Linux, pci_std_update_resource).
    #[test]
    fn a_bar_that_is_put_where_another_is_gets_the_place_when_that_one_moves() {
        let machine = Machine::new();
        let functions = [1, 2, 3].map(Function::new);
        for (slot, function) in (1..).zip(&functions) {
            machine.root.add(None, function.clone()).unwrap();
            machine.write(slot, 4, 2);
        }
        let is_at = |function: usize, base: u32| *functions[function].base.lock() == Some(base.into());
        let [first, second, third] = [1, 2, 3].map(|slot| machine.read(slot, 0x10));
        // Each onto the next one's place, and the last one elsewhere.
        machine.write(1, 0x10, second);
        machine.write(2, 0x10, third);
        assert!(is_at(0, second) && functions[1].base.lock().is_none() && is_at(2, third));
        machine.write(3, 0x10, first);
        assert!(is_at(0, second) && is_at(1, third) && is_at(2, first));
        for base in [first, second, third] {
            assert!(machine.answers(base.into()), "{base:#x}");
        }
        // Two that swap; one that has stopped waiting for a place does not get it.
        machine.write(1, 0x10, third);
        machine.write(2, 0x10, second);
        assert!(is_at(0, third) && is_at(1, second));
        machine.write(1, 0x10, second);
        machine.write(1, 4, 0);
        machine.write(2, 4, 0);
        assert!(!machine.answers(second.into()) && !machine.answers(third.into()));
        // A place is free as well where decoding is switched off.
        machine.write(1, 4, 2);
        machine.write(2, 4, 2);
        assert!(is_at(0, second) && functions[1].base.lock().is_none());
        machine.write(1, 4, 0);
        assert!(is_at(1, second));
    }

    /// Whoever's write frees a place sees who waits for it, or who waits finds it free.
    #[test]
    fn two_cpus_that_swap_bars_leave_both_in_their_places() {
        const PLACES: [u32; 2] = [0xd000_0000, 0xd000_2000];
        let machine = Machine::new();
        let functions = [1, 2].map(Function::new);
        for (slot, function) in (1..).zip(&functions) {
            machine.root.add(None, function.clone()).unwrap();
            machine.write(slot, 4, 2);
        }
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            // It asserts nothing: the other thread would wait for this one for ever.
            let moves = |slot: usize| {
                let mut wrong = 0;
                for _ in 0..2_000 {
                    start.wait();
                    machine.write(slot as u64, 0x10, PLACES[slot % 2]);
                    machine.write(slot as u64, 0x10, PLACES[(slot + 1) % 2]);
                    start.wait();
                    wrong +=
                        u32::from(*functions[slot - 1].base.lock() != Some(PLACES[(slot + 1) % 2].into()));
                }
                wrong
            };
            let other = scope.spawn(move || moves(1));
            assert_eq!((moves(2), other.join().unwrap()), (0, 0));
        });
    }

    #[test]
    fn sizing_by_a_driver_finds_the_length() {
        let machine = Machine::new();
        machine.root.add(None, Function::new(1)).unwrap();
        let base = machine.read(1, 0x10);
        machine.write(1, 0x10, u32::MAX);
        assert_eq!(!machine.read(1, 0x10) + 1, BAR_LEN);
        machine.write(1, 0x10, base);
        machine.write(1, 4, 2);
        assert!(machine.answers(base.into()));
    }

    /// A function whose BAR moves only when the test lets it.
    struct Slow {
        function: Arc<Function>,
        moving: mpsc::SyncSender<()>,
        go_on: Mutex<mpsc::Receiver<()>>,
    }

    impl PciDevice for Slow {
        fn read_config(&self, offset: u16, data: &mut [u8]) {
            self.function.read_config(offset, data);
        }
        fn write_config(&self, offset: u16, data: &[u8]) {
            self.function.write_config(offset, data);
        }
        fn decoded_bars(&self) -> Vec<BarRange> {
            self.function.decoded_bars()
        }
        fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]) {
            self.function.read_bar(bar, offset, data);
        }
        fn write_bar(&self, _: u8, _: u64, _: &[u8]) {}
        fn bar_moved(&self, _: u8, _: Option<u64>) {
            self.moving.send(()).unwrap();
            // An error is a test that has ended.
            let _ = self.go_on.lock().recv();
        }
    }

    #[test]
    fn a_bar_that_moves_slowly_holds_up_no_other_slot() {
        let machine = Machine::new();
        let (moving, moves) = mpsc::sync_channel(1);
        let (go_on, wait) = mpsc::channel();
        let slow = Slow { function: Function::new(1), moving, go_on: Mutex::new(wait) };
        machine.root.add(None, Arc::new(slow)).unwrap();
        machine.root.add(None, Function::new(2)).unwrap();
        let (answer, answered) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| machine.write(1, 4, 2));
            moves.recv().unwrap();
            scope.spawn(|| {
                machine.write(2, 4, 2);
                answer.send(machine.answers(machine.read(2, 0x10).into())).unwrap();
            });
            let other = answered.recv_timeout(Duration::from_secs(30));
            // Whatever came of it: a test that fails must end, too.
            drop(go_on);
            assert_eq!(other, Ok(true));
        });
        assert!(machine.answers(machine.read(1, 0x10).into()));
    }

    proptest! {
        #[test]
        fn any_access_is_survived(
            accesses in prop::collection::vec((any::<bool>(), any::<bool>(), 0..ECAM_LEN, prop::collection::vec(any::<u8>(), 1..9)), 0..100),
        ) {
            let machine = Machine::new();
            machine.root.add(None, Function::new(1)).unwrap();
            machine.root.add(None, Function::new(2)).unwrap();
            for (by_ports, write, offset, mut data) in accesses {
                // Most of the time something that exists.
                let offset = if offset % 4 == 0 { offset } else { offset & 0x1_80ff };
                let (bus, at) = if by_ports { (&machine.ports, 0xcf8 + offset % 8) } else { (&machine.memory, ECAM_START + offset) };
                if write { bus.write(at, &data); } else { bus.read(at, &mut data); }
            }
        }
    }
}
