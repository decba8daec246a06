//! Blocks of which a read has failed: what they hold is lost, and a lane that gets one does not
//! write to it.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// More than these are not remembered: a write to one that is not fails by itself.
const MAX_REMEMBERED: usize = 1 << 16;

/// Those of an arena, as long as it is open. Whoever opens it next finds those that a lane has in
/// the flog.
#[derive(Default)]
pub(super) struct FailedBlocks {
    /// So that those who have none, which is nearly all, look no further.
    is_any: AtomicBool,
    blocks: Mutex<BTreeSet<u32>>,
}

impl FailedBlocks {
    pub(super) fn add(&self, block: u32) {
        let mut blocks = self.blocks.lock().expect(NO_PANIC);
        if blocks.len() < MAX_REMEMBERED {
            blocks.insert(block);
        }
        self.is_any.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn contains(&self, block: u32) -> bool {
        self.is_any.load(Ordering::Acquire) && self.blocks.lock().expect(NO_PANIC).contains(&block)
    }
}

const NO_PANIC: &str = "no code panics while it holds the list of failed blocks";
