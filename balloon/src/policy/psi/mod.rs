//! `psi`: sizes by what the guest will need. docs/reference/policies.md has its rules on one page;
//! the numbers in comments here are theirs.

mod history;
mod kernel;
mod learned;
mod nodes;
mod params;
#[cfg(test)]
mod tests;

use foreshore_proto::{KernelGrowth, Measure, Report};
pub use params::Params;

use self::history::{History, Rates};
use self::learned::{Cache, Patience, PlugTime, Refusals, Swapped, Window};
use super::boot_memory::BootMemory;
use super::offlining::OffliningMemory;
use super::onlining::OnliningMemory;
use super::reserve::Forecast;
use super::{Decision, Input};
use crate::plan::Reason;
use crate::units::scale;
use crate::{HostView, TimeMs};

/// More doublings than this add more than any rate of growth asks for.
const MAX_STREAK: u32 = 7;

/// A guest that grows keeps so many slacks; at rest it keeps one.
const ACTIVE_SLACKS: u64 = 4;

/// How long it takes the agent to notice a burst; the way of its report counts with the plugging.
const NOTICE_MS: u64 = 50;

/// Grows closer together than this are one, seen by several reports.
const SAME_GROW_MS: u64 = 250;

/// What `psi` remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    history: History,
    boot_memory: BootMemory,
    onlining: OnliningMemory,
    grown: Option<Grown>,
    /// What the last decision asked for, of which the next report says whether the guest was
    /// asked.
    asked: Option<Asked>,
    /// The guest's clock when memory was last on its way to it.
    coming_ms: u64,
    offlining: OffliningMemory,
    /// When the guest last grew, or was seen to fill.
    active_at: TimeMs,
    plug_time: PlugTime,
    refusals: Refusals,
    patience: Patience,
    /// How fast it filled of late.
    fills: Window,
    cache: Cache,
    swapped: Swapped,
    kernel_growth: KernelGrowth,
}

/// The last grow, and how many followed closely upon one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grown {
    at: TimeMs,
    streak: u32,
}

/// A grow that was decided on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    at: TimeMs,
    step: Grown,
    /// What was requested before it.
    requested_bytes: u64,
    total_bytes: u64,
    /// For page cache, which comes back at this rate.
    file_refault_bytes_per_s: Option<u64>,
}

