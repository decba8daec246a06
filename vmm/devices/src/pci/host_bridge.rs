//! Host bridge: a function without BARs in slot 0. Linux recognizes a PCI bus by it.

use super::{BarRange, ConfigSpace, FunctionIds, PciDevice};

/// Generic PCI Express host bridge (pci.ids 1b36:0008). No driver has quirks for it.
const IDS: FunctionIds = FunctionIds {
    vendor: 0x1b36,
    device: 0x0008,
    revision: 0,
    class: 0x06_00_00,
    subsystem_vendor: 0,
    subsystem: 0,
};

pub(super) struct HostBridge(ConfigSpace);

impl HostBridge {
    pub(super) fn new() -> Self {
        Self(ConfigSpace::new(&IDS))
    }
}

impl Default for HostBridge {
    fn default() -> Self {
        Self::new()
    }
}

impl PciDevice for HostBridge {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    /// Ignores writes. All registers are read-only, because the bridge has no BARs and is not a bus
    /// master.
    fn write_config(&self, _offset: u16, _data: &[u8]) {}

    fn decoded_bars(&self) -> Vec<BarRange> {
        Vec::new()
    }

    fn read_bar(&self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write_bar(&self, _bar: u8, _offset: u64, _data: &[u8]) {}
}
