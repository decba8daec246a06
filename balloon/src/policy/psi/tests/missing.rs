//! Rules 6 and 7, and evictions that a cgroup's own limit causes.

use super::*;

#[test]
fn rule_6_returning_page_cache_grows_only_while_tasks_wait() {
    let mut rig = Rig::new();
    rig.raw.memory.cached_bytes = 150 * MIB;
    rig.report(1000, 250);
    rig.counters().workingset_refault_file += 100_000;
    assert_eq!(rig.report(1000, 250).want_bytes, None, "no task waits for it");
    rig.counters().workingset_refault_file += 100_000;
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(1000, 250).reason, Reason::Thrashing);
}

#[test]
fn rule_6_grow_includes_page_cache_that_returns_during_plugging() {
    let want_after = |pages, cached_mib| {
        let mut rig = Rig::new();
        rig.raw.memory.cached_bytes = cached_mib * MIB;
        rig.report(1000, 250);
        rig.counters().workingset_refault_file += pages;
        rig.stall().some_us += 500_000;
        want_mib(rig.report(1000, 250))
    };
    assert_eq!(want_after(2_047, 130), None, "less than 8 MiB/s is read again");
    // 120 MiB are left. This is above the headroom, but below the limit for signs of shortage: the
    // headroom plus a quarter of memory, which is 132 MiB.
    assert_eq!(want_after(2_048, 130), Some(32), "12 MiB in 1.5 s");
    assert_eq!(want_after(12_800, 130), Some(75));
    assert_eq!(
        want_after(25_600, 130),
        Some(130),
        "the grow is limited to the size of the page cache"
    );
    assert_eq!(
        want_after(25_600, 118),
        None,
        "132 MiB are available, so the guest does not evict for lack of memory"
    );
}

/// Reports `cached_mib` of available page cache, for which tasks have waited.
fn missed(rig: &mut Rig, cached_mib: u64) -> Decision {
    rig.raw.memory.cached_bytes = cached_mib * MIB;
    rig.counters().workingset_refault_file += 100_000;
    rig.stall().some_us += 500_000;
    rig.report(1000, 250)
}

#[test]
fn rule_6_missed_page_cache_counts_as_used_until_forgotten() {
    let mut rig = Rig::new();
    rig.report(1000, 250);
    let decision = missed(&mut rig, 220);
    assert_eq!(decision.reason, Reason::LowAvailable, "250 - 220 MiB are available");
    for _ in 0..299 {
        assert_eq!(rig.report(1000, 250).reason, Reason::LowAvailable);
    }
    assert_eq!(rig.report(1000, 250).reason, Reason::Enough, "after five minutes");
    // Tasks wait for evicted pages again, so the page cache counts as needed for twice as long.
    missed(&mut rig, 220);
    assert_eq!(rig.report(599_000, 250).reason, Reason::LowAvailable);
    assert_eq!(rig.report(1_000, 250).reason, Reason::Enough);
}

#[test]
fn rule_6_missed_anonymous_memory_makes_no_page_cache_needed() {
    let mut rig = Rig::new();
    rig.raw.memory.cached_bytes = 100 * MIB;
    rig.report(1000, 131);
    rig.counters().workingset_refault_anon += 100_000;
    rig.stall().some_us += 500_000;
    assert_eq!(rig.report(1000, 131).reason, Reason::Thrashing);
    rig.report(1000, 131);
    assert_eq!(
        rig.report(1000, 131).reason,
        Reason::Enough,
        "100 MiB would be less than the required 131 MiB"
    );
}

/// Guest with 10 GiB of PM online and mostly free, in which a cgroup of a few hundred MiB exceeds
/// its limit.
fn with_plenty_available(pages: impl Fn(&mut Counters)) {
    let mut rig = Rig::new();
    rig.host.zones[1].max_bytes = 20 << 30;
    rig.plug(10 << 10);
    (rig.raw.memory.free_bytes, rig.raw.memory.cached_bytes) = (9 << 30, 300 * MIB);
    let mut shrunk = 0;
    for _ in 0..60 {
        pages(rig.counters());
        rig.stall().some_us += 500_000;
        let decision = rig.report(1000, 10 << 10);
        assert!(!decision.pressure, "{decision:?}");
        shrunk += u32::from(decision.reason == Reason::Surplus);
    }
    assert!(shrunk > 50, "it keeps shrinking: {shrunk}");
    // The guest shrinks only as long as the signs are attributed to the cgroup.
    let mut total_mib = 10 << 10;
    for _ in 0..60 {
        pages(rig.counters());
        rig.stall().some_us += 500_000;
        let decision = rig.report(1000, total_mib);
        assert!(!decision.pressure, "{decision:?} at {total_mib}");
        if let Some(want) = want_mib(decision) {
            rig.plug(want);
            total_mib = want;
            rig.raw.memory.free_bytes =
                rig.raw.memory.free_bytes.min((total_mib - 1).saturating_sub(300) * MIB);
        }
    }
    assert!(total_mib < 1024, "{total_mib}");
}

