//! What `psi` learns of a guest: how long plugging takes, what does not come back, what was taken
//! too early, and which page cache and which swapped memory it needs.

use std::collections::VecDeque;

use foreshore_proto::Report;

use super::Params;
use super::history::Rates;
use crate::{HostView, Tier, TimeMs, ZoneId};

/// Until it is known how long plugging takes.
const PLUG_MS: u64 = 250;

/// The time between two reports of a guest that is short.
const REPORT_MS: u64 = 50;

/// Plugging is taken to be no faster and no slower than this, whatever a late report makes it look
/// like.
const PLUG_BOUNDS_MS: (u64, u64) = (20, 2_000);

/// What was refused is not asked for again for this long, doubling from the first to the second.
const REFUSED_MS: (u64, u64) = (10_000, 600_000);

/// A grow so soon after a shrink undoes it.
const REGRET_MS: u64 = 60_000;

/// Without such a grow for so long, patience is back to where it began.
const FORGIVEN_MS: u64 = 300_000;

/// How long page cache counts as needed since it was last missed, doubling from the first to the
/// second.
const CACHE_MS: (u64, u64) = (300_000, 3_600_000);

/// So many grows in a row are made for page cache that then comes back as fast as before: memory
/// that is scanned again and again is missed until all of it fits.
const VAIN_GROWS: u32 = 3;

/// Swapped memory of which nothing moved for so long is not needed.
const SWAP_COLD_MS: u64 = 60_000;

/// From a request to the first of it that is online.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlugTime {
    ms: u64,
    asked: Option<Asked>,
}

/// More was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    at: TimeMs,
    /// The guest's total at that time.
    total_bytes: u64,
    /// The last report in which nothing of it was online.
    nothing_at: TimeMs,
}

impl Default for PlugTime {
    fn default() -> Self {
        PlugTime { ms: PLUG_MS, asked: None }
    }
}

impl PlugTime {
    pub(super) fn is_settled(&self) -> bool {
        self.asked.is_none()
    }

    pub(super) fn ms(&self) -> u64 {
        self.ms
    }

    pub(super) fn asked(&mut self, total_bytes: u64, now: TimeMs) {
        self.asked.get_or_insert(Asked { at: now, total_bytes, nothing_at: now });
    }

    /// Takes the slower time at once, and comes down by a quarter of the way.
    pub(super) fn learn(&mut self, total_bytes: u64, host: &HostView, now: TimeMs) {
        let Some(asked) = &mut self.asked else { return };
        if total_bytes > asked.total_bytes {
            // It came between two reports, which may be a second apart: soon after the first of
            // them, for all that is known.
            let took =
                asked.nothing_at.since(asked.at) + now.since(asked.nothing_at).min(REPORT_MS);
            let took = took.clamp(PLUG_BOUNDS_MS.0, PLUG_BOUNDS_MS.1);
            self.ms = if took > self.ms { took } else { self.ms - (self.ms - took) / 4 };
            self.asked = None;
        } else if host.outstanding_grow_bytes() > 0 {
            asked.nothing_at = now;
        } else if now > asked.at {
            // It was not carried out, or was withdrawn.
            self.asked = None;
        }
    }
}

/// What was asked back and did not come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Refusals {
    zones: Vec<Refusal>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Refusal {
    id: ZoneId,
    /// The least that was requested while something is to go.
    going_to: Option<u64>,
    /// What stayed plugged.
    stays_bytes: u64,
    until: Option<TimeMs>,
    pause_ms: u64,
}

impl Refusals {
    pub(super) fn is_settled(&self, now: TimeMs) -> bool {
        self.zones
            .iter()
            .all(|zone| zone.going_to.is_none() && zone.until.is_none_or(|until| until <= now))
    }

    /// Looks at what became of the last requests. One that was withdrawn without a grow of ours was
    /// refused.
    pub(super) fn learn(&mut self, host: &HostView, now: TimeMs) {
        for zone in &host.zones {
            let index =
                self.zones.iter().position(|known| known.id == zone.id).unwrap_or_else(|| {
                    let new = Refusal {
                        id: zone.id,
                        going_to: None,
                        stays_bytes: 0,
                        until: None,
                        pause_ms: 0,
                    };
                    self.zones.push(new);
                    self.zones.len() - 1
                });
            let known = &mut self.zones[index];
            if zone.outstanding_shrink_bytes() > 0 {
                let to =
                    known.going_to.map_or(zone.requested_bytes, |to| to.min(zone.requested_bytes));
                known.going_to = Some(to);
                continue;
            }
            let Some(to) = known.going_to.take() else { continue };
            if zone.plugged_bytes > to {
                known.stays_bytes = zone.plugged_bytes;
                known.pause_ms = known.pause_ms.saturating_mul(2).clamp(REFUSED_MS.0, REFUSED_MS.1);
                known.until = Some(now + known.pause_ms);
            } else if zone.plugged_bytes < known.stays_bytes {
                *known =
                    Refusal { going_to: None, until: None, pause_ms: 0, stays_bytes: 0, ..*known };
            }
        }
    }

