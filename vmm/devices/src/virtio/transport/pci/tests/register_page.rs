//! Tests of the page from which a guest reads registers without an exit.

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};

use super::super::registers::LEN;
use super::*;
use crate::interrupt::VirtioInterrupt;

type Bytes = [u8; LEN];

impl Rig {
    fn with_mapped_registers() -> Self {
        Self::with_log(Log { has_mapped_registers: true, ..Log::default() })
    }

    fn slot(&self) -> Option<kvm_userspace_memory_region> {
        let slots = self.fake.slots.slots.lock();
        assert!(slots.len() <= 1, "{slots:?}");
        slots.values().next().copied()
    }

    /// Content of the page, if the guest has access to it.
    fn page(&self) -> Option<Bytes> {
        self.slot().map(|slot| read_page(&slot))
    }

    /// Registers as exits read them.
    fn exits(&self) -> Bytes {
        let mut bytes = [0; LEN];
        for (at, chunk) in (0..).step_by(8).zip(bytes.chunks_mut(8)) {
            chunk.copy_from_slice(&self.read(at, 8).to_le_bytes());
        }
        bytes
    }

    fn interrupt(&self) -> Option<Arc<dyn VirtioInterrupt>> {
        self.log.lock().active.as_ref().map(|active| active.interrupt.clone())
    }

    fn move_bar(&mut self, base: u32) {
        self.write_config(0x10, &base.to_le_bytes());
        self.bar = base.into();
    }
}

fn read_page(slot: &kvm_userspace_memory_region) -> Bytes {
    // SAFETY: the page is mapped while the slot exists, and no other thread writes to it.
    unsafe { (slot.userspace_addr as *const Bytes).read_volatile() }
}

#[test]
fn page_is_mapped_read_only_while_the_device_is_active_and_moves_with_the_bar() {
    let mut rig = Rig::with_mapped_registers();
    let mapped_at = |rig: &Rig| rig.slot().map(|slot| slot.guest_phys_addr);
    assert_eq!(mapped_at(&rig), None);
    rig.start();
    let slot = rig.slot().unwrap();
    assert_eq!((slot.guest_phys_addr, slot.memory_size), (rig.bar, 0x1000));
    assert_eq!(slot.flags, KVM_MEM_READONLY);
    rig.move_bar(0xd000_0000);
    assert_eq!(mapped_at(&rig), Some(0xd000_0000));
    rig.write_config(4, &4u16.to_le_bytes());
    assert_eq!(mapped_at(&rig), None, "memory decoding is off");
    rig.write_config(4, &6u16.to_le_bytes());
    assert_eq!(mapped_at(&rig), Some(0xd000_0000));
    rig.write_config(4, &2u16.to_le_bytes());
    assert_eq!(mapped_at(&rig), None, "the device stops without Bus Master");
    rig.write_config(4, &6u16.to_le_bytes());
    rig.start();
    assert_eq!(rig.page(), Some(rig.exits()));
    rig.write(0x14, 1, 0);
    assert_eq!(mapped_at(&rig), None, "the driver resets the device");
    rig.start();
    drop(rig.context.pci.remove(1));
    assert_eq!(mapped_at(&rig), None, "the device is removed");
}

#[test]
fn other_devices_have_no_page() {
    let rig = Rig::new();
    rig.start();
    assert!(rig.slot().is_none());
}

#[test]
fn registers_are_read_by_exits_if_kvm_refuses_the_slot() {
    let rig = Rig::with_mapped_registers();
    *rig.fake.slots.calls_left.lock() = Some(0);
    rig.start();
    assert!(rig.slot().is_none());
    assert_eq!(rig.read(0x14, 1), 15);
    *rig.fake.slots.calls_left.lock() = None;
    rig.start();
    assert_eq!(rig.page(), Some(rig.exits()), "the next activation maps the page");
}

