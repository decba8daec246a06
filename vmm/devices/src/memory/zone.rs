//! Memory zones: ranges of guest-physical memory with one tier and one guest NUMA node.

use std::num::NonZeroU64;
use std::path::PathBuf;

pub use foreshore_types::Tier;
use foreshore_types::{PAGE_BYTES, UNIT_BYTES};

use super::layout::GIB;

/// Host pages that back DRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostPages {
    /// Small pages, and huge pages if the host chooses so (transparent huge pages).
    #[default]
    Transparent,
    Small,
    /// Huge pages of the host's default size, which the host has reserved.
    HugeAsUsual,
    /// Huge pages of this size in bytes, which the host has reserved.
    Huge(u64),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Growth {
    /// Grows and shrinks by virtio-mem blocks.
    #[default]
    VirtioMem,
    /// Grows by DIMMs, which are announced through ACPI and never removed.
    Dimms,
}

/// Host memory behind a DRAM zone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    pub pages: HostPages,
    /// Other processes can map the memory.
    pub shared: bool,
    /// Pages are allocated when memory is plugged, not when it is first touched.
    pub prefault: bool,
    /// Memory counts as committed when it is mapped, so that mapping fails if the host has too
    /// little memory.
    pub reserve: bool,
    /// KSM may merge pages of equal content.
    pub mergeable: bool,
    /// File behind the boot part, if any.
    pub file: Option<PathBuf>,
}

impl HostMemory {
    /// Returns true if no other process can access the memory. It is then anonymous, or, with huge
    /// pages, an unnamed file of this process.
    pub fn is_private(&self) -> bool {
        !self.shared && self.file.is_none()
    }
}

/// ID of a zone's virtio-mem device in the API.
pub fn device_id(zone_id: &str) -> String {
    format!("mem-{zone_id}")
}

/// Configuration of a zone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZoneSpec {
    /// Name in metrics and API calls.
    pub id: String,
    pub tier: Tier,
    /// Guest NUMA node (an ACPI proximity domain).
    pub guest_node: u32,
    pub host: HostMemory,
    /// Host node for all memory of the zone. `None` means any node.
    pub host_node: Option<u32>,
    pub boot_bytes: u64,
    pub growth: Growth,
    /// Upper limit of plugged memory. 0 for a zone that does not grow.
    pub hotplug_bytes: u64,
    /// Size that is requested at the start of the guest.
    pub hotplugged_bytes: u64,
    /// Maximum rate in bytes per second at which the guest may plug memory again after unplugging
    /// it. `None` means no limit.
    pub plug_bytes_per_s: Option<NonZeroU64>,
    /// Upper limit of plugged PM that is moved if volumes need it. 0 except for PM zones.
    pub spill_bytes: u64,
    /// Folder of the file to which it is moved. `None` for DRAM.
    pub spill_file: Option<PathBuf>,
}

impl ZoneSpec {
    /// Page size. Each boot part must be a multiple of it. If the host's default or a file
    /// determines the page size, it is not known here. The result is then the largest of 1 GiB, 2
    /// MiB and 4 KiB that divides the boot memory.
    pub fn boot_page_bytes(&self) -> u64 {
        let largest = || {
            let sizes = [GIB, UNIT_BYTES];
            sizes
                .into_iter()
                .find(|size| self.boot_bytes.is_multiple_of(*size))
                .unwrap_or(PAGE_BYTES)
        };
        match self.host.pages {
            HostPages::Huge(page_bytes) => page_bytes,
            HostPages::HugeAsUsual => largest(),
            HostPages::Transparent | HostPages::Small if self.host.file.is_some() => largest(),
            HostPages::Transparent | HostPages::Small => PAGE_BYTES,
        }
    }
}