    /// More is asked for: what is still to go stays for that reason.
    pub(super) fn grown(&mut self) {
        for zone in &mut self.zones {
            zone.going_to = None;
        }
    }

    /// What can be asked back: no more of a zone than it has not refused, and no DRAM in place of
    /// PM that stays.
    pub(super) fn givable_bytes(&self, host: &HostView, now: TimeMs) -> u64 {
        let stays = |id: ZoneId| {
            let known = self.zones.iter().find(|known| known.id == id)?;
            known.until.filter(|until| now < *until).map(|_| known.stays_bytes)
        };
        let pm_stays =
            host.zones.iter().any(|zone| zone.tier == Tier::Pm && stays(zone.id).is_some());
        host.zones.iter().filter(|zone| !(pm_stays && zone.tier == Tier::Dram)).fold(
            0,
            |sum, zone| {
                let least = stays(zone.id).unwrap_or(0).max(zone.floor_bytes);
                sum.saturating_add(zone.requested_bytes.saturating_sub(least))
            },
        )
    }
}

/// The extreme of a figure over the last time: values that a later one makes irrelevant are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    values: VecDeque<(TimeMs, i64)>,
}

impl Window {
    /// It holds the value that it was given last, and none that will go with time.
    pub(super) fn is_settled(&self) -> bool {
        self.values.len() <= 1
    }

    /// Takes a value, and says the least of the last `ms`.
    pub(super) fn least(&mut self, value: i64, ms: u64, now: TimeMs) -> i64 {
        while self.values.pop_back_if(|(_, earlier)| *earlier >= value).is_some() {}
        self.push(value, ms, now)
    }

    /// Takes a value, and says the most of the last `ms`.
    pub(super) fn most(&mut self, value: i64, ms: u64, now: TimeMs) -> i64 {
        while self.values.pop_back_if(|(_, earlier)| *earlier <= value).is_some() {}
        self.push(value, ms, now)
    }

    fn push(&mut self, value: i64, ms: u64, now: TimeMs) -> i64 {
        self.values.push_back((now, value));
        while self.values.pop_front_if(|(at, _)| now.since(*at) > ms).is_some() {}
        self.values.front().map_or(value, |(_, extreme)| *extreme)
    }
}

/// For how long memory must have been idle before it goes, and how much was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Patience {
    /// Since when the guest has been seen without want.
    calm_since: Option<TimeMs>,
    /// What would be available with nothing plugged: what was asked for in the meantime makes no
    /// difference to it.
    available: Window,
    /// What of it was there, whatever was asked for.
    there: Window,
    /// Longer than configured, because it was too short.
    longer_ms: u64,
    regretted_at: TimeMs,
    plugged_bytes: u64,
    shrunk_at: Option<TimeMs>,
    grown_at: TimeMs,
}

impl Patience {
    pub(super) fn is_settled(&self, params: &Params, now: TimeMs) -> bool {
        let is_over = self.calm_since.is_some_and(|since| now.since(since) >= self.ms(params));
        self.longer_ms == 0 && is_over && self.available.is_settled() && self.there.is_settled()
    }

    /// How long memory must have been idle.
    pub(super) fn ms(&self, params: &Params) -> u64 {
        params.idle_ms.max(self.longer_ms).min(params.max_idle_ms)
    }

    /// Sees whether memory was given back since the last report. What a guest unplugs that is to
    /// have more was not asked of it: Linux does that where it lacks the page descriptors, and
    /// tries again.
    pub(super) fn learn(&mut self, host: &HostView, now: TimeMs) {
        let plugged_bytes = host.plugged_bytes();
        let is_growing =
            host.zones.iter().any(|zone| zone.outstanding_grow_bytes() >= zone.block_bytes.max(1));
        if plugged_bytes < self.plugged_bytes && !is_growing {
            self.shrunk_at = Some(now);
        }
        self.plugged_bytes = plugged_bytes;
        if now.since(self.regretted_at) >= FORGIVEN_MS {
            (self.longer_ms, self.regretted_at) = (self.longer_ms / 2, now);
        }
    }

    /// The guest is short. If something was taken from it lately, that was too early: wait twice as
    /// long the next time, and at least from one grow to the next, which is the time between
    /// two teeth of a saw.
    pub(super) fn grown(&mut self, params: &Params, now: TimeMs) {
        self.disturbed();
        if self.shrunk_at.take().is_some_and(|at| now.since(at) < REGRET_MS) {
            let tooth_ms = now.since(self.grown_at);
            self.longer_ms =
                self.ms(params).saturating_mul(2).max(tooth_ms).min(params.max_idle_ms);
            self.regretted_at = now;
        }
        self.grown_at = now;
    }

    /// The guest is short or waits: what it has now is not idle.
    pub(super) fn disturbed(&mut self) {
        self.calm_since = None;
    }

