//! Guest memory: where it lies, what backs it, and the one view through which the VMM reaches it.

pub mod backing;
mod build;
pub mod dimms;
pub mod layout;
pub mod lost;
mod populate;
pub mod slots;
pub mod view;
pub mod zone;

pub use build::{BLOCK_BYTES, HotplugPart, MappedRange, Memory, MemoryError, MemoryOptions, build};
