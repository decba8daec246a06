//! Tests that skipping the steps of an idle guest does not change its state.

use super::*;
use crate::sim::{HostPool, Random, Workload};

impl Guest {
    /// Same as [`Guest::live`], but never skips a step.
    fn live_in_steps(&mut self, to: TimeMs, segment: &Segment, pool: &mut impl Pool) {
        while self.now < to {
            let ms = to.since(self.now).min(self.step_ms(segment));
            self.step(ms, segment, pool);
        }
    }
}

#[test]
fn steps_skipped_at_rest_change_nothing() {
    let mut stills = 0;
    for (workload, seed) in Workload::ALL.into_iter().zip(0..) {
        let boot_bytes = 384 * MIB;
        let mut params = workload.defaults();
        params.period_ms = params.period_ms.min(600_000);
        let demand = workload.demand(&params, boot_bytes, 1_200_000, &mut Random::new(seed, 0));
        let segments = demand.segments();
        let mut guest = Guest::new(GuestConfig::default(), &[], &segments[0]);
        let mut other = guest.clone();
        for (index, segment) in segments.iter().enumerate() {
            let end = segments.get(index + 1).map_or(demand.end(), |next| next.at);
            while guest.now() < end {
                let to = (guest.now() + 1_000).min(end);
                stills += u64::from(guest.is_constant(segment));
                guest.advance(to, segment, &mut HostPool::new(0));
                other.live_in_steps(to, segment, &mut HostPool::new(0));
                assert_eq!(
                    format!("{guest:?}"),
                    format!("{other:?}"),
                    "{} at {to}",
                    workload.name()
                );
            }
        }
    }
    assert!(stills > 1_000, "{stills}");
}

/// Each case has one pending change, so no step may be skipped.
#[test]
fn guest_with_pending_change_is_not_still() {
    let segment = Segment {
        anon_bytes: 100 * MIB,
        file_bytes: 20 * MIB,
        touches_per_s: 1,
        hot_permille: 1000,
        ..Segment::default()
    };
    let mut guest = Guest::new(GuestConfig::default(), &[], &segment);
    guest.advance(TimeMs(5_000), &segment, &mut HostPool::new(0));
    assert!(guest.is_constant(&segment));
    assert!(!guest.is_constant(&Segment { stream_bytes_per_s: 1, ..segment }));
    assert!(!guest.is_constant(&Segment { anon_bytes_per_s: 1, ..segment }));
    assert!(!guest.is_constant(&Segment { anon_bytes: 100 * MIB + PAGE_BYTES, ..segment }));
    assert!(
        !guest.is_constant(&Segment { file_bytes: 0, ..segment }),
        "these files are cached like others"
    );
    let mut full = guest.clone();
    full.stream_bytes += full.room_bytes();
    assert!(!full.is_constant(&segment), "kswapd wakes");
}

/// Returns the plugged size every 10 ms for one second. 256 MiB are requested at the start, and
/// `then` bytes after half a second.
fn plugged(then: u64) -> Vec<u64> {
    let zone = ZoneSizes::empty(0, Tier::Dram, 512 * MIB);
    let segment = Segment { anon_bytes: 64 * MIB, hot_permille: 1000, ..Segment::default() };
    // Plugging a block takes 4 ms.
    let config = GuestConfig { plug_delay_ms: 100, plug_block_us: 4_000, ..GuestConfig::default() };
    let mut guest = Guest::new(config, &[zone], &segment);
    let at = |ms: u64| {
        guest.advance(TimeMs(ms), &segment, &mut HostPool::new(0));
        match ms {
            0 => guest.request([256 * MIB]),
            500 => guest.request([then]),
            _ => {}
        }
        guest.plugged_bytes() / MIB
    };
    (0..=1_000).step_by(10).map(at).collect()
}

#[test]
fn working_driver_adopts_new_size_and_reversed_one_starts_again() {
    let same = plugged(256 * MIB);
    assert_eq!((same[10], same[50], same[100]), (0, 200, 256));
    assert_eq!(plugged(512 * MIB)[..=61], same[..=61], "no pause");
    let back = plugged(0);
    assert_eq!((back[59], back[100] < 200), (200, true), "a pause, and back");
}

/// Guest with 512 MiB of DRAM and 7 GiB of PM.
struct Loaded {
    guest: Guest,
    now_ms: u64,
}

impl Loaded {
    const PM_BYTES: u64 = 7168 * MIB;

    fn new() -> Self {
        let pm = ZoneSizes { guest_numa_node: 1, ..ZoneSizes::empty(0, Tier::Pm, Self::PM_BYTES) };
        let config = GuestConfig { boot_bytes: 512 * MIB, ..GuestConfig::default() };
        Self { guest: Guest::new(config, &[pm], &Segment::default()), now_ms: 0 }
    }

    /// Simulates one minute with `anon_mib` of anonymous memory.
    fn advance(&mut self, anon_mib: u64) {
        self.now_ms += 60_000;
        let segment = Segment { anon_bytes: anon_mib * MIB, ..Segment::default() };
        self.guest.advance(TimeMs(self.now_ms), &segment, &mut HostPool::new(2 * Self::PM_BYTES));
    }

