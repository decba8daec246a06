//! Host memory that backs guest memory.

mod access_barrier;
mod dram;
mod host_dram;
mod host_node;
mod pm;
mod reservation;
pub mod resident;
mod segments;
mod source;
mod spill;
mod spill_file;
mod zone_file;

use std::fmt::Debug;
use std::io;
use std::ops::Range;

use foreshore_types::size::Size;
use thiserror::Error;

pub use access_barrier::{AccessBarrier, BarrierError};
pub use dram::DramBacking;
#[cfg(test)]
pub(crate) use host_node::tests::policy_at;
pub use host_node::{HostNode, HostNodeError};
pub use pm::PmBacking;
pub use reservation::{Access, Reservation};
pub use segments::{HeldMappings, MappingBudget};
pub use source::{DramError, DramSource};
pub use spill::{SpillPlan, SpillPlanError, SpillStatistics, Spiller};
pub use spill_file::{SpillFile, SpillFileError};
pub use zone_file::{ZoneFile, ZoneFileError};

use crate::pool::PoolError;

/// Failure to back a run of blocks with memory. The cause is on the host, so the guest receives
/// BUSY.
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
        /// Bytes in huge pages that are free and not reserved.
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
    #[error(
        "pool withholds free space for thin volumes and lends only {} more; {} are needed",
        Size(*available_bytes), Size(*wanted_bytes)
    )]
    Storage {
        /// Requested bytes.
        wanted_bytes: u64,
        available_bytes: u64,
    },
    #[error("pool failed")]
    Pool(#[from] PoolError),
}

/// Memory that backs one hotplug part. Offsets are relative to the start of the part, and the
/// caller has validated them.
pub trait Backing: Debug + Send {
    /// Backs the unplugged range `offset..offset + len` with zeroed memory. On an error, the range
    /// remains unplugged. Memory that may still be mapped in it is then not released.
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError>;

    /// Makes the plugged range `offset..offset + len` inaccessible. On an error, nothing has
    /// changed. The memory remains allocated until [`Backing::free_detached`] releases it.
    fn detach(&mut self, offset: u64, len: u64) -> Result<(), BackingError>;

    /// Releases detached memory, which is scrubbed before reuse. If the release fails, the memory
    /// remains detached, and the next call retries, because pools can recover from a failure.
    fn free_detached(&mut self) -> Result<(), BackingError>;

    /// Returns true for each block of the plugged range `run` whose first page is populated.
    /// Backings whose memory is cheap to allocate on first access need not implement this.
    fn populated_blocks(&self, run: &Range<u64>, block_bytes: u64) -> Vec<bool> {
        vec![false; ((run.end - run.start) / block_bytes) as usize]
    }

    /// Allocates the memory of the plugged range `offset..offset + len` before the first access.
    /// Existing contents are preserved.
    fn populate(&mut self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }
}
