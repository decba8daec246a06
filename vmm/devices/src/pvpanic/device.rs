//! PCI function of pvpanic.

use std::sync::Arc;

use parking_lot::Mutex;

use super::PvPanicMetrics;
use crate::pci::{BarRange, ConfigSpace, FunctionIds, PciDevice};

/// PCI IDs of pvpanic (pci.ids 1b36:0011). The class is a system peripheral without a more specific
/// type.
const IDS: FunctionIds = FunctionIds {
    vendor: 0x1b36,
    device: 0x0011,
    revision: 1,
    class: 0x08_80_00,
    subsystem_vendor: 0,
    subsystem: 0,
};

/// Index of the BAR. The BAR contains a single register of one byte.
const BAR: u8 = 0;
/// Length of the BAR, the minimum for a memory BAR (PCI Local Bus 3.0, 6.2.5.1).
const BAR_LEN: u32 = 16;

/// Bit for a panic that the host should handle.
const PANICKED: u8 = 1 << 0;
/// Bit for a panic that a crash kernel in the guest handles.
const CRASH_LOADED: u8 = 1 << 1;

/// Report from a guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestPanic {
    Panicked,
    /// The kernel has panicked, and is starting its crash kernel.
    CrashLoaded,
    /// The guest set bits that the device does not offer.
    Unknown,
}

impl GuestPanic {
    pub const ALL: [Self; 3] = [Self::Panicked, Self::CrashLoaded, Self::Unknown];

    /// Name in events and metrics. The name is the same as in Cloud Hypervisor.
    pub fn label(self) -> &'static str {
        match self {
            Self::Panicked => "panic",
            Self::CrashLoaded => "crash-loaded",
            Self::Unknown => "unknown-event",
        }
    }

    fn of(value: u8) -> Self {
        match value {
            PANICKED => Self::Panicked,
            CRASH_LOADED => Self::CrashLoaded,
            _ => Self::Unknown,
        }
    }
}

/// Function that receives reports. The function is called on the vCPU's thread, and a guest can
/// cause calls at any rate.
type OnPanic = Box<dyn Fn(GuestPanic) + Send + Sync>;

pub struct PvPanic {
    config: Mutex<ConfigSpace>,
    metrics: Arc<PvPanicMetrics>,
    on_panic: OnPanic,
}

impl PvPanic {
    /// Creates a device that reports to `on_panic`.
    pub fn new(on_panic: impl Fn(GuestPanic) + Send + Sync + 'static) -> Self {
        let mut config = ConfigSpace::new(&IDS);
        config.add_bar(BAR, BAR_LEN);
        Self { config: Mutex::new(config), metrics: Arc::default(), on_panic: Box::new(on_panic) }
    }

    /// Counters of the device.
    pub fn metrics(&self) -> Arc<PvPanicMetrics> {
        Arc::clone(&self.metrics)
    }
}

impl PciDevice for PvPanic {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config.lock().read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config.lock().write(offset, data);
    }

    fn decoded_bars(&self) -> Vec<BarRange> {
        self.config.lock().decoded_bars()
    }

    /// Reads the bits that the device offers. All other bytes are reserved and read as 0.
    fn read_bar(&self, _bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset == 0
            && let Some(register) = data.first_mut()
        {
            *register = PANICKED | CRASH_LOADED;
        }
    }

    fn write_bar(&self, _bar: u8, offset: u64, data: &[u8]) {
        if offset == 0
            && let Some(value) = data.first()
        {
            let report = GuestPanic::of(*value);
            self.metrics.count(report);
            (self.on_panic)(report);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> (PvPanic, Arc<Mutex<Vec<GuestPanic>>>) {
        let reports = Arc::<Mutex<Vec<_>>>::default();
        let sink = Arc::clone(&reports);
        (PvPanic::new(move |report| sink.lock().push(report)), reports)
    }

    #[test]
    fn driver_finds_the_function_and_its_register() {
        let (device, _) = device();
        let mut ids = [0; 4];
        device.read_config(0, &mut ids);
        assert_eq!(u32::from_le_bytes(ids), 0x0011_1b36);
        device.write_config(0x10, &0xc000_0000u32.to_le_bytes());
        device.write_config(4, &2u16.to_le_bytes());
        assert_eq!(device.decoded_bars(), [BarRange { bar: BAR, base: 0xc000_0000, len: 16 }]);
        let mut data = [0xff; 4];
        device.read_bar(BAR, 0, &mut data);
        assert_eq!(data, [3, 0, 0, 0]);
        device.read_bar(BAR, 1, &mut data);
        assert_eq!(data, [0; 4]);
        device.read_bar(BAR, 0, &mut []);
    }

    #[test]
    fn writes_to_the_register_are_reported_and_counted() {
        let (device, reports) = device();
        for value in [PANICKED, CRASH_LOADED, 0xff, 0] {
            device.write_bar(BAR, 0, &[value]);
        }
        device.write_bar(BAR, 1, &[PANICKED]);
        device.write_bar(BAR, 0, &[]);
        let [panicked, loaded, unknown] = GuestPanic::ALL;
        assert_eq!(*reports.lock(), [panicked, loaded, unknown, unknown]);
        assert_eq!(GuestPanic::ALL.map(|report| device.metrics().reports(report)), [1, 1, 2]);
    }
}
