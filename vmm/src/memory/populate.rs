//! Finds the pages of memory before anybody touches it, on several CPUs.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use super::backing::Reservation;
use super::layout::GIB;

/// More threads find no more: what is left is the memory's own speed.
const MAX_THREADS: usize = 16;
/// What one thread takes at a time: a whole number of huge pages of any size.
const STEP_BYTES: u64 = GIB;

/// Finds pages for the first `len` bytes of `reservation`, all of which is mapped. What is in them stays.
pub(super) fn populate(reservation: &Reservation, len: u64) -> io::Result<()> {
    let steps = len.div_ceil(STEP_BYTES);
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let threads = cpus.min(MAX_THREADS).min(usize::try_from(steps).unwrap_or(usize::MAX));
    let next = AtomicU64::new(0);
    let work = || {
        loop {
            let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(STEP_BYTES);
            if start >= len {
                return Ok(());
            }
            reservation.populate(start, STEP_BYTES.min(len - start))?;
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let first = work();
        let others = threads.into_iter().map(|thread| thread.join().expect("no panic in populate"));
        others.fold(first, io::Result::and)
    })
}
