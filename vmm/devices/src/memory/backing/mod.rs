//! What guest memory is made of.

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

/// Why a run of blocks has no memory behind it now. All of it is the host's affair: the guest is
/// told BUSY.
#[derive(Debug, Error)]
pub enum BackingError {
    #[error("The mapping budget of {limit} is used up: {used} in use")]
    MappingBudget { limit: usize, used: usize },
    /// The kernel does not map memory.
    #[error("{len:#x} bytes at offset {offset:#x} of the zone cannot be mapped")]
    Map {
        /// Offset in the hotplug part.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    #[error(
        "{} of huge pages of {} are wanted, the host has {} of them free",
        Size(*wanted_bytes), Size(*page_bytes), Size(*available_bytes)
    )]
    HugePages {
        /// What was asked for.
        wanted_bytes: u64,
        /// The size of a page.
        page_bytes: u64,
        /// What nobody has been promised.
        available_bytes: u64,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    #[error("The pool has {available_bytes} bytes left, {wanted_bytes} are wanted")]
    PoolFull {
        /// What was asked for.
        wanted_bytes: u64,
        available_bytes: u64,
    },
    /// The pool does not work.
    #[error("The pool fails")]
    Pool(#[from] PoolError),
}

/// The memory behind one hotplug part. Offsets count from its start; the caller has validated them.
pub trait Backing: Debug + Send {
    /// Puts zeroed memory behind `offset..offset + len`, none of which is plugged: all of it or, on
    /// an error, none that somebody else could get while it may still be mapped here.
    fn plug(&mut self, offset: u64, len: u64) -> Result<(), BackingError>;

    /// Makes `offset..offset + len`, all of which is plugged, inaccessible, all or nothing. The
    /// memory behind it is still set aside: [`Backing::free_detached`] gives it back.
    fn detach(&mut self, offset: u64, len: u64) -> Result<(), BackingError>;

    /// Gives back what has been detached: nobody gets it before it is scrubbed. What is not taken
    /// now stays set aside, and is offered again at the next call, for pools that get over a
    /// failure.
    fn free_detached(&mut self) -> Result<(), BackingError>;

    /// Which of the blocks of `run`, all of which is plugged, have a first page that was touched
    /// already. Backings whose memory costs nothing to find at the first touch need not know.
    fn populated_blocks(&self, run: &Range<u64>, block_bytes: u64) -> Vec<bool> {
        vec![false; ((run.end - run.start) / block_bytes) as usize]
    }

    /// Finds the memory of `offset..offset + len`, all of which is plugged, now instead of at the
    /// first touch. What the guest has written stays.
    fn populate(&mut self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }
}
