//! Types that all programs of Foreshore share.
//!
//! The crate depends on no other crate of the workspace.

#![forbid(unsafe_code)]

pub mod lending;
pub mod similar;
pub mod size;
mod tier;
mod volume_format;

pub use tier::Tier;
pub use volume_format::VolumeFormat;

/// Unit of plugged and unplugged memory: a block of virtio-mem and a chunk of a pool.
pub const UNIT_BYTES: u64 = 2 << 20;

/// Unit of boot memory and of memory that ACPI adds: a page.
pub const PAGE_BYTES: u64 = 4 << 10;

/// Returns one line with the text of an error and of all its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
