//! Code at the BIOS entry point, which resets the machine.
//!
//! With hardware-reduced ACPI, Linux does not use the reset register in the FADT. It prefers a
//! reset by EFI. Without EFI, it returns to real mode and jumps to FFFF:0000, the entry point of a
//! BIOS (arch/x86/kernel/reboot.c, `BOOT_EFI` and then `BOOT_BIOS`). The guest has no BIOS, so the
//! code at this address resets the machine instead.

use foreshore_devices::memory::layout::{ACPI_PM_PORT, BootMemory, RESET_VECTOR};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::BootError;
use crate::acpi::pm::{RESET_OFFSET, RESET_VALUE};

/// I/O port of the reset register.
const PORT: [u8; 2] = (ACPI_PM_PORT + RESET_OFFSET as u16).to_le_bytes();

/// `mov dx, PORT; mov al, VALUE; out dx, al; hlt; jmp` back to the `hlt`: real mode,
/// position-independent.
const CODE: [u8; 9] = [0xba, PORT[0], PORT[1], 0xb0, RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd];

pub(super) fn write<M: GuestMemoryBackend>(
    memory: &M,
    boot_memory: BootMemory,
) -> Result<(), BootError> {
    memory.write_slice(&CODE, GuestAddress(RESET_VECTOR)).map_err(|_| BootError::TooLittleMemory {
        boot_memory_bytes: boot_memory.bytes(),
        address: RESET_VECTOR,
    })
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use super::*;

    #[test]
    fn reset_code_writes_the_reset_register() {
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write(&memory, BootMemory::of_small_pages(1 << 20)).unwrap();
        let code: [u8; 9] = memory.read_obj(GuestAddress(0xf_fff0)).unwrap();
        // ba iw: mov dx, 0x602; b0 ib: mov al, 1; ee: out dx, al; f4: hlt; eb fd: jmp -3.
        assert_eq!(code, [0xba, 0x02, 0x06, 0xb0, 0x01, 0xee, 0xf4, 0xeb, 0xfd]);
    }
}
