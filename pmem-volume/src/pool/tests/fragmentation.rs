//! Contiguity of a pool's free space after a million random operations. docs/design/benchmarks.md
//! contains the results.

use std::io::Write;

use super::*;
use crate::media::simulator::Random;
use crate::pool::alloc::buddy::{Buddy, Placement};

/// Number of chunks in a pool of 256 GiB.
const CHUNKS: u32 = 1 << 17;
const OPERATIONS: u32 = 1_000_000;
/// Order of extents of 1 GiB, the largest page size of x86-64.
const LARGE_ORDER: u8 = 9;
/// Binary logarithm that limits the size of a request. Requests have 2 MiB to 4 GiB.
const MAX_REQUEST_BITS: u64 = 12;

/// Returns a random size with a uniformly distributed logarithm.
fn request(random: &mut Random) -> u32 {
    let order = random.below(MAX_REQUEST_BITS);
    (1 << order) + random.below(1 << order) as u32
}

/// Returns the percentage of chunks that are in large extents.
fn large_percent(extents: impl Iterator<Item = Extent>) -> f64 {
    let (mut large, mut all) = (0u64, 0u64);
    for extent in extents {
        all += u64::from(extent.chunks());
        large += if extent.order >= LARGE_ORDER { u64::from(extent.chunks()) } else { 0 };
    }
    100.0 * large as f64 / all.max(1) as f64
}

/// Lends and returns memory, one request or a part of one at a time. `percent` of the pool remains
/// lent.
fn churn(percent: u32, random: &mut Random) -> (Buddy, Vec<Vec<Extent>>) {
    let mut buddy = Buddy::default();
    buddy.free_run(Run { start: ChunkId(0), chunks: CHUNKS });
    let mut held: Vec<Vec<Extent>> = Vec::new();
    let keep_free = CHUNKS - CHUNKS / 100 * percent;
    let mut operations = 0;
    while operations < OPERATIONS {
        let chunks = request(random);
        // Returns memory until there is space for a request of any size. Otherwise, only small
        // requests would be left after a while.
        while buddy.free_chunks() < keep_free + chunks {
            let index = random.below(held.len() as u64) as usize;
            let remaining = if random.below(4) == 0 { held[index].len() / 2 } else { 0 };
            held[index].split_off(remaining).into_iter().for_each(|extent| buddy.free(extent));
            if remaining == 0 {
                held.swap_remove(index);
            }
            operations += 1;
        }
        held.extend(buddy.allocate(chunks, Placement::High));
        operations += 1;
    }
    (buddy, held)
}

/// Returns the free extents, largest first.
fn free_extents(buddy: &mut Buddy) -> Vec<Extent> {
    let all = buddy.free_chunks();
    let mut extents = Vec::new();
    // Allocated one by one, because a larger request would be divided according to its own size.
    while let Some(order) = buddy.largest_order() {
        extents.extend(buddy.allocate(1 << order, Placement::Low).expect("it is free"));
    }
    assert_eq!(extents.iter().map(|extent| extent.chunks()).sum::<u32>(), all);
    extents
}

#[test]
fn million_random_operations_leave_large_extents_that_merge_again() {
    for percent in [50, 80, 95] {
        let (mut buddy, held) = churn(percent, &mut Random::new(u64::from(percent)));
        let largest = buddy.largest_order();
        let free = free_extents(&mut buddy);
        let lent = || held.iter().flatten().copied();
        let (free_large, lent_large) = (large_percent(free.iter().copied()), large_percent(lent()));
        let lent_chunks: u32 = lent().map(|extent| extent.chunks()).sum();
        let free_chunks: u32 = free.iter().map(|extent| extent.chunks()).sum();
        assert_eq!(lent_chunks + free_chunks, CHUNKS, "each chunk is listed once");
        // Bypasses the test harness, which captures the output of passing tests.
        let _ = writeln!(
            std::io::stderr(),
            "{percent} % lent, {OPERATIONS} operations: largest free order {}, in extents of 1 GiB and more: {free_large:.0} % of free memory, {lent_large:.0} % of lent memory",
            largest.map_or("none".to_owned(), |order| order.to_string()),
        );
        assert!(
            largest >= Some(LARGE_ORDER - 1),
            "the largest free extent is less than 512 MiB: {largest:?}"
        );
        assert!(free_large > 20.0 && lent_large > 50.0, "{free_large} % and {lent_large} %");
        free.into_iter().chain(lent()).for_each(|extent| buddy.free(extent));
        assert_eq!(buddy.free_chunks(), CHUNKS);
        assert_eq!(buddy.longest_run(), CHUNKS);
        let whole = free_extents(&mut buddy);
        assert!(whole.iter().all(|extent| extent.order == MAX_ORDER), "all free chunks merge");
    }
}
