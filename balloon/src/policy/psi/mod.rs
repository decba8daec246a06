//! `psi`: sizes a guest by its expected available memory and by signs of pressure. Comments use the
//! numbers of the rules in docs/reference/policies.md.

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
use self::learned::{PageCacheNeed, Patience, PlugTime, SwappedMemory, UnplugRefusals, Window};
use super::boot_memory::BootMemory;
use super::offlining::OffliningMemory;
use super::onlining::OnliningMemory;
use super::reserve::Forecast;
use super::{Decision, Input};
use crate::plan::Reason;
use crate::units::scale;
use crate::{HostView, TimeMs};

/// Maximum number of times that the smallest step doubles. More doublings would add more memory
/// than any fill rate needs.
const MAX_STREAK: u32 = 7;

/// Number of margins (`margin`) that a guest keeps after a grow. An idle guest keeps one.
const ACTIVE_MARGINS: u64 = 4;

/// Time until the agent notices a burst. The time until its report arrives is part of the plug
/// time.
const NOTICE_MS: u64 = 50;

/// Minimum time between two grows that are counted separately. Several reports may show the same
/// demand.
const SAME_GROW_MS: u64 = 250;

/// State of `psi` between two reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    history: History,
    boot_memory: BootMemory,
    onlining: OnliningMemory,
    last_grow: Option<LastGrow>,
    /// Grow that the last decision requested. The next report shows if it was carried out.
    pending_grow: Option<PendingGrow>,
    /// Last time on the guest's clock at which requested memory had not arrived yet.
    outstanding_ms: u64,
    offlining: OffliningMemory,
    /// Time of the last grow, or of the last time that the guest filled memory fast.
    active_at: TimeMs,
    plug_time: PlugTime,
    refusals: UnplugRefusals,
    patience: Patience,
    /// Fill rates within the time of [`Patience`].
    fill_rates: Window,
    cache: PageCacheNeed,
    swapped: SwappedMemory,
    kernel_growth: KernelGrowth,
}

/// The last grow, and the number of grows that preceded it in close succession.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LastGrow {
    at: TimeMs,
    streak: u32,
}

/// A grow that was decided, but that may not have been carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PendingGrow {
    at: TimeMs,
    step: LastGrow,
    /// Requested size before this grow.
    requested_bytes: u64,
    total_bytes: u64,
    /// Rate at which evicted file pages were read back, if the grow was made for page cache.
    file_refault_bytes_per_s: Option<u64>,
}