/// Decides on one report.
pub fn decide(
    params: &Params,
    mut state: State,
    input: Input<'_>,
    now: TimeMs,
) -> (State, Decision) {
    let memory = input.report.memory();
    state.learn_grow(params, input.host);
    state.boot_memory.learn(input, now);
    let online_bytes = state.boot_memory.online_bytes(memory.total_bytes, input.host);
    let used_bytes = history::used_bytes(input.report);
    let to_go_bytes = online_bytes.saturating_sub(input.host.requested_bytes());
    let offlining_bytes = state.offlining.learn(used_bytes.into(), to_go_bytes);
    let onlining_bytes =
        state.onlining.learn(history::unprotected_bytes(input.report), memory.available_bytes, now);
    state.history.push(input.report, offlining_bytes, onlining_bytes);
    if input.host.outstanding_grow_bytes() > 0 {
        state.coming_ms = input.report.monotonic_ms();
    }
    state.plug_time.learn(memory.total_bytes, input.host, now);
    state.refusals.learn(input.host, now);
    state.patience.learn(input.host, now);

    let rates = state.history.rates(params, state.coming_ms.min(input.report.monotonic_ms()));
    // What will be available once the guest has followed every request: what is now, with what is
    // still to come, without what is still to go, and without the page cache that is needed.
    let reserve = Forecast::new(input.report, input.host);
    let reserve_change_bytes = reserve.change_bytes(input.host.requested_bytes());
    let coming = |available_bytes: u64| {
        let bytes = available_bytes
            .saturating_add(input.host.requested_bytes())
            .saturating_sub(online_bytes);
        bytes.saturating_add_signed(-reserve_change_bytes)
    };
    let with_cache_bytes =
        memory.available_bytes.saturating_add(offlining_bytes).saturating_add(onlining_bytes);
    let bare_bytes = coming(with_cache_bytes.saturating_sub(available_cache_bytes(input.report)));
    state.cache.learn(memory.total_bytes, &rates, now);
    let files_count = state.files_count(params, bare_bytes, input.report, now);
    if files_count && rates.files_refaulting && rates.stalled {
        state.cache.missed(input.report, now);
    }
    let available_bytes =
        with_cache_bytes.saturating_sub(state.cache.needed_bytes(input.report, now));
    let coming_bytes = coming(available_bytes);
    let marks = state.marks(params, input.report, &rates, available_bytes, now);
    let signs = Signs::new(&rates, coming_bytes < marks.tight_bytes, files_count);
    let signs = Signs { cache_bytes: coming_bytes.saturating_sub(bare_bytes), ..signs };
    let allocstalls = input.report.counters().allocstall_kernel;
    state.kernel_growth.update(input.report.kernel(), allocstalls, input.report.monotonic_ms());
    let kernel = kernel::need(input.report, input.host, &state.kernel_growth);
    // The kernel can be short while much memory is available, so reports must be fast in that case
    // as well.
    let watch_bytes = if kernel.is_some() { memory.total_bytes } else { marks.watch_bytes };
    let marks = Marks { watch_bytes, ..marks };

    let missing_bytes = kernel.map_or(0, |need| need.missing_bytes);
    // The block that the agent gives to the kernel needs free memory as well.
    let beside_block_bytes = coming_bytes.saturating_sub(kernel.map_or(0, |need| need.need_bytes));
    let for_kernel = (missing_bytes > 0).then_some((Reason::KernelMemory, missing_bytes));
    let decision = match shortage(params, &marks, &signs, &rates, coming_bytes, input)
        .or(for_kernel)
    {
        Some((reason, need_bytes)) => {
            state.active_at = now;
            let step = state.next_step(params, now);
            state.asked = Some(Asked {
                at: now,
                step,
                requested_bytes: input.host.requested_bytes(),
                total_bytes: memory.total_bytes,
                file_refault_bytes_per_s: signs
                    .misses_files
                    .then_some(rates.file_refault_bytes_per_s),
            });
            let step_bytes = need_bytes.max(params.min_step_bytes.saturating_mul(1 << step.streak));
            let want_bytes = input.host.requested_bytes().saturating_add(step_bytes);
            decided(Some(want_bytes), reason, true, &marks)
        }
        None => match state.surplus(params, &marks, &signs, beside_block_bytes, input, now) {
            0 => decided(None, Reason::Enough, false, &marks),
            bytes => {
                let want_bytes = input.host.requested_bytes().saturating_sub(bytes);
                decided(Some(want_bytes), Reason::Surplus, false, &marks)
            }
        },
    };
    (state, Decision { near: nodes::shortest(input.report), ..decision })
}

fn decided(want_bytes: Option<u64>, reason: Reason, pressure: bool, marks: &Marks) -> Decision {
    let (watermark_bytes, watermark_of) = (marks.watch_bytes, Measure::Available);
    Decision { want_bytes, near: None, from: None, reason, pressure, watermark_bytes, watermark_of }
}

/// Page cache that is available: what files have, without shared memory as far as that shows.
fn available_cache_bytes(report: &Report) -> u64 {
    let memory = report.memory();
    memory.cached_bytes.min(memory.available_bytes.saturating_sub(memory.free_bytes))
}

/// Rules 5 and 6: which signs of want are the guest's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Signs {
    swapping: bool,
    thrashing: bool,
    stalled: bool,
    /// Page cache comes back for which memory helps.
    misses_files: bool,
    /// There are some of its own,
    own: bool,
    /// or there are some, and none of its own.
    elsewhere: bool,
    /// Page cache comes back, whoever wants it.
    files_refaulting: bool,
    /// What of that which is coming is page cache.
    cache_bytes: u64,
}

