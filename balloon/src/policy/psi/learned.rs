//! State that `psi` learns about a guest: its plug time, memory that it does not return, and
//! shrinks that were too early. `psi` also learns the page cache and swapped memory that the guest
//! needs.

use std::collections::VecDeque;

use foreshore_proto::Report;

use super::Params;
use super::history::Rates;
use crate::{HostView, Tier, TimeMs, ZoneId};

/// Plug time that is assumed before the first measurement.
const DEFAULT_PLUG_MS: u64 = 250;

/// Time between two reports while the guest is short of memory.
const REPORT_MS: u64 = 50;

/// Bounds of the plug time, which limit the error that a late report causes.
const PLUG_BOUNDS_MS: (u64, u64) = (20, 2_000);

/// Time for which refused memory is not requested again. The time starts at the first value,
/// and doubles up to the second value.
const REFUSAL_MS: (u64, u64) = (10_000, 600_000);

/// Time after a shrink within which a grow shows that the shrink was too early.
const EARLY_SHRINK_MS: u64 = 60_000;

/// Time without an early shrink after which the learned patience is halved.
const PATIENCE_DECAY_MS: u64 = 300_000;

/// Time for which page cache counts as needed after tasks last waited for evicted pages of it. The
/// time starts at the first value, and doubles up to the second value.
const CACHE_MS: (u64, u64) = (300_000, 3_600_000);

/// Number of consecutive grows without effect after which page cache is ignored. If data is read in
/// a loop, its pages are evicted and read back until all of it fits, so the first grows may not
/// help.
const MAX_INEFFECTIVE_GROWS: u32 = 3;

/// Swapped memory no longer counts as needed if no page was swapped for this time.
const SWAP_COLD_MS: u64 = 60_000;

/// Time from a request until the first part of the requested memory is online.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlugTime {
    ms: u64,
    request: Option<PlugRequest>,
}

/// A request for more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PlugRequest {
    at: TimeMs,
    /// Guest's total memory when the request was made.
    total_bytes: u64,
    /// Time of the last report in which none of the requested memory was online.
    not_online_at: TimeMs,
}

impl Default for PlugTime {
    fn default() -> Self {
        PlugTime { ms: DEFAULT_PLUG_MS, request: None }
    }
}

impl PlugTime {
    pub(super) fn is_quiescent(&self) -> bool {
        self.request.is_none()
    }

    pub(super) fn ms(&self) -> u64 {
        self.ms
    }

    pub(super) fn start_measurement(&mut self, total_bytes: u64, now: TimeMs) {
        self.request.get_or_insert(PlugRequest { at: now, total_bytes, not_online_at: now });
    }

    /// Ends a measurement if memory has arrived. A longer time replaces the plug time immediately.
    /// A shorter time reduces it by a quarter of the difference.
    pub(super) fn learn(&mut self, total_bytes: u64, host: &HostView, now: TimeMs) {
        let Some(request) = &mut self.request else { return };
        if total_bytes > request.total_bytes {
            // The memory was onlined between two reports, which may be one second apart. It is
            // assumed to have been onlined soon after the first of them.
            let took = request.not_online_at.since(request.at)
                + now.since(request.not_online_at).min(REPORT_MS);
            let took = took.clamp(PLUG_BOUNDS_MS.0, PLUG_BOUNDS_MS.1);
            self.ms = if took > self.ms { took } else { self.ms - (self.ms - took) / 4 };
            self.request = None;
        } else if host.outstanding_grow_bytes() > 0 {
            request.not_online_at = now;
        } else if now > request.at {
            // The request was withdrawn, or was never made.
            self.request = None;
        }
    }
}

/// Memory that the guest did not return when it was requested to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UnplugRefusals {
    zones: Vec<UnplugRefusal>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UnplugRefusal {
    id: ZoneId,
    /// Smallest requested size while the zone still has to unplug memory.
    target_bytes: Option<u64>,
    /// Plugged size that remained after the last refusal.
    refused_bytes: u64,
    until: Option<TimeMs>,
    pause_ms: u64,
}

impl UnplugRefusals {
    pub(super) fn is_quiescent(&self, now: TimeMs) -> bool {
        self.zones
            .iter()
            .all(|zone| zone.target_bytes.is_none() && zone.until.is_none_or(|until| until <= now))
    }

