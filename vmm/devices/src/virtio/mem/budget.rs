//! Rate limits for a guest's plugs and unplugs. The functions read no clock; the caller passes the
//! time.
//!
//! For each plug the host changes mappings, writes the pool's table and, after the unplug, erases
//! the memory. On DAX, erasing takes bandwidth and wears the media. Linux plugs memory once and
//! then uses it, but a hostile driver may plug and unplug the same block in a loop. Each zone
//! therefore has a token bucket whose capacity is the size of the zone. The whole zone can be
//! plugged without delay, and only memory that is plugged again is limited to the rate. An unplug
//! takes no tokens from this bucket. It needs no limit, because no block can be unplugged more
//! often than it is plugged, and the host always benefits from returned memory.
//!
//! A second bucket limits the number of requests of any kind, including refused ones.
//!
//! A request that exceeds a budget is delayed. It is not answered with BUSY, because Linux's driver
//! would then wait for 50 to 300 seconds.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::memory::BLOCK_BYTES;
use crate::memory::zone::ZoneSpec;
use crate::throttle::TokenBucket;

/// Number of requests per second that are allowed after the burst. The most expensive request, an
/// unplug, takes about 100 µs on a host core.
const REQUESTS_PER_S: NonZeroU64 = NonZeroU64::new(4096).expect("not zero");
/// Number of requests per block that are allowed as a burst. A driver that handles each block
/// separately sends three requests: plug, unplug and state. It may first have tried a longer run.
const REQUESTS_PER_BLOCK: u64 = 4;
/// Minimum burst of requests, for small zones.
const MIN_REQUEST_BURST: u64 = 1024;

#[derive(Debug)]
pub struct PlugBudget {
    zone_bytes: u64,
    bytes_per_s: Option<NonZeroU64>,
    requests: TokenBucket,
    /// Token bucket for plugged bytes. `None` if they are unlimited.
    bytes: Option<TokenBucket>,
    /// Number of requests that exceeded the budget, including retries.
    #[cfg(test)]
    pub(super) refusals: u64,
}

impl PlugBudget {
    /// Creates a full budget for `zone`.
    pub fn new(zone: &ZoneSpec, now: Instant) -> Self {
        let (zone_bytes, bytes_per_s) = (zone.hotplug_bytes, zone.plug_bytes_per_s);
        let burst =
            (zone_bytes / BLOCK_BYTES).saturating_mul(REQUESTS_PER_BLOCK).max(MIN_REQUEST_BURST);
        Self {
            zone_bytes,
            bytes_per_s,
            requests: TokenBucket::full(burst, REQUESTS_PER_S, now),
            bytes: bytes_per_s.map(|rate| TokenBucket::full(zone_bytes, rate, now)),
            #[cfg(test)]
            refusals: 0,
        }
    }

    /// Takes the tokens for one request that plugs `bytes`. If there are too few tokens, takes none
    /// and returns the time after which the request can be retried.
    ///
    /// # Panics
    /// Panics if `bytes` exceeds the size of the zone.
    pub(super) fn take(&mut self, bytes: u64, now: Instant) -> Result<(), Duration> {
        self.requests.refill(now);
        let mut wait = self.requests.wait(1);
        if let Some(bucket) = &mut self.bytes {
            bucket.refill(now);
            wait = wait.max(bucket.wait(bytes));
        }
        if wait > Duration::ZERO {
            #[cfg(test)]
            {
                self.refusals += 1;
            }
            return Err(wait);
        }
        self.requests.take(1);
        if let Some(bucket) = &mut self.bytes {
            bucket.take(bytes);
        }
        Ok(())
    }

    fn is_of(&self, zone: &ZoneSpec) -> bool {
        self.zone_bytes == zone.hotplug_bytes && self.bytes_per_s == zone.plug_bytes_per_s
    }
}

/// Plug budgets of a VM, by zone id. They are retained across reboots, so that a guest cannot
/// refill its budget by rebooting.
#[derive(Debug, Default)]
pub struct PlugBudgets(BTreeMap<String, Arc<Mutex<PlugBudget>>>);

