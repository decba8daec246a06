//! Tests how much memory is needed to process a long trace. The test has a program of its own,
//! because it counts all allocations of its program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufReader, Read};
use std::sync::atomic::{AtomicUsize, Ordering};

use balloon::sim::{GuestConfig, replay};
use balloon::trace::{Reader, Trace};

/// The system's allocator, extended by a count of the allocated memory.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: Each call is passed to the system's allocator unchanged, and counting does not allocate
// memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: The caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: The caller upholds the same contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the peak of the memory that `act` allocates in addition to the memory allocated before.
fn peak_bytes<T>(act: impl FnOnce() -> T) -> (usize, T) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = act();
    (PEAK.load(Ordering::Relaxed) - before, result)
}

const HEADER: &str =
    r#"{"type":"trace","version":1,"vm":"long","boot_bytes":402653184,"zones":[]}"#;

/// A trace with a report every 50 ms. The trace is generated while it is read.
struct Long {
    reports: u64,
    next: u64,
    line: Vec<u8>,
    at: usize,
    bytes: usize,
}

impl Long {
    fn new(reports: u64) -> Self {
        Long { reports, next: 0, line: format!("{HEADER}\n").into_bytes(), at: 0, bytes: 0 }
    }
}

impl Read for Long {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.line.len() && self.next < self.reports {
            let (at_ms, available) = (self.next * 50, 100_000_000 + self.next % 97 * 4096);
            self.line = format!(
                concat!(
                    r#"{{"type":"report","at_ms":{},"report":{{"version":1,"seq":{},"monotonic_ms":{},"#,
                    r#""memory":{{"total_bytes":369098752,"free_bytes":90000000,"available_bytes":{}}},"#,
                    r#""zones":[{{"node":0,"kind":"dma32","free_pages":5120,"min_pages":500,"low_pages":625,"#,
                    r#""high_pages":750,"managed_pages":90112}}]}}}}"#,
                    "\n"
                ),
                at_ms,
                self.next + 1,
                at_ms + 10_000,
                available
            )
            .into_bytes();
            (self.next, self.at) = (self.next + 1, 0);
        }
        let count = buffer.len().min(self.line.len() - self.at);
        buffer[..count].copy_from_slice(&self.line[self.at..self.at + count]);
        self.at += count;
        self.bytes += count;
        Ok(count)
    }
}

#[test]
fn long_trace_is_replayed_in_a_part_of_its_size() {
    const REPORTS: u64 = 20_000;
    let (peak, bytes) = peak_bytes(|| {
        let mut long = Long::new(REPORTS);
        let mut reader = Reader::new(BufReader::new(&mut long)).expect("sound");
        let (setup, _) =
            replay(&mut reader, &GuestConfig::default(), 1000, 800).expect("long enough");
        assert_eq!(setup.demand.segments().len() as u64, REPORTS - 1);
        long.bytes
    });
    assert!(peak < bytes / 2, "{peak} for a trace of {bytes}");
    let (peak, trace) =
        peak_bytes(|| Trace::read(BufReader::new(Long::new(REPORTS))).expect("sound"));
    assert_eq!(trace.entries.len() as u64, REPORTS);
    assert!(peak > bytes, "the whole trace takes {peak}, so the bound is meaningful");
}
