//! What a guest at rest may leave out.

use super::*;
use crate::sim::{HostPool, Random, Workload};

impl Guest {
    /// [`Guest::live`] without anything left out.
    fn live_in_steps(&mut self, to: TimeMs, segment: &Segment, pool: &mut impl Pool) {
        while self.now < to {
            let ms = to.since(self.now).min(self.step_ms(segment));
            self.step(ms, segment, pool);
        }
    }
}

#[test]
fn a_guest_at_rest_leaves_out_nothing_that_changes_it() {
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
                stills += u64::from(guest.is_still(segment));
                guest.live(to, segment, &mut HostPool(0));
                other.live_in_steps(to, segment, &mut HostPool(0));
                assert_eq!(format!("{guest:?}"), format!("{other:?}"), "{} at {to}", workload.name());
            }
        }
    }
    assert!(stills > 1_000, "{stills}");
}

/// What keeps a guest from being still, each alone.
#[test]
fn a_guest_in_which_something_is_to_happen_is_not_still() {
    let segment = Segment {
        anon_bytes: 100 * MIB,
        file_bytes: 20 * MIB,
        touches_per_s: 1,
        hot_permille: 1000,
        ..Segment::default()
    };
    let mut guest = Guest::new(GuestConfig::default(), &[], &segment);
    guest.live(TimeMs(5_000), &segment, &mut HostPool(0));
    assert!(guest.is_still(&segment));
    assert!(!guest.is_still(&Segment { stream_bytes_per_s: 1, ..segment }));
    assert!(!guest.is_still(&Segment { anon_bytes_per_s: 1, ..segment }));
    assert!(!guest.is_still(&Segment { anon_bytes: 100 * MIB + PAGE_BYTES, ..segment }));
    assert!(!guest.is_still(&Segment { file_bytes: 0, ..segment }), "files become cache as any other");
    let mut full = guest.clone();
    full.stream_bytes += full.room_bytes();
    assert!(!full.is_still(&segment), "kswapd wakes");
}
