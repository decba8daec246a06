//! Disk content, accessed either by blocking calls ([`BlockDevice`]) or through a ring that
//! executes several steps concurrently ([`Executor`], such as an io_uring).

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
    /// Unit of the media. Partitions and file systems align to it.
    pub physical_block_bytes: u32,
    /// The device refuses writes.
    pub read_only: bool,
    /// The device supports discards.
    pub discard: bool,
    /// Zeroed ranges are deallocated if the driver allows this.
    pub unmap: bool,
}

#[derive(Debug, Error)]
pub enum ResizeError {
    /// A disk cannot shrink, because the guest may still use the data that would be lost.
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
    /// The disk must be resized in another way.
    #[error("{0}")]
    Unsupported(String),
    #[error("cannot resize its file to {wanted_bytes} bytes: {source}")]
    Io {
        /// Requested size.
        wanted_bytes: u64,
        source: io::Error,
    },
}

/// Content of a disk. All queues use it concurrently. Each call blocks until the operation is
/// complete.
///
/// Offsets and lengths are multiples of the block size, and ranges are within the device.
pub trait BlockDevice: Send + Sync {
    /// Properties of the disk, apart from its size.
    fn geometry(&self) -> Geometry;

    fn size_bytes(&self) -> u64;

    /// Returns true if reads and writes only access memory and never wait for a disk.
    fn is_memory(&self) -> bool {
        false
    }

    /// Fills `data` with the bytes at an offset.
    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes `data` to an offset.
    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()>;

    /// Makes all completed writes durable.
    fn flush(&self) -> io::Result<()>;

    fn discard(&self, range: DiskRange) -> io::Result<()>;

    /// Makes a range read as zeros.
    fn write_zeroes(&self, range: DiskRange, unmap: Unmap) -> io::Result<()>;

    fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError>;

    /// Starts a ring for one queue, which never has more than `depth` steps in flight. The ring
    /// serves all activations of the device. Returns `None` if the blocking methods of this
    /// trait are better suited, or if a ring is not available.
    fn start(self: Arc<Self>, _depth: u16) -> Option<Box<dyn Executor>> {
        None
    }

    /// Bytes of a pool that are guaranteed to the disk. `None` if the disk is not in a pool.
    fn reserve_bytes(&self) -> Option<u64> {
        None
    }

    /// Bytes of a pool that the disk occupies. `None` if the disk is not in a pool.
    fn allocated_bytes(&self) -> Option<u64> {
        None
    }

    /// Bytes of the disk that were written and not discarded since. `None` if they are not counted.
    fn live_bytes(&self) -> Option<u64> {
        None
    }

    /// Number of pieces of a pool that the disk occupies.
    fn extents(&self) -> usize {
        0
    }

    /// Bytes of a pool that discards and compactions have released. `None` if the disk is not in a
    /// pool.
    fn released_bytes(&self) -> Option<u64> {
        None
    }

    /// Moves data together and releases the space that becomes empty, for as long as `on_moved`
    /// returns true. It is called with the number of bytes moved since its last call. Returns the
    /// number of released bytes, and 0 if there is nothing to do. A change of the disk ends the
    /// work with [`io::ErrorKind::Interrupted`].
    fn compact(&self, _on_moved: &mut dyn FnMut(u64) -> bool) -> io::Result<u64> {
        Ok(0)
    }

    /// Bytes that [`Self::compact`] has moved. `None` if the disk is not in a pool.
    fn compacted_bytes(&self) -> Option<u64> {
        None
    }

    /// Returns true if the last write that failed for lack of space may succeed now.
    fn has_space(&self) -> bool {
        true
    }

    /// Number of BTT arenas that refuse writes because of an error.
    fn read_only_arenas(&self) -> usize {
        0
    }
}

/// Step of a request: one operation on the media.
pub enum Step {
    /// Fills the buffer with the bytes at this offset.
    Read(u64, Buffer),
    /// Writes the buffer to this offset in bytes.
    Write(u64, Buffer),
    /// Makes all completed writes durable.
    Flush,
    /// Deallocates a range.
    Discard(DiskRange),
    /// Makes a range read as zeros.
    WriteZeroes(DiskRange, Unmap),
}

impl Step {
    /// Executes the step by blocking calls to `device`.
    pub fn execute(&mut self, device: &(impl BlockDevice + ?Sized)) -> io::Result<()> {
        match self {
            Self::Read(offset, buffer) => device.read(*offset, buffer.bytes_mut()),
            Self::Write(offset, buffer) => device.write(*offset, buffer.bytes()),
            Self::Flush => device.flush(),
            Self::Discard(range) => device.discard(*range),
            Self::WriteZeroes(range, unmap) => device.write_zeroes(*range, *unmap),
        }
    }

    /// Returns the buffer of a completed step.
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
    /// The step itself. After a successful read, its buffer contains the data.
    pub step: Step,
    pub result: io::Result<()>,
}

/// Ring that executes the steps of one queue concurrently. Dropping it waits until no step is in
/// flight.
pub trait Executor: Send {
    /// Queues a step without waiting. The token must be unique among the steps in flight.
    fn add(&mut self, token: usize, step: Step);

    /// Starts all queued steps. Steps that the ring cannot execute are executed by blocking calls,
    /// one on each call of this function. Returns true if such steps are left.
    fn begin(&mut self) -> bool;

    /// Returns a completed step, if any.
    fn next_done(&mut self) -> Option<Done>;

    /// Makes later completions raise the event until more steps are started. Returns true if steps
    /// have already completed.
    fn arm(&mut self) -> bool;

    /// Event that [`Executor::arm`] raises.
    fn event(&self) -> &EventFd;

    /// Recommended number of steps to add before [`Executor::begin`] is called.
    fn batch(&self) -> usize;

    /// Returns true if the kernel no longer accepts steps from the ring. Steps are then executed by
    /// system calls.
    fn is_given_up(&self) -> bool;

    /// Waits for the steps in flight and returns their results. Steps that have not started are
    /// dropped, except flushes, which are all executed. The ring is then empty, and can be used
    /// again.
    fn drain(&mut self) -> Vec<Done>;
}