impl Signs {
    fn new(rates: &Rates, tight: bool, files_count: bool) -> Self {
        let misses_files = files_count && rates.files_refaulting && rates.stalled;
        let any = rates.stalled || rates.refaulting || rates.swapped_out_bytes > 0;
        let own = any && (tight || (files_count && rates.files_refaulting));
        Signs {
            swapping: tight && (rates.swapped_out_bytes > 0 || rates.swapping_in),
            thrashing: misses_files || (tight && rates.anon_refaulting && rates.stalled),
            stalled: tight && rates.stalled,
            misses_files,
            own,
            elsewhere: any && !own,
            files_refaulting: rates.files_refaulting,
            cache_bytes: 0,
        }
    }
}

/// Sizes of available memory at which something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Marks {
    /// Rule 1: the bridge, which serves a burst until more is there.
    rest_bytes: u64,
    /// Rule 2: the same with what the guest fills at its present rate.
    low_bytes: u64,
    /// Rule 3: where a grow leads.
    aim_bytes: u64,
    /// Rule 8: where a shrink leads.
    keep_bytes: u64,
    /// Rule 8: above this there may be a surplus.
    high_bytes: u64,
    /// Rule 5: under this signs of want are believed.
    tight_bytes: u64,
    /// Rule 12: under this the agent reports fast.
    watch_bytes: u64,
}

/// What marks are made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Needs {
    total_bytes: u64,
    kswapd_bytes: u64,
    used_bytes: u64,
    swapped_bytes: u64,
    fill_bytes_per_s: u64,
    /// The fastest of late.
    filled_bytes_per_s: u64,
    reaction_ms: u64,
    is_at_rest: bool,
}

impl Marks {
    fn new(params: &Params, needs: Needs) -> Self {
        let total_bytes = needs.total_bytes;
        let rest_bytes =
            Self::rest_bytes(params, total_bytes, needs.kswapd_bytes, needs.reaction_ms);
        // A burst may look faster than anything can last, and what is plugged in vain costs the
        // guest's time twice: what an aim, which has two of these, provides for the rate is
        // never more than there is.
        let horizon_ms = params.horizon_ms.max(needs.reaction_ms.saturating_mul(2));
        let ahead = |rate| scale(rate, horizon_ms, 1000).min(total_bytes / 2);
        let fill_bytes = ahead(needs.fill_bytes_per_s);
        let low_bytes = rest_bytes.saturating_add(fill_bytes);
        let need_bytes = needs.used_bytes.saturating_add(rest_bytes);
        let slack_bytes = scale(need_bytes, params.slack_permille, 1000).max(params.min_step_bytes);
        let keep_bytes =
            if needs.is_at_rest { slack_bytes } else { slack_bytes.saturating_mul(ACTIVE_SLACKS) };
        let with = |bytes: u64| low_bytes.saturating_add(bytes);
        // Not more than there is: a swap of any size says nothing about what comes back at once.
        let swapped_bytes = needs.swapped_bytes.min(total_bytes);
        // A guest that has filled fast and rests may be between two teeth of a saw.
        let kept = |bytes: u64| {
            let low_bytes = rest_bytes.saturating_add(ahead(needs.filled_bytes_per_s));
            low_bytes.saturating_add(bytes).saturating_add(swapped_bytes)
        };
        Marks {
            rest_bytes,
            low_bytes,
            aim_bytes: with(fill_bytes).saturating_add(slack_bytes).saturating_add(swapped_bytes),
            keep_bytes: kept(keep_bytes),
            high_bytes: kept(keep_bytes.saturating_add(slack_bytes / 2)),
            tight_bytes: Self::tight_bytes(rest_bytes, total_bytes),
            watch_bytes: with(slack_bytes / 4),
        }
    }

    fn rest_bytes(params: &Params, total_bytes: u64, kswapd_bytes: u64, reaction_ms: u64) -> u64 {
        let most_bytes =
            scale(total_bytes, params.headroom_permille, 1000).max(params.min_headroom_bytes);
        scale(params.burst_bytes_per_s, reaction_ms, 1000)
            .clamp(params.min_headroom_bytes, most_bytes)
            .max(kswapd_bytes.saturating_mul(params.watermark_scale))
    }

