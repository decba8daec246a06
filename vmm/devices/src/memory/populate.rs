//! Allocation of guest memory pages before the first access, on several CPUs.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use foreshore_confinement::thread::spawn_same_kind;

use super::backing::Reservation;
use super::layout::MIB;

/// Maximum number of threads. More threads are not faster, because memory bandwidth limits the
/// speed.
const MAX_THREADS: usize = 16;
/// Bytes that a thread allocates in one step: the size that Linux plugs in one request. Larger
/// sizes use a second thread. If a huge page is larger than a step, the first thread allocates all
/// of the page while the others wait.
const STEP_BYTES: u64 = 128 * MIB;

/// Allocates pages for `len` mapped bytes at `offset` in `reservation`. Existing contents are
/// preserved. On an error, some pages may have been allocated.
pub(super) fn populate(reservation: &Reservation, offset: u64, len: u64) -> io::Result<()> {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    populate_in_steps(reservation, offset, len, STEP_BYTES, cpus.min(MAX_THREADS))
}

fn populate_in_steps(
    reservation: &Reservation,
    offset: u64,
    len: u64,
    step_bytes: u64,
    max_threads: usize,
) -> io::Result<()> {
    let steps = len.div_ceil(step_bytes);
    let threads = max_threads.min(usize::try_from(steps).unwrap_or(usize::MAX));
    let next = AtomicU64::new(0);
    let work = || {
        loop {
            let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(step_bytes);
            if start >= len {
                return Ok(());
            }
            reservation.populate(offset + start, step_bytes.min(len - start)).inspect_err(
                |_| {
                    // Makes the other threads stop.
                    next.store(steps, Ordering::Relaxed);
                },
            )?;
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (1..threads).map(|_| spawn_same_kind(scope, work)).collect();
        let first = work();
        let others = threads.into_iter().map(|thread| thread.join().expect("no panic in populate"));
        others.fold(first, io::Result::and)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: usize = 4096;

    #[test]
    fn only_the_given_range_is_populated() {
        for (len, threads) in [(16 * MIB, 4), (15 * MIB, 4), (MIB, 4), (16 * MIB, 1)] {
            let reservation = Reservation::new(32 * MIB, 2 * MIB).unwrap();
            reservation.map_anonymous(0, 32 * MIB).unwrap();
            reservation.advise_small_pages(0, 32 * MIB);
            populate_in_steps(&reservation, 4 * MIB, len, 2 * MIB, threads).unwrap();
            let pages = reservation.pages(0, 32 * MIB).unwrap();
            let found = 4 * MIB as usize / PAGE_BYTES..(4 * MIB + len) as usize / PAGE_BYTES;
            let is_right = |(nth, page): (usize, &u8)| (page & 1 == 1) == found.contains(&nth);
            assert!(pages.iter().enumerate().all(is_right), "{threads} threads");
        }
    }

    #[test]
    fn failed_allocation_is_an_error_on_any_thread() {
        for mapped in [0, 2, 14] {
            let reservation = Reservation::new(32 * MIB, 2 * MIB).unwrap();
            if mapped > 0 {
                reservation.map_anonymous(0, mapped * MIB).unwrap();
            }
            populate_in_steps(&reservation, 0, 16 * MIB, 2 * MIB, 4).unwrap_err();
        }
    }
}