/// Changes that each path makes while the page is mapped. Broken variant: a page that one of them
/// does not update.
#[test]
fn page_shows_each_change() {
    type Change = (&'static str, fn(&Rig));
    let changes: [Change; 8] = [
        ("device_feature_select", |rig| rig.write(0x00, 4, 1)),
        ("driver_feature_select", |rig| rig.write(0x08, 4, 2)),
        ("config_msix_vector", |rig| rig.write(0x10, 2, 1)),
        ("device_status", |rig| rig.write(0x14, 1, 0x8f)),
        ("queue_select", |rig| rig.write(0x16, 2, 0)),
        ("access through configuration space", |rig| {
            let at = rig.virtio_capability(5);
            rig.write_config(at + access::OFFSET as u16, &0x16u32.to_le_bytes());
            rig.write_config(at + access::LEN as u16, &2u32.to_le_bytes());
            rig.write_config(at + access::DATA, &7u16.to_le_bytes());
        }),
        ("signal of a worker", |rig| rig.interrupt().unwrap().signal_config().unwrap()),
        ("failure of a worker", |rig| rig.interrupt().unwrap().needs_reset().unwrap()),
    ];
    let rig = Rig::with_mapped_registers();
    rig.start();
    for (name, change) in changes {
        let before = rig.page().unwrap();
        change(&rig);
        assert_eq!(rig.page(), Some(rig.exits()), "{name}");
        assert_ne!(before, rig.exits(), "{name}: a page without an update would pass");
    }
    assert_eq!(rig.page().unwrap()[0x14], 0x8f | 64);
}

/// The driver may handle the interrupt on another vCPU before the worker continues.
#[test]
fn page_shows_a_failure_before_its_interrupt() {
    let rig = Rig::with_mapped_registers();
    rig.start();
    let (seen, slot) = (Arc::<Mutex<Vec<u8>>>::default(), rig.slot().unwrap());
    let statuses = Arc::clone(&seen);
    rig.fake.interrupts.observe(move || statuses.lock().push(read_page(&slot)[0x14]));
    rig.interrupt().unwrap().needs_reset().unwrap();
    // The interrupt is the first of its vector, which needs a route and an irqfd.
    assert_eq!(*seen.lock(), [15 | 64; 2]);
    assert_eq!(rig.fake.interrupts.count_of(24), 1);
}

#[derive(Clone, Debug)]
enum Step {
    Start,
    Write(u32, usize, u64),
    MoveBar(u32),
    Command(u8),
    SignalConfig,
    NeedReset,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Offsets and widths of all fields that a driver writes.
    let field = prop::sample::select(vec![
        (0x00, 4),
        (0x08, 4),
        (0x0c, 4),
        (0x10, 2),
        (0x14, 1),
        (0x16, 2),
        (0x18, 2),
        (0x1a, 2),
        (0x1c, 2),
        (0x20, 8),
        (0x28, 4),
        (0x34, 4),
        (0x3004, 2),
    ]);
    let value = prop_oneof![0..4u64, Just(11), Just(15), any::<u64>()];
    let step = prop_oneof![
        3 => Just(Step::Start),
        16 => (field, value).prop_map(|((at, len), value)| Step::Write(at, len, value)),
        1 => (0..4u32).prop_map(|nth| Step::MoveBar(0xd000_0000 + nth * layout::BAR_LEN)),
        1 => (0..8u8).prop_map(Step::Command),
        1 => Just(Step::SignalConfig),
        1 => Just(Step::NeedReset),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn page_equals_the_registers_after_each_step(steps in steps()) {
        let mut rig = Rig::with_mapped_registers();
        let mut decodes = true;
        for step in steps {
            match step {
                Step::Start if decodes => rig.start(),
                Step::Write(at, len, value) if decodes => rig.write(at, len, value),
                Step::Start | Step::Write(..) => (),
                Step::MoveBar(base) => rig.move_bar(base),
                Step::Command(command) => {
                    rig.write_config(4, &[command]);
                    decodes = command & 2 != 0;
                }
                Step::SignalConfig => {
                    rig.interrupt().map_or(Ok(()), |interrupt| interrupt.signal_config()).unwrap();
                }
                Step::NeedReset => {
                    rig.interrupt().map_or(Ok(()), |interrupt| interrupt.needs_reset()).unwrap();
                }
            }
            let wanted = (rig.log.lock().active.is_some() && decodes).then_some(rig.bar);
            prop_assert_eq!(rig.slot().map(|slot| slot.guest_phys_addr), wanted);
            if wanted.is_some() {
                prop_assert_eq!(rig.page(), Some(rig.exits()));
            }
        }
    }
}
