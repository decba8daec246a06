//! What a line costs whoever takes it: alone in its program, because all that is allocated there is
//! counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use foreshore_proto::{
    Blocks, NodeBlocks, NodeIdle, PROTOCOL_VERSION, RawAgentMessage, RawReport, Zone,
    decode_agent_message, encode_report,
};

/// The system's allocator, and how often it was asked.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes on to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are the same ones.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the same ones.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations<T>(act: impl FnOnce() -> T) -> (usize, T) {
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    let result = act();
    (ALLOCATIONS.load(Ordering::Relaxed) - before, result)
}

#[test]
fn a_report_is_taken_without_a_copy_of_its_fields() {
    let report = RawReport {
        version: PROTOCOL_VERSION,
        zones: vec![Zone::default(); 4],
        blocks: Blocks { nodes: vec![NodeBlocks::default(); 2], ..Blocks::default() },
        idle: vec![NodeIdle::default(); 2],
        ..RawReport::default()
    };
    let mut line = Vec::new();
    encode_report(&report, &mut line);
    let (count, decoded) = allocations(|| decode_agent_message(&line));
    assert_eq!(decoded, Ok(RawAgentMessage::Report(report.clone())));
    assert_eq!(
        count, 4,
        "one for each list, and what serde_json passes over it counts the levels of"
    );
    // By the enum it is many more.
    let (count, decoded) = allocations(|| serde_json::from_slice::<RawAgentMessage>(&line));
    assert!(decoded.is_ok() && count > 10, "{count}");
    let (count, ()) = allocations(|| encode_report(&report, &mut line));
    assert_eq!(count, 0, "and a report is made without any");
}
