//! Allocation of chunks: free, lent as memory, or waiting to be erased.

pub(super) mod buddy;
pub(super) mod free_content;
pub(super) mod memory;
pub(super) mod pacer;
pub(super) mod recall;
pub(super) mod scrub;
pub(super) mod scrub_queue;
pub(super) mod scrubber;
pub(super) mod wear;
