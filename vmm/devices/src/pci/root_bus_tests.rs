//! Tests of the root bus, with functions that only record their addresses.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;

use super::super::{ConfigSpace, FunctionIds};
use super::*;
use crate::memory::layout::{ECAM_LEN, ECAM_START};

const BAR_LEN: u32 = 0x2000;

/// Function with one BAR, in which each byte reads as the low byte of its offset.
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
fn ecam_and_ports_reach_the_same_functions() {
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
fn slots_are_assigned_once_and_in_order() {
    let machine = Machine::new();
    assert_eq!(machine.root.add(None, Function::new(1)).unwrap(), 1);
    assert!(matches!(
        machine.root.add(Some(1), Function::new(2)),
        Err(PciError::SlotTaken { slot: 1 })
    ));
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
fn bars_get_disjoint_addresses_and_answer_with_decoding() {
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
fn bar_moves_only_to_free_addresses_in_the_window() {
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

/// Moves the BARs of several functions one by one with decoding on, as Linux does in
/// pci_std_update_resource.
#[test]
fn overlapping_bar_is_mapped_when_the_other_moves() {
    let machine = Machine::new();
    let functions = [1, 2, 3].map(Function::new);
    for (slot, function) in (1..).zip(&functions) {
        machine.root.add(None, function.clone()).unwrap();
        machine.write(slot, 4, 2);
    }
    let is_at = |function: usize, base: u32| *functions[function].base.lock() == Some(base.into());
    let [first, second, third] = [1, 2, 3].map(|slot| machine.read(slot, 0x10));
    // Moves each BAR to the address of the next one, and the last one elsewhere.
    machine.write(1, 0x10, second);
    machine.write(2, 0x10, third);
    assert!(is_at(0, second) && functions[1].base.lock().is_none() && is_at(2, third));
    machine.write(3, 0x10, first);
    assert!(is_at(0, second) && is_at(1, third) && is_at(2, first));
    for base in [first, second, third] {
        assert!(machine.answers(base.into()), "{base:#x}");
    }
    // Two BARs swap addresses. A BAR that no longer waits for an address is not moved to it.
    machine.write(1, 0x10, third);
    machine.write(2, 0x10, second);
    assert!(is_at(0, third) && is_at(1, second));
    machine.write(1, 0x10, second);
    machine.write(1, 4, 0);
    machine.write(2, 4, 0);
    assert!(!machine.answers(second.into()) && !machine.answers(third.into()));
    // Disabling decoding also frees an address.
    machine.write(1, 4, 2);
    machine.write(2, 4, 2);
    assert!(is_at(0, second) && functions[1].base.lock().is_none());
    machine.write(1, 4, 0);
    assert!(is_at(1, second));
}

/// Either the write that frees an address sees the waiting BAR, or the waiting BAR finds that the
/// address is free.
#[test]
fn concurrent_swap_maps_both_bars() {
    const ADDRESSES: [u32; 2] = [0xd000_0000, 0xd000_2000];
    let machine = Machine::new();
    let functions = [1, 2].map(Function::new);
    for (slot, function) in (1..).zip(&functions) {
        machine.root.add(None, function.clone()).unwrap();
        machine.write(slot, 4, 2);
    }
    let start = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        // Contains no assertions, because the other thread would wait forever after a failure.
        let moves = |slot: usize| {
            let mut wrong_moves = 0;
            for _ in 0..2_000 {
                start.wait();
                machine.write(slot as u64, 0x10, ADDRESSES[slot % 2]);
                machine.write(slot as u64, 0x10, ADDRESSES[(slot + 1) % 2]);
                start.wait();
                wrong_moves += u32::from(
                    *functions[slot - 1].base.lock() != Some(ADDRESSES[(slot + 1) % 2].into()),
                );
            }
            wrong_moves
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

/// Function with a BAR. The test must permit each move of the BAR.
struct Slow {
    function: Arc<Function>,
    moving: mpsc::SyncSender<()>,
    resume: Mutex<mpsc::Receiver<()>>,
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
        // An error means that the test has ended.
        let _ = self.resume.lock().recv();
    }
}

#[test]
fn slow_move_of_a_bar_blocks_no_other_slot() {
    let machine = Machine::new();
    let (moving, moves) = mpsc::sync_channel(1);
    let (resume, wait) = mpsc::channel();
    let slow = Slow { function: Function::new(1), moving, resume: Mutex::new(wait) };
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
        // The other thread must end even if the test fails.
        drop(resume);
        assert_eq!(other, Ok(true));
    });
    assert!(machine.answers(machine.read(1, 0x10).into()));
}

proptest! {
    #[test]
    fn arbitrary_accesses_do_not_panic(
        accesses in prop::collection::vec((any::<bool>(), any::<bool>(), 0..ECAM_LEN, prop::collection::vec(any::<u8>(), 1..9)), 0..100),
    ) {
        let machine = Machine::new();
        machine.root.add(None, Function::new(1)).unwrap();
        machine.root.add(None, Function::new(2)).unwrap();
        for (by_ports, write, offset, mut data) in accesses {
            // Most accesses are to registers that exist.
            let offset = if offset % 4 == 0 { offset } else { offset & 0x1_80ff };
            let (bus, at) = if by_ports { (&machine.ports, 0xcf8 + offset % 8) } else { (&machine.memory, ECAM_START + offset) };
            if write { bus.write(at, &data); } else { bus.read(at, &mut data); }
        }
    }
}

#[test]
fn removed_function_frees_slot_and_addresses() {
    let machine = Machine::new();
    let function = Function::new(7);
    machine.root.add(Some(3), function.clone()).unwrap();
    machine.write(3, 4, 2);
    let base = machine.read(3, 0x10);
    assert!(machine.answers(base.into()));
    assert!(machine.root.remove(0).is_none() && machine.root.remove(4).is_none());
    assert!(machine.root.remove(32).is_none() && machine.root.remove(255).is_none());
    assert_eq!(machine.root.used(), 2);
    drop(machine.root.remove(3).unwrap());
    assert!(machine.root.remove(3).is_none());
    assert_eq!(machine.root.used(), 1);
    assert_eq!((machine.read(3, 0), *function.base.lock()), (u32::MAX, None));
    assert!(!machine.answers(base.into()));
    assert_eq!(Arc::strong_count(&function), 1, "a reference to the removed function remains");
    // The next function uses the same slot and address.
    machine.root.add(Some(3), Function::new(8)).unwrap();
    assert_eq!((machine.read(3, 0) >> 16, machine.read(3, 0x10)), (8, base));
}

#[test]
fn address_of_a_removed_function_goes_to_a_waiting_bar() {
    let machine = Machine::new();
    let functions = [1, 2].map(Function::new);
    for (slot, function) in (1..).zip(&functions) {
        machine.root.add(None, function.clone()).unwrap();
        machine.write(slot, 4, 2);
    }
    let address = machine.read(1, 0x10);
    machine.write(2, 0x10, address);
    assert_eq!(*functions[1].base.lock(), None);
    machine.root.remove(1).unwrap();
    assert_eq!(*functions[1].base.lock(), Some(address.into()));
}

/// A thread that found a slot before its removal may write to it after the removal.
#[test]
fn late_write_to_a_removed_function_maps_no_bar() {
    let machine = Machine::new();
    let function = Function::new(1);
    machine.root.add(Some(1), function.clone()).unwrap();
    let slot = machine.root.slot(FunctionAddress { slot: 1, function: 0, register: 0 }).unwrap();
    machine.root.remove(1).unwrap();
    slot.device.write_config(4, &2u16.to_le_bytes());
    machine.root.follow(&slot);
    assert_eq!(*function.base.lock(), None);
}

#[test]
fn function_that_does_not_fit_allocates_nothing() {
    let machine = Machine::new();
    let large = |bars: &[u32]| Arc::new(Tagged::new(9, bars));
    // Two of the three BARs fit. The addresses of these BARs are freed after the failure.
    for _ in 0..3 {
        let error = machine.root.add(None, large(&[0x1000_0000, 0x1000_0000, 0x1000])).unwrap_err();
        assert!(matches!(error, PciError::NoAddress { len: 0x1000, .. }), "{error}");
    }
    machine.root.add(None, large(&[0x1000_0000, 0x1000_0000])).unwrap();
}

/// Function with several BARs, which read as the function's number. The function records the
/// addresses of its BARs.
struct Tagged {
    number: u8,
    config: Mutex<ConfigSpace>,
    bases: Mutex<[Option<u64>; 6]>,
}

impl Tagged {
    fn new(number: u8, bars: &[u32]) -> Self {
        let mut config = ConfigSpace::new(&FunctionIds {
            vendor: 0x1af4,
            device: number.into(),
            revision: 1,
            class: 0,
            subsystem_vendor: 0,
            subsystem: 0,
        });
        (0..).zip(bars).for_each(|(bar, &len)| config.add_bar(bar, len));
        Self { number, config: Mutex::new(config), bases: Mutex::default() }
    }
}

impl PciDevice for Tagged {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config.lock().read(offset, data);
    }
    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config.lock().write(offset, data);
    }
    fn decoded_bars(&self) -> Vec<BarRange> {
        self.config.lock().decoded_bars()
    }
    fn read_bar(&self, _: u8, _: u64, data: &mut [u8]) {
        data.fill(self.number);
    }
    fn write_bar(&self, _: u8, _: u64, _: &[u8]) {}
    fn bar_moved(&self, bar: u8, base: Option<u64>) {
        self.bases.lock()[usize::from(bar)] = base;
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Add a function to a slot, or to the first free one.
    Add(Option<u8>, Vec<u32>),
    Remove(u8),
    /// Enable or disable decoding.
    Decode(u8, bool),
    /// Move a BAR to the n-th of 128 addresses, which are 4 MiB apart.
    Move(u8, u8, u8),
}

/// Size of the largest BAR. With this limit, 31 functions with two BARs always fit, regardless of
/// earlier removals.
const LARGEST: u32 = 4 << 20;

fn step() -> impl Strategy<Value = Step> {
    let len = prop::sample::select(vec![0x1000, 0x2000, 0x1_0000, LARGEST]);
    let slot = || 0u8..34;
    prop_oneof![
        3 => (prop::option::of(slot()), prop::collection::vec(len, 0..3)).prop_map(|(slot, bars)| Step::Add(slot, bars)),
        2 => slot().prop_map(Step::Remove),
        2 => (slot(), any::<bool>()).prop_map(|(slot, on)| Step::Decode(slot, on)),
        2 => (slot(), 0u8..2, 0u8..128).prop_map(|(slot, bar, address)| Step::Move(slot, bar, address)),
    ]
}

type Remove = fn(&RootBus, u8) -> Option<Arc<dyn PciDevice>>;

/// Executes `steps`, and compares the bus with a simple model after each step. Then fills and
/// empties the bus several times.
fn bus_gives_back(steps: &[Step], remove: Remove) -> Result<(), String> {
    let machine = Machine::new();
    let mut model: BTreeMap<u8, Arc<Tagged>> = BTreeMap::new();
    let mut number = 0;
    let mut run = |step: &Step, model: &mut BTreeMap<u8, Arc<Tagged>>| -> Result<(), String> {
        match step {
            Step::Add(slot, bars) => {
                number = (number + 1) % 250;
                let function = Arc::new(Tagged::new(number, bars));
                let expected = match slot {
                    Some(slot) => (1..32)
                        .contains(slot)
                        .then_some(*slot)
                        .filter(|slot| !model.contains_key(slot)),
                    None => (1..32).find(|slot| !model.contains_key(slot)),
                };
                let found = machine.root.add(*slot, function.clone());
                if found.as_ref().ok() != expected.as_ref() {
                    return Err(format!("{step:?} gives {found:?}, not {expected:?}"));
                }
                expected.map(|slot| model.insert(slot, function));
            }
            Step::Remove(slot) => {
                let (found, expected) = (remove(&machine.root, *slot), model.remove(slot));
                if found.is_some() != expected.is_some() {
                    return Err(format!("{step:?} finds {}", found.is_some()));
                }
                drop(found);
                if let Some(gone) = expected {
                    let bases = *gone.bases.lock();
                    if bases.iter().any(Option::is_some) || Arc::strong_count(&gone) > 1 {
                        return Err(format!("after {step:?} it is at {bases:x?}"));
                    }
                }
            }
            Step::Decode(slot, on) => machine.write((*slot).into(), 4, u32::from(*on) << 1),
            Step::Move(slot, bar, address) => {
                let base = MMIO32_START as u32 + u32::from(*address) * LARGEST;
                machine.write((*slot).into(), 0x10 + 4 * u64::from(*bar), base);
            }
        }
        Ok(())
    };
    for step in steps {
        run(step, &mut model)?;
        hold_against(&machine, &model).map_err(|error| format!("after {step:?}: {error}"))?;
    }
    for _ in 0..4 {
        for slot in 1..32 {
            run(&Step::Remove(slot), &mut model)?;
        }
        for _ in 1..32 {
            run(&Step::Add(None, vec![LARGEST; 2]), &mut model)?;
        }
        hold_against(&machine, &model)?;
    }
    Ok(())
}

fn hold_against(machine: &Machine, model: &BTreeMap<u8, Arc<Tagged>>) -> Result<(), String> {
    let mut claimed: BTreeMap<u64, (u64, u8)> = BTreeMap::new();
    for slot in 1..32 {
        let expected = model.get(&slot).map_or(u16::MAX, |function| function.number.into());
        let found = (machine.read(slot.into(), 0) >> 16) as u16;
        if found != expected {
            return Err(format!("slot {slot} has {found}, not {expected}"));
        }
    }
    for (slot, function) in model {
        let bases = *function.bases.lock();
        for range in function.decoded_bars().into_iter().filter(in_window) {
            match bases[usize::from(range.bar)] {
                Some(base) if base != range.base => {
                    return Err(format!("a BAR of slot {slot} stays at {base:#x}"));
                }
                Some(base) => drop(claimed.insert(base, (range.len, function.number))),
                None => {}
            }
        }
        let claims = bases.iter().flatten().count();
        if claims > function.decoded_bars().len() {
            return Err(format!("slot {slot} decodes nothing and has {claims} BARs on the bus"));
        }
    }
    // A BAR with an address responds at this address. A BAR without an address lacks one only
    // because another BAR uses it.
    for (base, (len, number)) in &claimed {
        let mut answer = [0];
        machine.memory.read(base + len - 1, &mut answer);
        if answer != [*number] {
            return Err(format!("{} answers at {base:#x}, and not {number}", answer[0]));
        }
    }
    for (slot, function) in model {
        let bases = *function.bases.lock();
        for range in function.decoded_bars().into_iter().filter(in_window) {
            let overlaps = claimed
                .iter()
                .any(|(base, (len, _))| *base < range.base + range.len && range.base < base + len);
            if bases[usize::from(range.bar)].is_none() && !overlaps {
                return Err(format!("slot {slot} has nothing at {:#x}, which is free", range.base));
            }
        }
    }
    let addresses =
        (0..128u64).filter(|address| machine.answers(MMIO32_START + address * u64::from(LARGEST)));
    for address in addresses {
        let at = MMIO32_START + address * u64::from(LARGEST);
        if !claimed.iter().any(|(base, (len, _))| (*base..base + len).contains(&at)) {
            return Err(format!("a function answers at {at:#x}"));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn bus_matches_its_model(steps in prop::collection::vec(step(), 0..120)) {
        bus_gives_back(&steps, RootBus::remove).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn leaked_addresses_are_detected() {
    let leaks_address: Remove = |root, slot| {
        let removed =
            root.slots.lock().slots[1..].get_mut(usize::from(slot).checked_sub(1)?)?.take()?;
        removed.mapped.lock().is_removed = true;
        root.follow(&removed);
        Some(Arc::clone(&removed.device))
    };
    let error = bus_gives_back(&[], leaks_address).unwrap_err();
    assert!(error.contains("NoAddress"), "{error}");
}

#[test]
fn leaked_bars_are_detected() {
    let leaks_address: Remove = |root, slot| {
        let mut slots = root.slots.lock();
        let removed = slots.slots[1..].get_mut(usize::from(slot).checked_sub(1)?)?.take()?;
        free(&mut slots.addresses, &removed.given);
        Some(Arc::clone(&removed.device))
    };
    let steps = [Step::Add(Some(1), vec![LARGEST]), Step::Decode(1, true), Step::Remove(1)];
    let error = bus_gives_back(&steps, leaks_address).unwrap_err();
    assert!(error.contains("it is at"), "{error}");
}

#[test]
fn firmware_finds_decoded_bars() {
    let machine = Machine::new();
    let slots =
        [0x1042, 0x1044].map(|device| machine.root.add(None, Function::new(device)).unwrap());
    let bases = slots.map(|slot| u64::from(machine.read(slot.into(), 0x10) & !0xf));
    assert!(bases.iter().all(|base| !machine.answers(*base)), "a kernel makes them answer");
    machine.root.decode_memory();
    assert!(bases.iter().all(|base| machine.answers(*base)));
}

#[test]
fn reserved_slot_is_used_only_on_request() {
    let machine = Machine::new();
    machine.root.reserve(1);
    machine.root.reserve(200);
    assert_eq!(machine.root.add(None, Function::new(1)).unwrap(), 2);
    assert_eq!(machine.root.add(Some(1), Function::new(2)).unwrap(), 1);
    assert!(matches!(
        machine.root.add(Some(1), Function::new(3)),
        Err(PciError::SlotTaken { slot: 1 })
    ));
}