#[test]
fn rule_5_cgroup_that_swaps_neither_grows_guest_nor_prevents_shrink() {
    with_plenty_available(|counters| counters.pswpout += 900);
}

#[test]
fn rule_6_cgroup_that_misses_anonymous_memory_neither_grows_guest_nor_prevents_shrink() {
    with_plenty_available(|counters| counters.workingset_refault_anon += 20_000);
}

#[test]
fn rule_6_cgroup_that_misses_page_cache_neither_grows_guest_nor_prevents_shrink() {
    with_plenty_available(|counters| counters.workingset_refault_file += 20_000);
}

/// Number of grows of a guest that is full of page cache. One second after each grow, `pages`
/// evicted pages are read back.
fn grows(pages: impl Fn(usize) -> u64) -> (Rig, usize) {
    let mut rig = Rig::new();
    rig.host.zones[1].max_bytes = 1 << 40;
    rig.raw.memory.cached_bytes = 200 * MIB;
    rig.report(1000, 250);
    let (mut grows, mut plugged_mib) = (0, 0);
    for _ in 0..60 {
        let refaults = pages(grows);
        rig.counters().workingset_refault_file += refaults;
        rig.stall().some_us += if refaults < 2_048 { 0 } else { 500_000 };
        if let Some(want) =
            want_mib(rig.report(1000, 250 + plugged_mib)).filter(|want| *want > plugged_mib)
        {
            grows += 1;
            rig.plug(want);
            plugged_mib = want;
            rig.raw.memory.cached_bytes = (200 + want) * MIB;
            // These reports are made after the memory has arrived.
            rig.report(3000, 250 + plugged_mib);
        }
    }
    (rig, grows)
}

#[test]
fn rule_6_page_cache_that_returns_as_fast_after_three_grows_is_ignored() {
    let (mut rig, vain) = grows(|_| 20_000);
    assert_eq!(vain, 3);
    assert_eq!(
        rig.state.cache.needed_bytes(&Report::try_from(rig.raw.clone()).expect("sound"), TimeMs(0)),
        0
    );
    let available_mib = rig.raw.memory.available_bytes / MIB;
    rig.report(300_000, available_mib);
    rig.counters().workingset_refault_file += 20_000;
    rig.stall().some_us += 500_000;
    assert!(rig.report(1000, available_mib).pressure, "another attempt follows after five minutes");
    let (_, helped) = grows(|grows| 20_000 * 6u64.pow(grows as u32) / 10u64.pow(grows as u32));
    assert_eq!(helped, 5, "grows help until less than 8 MiB/s is refaulted");
}

#[test]
fn rule_6_page_cache_that_is_not_missed_counts_as_available() {
    let mut rig = Rig::new();
    rig.raw.memory.cached_bytes = 250 * MIB;
    rig.raw.memory.free_bytes = 2 * MIB;
    for _ in 0..20 {
        assert_eq!(rig.report(1000, 250).want_bytes, None);
    }
}

#[test]
fn rule_7_swapped_memory_counts_as_need_until_it_is_cold() {
    let mut rig = Rig::new();
    rig.raw.memory.swap_total_bytes = 1024 * MIB;
    rig.raw.memory.swap_free_bytes = 904 * MIB;
    // First report of a guest that has swapped before.
    assert_eq!(want_mib(rig.report(1000, 43)), Some(60 + 120 - 43));
    rig.plug(512);
    rig.raw.memory.swap_free_bytes = 904 * MIB;
    let mut warm = rig.clone();
    // After 60 MiB were swapped in, there is surplus beyond the memory that is still swapped out. A
    // minute later, that memory is surplus too.
    let left_after = |rig: &mut Rig, ms| {
        rig.report(ms, 430).want_bytes.map(|want| (want + 430 * MIB) / MIB - 512)
    };
    warm.counters().pswpin += 1;
    warm.report(1000, 430);
    let before = left_after(&mut warm, 59_000).expect("shrinks");
    let after = left_after(&mut warm, 1_000).expect("shrinks");
    assert_eq!(before - after, 120);
}