    /// Updates the refusals from the results of the last requests. If a shrink was withdrawn and
    /// `psi` did not grow the guest, the guest refused the shrink.
    pub(super) fn learn(&mut self, host: &HostView, now: TimeMs) {
        for zone in &host.zones {
            let index =
                self.zones.iter().position(|known| known.id == zone.id).unwrap_or_else(|| {
                    let new = UnplugRefusal {
                        id: zone.id,
                        target_bytes: None,
                        refused_bytes: 0,
                        until: None,
                        pause_ms: 0,
                    };
                    self.zones.push(new);
                    self.zones.len() - 1
                });
            let known = &mut self.zones[index];
            if zone.outstanding_shrink_bytes() > 0 {
                let to = known
                    .target_bytes
                    .map_or(zone.requested_bytes, |to| to.min(zone.requested_bytes));
                known.target_bytes = Some(to);
                continue;
            }
            let Some(to) = known.target_bytes.take() else { continue };
            if zone.plugged_bytes > to {
                known.refused_bytes = zone.plugged_bytes;
                known.pause_ms = known.pause_ms.saturating_mul(2).clamp(REFUSAL_MS.0, REFUSAL_MS.1);
                known.until = Some(now + known.pause_ms);
            } else if zone.plugged_bytes < known.refused_bytes {
                *known = UnplugRefusal {
                    target_bytes: None,
                    until: None,
                    pause_ms: 0,
                    refused_bytes: 0,
                    ..*known
                };
            }
        }
    }

    /// Forgets pending shrinks when the guest grows. In that case, memory remains plugged because
    /// of the grow and not because it was refused.
    pub(super) fn record_grow(&mut self) {
        for zone in &mut self.zones {
            zone.target_bytes = None;
        }
    }

    /// Returns the memory that can be requested back: for each zone, the memory that it has not
    /// refused to return. If any PM was refused, DRAM is not requested in its place.
    pub(super) fn returnable_bytes(&self, host: &HostView, now: TimeMs) -> u64 {
        let refused = |id: ZoneId| {
            let known = self.zones.iter().find(|known| known.id == id)?;
            known.until.filter(|until| now < *until).map(|_| known.refused_bytes)
        };
        let is_pm_refused =
            host.zones.iter().any(|zone| zone.tier == Tier::Pm && refused(zone.id).is_some());
        host.zones.iter().filter(|zone| !(is_pm_refused && zone.tier == Tier::Dram)).fold(
            0,
            |sum, zone| {
                let least = refused(zone.id).unwrap_or(0).max(zone.floor_bytes);
                sum.saturating_add(zone.requested_bytes.saturating_sub(least))
            },
        )
    }
}

/// Minimum or maximum of a value over a period. A value is dropped as soon as a later value makes
/// it irrelevant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    values: VecDeque<(TimeMs, i64)>,
}

impl Window {
    /// Returns true if a single value is left, so that time alone no longer changes the result.
    pub(super) fn is_quiescent(&self) -> bool {
        self.values.len() <= 1
    }

    /// Adds a value. Returns the minimum over the last `ms`.
    pub(super) fn push_min(&mut self, value: i64, ms: u64, now: TimeMs) -> i64 {
        while self.values.pop_back_if(|(_, earlier)| *earlier >= value).is_some() {}
        self.push(value, ms, now)
    }

    /// Adds a value. Returns the maximum over the last `ms`.
    pub(super) fn push_max(&mut self, value: i64, ms: u64, now: TimeMs) -> i64 {
        while self.values.pop_back_if(|(_, earlier)| *earlier <= value).is_some() {}
        self.push(value, ms, now)
    }

    fn push(&mut self, value: i64, ms: u64, now: TimeMs) -> i64 {
        self.values.push_back((now, value));
        while self.values.pop_front_if(|(at, _)| now.since(*at) > ms).is_some() {}
        self.values.front().map_or(value, |(_, extreme)| *extreme)
    }
}

