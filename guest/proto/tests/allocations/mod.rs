//! Counts the allocations of a thread. Tests of other packages include this file by its path.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// System allocator that also counts calls.
struct Counting;

thread_local! {
    // The constant initializer needs no destructor, so the first access in a thread does not
    // allocate.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded to the system's allocator. Counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Calls `act` and returns the number of its allocations, and its result.
pub(crate) fn count<T>(act: impl FnOnce() -> T) -> (usize, T) {
    let before = ALLOCATIONS.get();
    let result = act();
    (ALLOCATIONS.get() - before, result)
}
