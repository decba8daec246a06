//! Memory zones: ranges of guest-physical memory with one tier and one guest NUMA node.

use std::num::NonZeroU64;
use std::path::PathBuf;

pub use foreshore_types::Tier;
use foreshore_types::{PAGE_BYTES, UNIT_BYTES};

use super::layout::GIB;

/// The host's pages that DRAM is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostPages {
    /// Small ones, and huge ones where the host likes to (transparent huge pages).
    #[default]
    Transparent,
    Small,
    /// Huge ones that the host has set aside, of the size that is usual there.
    HugeAsUsual,
    /// The same, of so many bytes.
    Huge(u64),
}

/// How a zone grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Growth {
    /// By the blocks of a virtio-mem device, which come and go.
    #[default]
    VirtioMem,
    /// By DIMMs, which ACPI tells of, and which stay.
    Dimms,
}

/// What the host is asked for where a zone is of DRAM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// The size of its pages.
    pub pages: HostPages,
    /// Others can map it.
    pub shared: bool,
    /// Pages are found when memory comes, not when it is touched.
    pub prefault: bool,
    /// It is counted as taken when it comes, and refused if there is not as much.
    pub reserve: bool,
    /// Pages of the same content may be one.
    pub mergeable: bool,
    /// What the boot part is of, if not of memory alone.
    pub file: Option<PathBuf>,
}

/// What the API calls the virtio-mem device of a zone.
pub fn device_id(zone_id: &str) -> String {
    format!("mem-{zone_id}")
}

/// What a zone shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneSpec {
    /// Its name, which metrics and API calls use.
    pub id: String,
    /// What it is made of.
    pub tier: Tier,
    /// Its node in the guest (an ACPI proximity domain).
    pub guest_node: u32,
    /// What the host is asked for.
    pub host: HostMemory,
    /// The host's node from which all its memory comes; wherever the host likes otherwise.
    pub host_node: Option<u32>,
    /// The part that is there from the start.
    pub boot_bytes: u64,
    pub growth: Growth,
    /// The most that may be plugged beyond it; 0 for a zone that does not grow.
    pub hotplug_bytes: u64,
    /// How much of that is requested when the guest starts.
    pub hotplugged_bytes: u64,
    /// Bytes per second that the guest may plug again after it has unplugged them. `None`: no
    /// bound.
    pub plug_bytes_per_s: Option<NonZeroU64>,
}

impl ZoneSpec {
    /// Page size of which each boot part must be a multiple. If the host's default or a file
    /// determines the page size, it is not known here. The result is then the larger of 1 GiB and
    /// 2 MiB of which the boot memory is a multiple.
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