    fn tight_bytes(rest_bytes: u64, total_bytes: u64) -> u64 {
        rest_bytes.saturating_add(total_bytes / 4)
    }

    /// Where a surplus begins and where a shrink leads beside a cgroup's own want: not to where it
    /// would be taken for the guest's.
    fn beside_want(&self, signs: &Signs) -> Self {
        let half_slack_bytes = self.high_bytes - self.keep_bytes;
        let cache_bytes = if signs.files_refaulting { signs.cache_bytes } else { 0 };
        let tight_bytes = self.tight_bytes.saturating_add(cache_bytes);
        let keep_bytes = self.keep_bytes.max(tight_bytes.saturating_add(half_slack_bytes));
        Marks { keep_bytes, high_bytes: keep_bytes.saturating_add(half_slack_bytes), ..*self }
    }
}

/// Rules 1 to 7: whether the guest is short, why, and by how much.
fn shortage(
    params: &Params,
    marks: &Marks,
    signs: &Signs,
    rates: &Rates,
    coming_bytes: u64,
    input: Input<'_>,
) -> Option<(Reason, u64)> {
    // Page cache that tasks wait for is filled as fast as it comes back.
    let missed_bytes = if signs.misses_files {
        scale(rates.file_refault_bytes_per_s, params.horizon_ms, 1000)
            .min(input.report.memory().cached_bytes)
    } else {
        0
    };
    let need_bytes = marks.aim_bytes.saturating_sub(coming_bytes).saturating_add(missed_bytes);
    if coming_bytes < marks.low_bytes {
        let reason =
            if coming_bytes < marks.rest_bytes { Reason::LowAvailable } else { Reason::Filling };
        return Some((reason, need_bytes));
    }
    // What follows are signs of a shortage that has been; memory on its way is the answer to it
    // already.
    if input.host.outstanding_grow_bytes() > 0 {
        return None;
    }
    if signs.swapping {
        return Some((Reason::Swapping, need_bytes.max(rates.swapped_out_bytes.saturating_mul(2))));
    }
    if signs.thrashing {
        return Some((Reason::Thrashing, need_bytes.max(params.min_headroom_bytes)));
    }
    if signs.stalled {
        return Some((Reason::Stalled, need_bytes));
    }
    None
}

impl State {
    /// Whether the passing of time alone changes nothing that is decided any more: with reports
    /// that have been the same for five seconds and stay so, the next decision is the last one.
    /// A field that is added here has to say so too.
    pub(super) fn is_settled(&self, params: &Params, now: TimeMs) -> bool {
        let State {
            // All that looks back at these is within the five seconds, or sees when something
            // happened that is no rest.
            history: _,
            boot_memory: _,
            onlining: _,
            grown: _,
            // The rate falls to zero within a second; caches count again 10 s after a stall.
            kernel_growth,
            asked: _,
            coming_ms: _,
            offlining: _,
            active_at,
            plug_time,
            refusals,
            patience,
            fills,
            cache,
            swapped,
        } = self;
        now.since(*active_at) >= patience.ms(params).saturating_mul(2)
            && plug_time.is_settled()
            && refusals.is_settled(now)
            && patience.is_settled(params, now)
            && fills.is_settled()
            && kernel_growth.is_settled()
            && cache.is_settled(now)
            && swapped.is_settled(now)
    }

    /// Rule 6: whether page cache that comes back is one that more memory would hold. Beside plenty
    /// that is not page cache it is a cgroup's own limit that evicts, and so it is where grow
    /// after grow changes nothing.
    fn files_count(&self, params: &Params, bare_bytes: u64, report: &Report, now: TimeMs) -> bool {
        let total_bytes = report.memory().total_bytes;
        let reaction_ms = NOTICE_MS + self.plug_time.ms();
        let rest_bytes =
            Marks::rest_bytes(params, total_bytes, nodes::kswapd_bytes(report), reaction_ms);
        bare_bytes < Marks::tight_bytes(rest_bytes, total_bytes) && !self.cache.is_beyond_help(now)
    }

