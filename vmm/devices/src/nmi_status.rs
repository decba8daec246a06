//! Port 0x61, at which a PC reports the cause of a non-maskable interrupt.
//!
//! A port without a device reads as ones, which means a memory parity error and an I/O check. Linux
//! would then report one of these as the cause of an NMI from `vm.nmi` (arch/x86/kernel/nmi.c,
//! default_do_nmi). This device never reports a cause. Bit 5, the output of timer 2, is set:
//! otherwise a kernel that waits for it without a timer (arch/x86/kernel/tsc.c,
//! pit_hpet_ptimer_calibrate_cpu) would wait forever.

use crate::bus::BusDevice;

pub const NMI_STATUS_PORT: u64 = 0x61;
pub const NMI_STATUS_LEN: u64 = 1;

const TIMER_2_OUTPUT: u8 = 1 << 5;

/// Device on the port. The device has no state.
#[derive(Debug)]
pub struct NmiStatus;

impl BusDevice for NmiStatus {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(TIMER_2_OUTPUT);
    }

    /// Ignores writes, because the device has no causes that could be enabled or cleared.
    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cause_is_reported() {
        let mut data = [0xff];
        NmiStatus.write(0, &[0xff]);
        NmiStatus.read(0, &mut data);
        assert_eq!(data[0] & 0xc0, 0);
        assert_ne!(data[0] & TIMER_2_OUTPUT, 0);
    }
}