/// Time for which memory must be idle before it is surplus, and the minimum of idle memory during
/// that time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Patience {
    /// Time since which there has been no sign of shortage.
    calm_since: Option<TimeMs>,
    /// Expected available memory minus the requested memory, so that requests during the period do
    /// not change it.
    available: Window,
    /// Memory that was online during the whole period. Requests do not change it.
    online_available: Window,
    /// Learned patience, if the configured patience was too short. Otherwise 0.
    learned_ms: u64,
    lengthened_at: TimeMs,
    plugged_bytes: u64,
    shrunk_at: Option<TimeMs>,
    grown_at: TimeMs,
}

impl Patience {
    pub(super) fn is_quiescent(&self, params: &Params, now: TimeMs) -> bool {
        let is_over = self.calm_since.is_some_and(|since| now.since(since) >= self.ms(params));
        self.learned_ms == 0
            && is_over
            && self.available.is_quiescent()
            && self.online_available.is_quiescent()
    }

    /// Returns the time for which memory must be idle before it is surplus.
    pub(super) fn ms(&self, params: &Params) -> u64 {
        params.idle_ms.max(self.learned_ms).min(params.max_idle_ms)
    }

    /// Records whether the guest has shrunk since the last report. If a growing guest unplugs
    /// memory, that is not a shrink: Linux unplugs memory for whose page descriptors it has no
    /// room, and plugs it again later.
    pub(super) fn learn(&mut self, host: &HostView, now: TimeMs) {
        let plugged_bytes = host.plugged_bytes();
        let is_growing =
            host.zones.iter().any(|zone| zone.outstanding_grow_bytes() >= zone.block_bytes.max(1));
        if plugged_bytes < self.plugged_bytes && !is_growing {
            self.shrunk_at = Some(now);
        }
        self.plugged_bytes = plugged_bytes;
        if now.since(self.lengthened_at) >= PATIENCE_DECAY_MS {
            (self.learned_ms, self.lengthened_at) = (self.learned_ms / 2, now);
        }
    }

    /// Records a grow. If it follows soon after a shrink, the shrink was too early, and the
    /// patience doubles. The new patience is at least the time since the previous grow, because the
    /// demand may be periodic.
    pub(super) fn record_grow(&mut self, params: &Params, now: TimeMs) {
        self.restart();
        if self.shrunk_at.take().is_some_and(|at| now.since(at) < EARLY_SHRINK_MS) {
            let cycle_ms = now.since(self.grown_at);
            self.learned_ms =
                self.ms(params).saturating_mul(2).max(cycle_ms).min(params.max_idle_ms);
            self.lengthened_at = now;
        }
        self.grown_at = now;
    }

    /// Restarts the period because the guest is short of memory or waits for it, so its memory is
    /// not idle.
    pub(super) fn restart(&mut self) {
        self.calm_since = None;
    }

    /// Returns the minimum of expected available memory over the period, or `None` if the period
    /// has not passed yet. The result is at most the memory that was online during the whole
    /// period.
    pub(super) fn min_available_bytes(
        &mut self,
        params: &Params,
        expected_available_bytes: u64,
        online_available_bytes: u64,
        requested_bytes: u64,
        now: TimeMs,
    ) -> Option<u64> {
        let (since, ms) = (*self.calm_since.get_or_insert(now), self.ms(params));
        // Sizes of memory are far below the limits of both types.
        let least = self.available.push_min(
            expected_available_bytes as i64 - requested_bytes as i64,
            ms,
            now,
        );
        let online_available_bytes =
            self.online_available.push_min(online_available_bytes as i64, ms, now) as u64;
        (now.since(since) >= ms)
            .then(|| requested_bytes.saturating_add_signed(least).min(online_available_bytes))
    }
}

/// Page cache that counts as needed by the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageCacheNeed {
    needed_bytes: u64,
    missed_at: TimeMs,
    retain_ms: u64,
    /// Last grow that was made for page cache.
    last_grow: Option<CacheGrow>,
    /// Time until which the guest does not grow for page cache.
    ignored_until: Option<TimeMs>,
    ignored_ms: u64,
}

/// A grow that was made for page cache, and the number of consecutive grows without effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CacheGrow {
    at: TimeMs,
    /// Guest's total memory before the grow. Memory that has not arrived cannot have helped.
    total_bytes: u64,
    refault_bytes_per_s: u64,
    ineffective_grows: u32,
}