/// Makes a decision after a report.
pub fn decide(
    params: &Params,
    mut state: State,
    input: Input<'_>,
    now: TimeMs,
) -> (State, Decision) {
    let memory = input.report.memory();
    state.record_last_grow(params, input.host);
    state.boot_memory.learn(input, now);
    let online_bytes = state.boot_memory.online_bytes(memory.total_bytes, input.host);
    let used_bytes = history::used_bytes(input.report);
    let pending_unplug_bytes = online_bytes.saturating_sub(input.host.requested_bytes());
    let offlining_bytes = state.offlining.learn(used_bytes.into(), pending_unplug_bytes);
    let onlining_bytes =
        state.onlining.learn(history::unprotected_bytes(input.report), memory.available_bytes, now);
    state.history.push(input.report, offlining_bytes, onlining_bytes);
    if input.host.outstanding_grow_bytes() > 0 {
        state.outstanding_ms = input.report.monotonic_ms();
    }
    state.plug_time.learn(memory.total_bytes, input.host, now);
    state.refusals.learn(input.host, now);
    state.patience.learn(input.host, now);

    let rates = state.history.rates(params, state.outstanding_ms.min(input.report.monotonic_ms()));
    // Expected available memory is the memory that will be available when the guest has followed
    // every request. It includes memory that has been requested. It excludes memory that the guest
    // has to unplug, and growth of the kernel's reserve.
    let reserve = Forecast::new(input.report, input.host);
    let reserve_change_bytes = reserve.change_bytes(input.host.requested_bytes());
    let expected_available = |available_bytes: u64| {
        let bytes = available_bytes
            .saturating_add(input.host.requested_bytes())
            .saturating_sub(online_bytes);
        bytes.saturating_add_signed(-reserve_change_bytes)
    };
    let with_cache_bytes =
        memory.available_bytes.saturating_add(offlining_bytes).saturating_add(onlining_bytes);
    let available_without_cache_bytes =
        expected_available(with_cache_bytes.saturating_sub(available_cache_bytes(input.report)));
    state.cache.learn(memory.total_bytes, &rates, now);
    let is_page_cache_needed =
        state.is_page_cache_needed(params, available_without_cache_bytes, input.report, now);
    if is_page_cache_needed && rates.files_refaulting && rates.stalled {
        state.cache.record_miss(input.report, now);
    }
    let available_bytes =
        with_cache_bytes.saturating_sub(state.cache.needed_bytes(input.report, now));
    let expected_available_bytes = expected_available(available_bytes);
    let marks = state.marks(params, input.report, &rates, available_bytes, now);
    let signs =
        Signs::new(&rates, expected_available_bytes < marks.tight_bytes, is_page_cache_needed);
    let signs = Signs {
        cache_bytes: expected_available_bytes.saturating_sub(available_without_cache_bytes),
        ..signs
    };
    let allocstalls = input.report.counters().allocstall_kernel;
    state.kernel_growth.update(input.report.kernel(), allocstalls, input.report.monotonic_ms());
    let kernel = kernel::need(input.report, input.host, &state.kernel_growth);
    // The kernel can be short of memory while much memory is available, so reports should be fast
    // in that case too.
    let watch_bytes = if kernel.is_some() { memory.total_bytes } else { marks.watch_bytes };
    let marks = Marks { watch_bytes, ..marks };

    let missing_bytes = kernel.map_or(0, |need| need.missing_bytes);
    // Converting a block to kernel memory needs free memory for the pages of the block.
    let available_without_block_bytes =
        expected_available_bytes.saturating_sub(kernel.map_or(0, |need| need.need_bytes));
    let for_kernel = (missing_bytes > 0).then_some((Reason::KernelMemory, missing_bytes));
    let decision = match shortage(params, &marks, &signs, &rates, expected_available_bytes, input)
        .or(for_kernel)
    {
        Some((reason, need_bytes)) => {
            state.active_at = now;
            let step = state.next_step(params, now);
            state.pending_grow = Some(PendingGrow {
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
            new_decision(Some(want_bytes), reason, true, &marks)
        }
        None => {
            match state.surplus(params, &marks, &signs, available_without_block_bytes, input, now) {
                0 => new_decision(None, Reason::Enough, false, &marks),
                bytes => {
                    let want_bytes = input.host.requested_bytes().saturating_sub(bytes);
                    new_decision(Some(want_bytes), Reason::Surplus, false, &marks)
                }
            }
        }
    };
    (state, Decision { near: nodes::shortest(input.report), ..decision })
}

fn new_decision(
    want_bytes: Option<u64>,
    reason: Reason,
    pressure: bool,
    marks: &Marks,
) -> Decision {
    let (watermark_bytes, watermark_of) = (marks.watch_bytes, Measure::Available);
    Decision { want_bytes, near: None, from: None, reason, pressure, watermark_bytes, watermark_of }
}

/// Available page cache. If the report shows shared memory, it is not included.
fn available_cache_bytes(report: &Report) -> u64 {
    let memory = report.memory();
    memory.cached_bytes.min(memory.available_bytes.saturating_sub(memory.free_bytes))
}

/// Rules 5 and 6: signs of shortage, grouped by their cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Signs {
    swapping: bool,
    thrashing: bool,
    stalled: bool,
    /// Evicted file pages are being read back, and more memory would help.
    misses_files: bool,
    /// There are signs of shortage, and the guest as a whole causes them.
    by_guest: bool,
    /// There are signs of shortage, and a cgroup limit causes them.
    by_cgroup: bool,
    /// Evicted file pages are being read back, for any cause.
    files_refaulting: bool,
    /// Page cache that is included in the expected available memory.
    cache_bytes: u64,
}

impl Signs {
    fn new(rates: &Rates, tight: bool, is_page_cache_needed: bool) -> Self {
        let misses_files = is_page_cache_needed && rates.files_refaulting && rates.stalled;
        let any = rates.stalled || rates.refaulting || rates.swapped_out_bytes > 0;
        let by_guest = any && (tight || (is_page_cache_needed && rates.files_refaulting));
        Signs {
            swapping: tight && (rates.swapped_out_bytes > 0 || rates.swapping_in),
            thrashing: misses_files || (tight && rates.anon_refaulting && rates.stalled),
            stalled: tight && rates.stalled,
            misses_files,
            by_guest,
            by_cgroup: any && !by_guest,
            files_refaulting: rates.files_refaulting,
            cache_bytes: 0,
        }
    }
}

/// Amounts of available memory that the rules use as limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Marks {
    /// Rule 1: the headroom, which absorbs a burst until more memory is online.
    headroom_bytes: u64,
    /// Rule 2: the headroom plus the memory that the guest will fill at its present rate.
    low_bytes: u64,
    /// Rule 3: the target of a grow.
    grow_target_bytes: u64,
    /// Rule 8: the target of a shrink.
    shrink_target_bytes: u64,
    /// Rule 8: the limit above which there is surplus.
    surplus_limit_bytes: u64,
    /// Rule 5: the limit below which signs of shortage are attributed to the guest instead of a
    /// cgroup.
    tight_bytes: u64,
    /// Rule 12: the limit below which the agent reports fast.
    watch_bytes: u64,
}

