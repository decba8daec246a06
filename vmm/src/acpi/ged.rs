//! The generic event device (ACPI 6.5, 5.6.9): one interrupt, one register that says what happened.
//!
//! | offset | access | what |
//! |---|---|---|
//! | 0 | 4 bytes, read | pending events, one bit each; reading clears them |
//!
//! The DSDT's `_EVT` method reads it and notifies the devices concerned.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::bus::BusDevice;

/// What can happen. The value is the bit in the register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Event {
    /// The power button was pressed.
    PowerButton = 1 << 0,
    /// Something has come into a PCI slot, or is to go.
    Pci = 1 << 1,
    /// A vCPU has come, or is to go.
    Cpus = 1 << 2,
    /// A DIMM has come.
    Memory = 1 << 3,
}

/// The device.
pub struct GenericEventDevice {
    pending: AtomicU32,
    raise: Box<dyn Fn() -> io::Result<()> + Send + Sync>,
}

impl GenericEventDevice {
    /// `raise` pulses the interrupt [`GED_GSI`](crate::memory::layout::GED_GSI): it is edge-triggered.
    pub fn new(raise: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self { pending: AtomicU32::new(0), raise: Box::new(raise) }
    }

    /// Tells the guest about `event`. Several before the guest looks are one.
    pub fn notify(&self, event: Event) -> io::Result<()> {
        // The bit comes before the edge: the guest's handler may run as soon as there is one.
        self.pending.fetch_or(event as u32, Ordering::AcqRel);
        (self.raise)()
    }
}

impl fmt::Debug for GenericEventDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GenericEventDevice").field("pending", &self.pending).finish_non_exhaustive()
    }
}

impl BusDevice for GenericEventDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match <&mut [u8; 4]>::try_from(&mut *data) {
            Ok(register) if offset == 0 => {
                *register = self.pending.swap(0, Ordering::AcqRel).to_le_bytes();
            }
            // An access that is not the register's must not lose events.
            _ => data.fill(0),
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn events_raise_the_line_and_are_cleared_by_reading() {
        let edges = Arc::new(AtomicUsize::new(0));
        let ged = GenericEventDevice::new({
            let edges = Arc::clone(&edges);
            move || {
                edges.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        });
        let read = |offset| {
            let mut register = [0xff; 4];
            ged.read(offset, &mut register);
            u32::from_le_bytes(register)
        };
        assert_eq!(read(0), 0);
        ged.notify(Event::PowerButton).unwrap();
        ged.notify(Event::PowerButton).unwrap();
        assert_eq!(edges.load(Ordering::Relaxed), 2);
        // Not the register: nothing is lost.
        let mut byte = [0xff];
        ged.read(0, &mut byte);
        assert_eq!((byte, read(4)), ([0], 0));
        ged.write(0, &[1, 0, 0, 0]);
        assert_eq!((read(0), read(0)), (1, 0));
    }

    #[test]
    fn a_failed_interrupt_is_told_and_the_event_stays() {
        let ged = GenericEventDevice::new(|| Err(io::ErrorKind::BrokenPipe.into()));
        assert!(ged.notify(Event::PowerButton).is_err());
        let mut register = [0; 4];
        ged.read(0, &mut register);
        assert_eq!(register, [1, 0, 0, 0]);
    }
}
