//! vCPU registers in the hotplug page, from offset 0x20, for the DSDT's methods.
//!
//! The layout is private to Foreshore because only its own AML accesses the page. All registers are
//! 4 bytes wide. Accesses of other widths read 0 and write nothing.
//!
//! | offset | access | content |
//! |---|---|---|
//! | 0x00 | read, write | selected vCPU, to which 0x04 belongs |
//! | 0x04 | read | 1 if the vCPU is present, otherwise 0 |
//! | 0x04 | write | bit 0: the guest ejects the vCPU |
//! | 0x08 | read | next added vCPU, which reading removes from the list; 0xffff_ffff at its end |
//! | 0x0c | read | next vCPU whose removal is requested, likewise |

use std::fmt;

use foreshore_devices::bus::BusDevice;
use parking_lot::Mutex;

use crate::acpi::plug::Plug;

/// Offset of the registers in the hotplug page.
pub(crate) const CPUS_OFFSET: u64 = 0x20;
/// Length of the vCPU registers in bytes.
pub(crate) const CPUS_LEN: u64 = 0x20;

/// Offset of the selection register, relative to [`CPUS_OFFSET`].
pub(crate) const CPU_SELECT: u64 = 0x00;
pub(crate) const CPU_STATUS: u64 = 0x04;
/// Offset of the list of added vCPUs.
pub(crate) const CPU_ADDED: u64 = 0x08;
/// Offset of the list of vCPUs whose removal is requested.
pub(crate) const CPU_REMOVAL: u64 = 0x0c;
pub(crate) const CPU_REGISTERS_LEN: u64 = 0x10;

/// Marks the end of a list.
const NONE: u32 = u32::MAX;
/// Bit 0 of the written status.
const EJECT: u32 = 1;

struct Registers {
    plug: Plug,
    /// vCPU number that the guest wrote. It can exceed the number of vCPUs.
    selected: u32,
}

/// vCPU hotplug state behind the registers.
pub(crate) struct CpuRegisters {
    registers: Mutex<Registers>,
    gone: Box<dyn Fn(u8) + Send + Sync>,
}

impl CpuRegisters {
    /// `gone` is called after each ejection of a vCPU. It runs on the thread of the vCPU that
    /// writes the register, which may be the ejected vCPU.
    pub(crate) fn new(plug: Plug, gone: impl Fn(u8) + Send + Sync + 'static) -> Self {
        Self { registers: Mutex::new(Registers { plug, selected: 0 }), gone: Box::new(gone) }
    }

    pub(crate) fn plug<T>(&self, act: impl FnOnce(&mut Plug) -> T) -> T {
        act(&mut self.registers.lock().plug)
    }
}

impl fmt::Debug for CpuRegisters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuRegisters").finish_non_exhaustive()
    }
}

impl Registers {
    fn selected(&self) -> Option<u8> {
        u8::try_from(self.selected).ok()
    }

    fn read(&mut self, offset: u64) -> u32 {
        match offset {
            CPU_SELECT => self.selected,
            CPU_STATUS => self.selected().is_some_and(|index| self.plug.is_there(index)).into(),
            CPU_ADDED => self.plug.next_added().map_or(NONE, u32::from),
            CPU_REMOVAL => self.plug.next_removal().map_or(NONE, u32::from),
            _ => 0,
        }
    }

    /// Writes a register for the guest, and returns the vCPU ejected by the write.
    fn write(&mut self, offset: u64, value: u32) -> Option<u8> {
        match offset {
            CPU_SELECT => self.selected = value,
            CPU_STATUS if value & EJECT != 0 => {
                return self.selected().filter(|&index| self.plug.eject(index));
            }
            _ => {}
        }
        None
    }
}

impl BusDevice for CpuRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match <&mut [u8; 4]>::try_from(&mut *data) {
            Ok(register) => *register = self.registers.lock().read(offset).to_le_bytes(),
            Err(_) => data.fill(0),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(value) = data.try_into() else { return };
        let gone = self.registers.lock().write(offset, u32::from_le_bytes(value));
        gone.into_iter().for_each(&self.gone);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    fn registers(boot: u8, max: u8) -> (CpuRegisters, Arc<Mutex<Vec<u8>>>) {
        let gone = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&gone);
        (CpuRegisters::new(Plug::new(boot, max), move |index| heard.lock().push(index)), gone)
    }

    fn read(registers: &CpuRegisters, offset: u64) -> u32 {
        let mut register = [0; 4];
        registers.read(offset, &mut register);
        u32::from_le_bytes(register)
    }

    fn write(registers: &CpuRegisters, offset: u64, value: u32) {
        registers.write(offset, &value.to_le_bytes());
    }

    #[test]
    fn vcpus_are_announced_once_and_ejected_by_index() {
        let (registers, gone) = registers(1, 4);
        registers.plug(|plug| plug.put(1..3));
        assert_eq!([(); 3].map(|()| read(&registers, CPU_ADDED)), [1, 2, NONE]);
        assert_eq!(read(&registers, CPU_REMOVAL), NONE);
        let status = |index| {
            write(&registers, CPU_SELECT, index);
            read(&registers, CPU_STATUS)
        };
        assert_eq!([0, 1, 2, 3, 4, 255, 256, u32::MAX].map(status), [1, 1, 1, 0, 0, 0, 0, 0]);
        registers.plug(|plug| plug.request_removal(1..3));
        assert_eq!([(); 3].map(|()| read(&registers, CPU_REMOVAL)), [2, 1, NONE]);
        assert_eq!(status(2), 1, "a vCPU stays until it is ejected");
        write(&registers, CPU_STATUS, !EJECT);
        assert!(gone.lock().is_empty());
        write(&registers, CPU_STATUS, EJECT);
        assert_eq!((read(&registers, CPU_STATUS), gone.lock().clone()), (0, vec![2]));
    }

    #[test]
    fn accesses_outside_registers_have_no_effect() {
        let (registers, gone) = registers(2, 2);
        registers.plug(|plug| plug.request_removal(1..2));
        write(&registers, CPU_SELECT, 1);
        let mut byte = [0xff];
        registers.read(CPU_STATUS, &mut byte);
        let mut long = [0xff; 8];
        registers.read(CPU_STATUS, &mut long);
        assert_eq!((byte, long), ([0], [0; 8]));
        registers.write(CPU_STATUS, &[1]);
        registers.write(CPU_STATUS, &[1; 8]);
        write(&registers, CPU_REMOVAL, 1);
        assert_eq!((read(&registers, 2), read(&registers, 0x1c)), (0, 0));
        assert!(gone.lock().is_empty());
    }

    proptest! {
        /// For any sequence of accesses, a vCPU is ejected only if its removal was requested, and
        /// at most once.
        #[test]
        fn only_requested_vcpus_are_ejected(
            boot in 1u8..8, down_to in 1u8..8, accesses in prop::collection::vec((0u64..0x14, any::<bool>(), 0u32..10), 0..200)
        ) {
            let (registers, gone) = registers(boot, 8);
            let requested = down_to.min(boot)..boot;
            registers.plug(|plug| plug.request_removal(requested.clone()));
            for (offset, writes, value) in accesses {
                match writes {
                    true => write(&registers, offset, value),
                    false => drop(read(&registers, offset)),
                }
            }
            let gone = gone.lock().clone();
            for index in 0..8 {
                let times = gone.iter().filter(|&&one| one == index).count();
                prop_assert!(times <= usize::from(requested.contains(&index)));
                let there = registers.plug(|plug| plug.is_there(index));
                prop_assert_eq!(there, index < boot && times == 0);
            }
        }
    }
}
