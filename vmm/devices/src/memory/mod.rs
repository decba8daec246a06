//! Guest memory: where it lies, what backs it, and the one view through which the VMM reaches it.

pub mod backing;
mod build;
pub mod dimms;
mod file_ranges;
pub mod layout;
pub mod lost;
mod populate;
pub mod slots;
pub mod view;
pub mod zone;

pub use build::{BLOCK_BYTES, HotplugPart, Memory, MemoryError, MemoryOptions, build};
pub use file_ranges::MappedRange;
