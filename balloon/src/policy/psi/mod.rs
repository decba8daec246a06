//! `psi`: sizes by what the guest will need. docs/policy.md has its rules on one page; the numbers in comments here
//! are theirs.

mod history;
mod params;
#[cfg(test)]
mod tests;

use foreshore_proto::Report;
pub use params::Params;

use self::history::{History, Rates};
use super::{Decision, Input};
use crate::plan::Reason;
use crate::units::scale;
use crate::{HostView, TimeMs};

const PAGE_BYTES: u64 = 4096;

/// A total that did not move for this long, while nothing was plugged or unplugged, shows what the guest has beside
/// its hotplugged memory.
const SETTLE_MS: u64 = 2_000;

/// More doublings than this add more than any rate of growth asks for.
const MAX_STREAK: u32 = 6;

/// Grows closer together than this are one, seen by several reports.
const SAME_GROW_MS: u64 = 250;

/// What `psi` remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    history: History,
    base: Base,
    grown: Option<Grown>,
    calm: Option<Calm>,
    /// The guest's clock when memory was last on its way to it.
    coming_ms: u64,
    /// What was used when nothing was on its way back.
    still_used_bytes: Option<u64>,
}

/// The last grow, and how many followed closely upon one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grown {
    at: TimeMs,
    streak: u32,
}

/// Since when the guest has had a surplus, and the least that it had since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Calm {
    since: TimeMs,
    least_bytes: u64,
}

/// Decides on one report.
pub fn decide(params: &Params, mut state: State, input: Input<'_>, now: TimeMs) -> (State, Decision) {
    state.base.learn(input, now);
    let online_bytes = state.base.online_bytes(input.report.memory().total_bytes, input.host);
    let leaving_bytes = state.leaving(input, online_bytes);
    state.history.push(input.report, leaving_bytes);
    if input.host.outstanding_grow_bytes() > 0 {
        state.coming_ms = input.report.monotonic_ms();
    }
    let rates = state.history.rates(params, state.coming_ms.min(input.report.monotonic_ms()));
    let marks = Marks::new(params, input.report, &rates);
    // What will be available once the guest has followed every request: what is now, with what is still to come,
    // without what is still to go.
    let available_bytes = input.report.memory().available_bytes.saturating_add(leaving_bytes);
    let coming_bytes =
        available_bytes.saturating_add(input.host.requested_bytes()).saturating_sub(online_bytes);

    let grow = shortage(&marks, &rates, coming_bytes, input);
    let decision = match grow {
        Some((reason, need_bytes)) => {
            state.calm = None;
            let step_bytes = need_bytes.max(state.next_step(params, now));
            decided(Some(input.host.requested_bytes().saturating_add(step_bytes)), reason, true, &marks)
        }
        None => {
            let surplus_bytes = state.surplus(params, &marks, &rates, coming_bytes, now);
            match input.host.requested_bytes() {
                requested if surplus_bytes > 0 && requested > 0 => {
                    decided(Some(requested.saturating_sub(surplus_bytes)), Reason::Surplus, false, &marks)
                }
                _ => decided(None, Reason::Enough, false, &marks),
            }
        }
    };
    (state, decision)
}

fn decided(want_bytes: Option<u64>, reason: Reason, pressure: bool, marks: &Marks) -> Decision {
    Decision { want_bytes, near: None, reason, pressure, watermark_bytes: marks.watch_bytes }
}

/// Sizes of available memory at which something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Marks {
    /// Rule 1: the headroom of a guest whose use does not grow.
    rest_bytes: u64,
    /// Rule 2: the headroom that also bridges the time until more can be there.
    low_bytes: u64,
    /// Rule 3: where a grow leads.
    aim_bytes: u64,
    /// Rule 7: where a shrink leads.
    keep_bytes: u64,
    /// Rule 7: above this there may be a surplus.
    high_bytes: u64,
    /// Rule 9: under this the agent reports fast.
    watch_bytes: u64,
}

impl Marks {
    fn new(params: &Params, report: &Report, rates: &Rates) -> Self {
        let total_bytes = report.memory().total_bytes;
        let kswapd_bytes = report
            .zones()
            .iter()
            .filter(|zone| zone.managed_pages > 0)
            .fold(0u64, |sum, zone| sum.saturating_add(zone.high_pages.saturating_mul(PAGE_BYTES)));
        let rest_bytes = scale(total_bytes, params.headroom_permille, 1000)
            .clamp(params.min_headroom_bytes, params.max_headroom_bytes)
            .max(kswapd_bytes.saturating_mul(params.watermark_scale));
        // A burst may look faster than anything can last: never provide for more than as much again as there is.
        let bridge_bytes = scale(rates.fill_bytes_per_s, params.horizon_ms, 1000).min(total_bytes);
        let low_bytes = rest_bytes.saturating_add(bridge_bytes);
        Marks {
            rest_bytes,
            low_bytes,
            aim_bytes: low_bytes.saturating_mul(2),
            keep_bytes: scale(rest_bytes, 9, 4),
            high_bytes: rest_bytes.saturating_mul(3),
            watch_bytes: low_bytes.saturating_add(rest_bytes / 2),
        }
    }
}

