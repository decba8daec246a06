//! `memorage`: lends storage to the guest in large units before kswapd wakes, and returns it in the
//! background, as in the paper "Memorage". docs/design/papers.md lists the differences from the
//! paper.

#[cfg(test)]
mod tests;

use super::numa_view::{self, OutstandingMemory};
use super::{Decision, Input};
use crate::params::params;
use crate::plan::Reason;
use crate::units::{round_down, round_up};
use crate::{BLOCK_BYTES, HostView, MIB, Tier, TimeMs, ZoneSizes};

params! {
    /// Parameters of `memorage`.
    pub struct Params {
        /// PM is lent if free memory is below this multiple of the sum of the guest's high watermarks; the paper uses 1.
        watermark_scale: "watermark-scale", Count, 1 => 65_536, 32;
        /// Amount of PM that is lent at a time.
        unit_bytes: "unit", Blocks, 2 * MIB => 1 << 40, 2048 * MIB;
        /// Time without pressure after which lent memory is returned.
        calm_ms: "calm", Ms, 100 => 86_400_000, 10_000;
        /// Free space of the pool that is reserved for storage: none of it is lent, and if less is free, lent memory is returned.
        storage_floor_bytes: "storage_floor", Bytes, 0 => 1 << 50, 0;
    }
}

/// State of `memorage` between two reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    outstanding: OutstandingMemory,
    calm: Option<Calm>,
}

/// Time since which enough memory has been free, and the minimum of free memory since then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Calm {
    since: TimeMs,
    least_bytes: u64,
}

pub(super) fn decide(
    params: &Params,
    mut state: State,
    input: Input<'_>,
    now: TimeMs,
) -> (State, Decision) {
    state.outstanding.observe(input, now);
    let host = input.host;
    let trigger_bytes =
        numa_view::scaled_high_bytes(&numa_view::nodes(input), params.watermark_scale);
    let free_bytes = input.report.memory().free_bytes;
    let expected_free_bytes = free_bytes.saturating_add(state.outstanding.bytes());
    let requested_bytes = host.requested_bytes();
    // Memory that has not arrived yet reduces a shortage. The memory is not surplus, because tasks
    // that wait for it may fill it as soon as it arrives.
    let surplus_bytes = state.surplus(params, trigger_bytes, free_bytes, now);
    let storage = Storage::new(params, host);
    let decision = if storage.owed_bytes > 0 {
        // Storage is short of space, so memory is returned even if the guest is short of memory.
        Decision::want(requested_bytes - storage.owed_bytes, Reason::StorageShort)
    } else if expected_free_bytes < trigger_bytes {
        let units = (trigger_bytes - expected_free_bytes).div_ceil(params.unit_bytes);
        let bytes = units.saturating_mul(params.unit_bytes).min(storage.lendable_bytes);
        match bytes {
            // No memory can be lent, so the guest has to swap.
            0 if storage.has_room => Decision::hold(Reason::StorageShort),
            0 => Decision::hold(Reason::AtCeiling),
            _ => {
                let grow = Decision::want(requested_bytes.saturating_add(bytes), Reason::LowFree);
                Decision { pressure: true, ..grow }
            }
        }
    } else if surplus_bytes >= BLOCK_BYTES && requested_bytes > 0 {
        Decision::want(requested_bytes.saturating_sub(surplus_bytes), Reason::Calm)
    } else {
        Decision::hold(Reason::Enough)
    };
    (state, decision.watching_one(trigger_bytes, input))
}

/// Memory that storage can lend, and memory that must be returned to storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Storage {
    /// Memory that can be added to the guest: the unrequested DRAM, and the pool's free memory
    /// above its floor for storage.
    lendable_bytes: u64,
    /// True if zones of PM can still grow.
    has_room: bool,
    /// Memory that must be returned to storage.
    owed_bytes: u64,
}

impl Storage {
    fn new(params: &Params, host: &HostView) -> Self {
        let sum = |tier, size: fn(&ZoneSizes) -> u64| {
            let zones = host.zones.iter().filter(|zone| zone.tier == tier);
            zones.fold(0u64, |sum, zone| sum.saturating_add(size(zone)))
        };
        let room = |zone: &ZoneSizes| zone.requestable_bytes().saturating_sub(zone.requested_bytes);
        // Outstanding requests are treated as completed: the pool's free memory excludes requested
        // grows and includes requested shrinks.
        let free_bytes = host
            .pool_free_bytes
            .saturating_add(sum(Tier::Pm, ZoneSizes::outstanding_shrink_bytes))
            .saturating_sub(sum(Tier::Pm, ZoneSizes::outstanding_grow_bytes));
        let (dram, pm) = (sum(Tier::Dram, room), sum(Tier::Pm, room));
        // Lending stops at the watermark at which a recall ends. Otherwise, the next write would
        // recall the unit. In the paper, memory grows again once storage has enough pages.
        let kept_bytes = host.storage.map_or(0, |storage| {
            let above_high_bytes = storage.above_high_bytes();
            host.pool_free_bytes.saturating_sub(above_high_bytes)
        });
        let kept_bytes = kept_bytes.max(params.storage_floor_bytes);
        let above_floor = round_down(free_bytes.saturating_sub(kept_bytes), BLOCK_BYTES);
        let lent = sum(Tier::Pm, |zone| zone.requested_bytes.saturating_sub(zone.floor_bytes));
        let missing = params.storage_floor_bytes.saturating_sub(free_bytes);
        Storage {
            lendable_bytes: dram.saturating_add(pm.min(above_floor)),
            has_room: pm > 0,
            owed_bytes: round_up(missing, BLOCK_BYTES).min(lent),
        }
    }
}

impl State {
    /// Returns the memory that was free for long enough and that need not be kept. There is surplus
    /// if more than three times the trigger is free. Twice the trigger is kept, so that returning
    /// memory does not cause the next loan.
    fn surplus(
        &mut self,
        params: &Params,
        trigger_bytes: u64,
        free_bytes: u64,
        now: TimeMs,
    ) -> u64 {
        if free_bytes <= trigger_bytes.saturating_mul(3) {
            self.calm = None;
            return 0;
        }
        let calm = self.calm.get_or_insert(Calm { since: now, least_bytes: free_bytes });
        calm.least_bytes = calm.least_bytes.min(free_bytes);
        if now.since(calm.since) < params.calm_ms {
            return 0;
        }
        calm.least_bytes.saturating_sub(trigger_bytes.saturating_mul(2))
    }
}
