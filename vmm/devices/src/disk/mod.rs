//! Disk content: a device that executes requests by calls, or a ring that executes them together.

pub mod buffer;
mod direct;
pub mod image;
pub mod range;
mod range_locks;
pub mod uring;

use std::io;
use std::sync::Arc;

use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use self::buffer::Buffer;
use self::range::{DiskRange, Unmap};

/// Properties of a disk that the guest sees, apart from its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Unit of all requests.
    pub block_bytes: u32,
    /// Unit of the media, to which partitions and file systems align.
    pub physical_block_bytes: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Ranges can be discarded.
    pub discard: bool,
    /// Zeroed ranges are deallocated if the driver allows it.
    pub unmap: bool,
}

#[derive(Debug, Error)]
pub enum ResizeError {
    /// Shrinking would lose data that the guest may still use.
    #[error("cannot shrink from {size_bytes} to {wanted_bytes} bytes")]
    Shrinks {
        size_bytes: u64,
        /// Requested size.
        wanted_bytes: u64,
    },
    #[error("size {wanted_bytes} is not a multiple of the block size {block_bytes}")]
    PartOfBlock {
        /// Requested size.
        wanted_bytes: u64,
        block_bytes: u32,
    },
    /// The image is resized by other means.
    #[error("{0}")]
    NotHere(String),
    #[error("cannot resize its file to {wanted_bytes} bytes: {source}")]
    Io {
        /// Requested size.
        wanted_bytes: u64,
        source: io::Error,
    },
}

/// Content of a disk. All queues use it at once. Each call returns when it is done.
///
/// Offsets and lengths are whole blocks inside the device.
pub trait BlockDevice: Send + Sync {
    /// Properties of the disk, apart from its size.
    fn geometry(&self) -> Geometry;

    fn size_bytes(&self) -> u64;

    /// True if reads and writes never wait for more than memory.
    fn is_memory(&self) -> bool {
        false
    }

    /// Fills `data` from an offset.
    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes `data` to an offset.
    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()>;

    /// Makes everything written durable.
    fn flush(&self) -> io::Result<()>;

    fn discard(&self, range: DiskRange) -> io::Result<()>;

    /// Makes a range read as zeros.
    fn write_zeroes(&self, range: DiskRange, unmap: Unmap) -> io::Result<()>;

    fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError>;

    /// Starts a ring for one queue, which never has more than `depth` steps in flight. `None`: the
    /// calls of this trait are the only or the better way.
    fn start(self: Arc<Self>, _depth: u16) -> Option<Box<dyn Executor>> {
        None
    }

    /// Number of BTT arenas that take no writes because of an error.
    fn read_only_arenas(&self) -> usize {
        0
    }
}

/// Step of a request, which the media execute at once.
pub enum Step {
    /// Fills the buffer from an offset in bytes.
    Read(u64, Buffer),
    /// Writes the buffer to an offset in bytes.
    Write(u64, Buffer),
    /// Makes everything written durable.
    Flush,
    /// Deallocates a range.
    Discard(DiskRange),
    /// Makes a range read as zeros.
    WriteZeroes(DiskRange, Unmap),
}

impl Step {
    /// Executes the step by calls of `device`.
    pub fn execute(&mut self, device: &(impl BlockDevice + ?Sized)) -> io::Result<()> {
        match self {
            Self::Read(offset, buffer) => device.read(*offset, buffer.bytes_mut()),
            Self::Write(offset, buffer) => device.write(*offset, buffer.bytes()),
            Self::Flush => device.flush(),
            Self::Discard(range) => device.discard(*range),
            Self::WriteZeroes(range, unmap) => device.write_zeroes(*range, *unmap),
        }
    }

    /// Returns the buffer of a step that is done.
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Self::Read(_, buffer) | Self::Write(_, buffer) => Some(buffer),
            Self::Flush | Self::Discard(_) | Self::WriteZeroes(..) => None,
        }
    }
}

/// Completed step.
pub struct Done {
    /// Token that was passed with the step.
    pub token: usize,
    /// The step. Its buffer is filled if it was a read without an error.
    pub step: Step,
    pub result: io::Result<()>,
}

/// Ring that executes the steps of one queue together. After drop, no step is in flight.
pub trait Executor: Send {
    /// Queues a step and returns at once. A token must be unique among the steps in flight.
    fn add(&mut self, token: usize, step: Step);

    /// Starts all queued steps. Returns true if steps are left that must be executed by calls: each
    /// call of this function executes one of them.
    fn begin(&mut self) -> bool;

    /// Takes a completed step.
    fn next_done(&mut self) -> Option<Done>;

    /// Makes later completions raise the event until more steps are started. Returns true if there
    /// are completed steps already.
    fn arm(&mut self) -> bool;

    /// Event that [`Executor::arm`] raises.
    fn event(&self) -> &EventFd;

    /// Number of steps that should be added before they are started together.
    fn batch(&self) -> usize;

    /// Returns true if the kernel accepts no more steps from the ring, and system calls execute
    /// them.
    fn is_given_up(&self) -> bool;

    /// Waits for the steps in flight and returns their results. Steps that have not begun are
    /// dropped, except flushes, which are all executed.
    fn drain(&mut self) -> Vec<Done>;
}
