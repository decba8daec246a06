//! Guest memory: address layout, backing memory, and the view through which the VMM accesses it.

pub mod backing;
mod build;
pub mod dimms;
mod file_ranges;
pub mod holes;
pub mod layout;
pub mod lost_memory;
mod populate;
mod private_ranges;
pub mod slots;
pub mod view;
pub mod zone;

pub use build::{BLOCK_BYTES, HotplugPart, Memory, MemoryError, MemoryOptions, PmSource, build};
pub use file_ranges::{FileMapping, MappedRange};
pub use private_ranges::PrivateRanges;
