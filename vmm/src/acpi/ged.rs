//! Generic event device (ACPI 6.5, 5.6.9): one interrupt and one register of pending events.
//!
//! | offset | access | content |
//! |---|---|---|
//! | 0 | 4 bytes, read | pending events, one bit each; reading clears them |
//!
//! The DSDT's `_EVT` method reads the register and notifies the affected devices.
//!
//! The interrupt is level-triggered, and its line is high while events are pending. A guest keeps
//! the pin of the I/O APIC masked until its driver is loaded. KVM keeps the level of a masked pin,
//! but loses an edge.

use std::fmt;
use std::io;

use foreshore_devices::bus::BusDevice;
use foreshore_devices::log::rate_limited;
use parking_lot::Mutex;

/// Event that the guest is notified of. The value is the event's bit in the register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Event {
    PowerButton = 1 << 0,
    /// A device was added to a PCI slot, or its removal was requested.
    Pci = 1 << 1,
    /// A vCPU was added, or its removal was requested.
    Cpus = 1 << 2,
    /// A DIMM was added.
    Memory = 1 << 3,
}

pub(crate) struct GenericEventDevice {
    /// `line` changes only under this lock, so that it always matches the pending events.
    pending: Mutex<u32>,
    line: Box<dyn Fn(bool) -> io::Result<()> + Send + Sync>,
}

impl GenericEventDevice {
    /// `line` drives the interrupt line [`GED_GSI`](foreshore_devices::memory::layout::GED_GSI)
    /// high or low.
    pub(crate) fn new(line: impl Fn(bool) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self { pending: Mutex::new(0), line: Box::new(line) }
    }

    /// Notifies the guest of `event`. Repeated events are merged until the guest reads the
    /// register.
    pub(crate) fn notify(&self, event: Event) -> io::Result<()> {
        let mut pending = self.pending.lock();
        *pending |= event as u32;
        (self.line)(true)
    }

    /// Clears and returns the pending events, and lowers the line.
    fn take(&self) -> u32 {
        let mut pending = self.pending.lock();
        let taken = std::mem::take(&mut *pending);
        if taken != 0
            && let Err(err) = (self.line)(false)
        {
            // If the line stays high, the guest only reads the register again and finds no events.
            rate_limited!(warn, %err, "Cannot lower the interrupt of the generic event device");
        }
        taken
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
                *register = self.take().to_le_bytes();
            }
            // An access of any other width must not clear events.
            _ => data.fill(0),
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    fn device() -> (GenericEventDevice, Arc<AtomicBool>) {
        let line = Arc::new(AtomicBool::new(false));
        let ged = GenericEventDevice::new({
            let line = Arc::clone(&line);
            move |high| {
                line.store(high, Ordering::Relaxed);
                Ok(())
            }
        });
        (ged, line)
    }

    /// A guest that loads its driver long after the event finds the line high.
    #[test]
    fn line_is_high_until_pending_events_are_read() {
        let (ged, line) = device();
        let high = || line.load(Ordering::Relaxed);
        let read = |offset| {
            let mut register = [0xff; 4];
            ged.read(offset, &mut register);
            u32::from_le_bytes(register)
        };
        assert_eq!(read(0), 0);
        assert!(!high());
        ged.notify(Event::PowerButton).unwrap();
        ged.notify(Event::PowerButton).unwrap();
        ged.notify(Event::Pci).unwrap();
        assert!(high());
        // Accesses with another width or offset clear no events.
        let mut byte = [0xff];
        ged.read(0, &mut byte);
        assert_eq!((byte, read(4)), ([0], 0));
        ged.write(0, &[1, 0, 0, 0]);
        assert!(high());
        assert_eq!((read(0), high()), (3, false));
        assert_eq!((read(0), high()), (0, false));
        ged.notify(Event::Cpus).unwrap();
        assert!(high());
        assert_eq!((read(0), high()), (4, false));
    }

    #[test]
    fn event_during_a_read_is_returned_or_keeps_the_line_high() {
        let (ged, line) = device();
        let read = || {
            let mut register = [0; 4];
            ged.read(0, &mut register);
            u32::from_le_bytes(register)
        };
        for _ in 0..200 {
            ged.notify(Event::Pci).unwrap();
            let taken = thread::scope(|scope| {
                let notifier = scope.spawn(|| ged.notify(Event::Cpus).unwrap());
                let taken = read();
                notifier.join().unwrap();
                taken
            });
            let left = line.load(Ordering::Relaxed);
            assert_eq!(left, taken & Event::Cpus as u32 == 0);
            assert_eq!(taken | read(), Event::Pci as u32 | Event::Cpus as u32);
        }
    }

    #[test]
    fn failed_interrupt_is_reported_and_event_stays_pending() {
        let ged = GenericEventDevice::new(|_| Err(io::ErrorKind::BrokenPipe.into()));
        assert!(ged.notify(Event::PowerButton).is_err());
        let mut register = [0; 4];
        ged.read(0, &mut register);
        assert_eq!(register, [1, 0, 0, 0]);
    }
}
