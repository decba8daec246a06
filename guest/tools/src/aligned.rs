//! Buffers aligned for O_DIRECT.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};

/// Largest alignment that any device requires.
const ALIGNMENT_BYTES: usize = 4096;

#[derive(Debug)]
pub struct Aligned {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the value owns the memory, and the memory is not bound to a thread.
unsafe impl Send for Aligned {}

impl Aligned {
    pub fn zeroed(len: usize) -> Self {
        assert!(len > 0, "no bytes");
        let layout =
            Layout::from_size_align(len, ALIGNMENT_BYTES).expect("a buffer fits into memory");
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        assert!(!start.is_null(), "out of memory");
        Self { start, layout }
    }
}

impl Deref for Aligned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: zeroed() allocated this many initialized bytes, which live as long as self. There
        // are no other references to them.
        unsafe { std::slice::from_raw_parts(self.start, self.layout.size()) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in deref(), and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: zeroed() allocated the memory with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}
