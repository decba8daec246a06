//! PCI: one root bus with functions in its slots, accessible through ECAM and the legacy ports.

mod config_space;
mod host_bridge;
pub(crate) mod msix;
mod root_bus;

pub(crate) use config_space::{BarRange, ConfigSpace, FunctionIds};
pub(crate) use root_bus::{PciError, RootBus};

/// Function in a slot of the root bus.
///
/// vCPU threads make all calls, concurrently. Implementations must not call the bus. The bus calls
/// [`Self::decoded_bars`] after every write to the header.
pub trait PciDevice: Send + Sync {
    /// Reads configuration space from `offset`. `offset` and the end of `data` are within 4096
    /// bytes.
    fn read_config(&self, offset: u16, data: &mut [u8]);

    fn write_config(&self, offset: u16, data: &[u8]);

    /// Memory BARs that the function currently decodes. Empty while memory decoding is off.
    fn decoded_bars(&self) -> Vec<BarRange>;

    /// Reads from BAR `bar`.
    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes to BAR `bar`.
    fn write_bar(&self, bar: u8, offset: u64, data: &[u8]);

    /// Notifies the function that BAR `bar` is now accessible at `base`, or no longer accessible.
    fn bar_moved(&self, _bar: u8, _base: Option<u64>) {}

    /// Stops the function. Called when the VM ends or the guest has ejected the function.
    fn stop(&self) {}
}