    /// The least of what is coming over the time of patience, once it has passed, and no more than
    /// was there for all of it.
    pub(super) fn least_bytes(
        &mut self,
        params: &Params,
        coming_bytes: u64,
        there_bytes: u64,
        requested_bytes: u64,
        now: TimeMs,
    ) -> Option<u64> {
        let (since, ms) = (*self.calm_since.get_or_insert(now), self.ms(params));
        // Bytes of memory: far from the bounds of either type.
        let least = self.available.least(coming_bytes as i64 - requested_bytes as i64, ms, now);
        let there_bytes = self.there.least(there_bytes as i64, ms, now) as u64;
        (now.since(since) >= ms)
            .then(|| requested_bytes.saturating_add_signed(least).min(there_bytes))
    }
}

/// Page cache that is missed when it is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cache {
    needed_bytes: u64,
    missed_at: TimeMs,
    keep_ms: u64,
    /// The last grow for it.
    tried: Option<Tried>,
    /// Until when no more is given for it.
    vain_until: Option<TimeMs>,
    vain_ms: u64,
}

/// A grow for page cache, and how many before it helped nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tried {
    at: TimeMs,
    /// The guest's total at that time: what never came cannot have helped.
    total_bytes: u64,
    refault_bytes_per_s: u64,
    in_vain: u32,
}

impl Cache {
    pub(super) fn is_settled(&self, now: TimeMs) -> bool {
        self.is_forgotten(now) && !self.is_beyond_help(now)
    }

    /// Sees whether the last grow for it has helped: that at least a quarter less comes back.
    pub(super) fn learn(&mut self, total_bytes: u64, rates: &Rates, now: TimeMs) {
        let Some(tried) = self.tried.filter(|_| rates.watched) else { return };
        if rates.file_refault_bytes_per_s < tried.refault_bytes_per_s / 4 * 3 {
            (self.tried, self.vain_ms) = (None, 0);
        } else if tried.in_vain >= VAIN_GROWS
            && total_bytes > tried.total_bytes
            && rates.files_refaulting
            && rates.stalled
        {
            self.vain_ms = self.vain_ms.saturating_mul(2).clamp(CACHE_MS.0, CACHE_MS.1);
            (self.tried, self.vain_until) = (None, Some(now + self.vain_ms));
            self.needed_bytes = 0;
        }
    }

    /// The guest is given more for it.
    pub(super) fn tried(&mut self, total_bytes: u64, refault_bytes_per_s: u64, now: TimeMs) {
        let before = self.tried.filter(|before| now.since(before.at) < REGRET_MS);
        let came = before.is_none_or(|before| total_bytes > before.total_bytes);
        let in_vain = before.map_or(0, |before| before.in_vain) + u32::from(came);
        // The first of them is what all are held against.
        let refault_bytes_per_s =
            before.map_or(refault_bytes_per_s, |before| before.refault_bytes_per_s);
        self.tried = Some(Tried { at: now, total_bytes, refault_bytes_per_s, in_vain });
    }

    /// Memory has not helped.
    pub(super) fn is_beyond_help(&self, now: TimeMs) -> bool {
        self.vain_until.is_some_and(|until| now < until)
    }

    /// Evicted pages come back and tasks wait for them: what is cached now is needed.
    pub(super) fn missed(&mut self, report: &Report, now: TimeMs) {
        let cached_bytes = report.memory().cached_bytes;
        let forgotten = self.is_forgotten(now);
        if self.keep_ms == 0 {
            self.keep_ms = CACHE_MS.0;
        } else if forgotten {
            self.keep_ms = self.keep_ms.saturating_mul(2).min(CACHE_MS.1);
        }
        self.needed_bytes =
            if forgotten { cached_bytes } else { self.needed_bytes.max(cached_bytes) };
        self.missed_at = now;
    }

    /// How much of what is cached counts as used.
    pub(super) fn needed_bytes(&self, report: &Report, now: TimeMs) -> u64 {
        if self.is_forgotten(now) {
            return 0;
        }
        let memory = report.memory();
        self.needed_bytes.min(memory.cached_bytes).min(memory.available_bytes)
    }

    fn is_forgotten(&self, now: TimeMs) -> bool {
        now.since(self.missed_at) >= self.keep_ms
    }
}

/// Swapped memory that will come back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Swapped {
    pages: u64,
    moved_at: Option<TimeMs>,
}

impl Swapped {
    pub(super) fn is_settled(&self, now: TimeMs) -> bool {
        self.moved_at.is_some_and(|at| now.since(at) >= SWAP_COLD_MS)
    }

    /// What is in swap counts as needed until nothing of it has moved for a minute. A guest that
    /// was never seen before may be about to want it.
    pub(super) fn needed_bytes(&mut self, report: &Report, now: TimeMs) -> u64 {
        let (memory, counters) = (report.memory(), report.counters());
        let pages = counters.pswpin.saturating_add(counters.pswpout);
        if pages != self.pages || self.moved_at.is_none() {
            (self.pages, self.moved_at) = (pages, Some(now));
        }
        match self.moved_at {
            Some(at) if now.since(at) < SWAP_COLD_MS => {
                memory.swap_total_bytes.saturating_sub(memory.swap_free_bytes)
            }
            _ => 0,
        }
    }
}