    fn plug(&mut self, mib: u64, anon_mib: u64) {
        self.guest.request([mib * MIB]);
        self.advance(anon_mib);
        assert_eq!(self.guest.plugged_bytes(), mib * MIB);
    }

    /// Returns the free memory in the kernel's zone, in MiB.
    fn kernel_free_mib(&self) -> u64 {
        self.guest.free_by_zone(&mut [0]).kernel_bytes / MIB
    }
}

/// Sum of a sixteenth of DRAM and the page descriptors of 7 GiB, which are 112 MiB. The ratio is 1,
/// so all of ZONE_MOVABLE is reserved.
const KEPT_MIB: u64 = 144;

#[test]
fn user_pages_leave_reserve_free_in_addition_to_descriptors() {
    let mut loaded = Loaded::new();
    let reserved_bytes: u64 =
        loaded.guest.boot().kernel_zones(0, 0).map(|part| part.zone.reserved_bytes).sum();
    assert_eq!(reserved_bytes / MIB, KEPT_MIB);
    loaded.plug(2048, 0);
    loaded.advance(1500);
    assert_eq!(loaded.guest.descriptor_bytes(), 32 * MIB);
    assert_eq!(loaded.kernel_free_mib(), KEPT_MIB);
}

#[test]
fn reserve_used_for_descriptors_is_refilled_when_pages_are_freed() {
    let mut loaded = Loaded::new();
    loaded.advance(320);
    let free_mib = loaded.kernel_free_mib();
    assert!((KEPT_MIB..KEPT_MIB + 32).contains(&free_mib), "{free_mib}");
    loaded.plug(2048, 320);
    assert_eq!(loaded.kernel_free_mib(), free_mib - 32, "the user pages stay");
    loaded.advance(1500);
    assert_eq!(loaded.kernel_free_mib(), free_mib - 32);
    loaded.advance(0);
    loaded.advance(1500);
    assert_eq!(loaded.kernel_free_mib(), KEPT_MIB);
}

#[test]
fn reserve_is_refilled_when_some_pages_are_freed() {
    let mut loaded = Loaded::new();
    loaded.advance(320);
    loaded.plug(2048, 320);
    loaded.advance(1500);
    assert!(loaded.kernel_free_mib() < KEPT_MIB);
    // Half of all pages are freed, and so is half of the pages in the kernel's zone.
    loaded.advance(750);
    loaded.advance(1500);
    assert_eq!(loaded.kernel_free_mib(), KEPT_MIB);
}

/// Guest of 384 MiB without PM and swap. Its programs use 250 MiB. After `plugged_mib` of DRAM have
/// been plugged, the kernel demands 250 MiB.
fn kernel_load_after(plugged_mib: u64) -> Guest {
    let dram = ZoneSizes::empty(0, Tier::Dram, 256 * MIB);
    let swap = SwapDevice::from_name("none", 0).expect("listed");
    let config = GuestConfig { swap, ..GuestConfig::default() };
    let programs = Segment { anon_bytes: 250 * MIB, ..Segment::default() };
    let mut guest = Guest::new(config, &[dram], &programs);
    guest.request([plugged_mib * MIB]);
    guest.advance(TimeMs(10_000), &programs, &mut HostPool::new(0));
    assert_eq!(guest.plugged_bytes(), plugged_mib * MIB);
    let kernel = Segment { kernel_bytes: 250 * MIB, ..programs };
    guest.advance(TimeMs(20_000), &kernel, &mut HostPool::new(0));
    guest
}

#[test]
fn plugged_dram_does_not_empty_the_zones_of_the_kernel() {
    let [without, with] = [0, 256].map(kernel_load_after);
    assert!(without.totals().oom_kills > 0);
    assert_eq!(with.totals().oom_kills, without.totals().oom_kills);
    assert_eq!((with.totals().demoted_bytes, with.kernel_killed_bytes() > 0), (0, true));
    // New pages are placed in plugged memory, so the kernel keeps the memory that was freed in its
    // zones.
    let mut guest = with;
    let more = Segment { anon_bytes: 400 * MIB, ..Segment::default() };
    guest.advance(TimeMs(21_000), &Segment::default(), &mut HostPool::new(0));
    guest.advance(TimeMs(22_000), &more, &mut HostPool::new(0));
    assert_eq!(
        (guest.resident_bytes(), guest.totals().oom_kills),
        (400 * MIB, without.totals().oom_kills)
    );
}

#[test]
fn no_page_is_swapped_while_page_cache_is_left() {
    let segment = Segment { anon_bytes: 100 * MIB, ..Segment::default() };
    let mut guest = Guest::new(GuestConfig::default(), &[], &segment);
    guest.stream_bytes = 20 * MIB;
    let mut reclaim = || {
        guest.reclaim(12 * MIB, &mut Budget::new(1, &guest.config.swap.clone()));
        [guest.cached_bytes() / MIB, guest.totals.swapped_out_bytes / PAGE_BYTES]
    };
    let seen = [(); 5].map(|()| reclaim());
    assert_eq!(seen, [[16, 0], [12, 0], [8, 0], [4, 0], [0, 50]]);
}
