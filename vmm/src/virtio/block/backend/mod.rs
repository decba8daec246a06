//! What a disk is made of: something that has bytes, and a way of working on them for each queue.

pub mod blocking;
mod direct;
pub mod image;
mod range_locks;
pub mod uring;
pub mod volume;

use std::io;

use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use super::buffer::Buffer;
use super::request::{DiskRange, Unmap};

/// What a disk shows of itself, apart from its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The unit of all requests.
    pub block_bytes: u32,
    /// What the media works with: partitions and file systems align to it.
    pub physical_block_bytes: u32,
    /// Nothing may be written.
    pub read_only: bool,
    /// Ranges can be given away.
    pub discard: bool,
    /// Ranges that are made to be zeros are given away where the driver allows it.
    pub unmap: bool,
}

/// Why a disk cannot get another size.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// What is cut off would be lost, and the guest may hold it to be there.
    #[error("it has {size_bytes} bytes and does not shrink to {wanted_bytes}")]
    Shrinks {
        /// What it has.
        size_bytes: u64,
        /// What was asked for.
        wanted_bytes: u64,
    },
    /// Not whole blocks.
    #[error("{wanted_bytes} bytes are not whole blocks of {block_bytes}")]
    PartOfBlock {
        /// What was asked for.
        wanted_bytes: u64,
        /// The unit.
        block_bytes: u32,
    },
    /// The disk is somebody else's to resize.
    #[error("{0}")]
    NotHere(String),
    /// The file does not get the size.
    #[error("its file cannot be resized to {wanted_bytes} bytes: {source}")]
    Io {
        /// What was asked for.
        wanted_bytes: u64,
        /// What the operating system says.
        source: io::Error,
    },
}

/// Something that a disk's queues work on, all at once.
pub trait Backend: Send + Sync {
    /// What the disk is like.
    fn geometry(&self) -> Geometry;

    /// Its size now.
    fn size_bytes(&self) -> u64;

    /// Begins to work for one queue, which never has more than `depth` steps under way.
    fn start(&self, depth: u16) -> io::Result<Box<dyn Executor>>;

    /// Makes what was written durable, on the caller's thread.
    fn flush(&self) -> io::Result<()>;

    /// Gives it another size.
    fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError>;
}

/// One step of a request: what media do at once.
pub enum Step {
    /// Fills the buffer from an offset in bytes.
    Read(u64, Buffer),
    /// Writes the buffer to an offset in bytes.
    Write(u64, Buffer),
    /// Makes everything written durable.
    Flush,
    /// Gives a range away.
    Discard(DiskRange),
    /// Makes a range read as zeros.
    WriteZeroes(DiskRange, Unmap),
}

impl Step {
    /// The buffer, when it is not needed any more.
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Self::Read(_, buffer) | Self::Write(_, buffer) => Some(buffer),
            Self::Flush | Self::Discard(_) | Self::WriteZeroes(..) => None,
        }
    }
}

/// A step that is over.
pub struct Done {
    /// What it was given as.
    pub token: usize,
    /// What it was; a buffer that was read into is full if there is no error.
    pub step: Step,
    /// How it went.
    pub result: io::Result<()>,
}

/// Carries out the steps of one queue. When it is dropped, nothing is under way any more.
pub trait Executor: Send {
    /// Takes a step over, and returns at once. A token is not used twice at a time.
    fn add(&mut self, token: usize, step: Step);

    /// Begins all that was added; or, where a step is over when it has begun, carries out one of them. True: there are
    /// more to be begun.
    fn begin(&mut self) -> bool;

    /// A step that is over.
    fn next_done(&mut self) -> Option<Done>;

    /// Has the event raised for steps that end from now on, until more are begun. True: some are over already.
    fn arm(&mut self) -> bool {
        false
    }

    /// What [`Executor::arm`] is about; `None`: all steps are over when [`Executor::begin`] returns.
    fn event(&self) -> Option<&EventFd>;

    /// How many steps are worth being added before the first is begun.
    fn batch(&self) -> usize;

    /// Whether io_uring does it.
    fn is_uring(&self) -> bool {
        false
    }

    /// Waits for what is under way, and says how it went. What has not begun does not begin any more.
    fn drain(&mut self) -> Vec<Done>;
}