impl PlugBudgets {
    /// Returns the budget of `zone`. Creates a full budget if the zone is new or its size or rate
    /// has changed.
    pub fn of(&mut self, zone: &ZoneSpec, now: Instant) -> Arc<Mutex<PlugBudget>> {
        match self.0.get(&zone.id) {
            Some(budget) if budget.lock().is_of(zone) => Arc::clone(budget),
            _ => {
                let budget = Arc::new(Mutex::new(PlugBudget::new(zone, now)));
                self.0.insert(zone.id.clone(), Arc::clone(&budget));
                budget
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::layout::{GIB, MIB};
    use crate::memory::zone::Tier;
    use crate::throttle::NANOS_PER_S;

    fn zone(hotplug_bytes: u64, plug_bytes_per_s: u64) -> ZoneSpec {
        ZoneSpec {
            id: "pm".to_owned(),
            tier: Tier::Pm,
            guest_node: 1,
            hotplug_bytes,
            plug_bytes_per_s: NonZeroU64::new(plug_bytes_per_s),
            ..ZoneSpec::default()
        }
    }

    #[test]
    fn first_plug_of_a_whole_zone_is_free_in_blocks_of_any_size() {
        let now = Instant::now();
        for block_bytes in [2 * MIB, 128 * MIB, 2 * GIB] {
            let mut budget = PlugBudget::new(&zone(24 * GIB, 64 * MIB), now);
            for _ in 0..24 * GIB / block_bytes {
                assert_eq!(budget.take(block_bytes, now), Ok(()));
            }
            // Unplugging all blocks is not delayed either.
            for _ in 0..24 * GIB / block_bytes {
                assert_eq!(budget.take(0, now), Ok(()));
            }
            assert_eq!(budget.take(64 * MIB, now), Err(Duration::from_secs(1)));
        }
    }

    #[test]
    fn refused_request_takes_nothing() {
        let now = Instant::now();
        let mut budget = PlugBudget::new(&zone(GIB, GIB), now);
        budget.take(GIB, now).unwrap();
        let requests = budget.requests.level;
        for _ in 0..10_000 {
            assert!(budget.take(GIB / 2, now).is_err());
        }
        assert_eq!((budget.requests.level, budget.take(0, now)), (requests, Ok(())));
        assert_eq!(budget.take(GIB / 2, now + Duration::from_millis(500)), Ok(()));
    }

    #[test]
    fn requests_are_limited_even_if_bytes_are_not() {
        let start = Instant::now();
        let mut budget = PlugBudget::new(&zone(2 * MIB, 0), start);
        let (mut now, mut served) = (start, 0);
        while now <= start + Duration::from_secs(10) {
            match budget.take(2 * MIB, now) {
                Ok(()) => served += 1,
                Err(wait) => now += wait,
            }
        }
        assert_eq!(served, MIN_REQUEST_BURST + 10 * REQUESTS_PER_S.get());
    }

    #[test]
    fn reboot_keeps_the_budget_and_a_changed_zone_has_a_new_one() {
        let now = Instant::now();
        let mut budgets = PlugBudgets::default();
        budgets.of(&zone(GIB, GIB), now).lock().take(GIB, now).unwrap();
        assert!(budgets.of(&zone(GIB, GIB), now).lock().take(GIB, now).is_err());
        assert!(budgets.of(&zone(2 * GIB, GIB), now).lock().take(2 * GIB, now).is_ok());
        assert!(budgets.of(&zone(2 * GIB, 2 * GIB), now).lock().take(2 * GIB, now).is_ok());
    }

    proptest! {
        /// In any interval, the guest can plug at most the zone's size plus the rate times the
        /// interval.
        #[test]
        fn rate_holds_in_every_interval(
            bytes_per_s in 1..4 * GIB,
            requests in prop::collection::vec((0..=64u64, 0..50_000_000u64), 2..60),
        ) {
            let start = Instant::now();
            let mut budget = PlugBudget::new(&zone(64 * MIB, bytes_per_s), start);
            let (mut now, mut done) = (start, Vec::new());
            for (mib, pause_ns) in requests {
                while let Err(wait) = budget.take(mib * MIB, now) {
                    now += wait;
                }
                done.push((now, mib * MIB));
                now += Duration::from_nanos(pause_ns);
            }
            for from in 0..done.len() {
                let mut bytes = 0;
                for (at, more) in &done[from..] {
                    bytes += u128::from(*more);
                    let refilled = (*at - done[from].0).as_nanos() * u128::from(bytes_per_s);
                    prop_assert!(bytes * NANOS_PER_S <= u128::from(64 * MIB) * NANOS_PER_S + refilled);
                }
            }
        }
    }
}
