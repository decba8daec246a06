//! What a network interface counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// Where a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The guest sends it.
    FromGuest,
    /// The guest receives it.
    ToGuest,
}

impl Direction {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::FromGuest, Self::ToGuest];

    /// As it is shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FromGuest => "from-guest",
            Self::ToGuest => "to-guest",
        }
    }
}

/// Why a frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// The host's interface does not take it: it is down, or the frame's header makes no sense to it.
    Host,
    /// The driver's buffers are too small for it, or are not in memory.
    Buffers,
    /// It leaves to the driver what it has not agreed to do.
    Offload,
    /// The driver's rings cannot be written.
    Ring,
    /// Memory that it was in is lost.
    Memory,
}

impl DropReason {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Host, Self::Buffers, Self::Offload, Self::Ring, Self::Memory];

    /// As it is shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Buffers => "buffers",
            Self::Offload => "offload",
            Self::Ring => "ring",
            Self::Memory => "memory",
        }
    }
}

/// Counters of one interface; they only grow.
#[derive(Debug, Default)]
pub struct NetMetrics {
    frames: [AtomicU64; 2],
    bytes: [AtomicU64; 2],
    dropped: [[AtomicU64; DropReason::ALL.len()]; 2],
    /// Chains that are no frame, or no place for one.
    pub bad_requests: AtomicU64,
    /// Queues whose ring the driver has made nonsense of; each is served again after a reset.
    pub broken_queues: AtomicU64,
    /// Passes of the queues' workers: what they do when there is nothing to be done must not grow.
    #[cfg(test)]
    pub passes: AtomicU64,
}

impl NetMetrics {
    /// Counts a frame that has arrived.
    pub fn passed(&self, direction: Direction, bytes: usize) {
        self.frames[direction as usize].fetch_add(1, Ordering::Relaxed);
        self.bytes[direction as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts one that has not.
    pub fn dropped(&self, direction: Direction, reason: DropReason, frames: u64) {
        self.dropped[direction as usize][reason as usize].fetch_add(frames, Ordering::Relaxed);
    }

    /// Frames that have arrived.
    pub fn frames(&self, direction: Direction) -> u64 {
        self.frames[direction as usize].load(Ordering::Relaxed)
    }

    /// Their bytes, without the header of virtio.
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.bytes[direction as usize].load(Ordering::Relaxed)
    }

    /// Frames that were dropped.
    pub fn drops(&self, direction: Direction, reason: DropReason) -> u64 {
        self.dropped[direction as usize][reason as usize].load(Ordering::Relaxed)
    }
}