    /// Rule 4: what is not carried out teaches nothing, be it for a dry run, a pause, a bound, or
    /// that nobody has any: the next decision is the first one again.
    fn learn_grow(&mut self, params: &Params, host: &HostView) {
        let Some(asked) = self.asked.take() else { return };
        if host.requested_bytes() <= asked.requested_bytes {
            return;
        }
        self.grown = Some(asked.step);
        self.patience.grown(params, asked.at);
        self.refusals.grown();
        self.plug_time.asked(asked.total_bytes, asked.at);
        if let Some(bytes_per_s) = asked.file_refault_bytes_per_s {
            self.cache.tried(asked.total_bytes, bytes_per_s, asked.at);
        }
    }

    /// Rule 4: how many grows this one follows closely upon. For each the least step is doubled.
    fn next_step(&self, params: &Params, now: TimeMs) -> Grown {
        let streak = match self.grown {
            Some(grown) if now.since(grown.at) < SAME_GROW_MS => grown.streak,
            Some(grown) if now.since(grown.at) <= params.streak_ms => {
                (grown.streak + 1).min(MAX_STREAK)
            }
            _ => 0,
        };
        let same = self.grown.filter(|grown| now.since(grown.at) < SAME_GROW_MS);
        Grown { at: same.map_or(now, |grown| grown.at), streak }
    }

    /// The marks of this moment.
    fn marks(
        &mut self,
        params: &Params,
        report: &Report,
        rates: &Rates,
        available_bytes: u64,
        now: TimeMs,
    ) -> Marks {
        let total_bytes = report.memory().total_bytes;
        let rest_ms = self.patience.ms(params);
        let needs = Needs {
            total_bytes,
            kswapd_bytes: nodes::kswapd_bytes(report),
            used_bytes: total_bytes.saturating_sub(available_bytes),
            swapped_bytes: self.swapped.needed_bytes(report, now),
            fill_bytes_per_s: rates.fill_bytes_per_s,
            filled_bytes_per_s: self.fills.most(rates.fill_bytes_per_s as i64, rest_ms, now) as u64,
            reaction_ms: NOTICE_MS + self.plug_time.ms(),
            is_at_rest: now.since(self.active_at) >= rest_ms,
        };
        Marks::new(params, needs)
    }

    /// Rules 8 and 10: what has been idle for long enough, beyond what is kept and what was
    /// refused.
    fn surplus(
        &mut self,
        params: &Params,
        marks: &Marks,
        signs: &Signs,
        coming_bytes: u64,
        input: Input<'_>,
        now: TimeMs,
    ) -> u64 {
        if signs.own {
            self.patience.disturbed();
        }
        let marks = if signs.elsewhere { marks.beside_want(signs) } else { *marks };
        let filling = marks.low_bytes - marks.rest_bytes > marks.rest_bytes / 4;
        if filling {
            self.active_at = now;
        }
        // Page cache that somebody touches is not surplus, however available.
        let memory = input.report.memory();
        let idle_bytes = nodes::idle_bytes(input.report, params.idle_ms).unwrap_or(u64::MAX);
        let touched_bytes =
            memory.available_bytes.saturating_sub(idle_bytes.max(memory.free_bytes));
        let spare_bytes = coming_bytes.saturating_sub(touched_bytes);
        // Nor is what has not been there for as long: who waits for it may fill it as it comes.
        let requested_bytes = input.host.requested_bytes();
        let online_bytes = self.boot_memory.online_bytes(memory.total_bytes, input.host);
        let on_way_bytes =
            requested_bytes.saturating_sub(online_bytes).saturating_add(self.onlining.bytes());
        let there_bytes = spare_bytes.saturating_sub(on_way_bytes);
        match self.patience.least_bytes(params, spare_bytes, there_bytes, requested_bytes, now) {
            Some(least) if !filling && least > marks.high_bytes => {
                let bytes =
                    (least - marks.keep_bytes).min(self.refusals.givable_bytes(input.host, now));
                let reserve = Forecast::new(input.report, input.host);
                reserve.part_beside_reserve(bytes, least - marks.keep_bytes)
            }
            _ => 0,
        }
    }
}
