//! Memory behind guest memory.

mod dram;
mod host_node;
mod pm;
mod reservation;
pub mod resident;
mod segments;
mod source;
mod zone_file;

use std::fmt::Debug;
use std::io;
use std::ops::Range;

use foreshore_types::size::Size;
use thiserror::Error;

pub use dram::DramBacking;
#[cfg(test)]
pub(crate) use host_node::tests::policy_at;
pub use host_node::{HostNode, HostNodeError};
pub use pm::PmBacking;
pub use reservation::{Access, Reservation};
pub use segments::MappingBudget;
pub use source::{DramError, DramSource};
pub use zone_file::{ZoneFile, ZoneFileError};

use crate::pool::PoolError;

/// Failure to back a run of blocks with memory. The host is the cause, so the guest receives BUSY.
#[derive(Debug, Error)]
pub enum BackingError {
    #[error("mapping budget is used up: {used} of {limit} in use")]
    MappingBudget { limit: usize, used: usize },
    #[error("cannot map {len:#x} bytes at offset {offset:#x} of the zone")]
    Map {
        /// Offset in the hotplug part.
        offset: u64,
        len: u64,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot allocate {} of huge pages of {}; the host has {} of them free",
        Size(*wanted_bytes), Size(*page_bytes), Size(*available_bytes)
    )]
    HugePages {
        wanted_bytes: u64,
        page_bytes: u64,
        /// Bytes of free huge pages that are not reserved.
        available_bytes: u64,
        #[source]
        source: io::Error,
    },
    #[error("pool has {available_bytes} bytes left, {wanted_bytes} are needed")]
    PoolFull {
        /// Requested bytes.
        wanted_bytes: u64,
        available_bytes: u64,
    },
    #[error("pool failed")]
    Pool(#[from] PoolError),
}

/// Memory behind one hotplug part. Offsets count from its start. The caller has validated them.
pub trait Backing: Debug + Send {
    /// Puts zeroed memory behind the unplugged range `offset..offset + len`. On an error, none is
    /// plugged, and memory that may still be mapped here is not released.
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError>;

    /// Makes the plugged range `offset..offset + len` inaccessible, or changes nothing. The memory
    /// stays allocated until [`Backing::free_detached`] releases it.
    fn detach(&mut self, offset: u64, len: u64) -> Result<(), BackingError>;

    /// Releases detached memory, which is scrubbed before reuse. Memory whose release fails stays
    /// detached, and the next call tries again, because pools can recover from a failure.
    fn free_detached(&mut self) -> Result<(), BackingError>;

    /// For each block of the plugged range `run`: true if its first page is populated. Backings
    /// with memory that is cheap to allocate on the first access need not implement this.
    fn populated_blocks(&self, run: &Range<u64>, block_bytes: u64) -> Vec<bool> {
        vec![false; ((run.end - run.start) / block_bytes) as usize]
    }

    /// Allocates the memory of the plugged range `offset..offset + len` before the first access.
    /// Contents are kept.
    fn populate(&mut self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }
}