/// Rules 3 to 6: whether the guest is short, why, and by how much.
fn shortage(marks: &Marks, rates: &Rates, coming_bytes: u64, input: Input<'_>) -> Option<(Reason, u64)> {
    let need_bytes = marks.aim_bytes.saturating_sub(coming_bytes);
    if coming_bytes < marks.low_bytes {
        let reason = if coming_bytes < marks.rest_bytes { Reason::LowAvailable } else { Reason::Filling };
        return Some((reason, need_bytes));
    }
    // What follows are signs of a shortage that has been; memory on its way is the answer to it already.
    if input.host.outstanding_grow_bytes() > 0 {
        return None;
    }
    let tight = coming_bytes < marks.high_bytes;
    if tight && (rates.swapped_out_bytes > 0 || rates.swapping_in) {
        return Some((Reason::Swapping, need_bytes.max(rates.swapped_out_bytes.saturating_mul(2))));
    }
    if rates.refaulting && rates.stalled {
        return Some((Reason::Thrashing, need_bytes.max(marks.rest_bytes)));
    }
    if tight && rates.stalled {
        return Some((Reason::Stalled, need_bytes));
    }
    None
}

impl State {
    /// Memory that the guest is about to give back: Linux takes it out of what is free first, and out of the total
    /// only at the end. A rise in use while memory is to go is taken for that, as far as it goes: if it is use after
    /// all, what was to go is still there to serve it.
    fn leaving(&mut self, input: Input<'_>, online_bytes: u64) -> u64 {
        let memory = input.report.memory();
        let used_bytes = memory.total_bytes - memory.available_bytes;
        let to_go_bytes = online_bytes.saturating_sub(input.host.requested_bytes());
        if to_go_bytes == 0 {
            self.still_used_bytes = Some(used_bytes);
        }
        let still_bytes = *self.still_used_bytes.get_or_insert(used_bytes);
        used_bytes.saturating_sub(still_bytes).min(to_go_bytes)
    }

    /// Rule 4: the least step, doubled for every grow that follows closely upon another.
    fn next_step(&mut self, params: &Params, now: TimeMs) -> u64 {
        let streak = match self.grown {
            Some(grown) if now.since(grown.at) < SAME_GROW_MS => grown.streak,
            Some(grown) if now.since(grown.at) <= params.streak_ms => (grown.streak + 1).min(MAX_STREAK),
            _ => 0,
        };
        let same = self.grown.filter(|grown| now.since(grown.at) < SAME_GROW_MS);
        self.grown = Some(Grown { at: same.map_or(now, |grown| grown.at), streak });
        params.min_step_bytes.saturating_mul(1 << streak)
    }

    /// Rule 7: what has been idle for long enough, beyond what is kept.
    fn surplus(
        &mut self,
        params: &Params,
        marks: &Marks,
        rates: &Rates,
        coming_bytes: u64,
        now: TimeMs,
    ) -> u64 {
        let growing = marks.low_bytes - marks.rest_bytes > marks.rest_bytes / 4;
        let busy = growing || rates.stalled || rates.swapped_out_bytes > 0;
        if busy || coming_bytes <= marks.high_bytes {
            self.calm = None;
            return 0;
        }
        let calm = self.calm.get_or_insert(Calm { since: now, least_bytes: coming_bytes });
        calm.least_bytes = calm.least_bytes.min(coming_bytes);
        if now.since(calm.since) < params.idle_ms {
            return 0;
        }
        calm.least_bytes.saturating_sub(marks.keep_bytes)
    }
}

/// The guest's total without its hotplugged memory, learned from reports: what the host calls plugged and what the
/// guest has online differ while blocks are on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Base {
    bytes: Option<u64>,
    /// The total and the plugged size that have not moved, and since when.
    still: Option<(u64, u64, TimeMs)>,
}

impl Base {
    fn learn(&mut self, input: Input<'_>, now: TimeMs) {
        let total = input.report.memory().total_bytes;
        let plugged = input.host.plugged_bytes();
        let since = match self.still {
            Some((t, p, since)) if (t, p) == (total, plugged) => since,
            _ => now,
        };
        self.still = Some((total, plugged, since));
        let first = self.bytes.is_none();
        let settled = now.since(since) >= SETTLE_MS || (first && plugged == 0);
        if settled && total > plugged {
            self.bytes = Some(total - plugged);
        } else if first {
            // Never seen at rest: the kernel keeps a little of what it booted with to itself.
            self.bytes = Some(total.min(scale(input.host.boot_bytes, 31, 32)));
        }
    }

    fn online_bytes(&self, total_bytes: u64, host: &HostView) -> u64 {
        total_bytes.saturating_sub(self.bytes.unwrap_or(total_bytes)).min(host.max_bytes())
    }
}