/// Values from which the limits are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Needs {
    total_bytes: u64,
    kswapd_bytes: u64,
    used_bytes: u64,
    swapped_bytes: u64,
    fill_rate_bytes_per_s: u64,
    /// Highest fill rate within the time of [`Patience`].
    max_fill_rate_bytes_per_s: u64,
    reaction_ms: u64,
    is_at_rest: bool,
}

impl Marks {
    fn new(params: &Params, needs: Needs) -> Self {
        let total_bytes = needs.total_bytes;
        let headroom_bytes =
            Self::headroom_bytes(params, total_bytes, needs.kswapd_bytes, needs.reaction_ms);
        // A burst may look faster than any lasting rate, and unneeded memory costs the guest time
        // when it is plugged and again when it is unplugged. The target of a grow contains this
        // amount twice, so the amount is limited to half of the guest's memory.
        let horizon_ms = params.horizon_ms.max(needs.reaction_ms.saturating_mul(2));
        let ahead = |rate| scale(rate, horizon_ms, 1000).min(total_bytes / 2);
        let fill_bytes = ahead(needs.fill_rate_bytes_per_s);
        let low_bytes = headroom_bytes.saturating_add(fill_bytes);
        let need_bytes = needs.used_bytes.saturating_add(headroom_bytes);
        let margin_bytes =
            scale(need_bytes, params.margin_permille, 1000).max(params.min_step_bytes);
        let shrink_target_bytes = if needs.is_at_rest {
            margin_bytes
        } else {
            margin_bytes.saturating_mul(ACTIVE_MARGINS)
        };
        let with = |bytes: u64| low_bytes.saturating_add(bytes);
        // Limited to the guest's memory, because the size of the swapped memory does not show how
        // much of it the guest needs at the same time.
        let swapped_bytes = needs.swapped_bytes.min(total_bytes);
        // If a guest has filled memory fast and is now idle, its demand may be periodic.
        let with_max_fill = |bytes: u64| {
            let low_bytes = headroom_bytes.saturating_add(ahead(needs.max_fill_rate_bytes_per_s));
            low_bytes.saturating_add(bytes).saturating_add(swapped_bytes)
        };
        Marks {
            headroom_bytes,
            low_bytes,
            grow_target_bytes: with(fill_bytes)
                .saturating_add(margin_bytes)
                .saturating_add(swapped_bytes),
            shrink_target_bytes: with_max_fill(shrink_target_bytes),
            surplus_limit_bytes: with_max_fill(
                shrink_target_bytes.saturating_add(margin_bytes / 2),
            ),
            tight_bytes: Self::tight_bytes(headroom_bytes, total_bytes),
            watch_bytes: with(margin_bytes / 4),
        }
    }

    fn headroom_bytes(
        params: &Params,
        total_bytes: u64,
        kswapd_bytes: u64,
        reaction_ms: u64,
    ) -> u64 {
        let most_bytes =
            scale(total_bytes, params.headroom_permille, 1000).max(params.min_headroom_bytes);
        scale(params.burst_bytes_per_s, reaction_ms, 1000)
            .clamp(params.min_headroom_bytes, most_bytes)
            .max(kswapd_bytes.saturating_mul(params.watermark_scale))
    }

