//! Sleep and reset registers of a hardware-reduced machine (ACPI 6.5, 4.8.3.6 and 4.8.3.7).

use std::fmt;

use foreshore_devices::bus::BusDevice;

pub(crate) const SLEEP_CONTROL_OFFSET: u64 = 0;
pub(crate) const SLEEP_STATUS_OFFSET: u64 = 1;
pub(crate) const RESET_OFFSET: u64 = 2;
pub(crate) const RESET_VALUE: u8 = 1;
/// SLP_TYPx of `\_S5`.
pub(crate) const S5_SLEEP_TYPE: u8 = 5;

/// SLP_EN in the sleep control register (ACPI 6.5, table 4.18).
const SLEEP_ENABLE: u8 = 1 << 5;
/// SLP_TYPx, bits 2 to 4.
const SLEEP_TYPE_SHIFT: u32 = 2;
const SLEEP_TYPE_MASK: u8 = 0x7;

/// Power request of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PmEvent {
    /// The guest entered S5 (power off).
    Shutdown,
    Reset,
}

/// Sleep control, sleep status and reset registers: three ports of one byte each.
pub(crate) struct PmPort {
    on_event: Box<dyn Fn(PmEvent) + Send + Sync>,
}

impl PmPort {
    /// `on_event` is called on the thread of the vCPU that writes the register.
    pub(crate) fn new(on_event: impl Fn(PmEvent) + Send + Sync + 'static) -> Self {
        Self { on_event: Box::new(on_event) }
    }
}

impl fmt::Debug for PmPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PmPort").finish_non_exhaustive()
    }
}

/// Power event caused by a write of `value` to the register at `offset`.
fn event_of(offset: u64, value: u8) -> Option<PmEvent> {
    match offset {
        SLEEP_CONTROL_OFFSET => {
            let enabled = value & SLEEP_ENABLE != 0;
            let sleep_type = value >> SLEEP_TYPE_SHIFT & SLEEP_TYPE_MASK;
            (enabled && sleep_type == S5_SLEEP_TYPE).then_some(PmEvent::Shutdown)
        }
        RESET_OFFSET => (value == RESET_VALUE).then_some(PmEvent::Reset),
        // The status register has only the wake bit. The guest clears it by writing 1, and
        // Foreshore never sets it.
        _ => None,
    }
}

impl BusDevice for PmPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (index, &value) in data.iter().enumerate() {
            // A wider access also covers the next registers.
            let register = offset.checked_add(index as u64);
            if let Some(event) = register.and_then(|register| event_of(register, value)) {
                (self.on_event)(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn only_s5_and_the_reset_value_are_events() {
        let events = Arc::new(Mutex::new(Vec::new()));
        let port = PmPort::new({
            let events = Arc::clone(&events);
            move |event| events.lock().push(event)
        });
        // Linux clears the wake status, writes the sleep type, and then writes the type together
        // with the enable bit.
        port.write(SLEEP_STATUS_OFFSET, &[0x80]);
        port.write(SLEEP_CONTROL_OFFSET, &[5 << 2]);
        port.write(SLEEP_CONTROL_OFFSET, &[1 << 5 | 1 << 2]);
        port.write(RESET_OFFSET, &[0]);
        port.write(RESET_OFFSET, &[6]);
        port.write(u64::MAX, &[1, 1]);
        assert!(events.lock().is_empty());
        port.write(SLEEP_CONTROL_OFFSET, &[1 << 5 | 5 << 2]);
        port.write(RESET_OFFSET, &[1]);
        assert_eq!(*events.lock(), [PmEvent::Shutdown, PmEvent::Reset]);
        let mut status = [0xff];
        port.read(SLEEP_STATUS_OFFSET, &mut status);
        assert_eq!(status, [0]);
    }
}
