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
        size_bytes: u64,
        /// What was asked for.
        wanted_bytes: u64,
    },
    /// Not whole blocks.
    #[error("{wanted_bytes} bytes are not whole blocks of {block_bytes}")]
    PartOfBlock {
        /// What was asked for.
        wanted_bytes: u64,
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

    /// Starts a ring for one queue, which never has more than `depth` steps under way. `None`: the
    /// calls of this trait are the only way, or the better one.
    fn start(self: Arc<Self>, _depth: u16) -> Option<Box<dyn Executor>> {
        None
    }

    /// Number of BTT arenas that take no writes because of an error.
    fn read_only_arenas(&self) -> usize {
        0
    }
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
    pub result: io::Result<()>,
}

/// Ring that executes the steps of one queue together. When it is dropped, nothing is under way any
/// more.
pub trait Executor: Send {
    /// Takes a step over, and returns at once. A token is not used twice at a time.
    fn add(&mut self, token: usize, step: Step);

    /// Begins all steps that were added. True: steps that have to be executed by calls are left,
    /// and each call of this function executes one of them.
    fn begin(&mut self) -> bool;

    /// Takes a step that is over.
    fn next_done(&mut self) -> Option<Done>;

    /// Has the event raised for steps that end from now on, until more are begun. True: some are
    /// over already.
    fn arm(&mut self) -> bool;

    /// Event that [`Executor::arm`] raises.
    fn event(&self) -> &EventFd;

    /// Number of steps worth adding before the first is begun.
    fn batch(&self) -> usize;

    /// True once the kernel takes no more steps from the ring, so that system calls execute them.
    fn is_given_up(&self) -> bool;

    /// Waits for the steps under way and returns their results. Steps that have not begun are
    /// dropped, except flushes, which are all executed.
    fn drain(&mut self) -> Vec<Done>;
}
