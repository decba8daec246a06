//! Blocks whose reads have failed. Their content is lost. A lane that receives such a block does
//! not write to it.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum number of recorded blocks. A write to a block that is not recorded fails by itself.
const MAX_RECORDED: usize = 1 << 16;

/// Failed blocks of an open arena. The next open finds those that a lane has recorded in the flog.
#[derive(Default)]
pub(super) struct FailedBlocks {
    /// Fast path for arenas without failed blocks.
    has_any: AtomicBool,
    blocks: Mutex<BTreeSet<u32>>,
}

impl FailedBlocks {
    pub(super) fn add(&self, block: u32) {
        let mut blocks = self.blocks.lock().expect(NO_PANIC);
        if blocks.len() < MAX_RECORDED {
            blocks.insert(block);
        }
        self.has_any.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn contains(&self, block: u32) -> bool {
        self.has_any.load(Ordering::Acquire) && self.blocks.lock().expect(NO_PANIC).contains(&block)
    }
}

const NO_PANIC: &str = "no code panics while holding the list of failed blocks";
