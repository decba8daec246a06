//! PCI: one root bus with functions in its slots, reached through ECAM and the legacy ports.

mod config_space;
mod host_bridge;
pub(crate) mod msix;
mod root_bus;

pub(crate) use config_space::{BarRange, ConfigSpace, FunctionIds};
pub(crate) use root_bus::{PciError, RootBus};

/// A function in a slot of the root bus.
///
/// All calls run on vCPU threads, several at once. An implementation never calls the bus back: the
/// bus asks it, after every write to its header, where its BARs are.
pub trait PciDevice: Send + Sync {
    /// Reads configuration space from `offset`, which is below 4096 as is the end of `data`.
    fn read_config(&self, offset: u16, data: &mut [u8]);

    fn write_config(&self, offset: u16, data: &[u8]);

    /// The memory BARs that the function decodes at present: none while memory decoding is off.
    fn decoded_bars(&self) -> Vec<BarRange>;

    /// Reads in BAR `bar`.
    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes in BAR `bar`.
    fn write_bar(&self, bar: u8, offset: u64, data: &[u8]);

    /// BAR `bar` can now be reached at `base`, or no longer.
    fn bar_moved(&self, _bar: u8, _base: Option<u64>) {}

    /// Stops the function, because the VM ends or the guest has ejected it.
    fn stop(&self) {}
}