impl PageCacheNeed {
    pub(super) fn is_quiescent(&self, now: TimeMs) -> bool {
        self.is_expired(now) && !self.is_ignored(now)
    }

    /// Checks if the last grow for page cache has helped, that is, if the rate at which evicted
    /// pages are read back has fallen by a quarter.
    pub(super) fn learn(&mut self, total_bytes: u64, rates: &Rates, now: TimeMs) {
        let Some(grow) = self.last_grow.filter(|_| rates.has_signs) else { return };
        if rates.file_refault_bytes_per_s < grow.refault_bytes_per_s / 4 * 3 {
            (self.last_grow, self.ignored_ms) = (None, 0);
        } else if grow.ineffective_grows >= MAX_INEFFECTIVE_GROWS
            && total_bytes > grow.total_bytes
            && rates.files_refaulting
            && rates.stalled
        {
            self.ignored_ms = self.ignored_ms.saturating_mul(2).clamp(CACHE_MS.0, CACHE_MS.1);
            (self.last_grow, self.ignored_until) = (None, Some(now + self.ignored_ms));
            self.needed_bytes = 0;
        }
    }

    /// Records a grow for page cache.
    pub(super) fn record_grow(&mut self, total_bytes: u64, refault_bytes_per_s: u64, now: TimeMs) {
        let before = self.last_grow.filter(|before| now.since(before.at) < EARLY_SHRINK_MS);
        let has_arrived = before.is_none_or(|before| total_bytes > before.total_bytes);
        let ineffective_grows =
            before.map_or(0, |before| before.ineffective_grows) + u32::from(has_arrived);
        // The rate is compared with the rate before the first grow.
        let refault_bytes_per_s =
            before.map_or(refault_bytes_per_s, |before| before.refault_bytes_per_s);
        self.last_grow =
            Some(CacheGrow { at: now, total_bytes, refault_bytes_per_s, ineffective_grows });
    }

    /// Returns true while page cache is ignored because growing did not help.
    pub(super) fn is_ignored(&self, now: TimeMs) -> bool {
        self.ignored_until.is_some_and(|until| now < until)
    }

    /// Records that tasks wait for evicted pages, which means that the present page cache is
    /// needed.
    pub(super) fn record_miss(&mut self, report: &Report, now: TimeMs) {
        let cached_bytes = report.memory().cached_bytes;
        let is_expired = self.is_expired(now);
        if self.retain_ms == 0 {
            self.retain_ms = CACHE_MS.0;
        } else if is_expired {
            self.retain_ms = self.retain_ms.saturating_mul(2).min(CACHE_MS.1);
        }
        self.needed_bytes =
            if is_expired { cached_bytes } else { self.needed_bytes.max(cached_bytes) };
        self.missed_at = now;
    }

    /// Returns the page cache that counts as used.
    pub(super) fn needed_bytes(&self, report: &Report, now: TimeMs) -> u64 {
        if self.is_expired(now) {
            return 0;
        }
        let memory = report.memory();
        self.needed_bytes.min(memory.cached_bytes).min(memory.available_bytes)
    }

    fn is_expired(&self, now: TimeMs) -> bool {
        now.since(self.missed_at) >= self.retain_ms
    }
}

/// Swapped memory that the guest may need again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SwappedMemory {
    pages: u64,
    swapped_at: Option<TimeMs>,
}

impl SwappedMemory {
    pub(super) fn is_quiescent(&self, now: TimeMs) -> bool {
        self.swapped_at.is_some_and(|at| now.since(at) >= SWAP_COLD_MS)
    }

    /// Returns the swapped memory that counts as needed: all of it, until no page has been swapped
    /// for a minute. The minute also starts with the first report, because the guest may be about
    /// to need the memory.
    pub(super) fn needed_bytes(&mut self, report: &Report, now: TimeMs) -> u64 {
        let (memory, counters) = (report.memory(), report.counters());
        let pages = counters.pswpin.saturating_add(counters.pswpout);
        if pages != self.pages || self.swapped_at.is_none() {
            (self.pages, self.swapped_at) = (pages, Some(now));
        }
        match self.swapped_at {
            Some(at) if now.since(at) < SWAP_COLD_MS => {
                memory.swap_total_bytes.saturating_sub(memory.swap_free_bytes)
            }
            _ => 0,
        }
    }
}
