//! Address ranges and their devices, for port and memory-mapped I/O.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use parking_lot::RwLock;
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use crate::metrics::{Expose, Exposition, Family, and, one};

/// Device that responds to accesses of vCPUs.
///
/// vCPU threads make both calls, concurrently. Implementations lock as needed, and block on I/O
/// only if the guest is meant to wait (a synchronous flush).
pub trait BusDevice: Send + Sync {
    /// Fills `data` from `offset`, relative to the start of the inserted range.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Receives `data` at `offset`, relative to the start of the inserted range.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Registers ioeventfds. KVM raises such an eventfd when a vCPU writes to an address, without an
/// exit to the VMM. Tests use an implementation that records calls.
pub trait IoEvents: Send + Sync {
    /// Registers `event`. KVM then raises it on each write of any width to guest-physical
    /// `address`.
    fn register(&self, event: &EventFd, address: u64) -> io::Result<()>;
    /// Undoes [`Self::register`].
    fn unregister(&self, event: &EventFd, address: u64) -> io::Result<()>;
}

impl IoEvents for VmFd {
    fn register(&self, event: &EventFd, address: u64) -> io::Result<()> {
        Ok(self.register_ioevent(event, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }

    fn unregister(&self, event: &EventFd, address: u64) -> io::Result<()> {
        Ok(self.unregister_ioevent(event, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum BusError {
    /// The range is empty or ends beyond 2^64.
    #[error("range {base:#x}+{len:#x} is empty or ends beyond the address space")]
    BadRange {
        base: u64,
        /// Length in bytes.
        len: u64,
    },
    #[error("range {base:#x}+{len:#x} overlaps the range at {other:#x}")]
    Overlap {
        base: u64,
        /// Length in bytes.
        len: u64,
        /// First address of the existing range that overlaps.
        other: u64,
    },
}

struct Entry {
    len: u64,
    device: Arc<dyn BusDevice>,
}

/// Range of a device that may be removed before the bus is dropped. Dropping this removes the range
/// from the bus.
#[must_use = "dropping this removes the range from the bus"]
pub struct BusRange {
    bus: Arc<Bus>,
    base: u64,
}

impl Drop for BusRange {
    fn drop(&mut self) {
        self.bus.remove(self.base);
    }
}

/// Counters of accesses to addresses without a device.
#[derive(Debug, Default)]
pub struct BusMetrics {
    /// Reads from addresses without a device. They return ones.
    pub unanswered_reads: AtomicU64,
    /// Writes to addresses without a device. They are discarded.
    pub unanswered_writes: AtomicU64,
}

/// Address space: a set of disjoint ranges. Lookups share a read lock. Ranges change only when the
/// machine is built, when the guest moves a BAR, and on hotplug.
#[derive(Default)]
pub struct Bus {
    ranges: RwLock<BTreeMap<u64, Entry>>,
    metrics: Arc<BusMetrics>,
}

impl Bus {
    /// Inserts `device` at `base`. Dropping the returned range removes it.
    pub fn attach(
        self: &Arc<Self>,
        base: u64,
        len: u64,
        device: Arc<dyn BusDevice>,
    ) -> Result<BusRange, BusError> {
        self.insert(base, len, device)?;
        Ok(BusRange { bus: Arc::clone(self), base })
    }

    /// Inserts `device` at `base`. [`Self::remove`] removes it.
    pub fn insert(&self, base: u64, len: u64, device: Arc<dyn BusDevice>) -> Result<(), BusError> {
        let last = match len.checked_sub(1).and_then(|n| base.checked_add(n)) {
            Some(last) => last,
            None => return Err(BusError::BadRange { base, len }),
        };
        let mut ranges = self.ranges.write();
        if let Some((&other, entry)) = ranges.range(..=last).next_back()
            && other + (entry.len - 1) >= base
        {
            return Err(BusError::Overlap { base, len, other });
        }
        ranges.insert(base, Entry { len, device });
        Ok(())
    }

    /// Removes the range that starts at `base`. Returns false if no range starts there.
    pub fn remove(&self, base: u64) -> bool {
        let removed = self.ranges.write().remove(&base);
        // Drops the removed device after the lock is released, because dropping it may wait for
        // work in progress.
        removed.is_some()
    }

    /// Number of ranges.
    #[cfg(any(test, feature = "testing"))]
    pub fn count(&self) -> usize {
        self.ranges.read().len()
    }

    pub fn metrics(&self) -> Arc<BusMetrics> {
        Arc::clone(&self.metrics)
    }

    fn find(&self, address: u64, len: usize) -> Option<(u64, Arc<dyn BusDevice>)> {
        let ranges = self.ranges.read();
        let (&base, entry) = ranges.range(..=address).next_back()?;
        let offset = address - base;
        // An access must be within one range. Hardware would split an access across ranges, but no
        // driver relies on this.
        let end = offset.checked_add(len as u64)?;
        (end <= entry.len).then(|| (offset, Arc::clone(&entry.device)))
    }

    /// Reads at `address`. If no device has this address, fills `data` with ones, as on a PCI bus,
    /// and returns false.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        match self.find(address, data.len()) {
            Some((offset, device)) => {
                device.read(offset, data);
                true
            }
            None => {
                data.fill(0xff);
                self.metrics.unanswered_reads.fetch_add(1, Ordering::Relaxed);
                false
            }
        }
    }

    /// Writes at `address`. Returns false if no device has this address.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        match self.find(address, data.len()) {
            Some((offset, device)) => {
                device.write(offset, data);
                true
            }
            None => {
                self.metrics.unanswered_writes.fetch_add(1, Ordering::Relaxed);
                false
            }
        }
    }
}

/// Counters of an address space, with its name.
#[derive(Debug)]
pub struct AddressSpaceMetrics {
    /// Name of the address space.
    pub space: &'static str,
    pub counters: Arc<BusMetrics>,
}

impl Expose for AddressSpaceMetrics {
    fn expose(&self, out: &mut Exposition) {
        let accesses = [
            ("read", &self.counters.unanswered_reads),
            ("write", &self.counters.unanswered_writes),
        ];
        let samples = accesses.map(|(direction, counter)| {
            let labels = and(&one("space", self.space), "direction", direction);
            (labels, counter.load(Ordering::Relaxed))
        });
        let help = "Accesses of the guest to addresses without a device.";
        out.counters(Family("vcpu_unanswered_accesses", help, None), samples);
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().push((offset, data.to_vec()));
        }
    }

    fn unanswered(bus: &Bus) -> (u64, u64) {
        let metrics = bus.metrics();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (get(&metrics.unanswered_reads), get(&metrics.unanswered_writes))
    }

    #[test]
    fn accesses_reach_the_device_with_the_offset_in_its_range() {
        let bus = Bus::default();
        let device = Arc::new(Recorder::default());
        bus.insert(0x1000, 0x10, device.clone()).unwrap();
        let mut data = [0; 2];
        assert!(bus.read(0x1008, &mut data));
        assert_eq!(data, [8, 8]);
        assert!(bus.write(0x100e, &[1, 2]));
        assert_eq!(unanswered(&bus), (0, 0));
        assert_eq!(device.0.lock().as_slice(), &[(0xe, vec![1, 2])]);
    }

    #[test]
    fn access_beyond_a_range_reaches_no_device() {
        let bus = Bus::default();
        bus.insert(0x1000, 0x10, Arc::new(Recorder::default())).unwrap();
        let mut data = [0; 4];
        assert!(!bus.read(0x100e, &mut data));
        assert_eq!(data, [0xff; 4]);
        assert!(!bus.write(0xfff, &[0]));
        assert!(!bus.write(u64::MAX, &[0, 0]));
        assert_eq!(unanswered(&bus), (1, 2));
    }

    #[test]
    fn dropped_range_leaves_the_bus() {
        let bus = Arc::new(Bus::default());
        let range = bus.attach(0x1000, 0x10, Arc::new(Recorder::default())).unwrap();
        assert!(bus.attach(0x1000, 0x10, Arc::new(Recorder::default())).is_err());
        assert!(bus.write(0x1000, &[0]), "the refused device removed a range from the bus");
        drop(range);
        assert!(!bus.write(0x1000, &[0]));
    }

    #[test]
    fn ranges_may_touch_but_not_overlap() {
        let bus = Bus::default();
        bus.insert(0x1000, 0x10, Arc::new(Recorder::default())).unwrap();
        bus.insert(0x1010, 0x10, Arc::new(Recorder::default())).unwrap();
        for (base, len) in [(0xfff, 2), (0x1008, 1), (0x100f, 0x100), (0, 0x10000)] {
            assert!(matches!(
                bus.insert(base, len, Arc::new(Recorder::default())),
                Err(BusError::Overlap { .. })
            ));
        }
        assert!(bus.insert(0x2000, 0, Arc::new(Recorder::default())).is_err());
        assert!(bus.insert(u64::MAX, 2, Arc::new(Recorder::default())).is_err());
        assert!(bus.remove(0x1000));
        assert!(!bus.remove(0x1000));
        bus.insert(0x1000, 0x10, Arc::new(Recorder::default())).unwrap();
    }
}