    fn tight_bytes(headroom_bytes: u64, total_bytes: u64) -> u64 {
        headroom_bytes.saturating_add(total_bytes / 4)
    }

    /// Returns the limits for a guest in which a cgroup limit causes the signs of shortage. Both
    /// limits of a surplus are above `tight_bytes`, because below it the signs would be attributed
    /// to the guest.
    fn for_cgroup_signs(&self, signs: &Signs) -> Self {
        let half_margin_bytes = self.surplus_limit_bytes - self.shrink_target_bytes;
        let cache_bytes = if signs.files_refaulting { signs.cache_bytes } else { 0 };
        let tight_bytes = self.tight_bytes.saturating_add(cache_bytes);
        let shrink_target_bytes =
            self.shrink_target_bytes.max(tight_bytes.saturating_add(half_margin_bytes));
        Marks {
            shrink_target_bytes,
            surplus_limit_bytes: shrink_target_bytes.saturating_add(half_margin_bytes),
            ..*self
        }
    }
}

/// Rules 1 to 7: returns the reason and the missing amount if the guest is short of memory.
fn shortage(
    params: &Params,
    marks: &Marks,
    signs: &Signs,
    rates: &Rates,
    expected_available_bytes: u64,
    input: Input<'_>,
) -> Option<(Reason, u64)> {
    // Page cache for which tasks wait is filled at the rate at which evicted pages are read back.
    let missed_bytes = if signs.misses_files {
        scale(rates.file_refault_bytes_per_s, params.horizon_ms, 1000)
            .min(input.report.memory().cached_bytes)
    } else {
        0
    };
    let need_bytes = marks
        .grow_target_bytes
        .saturating_sub(expected_available_bytes)
        .saturating_add(missed_bytes);
    if expected_available_bytes < marks.low_bytes {
        let reason = if expected_available_bytes < marks.headroom_bytes {
            Reason::LowAvailable
        } else {
            Reason::Filling
        };
        return Some((reason, need_bytes));
    }
    // All other signs of shortage are from the past, and memory may already be requested for them.
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
    /// Returns true if time alone no longer changes decisions. If reports have been the same for 5
    /// s, the next decision is then final until a report changes. Each new field needs a check
    /// here.
    pub(super) fn is_quiescent(&self, params: &Params, now: TimeMs) -> bool {
        let State {
            // Decisions look back less than 5 s in these fields, or only at events that do not
            // occur in an idle guest.
            history: _,
            boot_memory: _,
            onlining: _,
            last_grow: _,
            // The rate falls to zero within a second. Caches count as free memory again 10 s after
            // a stall.
            kernel_growth,
            pending_grow: _,
            outstanding_ms: _,
            offlining: _,
            active_at,
            plug_time,
            refusals,
            patience,
            fill_rates,
            cache,
            swapped,
        } = self;
        now.since(*active_at) >= patience.ms(params).saturating_mul(2)
            && plug_time.is_quiescent()
            && refusals.is_quiescent(now)
            && patience.is_quiescent(params, now)
            && fill_rates.is_quiescent()
            && kernel_growth.is_quiescent()
            && cache.is_quiescent(now)
            && swapped.is_quiescent(now)
    }

    /// Rule 6: returns true if more memory would prevent the eviction of page cache. If plenty of
    /// memory besides page cache is available, a cgroup limit causes the eviction. A cgroup limit
    /// is also assumed after several consecutive grows that did not help.
    fn is_page_cache_needed(
        &self,
        params: &Params,
        available_without_cache_bytes: u64,
        report: &Report,
        now: TimeMs,
    ) -> bool {
        let total_bytes = report.memory().total_bytes;
        let reaction_ms = NOTICE_MS + self.plug_time.ms();
        let headroom_bytes =
            Marks::headroom_bytes(params, total_bytes, nodes::kswapd_bytes(report), reaction_ms);
        available_without_cache_bytes < Marks::tight_bytes(headroom_bytes, total_bytes)
            && !self.cache.is_ignored(now)
    }

    /// Rule 4: records the last grow if it was carried out. If a dry run, a pause, a bound or a
    /// lack of memory prevented it, nothing is recorded, and the next grow starts a new streak.
    fn record_last_grow(&mut self, params: &Params, host: &HostView) {
        let Some(pending) = self.pending_grow.take() else { return };
        if host.requested_bytes() <= pending.requested_bytes {
            return;
        }
        self.last_grow = Some(pending.step);
        self.patience.record_grow(params, pending.at);
        self.refusals.record_grow();
        self.plug_time.start_measurement(pending.total_bytes, pending.at);
        if let Some(bytes_per_s) = pending.file_refault_bytes_per_s {
            self.cache.record_grow(pending.total_bytes, bytes_per_s, pending.at);
        }
    }

    /// Rule 4: returns the next grow, with the number of grows that preceded it in close
    /// succession. Each of those grows doubles the smallest step.
    fn next_step(&self, params: &Params, now: TimeMs) -> LastGrow {
        let streak = match self.last_grow {
            Some(last) if now.since(last.at) < SAME_GROW_MS => last.streak,
            Some(last) if now.since(last.at) <= params.streak_ms => {
                (last.streak + 1).min(MAX_STREAK)
            }
            _ => 0,
        };
        let same = self.last_grow.filter(|last| now.since(last.at) < SAME_GROW_MS);
        LastGrow { at: same.map_or(now, |last| last.at), streak }
    }

    fn marks(
        &mut self,
        params: &Params,
        report: &Report,
        rates: &Rates,
        available_bytes: u64,
        now: TimeMs,
    ) -> Marks {
        let total_bytes = report.memory().total_bytes;
        let patience_ms = self.patience.ms(params);
        let needs = Needs {
            total_bytes,
            kswapd_bytes: nodes::kswapd_bytes(report),
            used_bytes: total_bytes.saturating_sub(available_bytes),
            swapped_bytes: self.swapped.needed_bytes(report, now),
            fill_rate_bytes_per_s: rates.fill_rate_bytes_per_s,
            max_fill_rate_bytes_per_s: self.fill_rates.push_max(
                rates.fill_rate_bytes_per_s as i64,
                patience_ms,
                now,
            ) as u64,
            reaction_ms: NOTICE_MS + self.plug_time.ms(),
            is_at_rest: now.since(self.active_at) >= patience_ms,
        };
        Marks::new(params, needs)
    }

    /// Rules 8 and 10: returns the memory that was idle for long enough, minus the memory to keep
    /// and the memory that the guest has refused to return.
    fn surplus(
        &mut self,
        params: &Params,
        marks: &Marks,
        signs: &Signs,
        expected_available_bytes: u64,
        input: Input<'_>,
        now: TimeMs,
    ) -> u64 {
        if signs.by_guest {
            self.patience.restart();
        }
        let marks = if signs.by_cgroup { marks.for_cgroup_signs(signs) } else { *marks };
        let filling = marks.low_bytes - marks.headroom_bytes > marks.headroom_bytes / 4;
        if filling {
            self.active_at = now;
        }
        // Page cache that is in use is available, but it is not surplus.
        let memory = input.report.memory();
        let idle_bytes = nodes::idle_bytes(input.report, params.idle_ms).unwrap_or(u64::MAX);
        let touched_bytes =
            memory.available_bytes.saturating_sub(idle_bytes.max(memory.free_bytes));
        let spare_bytes = expected_available_bytes.saturating_sub(touched_bytes);
        // Memory that was not online for the whole period is not surplus either, because tasks that
        // wait for it may fill it as soon as it arrives.
        let requested_bytes = input.host.requested_bytes();
        let online_bytes = self.boot_memory.online_bytes(memory.total_bytes, input.host);
        let outstanding_bytes =
            requested_bytes.saturating_sub(online_bytes).saturating_add(self.onlining.bytes());
        let online_available_bytes = spare_bytes.saturating_sub(outstanding_bytes);
        match self.patience.min_available_bytes(
            params,
            spare_bytes,
            online_available_bytes,
            requested_bytes,
            now,
        ) {
            Some(least) if !filling && least > marks.surplus_limit_bytes => {
                let bytes = (least - marks.shrink_target_bytes)
                    .min(self.refusals.returnable_bytes(input.host, now));
                let reserve = Forecast::new(input.report, input.host);
                reserve.removable_part(bytes, least - marks.shrink_target_bytes)
            }
            _ => 0,
        }
    }
}
