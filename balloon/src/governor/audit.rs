//! Record of recent decisions with their input, reason and outcome.
//!
//! A decision requests sizes from zones. It remains open until each zone has followed, or until a
//! later decision withdraws or reverses a request. A later decision that requests more in the same
//! direction leaves it open, because the guest reaches the smaller size on the way. A decision that
//! was reached is reopened if the zone leaves the size within a second, unless another size has
//! been requested meanwhile.
//!
//! If a decision without a request repeats an earlier decision, only that decision's counter is
//! incremented. Such decisions are made with every report, and would otherwise displace decisions
//! with requests.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::plan::{Direction, Plan, Reason};
use crate::plug_filter::CONFIRM_MS;
use crate::{HostView, StorageSpace, TimeMs, ZoneSizes};
use foreshore_proto::Report;

use super::decision::{
    DecisionInfo, DecisionInput, DecisionSizes, DecisionTarget, MAX_DECISIONS, Outcome,
    ReportDigest,
};

/// Time during which a decision of a dry run counts as a repetition of a similar one, even if their
/// sizes differ. A dry run requests nothing from the guest, so each report leads to another size.
const DRY_RUN_MS: u64 = 1_000;

/// Recent decisions.
#[derive(Clone, Debug, Default)]
pub struct Audit {
    /// Recent decisions, oldest first. Readers share the list, because reading takes longer than a
    /// step of the governor.
    ring: VecDeque<Arc<Entry>>,
    /// Number of decisions so far, which is also the number of the newest one.
    total: u64,
    /// Numbers of decisions that the guest has not completely followed yet, oldest first.
    open: Vec<u64>,
    /// Numbers of decisions that the guest has followed just now. The guest may still leave their
    /// sizes.
    just_reached: Vec<(u64, TimeMs)>,
}

/// Input that is recorded with a decision.
#[derive(Clone, Copy, Debug)]
pub struct DecisionContext<'a> {
    /// The policy's name.
    pub policy: &'static str,
    /// Last report, and the time at which it arrived.
    pub report: Option<(TimeMs, &'a Report)>,
    /// Guest node for which the policy decided.
    pub near: Option<u32>,
    /// Sizes of the zones and the pool.
    pub host: &'a HostView,
}

/// A recorded decision. A reader receives a copy of its state at the time of reading.
#[derive(Clone, Debug)]
pub struct Entry {
    seq: u64,
    at: TimeMs,
    times: u64,
    policy: &'static str,
    report: Option<ReportDigest>,
    near: Option<u32>,
    pool_free_bytes: u64,
    storage: Option<StorageSpace>,
    /// Requested and plugged size of each zone before the decision.
    before: Vec<(u64, u64)>,
    plan: Plan,
    requests: Vec<ZoneRequest>,
    end: Option<Outcome>,
}

/// Request that a decision makes to one zone.
#[derive(Clone, Copy, Debug)]
struct ZoneRequest {
    zone: usize,
    /// True if the request is larger than the previous request. The plugged size at that time may
    /// be larger or smaller than either request.
    grows: bool,
    /// Plugged size when the decision was made.
    from_bytes: u64,
    target_bytes: u64,
    reached: Option<TimeMs>,
    /// True if the request was reached and another size has been requested from the zone since.
    /// Later changes of the plugged size are then ignored.
    is_final: bool,
}

impl ZoneRequest {
    fn new(index: usize, zone: &ZoneSizes, target_bytes: u64, now: TimeMs) -> Self {
        let mut request = Self {
            zone: index,
            grows: target_bytes > zone.requested_bytes,
            from_bytes: zone.plugged_bytes,
            target_bytes,
            reached: None,
            is_final: false,
        };
        request.reached = request.is_reached_by(zone.plugged_bytes).then_some(now);
        request
    }

    /// Updates the request with the zone's present sizes. A request to grow was not reached if the
    /// guest soon unplugs the memory again, although it is still requested.
    ///
    /// The zone's tracker cannot be used instead. It follows only the newest request, and counts
    /// memory only after it has remained plugged, which takes up to 16 s. A recorded request may be
    /// older than the newest one, and is shown as reached immediately.
    fn observe(&mut self, sizes: &ZoneSizes, now: TimeMs) {
        let is_reached = self.is_reached_by(sizes.plugged_bytes);
        let is_asked = self.grows && sizes.requested_bytes >= self.target_bytes;
        match self.reached {
            None if is_reached => self.reached = Some(now),
            Some(at) if !self.is_final && !is_reached && is_asked && now.since(at) < CONFIRM_MS => {
                self.reached = None
            }
            _ => {}
        }
    }

    fn is_reached_by(&self, plugged_bytes: u64) -> bool {
        if self.grows {
            plugged_bytes >= self.target_bytes
        } else {
            plugged_bytes <= self.target_bytes
        }
    }

    /// Returns true if requesting `bytes` withdraws this request.
    fn is_withdrawn_by(&self, bytes: u64) -> bool {
        self.reached.is_none() && self.is_reversed_by(bytes)
    }

    /// Returns true if requesting `bytes` is a change in the opposite direction.
    fn is_reversed_by(&self, bytes: u64) -> bool {
        if self.grows { bytes < self.target_bytes } else { bytes > self.target_bytes }
    }

    fn moved_bytes(&self, plugged_bytes: u64) -> u64 {
        let to_bytes = if self.reached.is_some() { self.target_bytes } else { plugged_bytes };
        if self.grows {
            to_bytes.min(self.target_bytes).saturating_sub(self.from_bytes)
        } else {
            self.from_bytes.saturating_sub(to_bytes.max(self.target_bytes))
        }
    }

    /// Amount of memory to plug or unplug for this request.
    fn change_bytes(&self) -> u64 {
        self.moved_bytes(self.target_bytes)
    }
}

impl Audit {
    /// Returns the number of decisions so far.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Records a decision before it is carried out. Returns false if it repeats an earlier
    /// decision.
    pub fn record(&mut self, plan: &Plan, context: DecisionContext<'_>, now: TimeMs) -> bool {
        if plan.direction == Direction::Hold && plan.reason == Reason::Quiet {
            return false;
        }
        let zones = &context.host.zones;
        let requests: Vec<ZoneRequest> = zones
            .iter()
            .zip(&plan.targets)
            .enumerate()
            .filter(|(_, (zone, target))| {
                !plan.dry_run && zone.requested_bytes != target.requested_bytes
            })
            .map(|(index, (zone, target))| {
                ZoneRequest::new(index, zone, target.requested_bytes, now)
            })
            .collect();
        if requests.is_empty()
            && let Some(earlier) = self.find_repeated(plan, context.policy, now)
        {
            earlier.times += 1;
            return false;
        }
        self.total += 1;
        let plugged: Vec<u64> = zones.iter().map(|zone| zone.plugged_bytes).collect();
        if !requests.is_empty() {
            self.close_withdrawn(plan, &plugged, now);
        }
        let end = match () {
            () if plan.dry_run => Some(Outcome::DryRun),
            () if requests.is_empty() => Some(Outcome::None),
            () if requests.iter().all(|request| request.reached.is_some()) => {
                Some(Outcome::Reached { after_ms: 0 })
            }
            () => None,
        };
        if end.is_none() {
            self.open.push(self.total);
        }
        if self.ring.len() == MAX_DECISIONS {
            let oldest = self.ring.pop_front().map(|entry| entry.seq);
            self.open.retain(|seq| Some(*seq) != oldest);
        }
        self.ring.push_back(Arc::new(Entry {
            seq: self.total,
            at: now,
            times: 1,
            policy: context.policy,
            report: context.report.map(|(at, report)| digest(report, now.since(at))),
            near: context.near,
            pool_free_bytes: context.host.pool_free_bytes,
            storage: context.host.storage,
            before: zones.iter().map(|zone| (zone.requested_bytes, zone.plugged_bytes)).collect(),
            end,
            plan: plan.clone(),
            requests,
        }));
        true
    }

    /// Returns the earlier decision that a decision without a request repeats, if any. A hold
    /// repeats an earlier hold for the same reason, unless a decision other than a hold was made in
    /// between. A dry run's decision repeats the last decision of the same kind.
    fn find_repeated(&mut self, plan: &Plan, policy: &str, now: TimeMs) -> Option<&mut Entry> {
        let hold = plan.direction == Direction::Hold;
        let counts = |entry: &Entry| {
            entry.requests.is_empty() && (!hold || entry.plan.direction == Direction::Hold)
        };
        let mut since = self.ring.iter_mut().rev().take_while(|entry| counts(entry));
        let same = since.find(|entry| entry.policy == policy && entry.is_same_kind(plan))?;
        let is_repetition =
            hold || same.plan.targets == plan.targets || now.since(same.at) < DRY_RUN_MS;
        is_repetition.then(|| Arc::make_mut(same))
    }

    /// Ends the decisions that the newest decision withdraws or reverses.
    fn close_withdrawn(&mut self, plan: &Plan, plugged: &[u64], now: TimeMs) {
        let target = |request: &ZoneRequest| plan.targets.get(request.zone);
        self.finalize_reached(|request| {
            target(request).is_some_and(|target| request.is_reversed_by(target.requested_bytes))
        });
        let by = self.total;
        let withdraws = plan.reason == Reason::NoProgress;
        self.close(|entry| {
            let is_withdrawn = entry.requests.iter().any(|request| {
                target(request)
                    .is_some_and(|target| request.is_withdrawn_by(target.requested_bytes))
            });
            let (moved_bytes, after_ms) = (entry.moved_bytes(plugged), now.since(entry.at));
            is_withdrawn.then_some(match (withdraws, moved_bytes) {
                (false, _) => Outcome::Superseded { moved_bytes, after_ms, by },
                (true, 0) => Outcome::Withdrawn { after_ms, by },
                (true, _) => Outcome::Partly { moved_bytes, after_ms, by: Some(by), lack: None },
            })
        });
    }

    /// Ends decisions because a client has resized a zone.
    pub fn resized_by_client(&mut self, zone: usize, sizes: &[ZoneSizes], now: TimeMs) {
        self.finalize_reached(|request| request.zone == zone);
        let plugged: Vec<u64> = sizes.iter().map(|sizes| sizes.plugged_bytes).collect();
        self.close(|entry| {
            let is_withdrawn = entry
                .requests
                .iter()
                .any(|request| request.zone == zone && request.reached.is_none());
            let (moved_bytes, after_ms) = (entry.moved_bytes(&plugged), now.since(entry.at));
            is_withdrawn.then_some(Outcome::ByHand { moved_bytes, after_ms })
        });
    }

    /// Updates the open decisions with the zones' present sizes.
    pub fn observe(&mut self, sizes: &[ZoneSizes], now: TimeMs) {
        self.reopen(sizes, now);
        if self.open.is_empty() {
            return;
        }
        let plugged: Vec<u64> = sizes.iter().map(|sizes| sizes.plugged_bytes).collect();
        let mut just_reached = Vec::new();
        self.close(|entry| {
            entry.observe(sizes, now);
            let after_ms = now.since(entry.at);
            if entry.is_reached() {
                just_reached.push((entry.seq, now));
                return Some(Outcome::Reached { after_ms });
            }
            // The device has lowered the request, because the host could not provide all memory or
            // the driver was refused. The guest has reached the lowered size.
            let lack = entry.requests.iter().find_map(|request| {
                let sizes = sizes.get(request.zone)?;
                let has_lowered_size = request.is_withdrawn_by(sizes.requested_bytes)
                    && request.grows
                    && sizes.plugged_bytes >= sizes.requested_bytes;
                sizes.lowered_by().filter(|_| has_lowered_size).map(str::to_owned)
            })?;
            let moved_bytes = entry.moved_bytes(&plugged);
            Some(Outcome::Partly { moved_bytes, after_ms, by: None, lack: Some(lack) })
        });
        self.just_reached.append(&mut just_reached);
    }

    /// Makes the outcome of reached requests final, because another size has been requested from
    /// their zones.
    fn finalize_reached(&mut self, is_final: impl Fn(&ZoneRequest) -> bool) {
        let first = self.ring.front().map_or(0, |entry| entry.seq);
        let just_reached = self.just_reached.iter().map(|&(seq, _)| seq);
        for seq in self.open.iter().copied().chain(just_reached).filter(|seq| *seq >= first) {
            let entry = &mut self.ring[(seq - first) as usize];
            let becomes_final = |request: &ZoneRequest| {
                request.reached.is_some() && !request.is_final && is_final(request)
            };
            if entry.requests.iter().any(becomes_final) {
                let requests = &mut Arc::make_mut(entry).requests;
                requests
                    .iter_mut()
                    .filter(|request| becomes_final(request))
                    .for_each(|request| request.is_final = true);
            }
        }
    }

    /// Reopens decisions whose sizes the guest has left within [`CONFIRM_MS`].
    fn reopen(&mut self, sizes: &[ZoneSizes], now: TimeMs) {
        let first = self.ring.front().map_or(0, |entry| entry.seq);
        let (ring, open) = (&mut self.ring, &mut self.open);
        self.just_reached.retain(|&(seq, at)| {
            if seq < first || now.since(at) >= CONFIRM_MS {
                return false;
            }
            let entry = Arc::make_mut(&mut ring[(seq - first) as usize]);
            entry.observe(sizes, now);
            if !entry.is_reached() {
                entry.end = None;
                // A later decision may already be open.
                open.insert(open.partition_point(|other| *other < seq), seq);
            }
            entry.is_reached()
        });
    }

    /// Closes each open decision for which `end` returns an outcome.
    fn close(&mut self, mut end: impl FnMut(&mut Entry) -> Option<Outcome>) {
        let first = self.ring.front().map_or(0, |entry| entry.seq);
        let ring = &mut self.ring;
        self.open.retain(|seq| {
            let entry = Arc::make_mut(&mut ring[(seq - first) as usize]);
            entry.end = end(entry);
            entry.end.is_none()
        });
    }

    /// Returns the last `count` decisions, newest first.
    pub fn newest(&self, count: usize) -> Vec<Arc<Entry>> {
        self.ring.iter().rev().take(count).cloned().collect()
    }
}

/// State of a zone that determines the outcome of decisions.
#[derive(Clone, Copy, Debug)]
pub struct AuditedZone<'a> {
    /// ID of the zone.
    pub id: &'a str,
    /// Plugged size.
    pub plugged_bytes: u64,
    /// The zone makes no progress.
    pub late: bool,
}

impl Entry {
    fn is_same_kind(&self, plan: &Plan) -> bool {
        let old = &self.plan;
        (old.direction, old.reason, old.dry_run) == (plan.direction, plan.reason, plan.dry_run)
    }

    fn observe(&mut self, sizes: &[ZoneSizes], now: TimeMs) {
        for request in &mut self.requests {
            if let Some(sizes) = sizes.get(request.zone) {
                request.observe(sizes, now);
            }
        }
    }

    fn is_reached(&self) -> bool {
        self.requests.iter().all(|request| request.reached.is_some())
    }

    fn moved_bytes(&self, plugged: &[u64]) -> u64 {
        let moved = |request: &ZoneRequest| {
            plugged.get(request.zone).map_or(0, |bytes| request.moved_bytes(*bytes))
        };
        self.requests.iter().map(moved).fold(0, u64::saturating_add)
    }

    /// Returns the decision as the API shows it, with an outcome for the present state of `zones`.
    pub fn info(&self, zones: &[AuditedZone<'_>], now: TimeMs) -> DecisionInfo {
        let id =
            |index: usize| zones.get(index).map_or_else(String::new, |zone| zone.id.to_owned());
        let plan = &self.plan;
        DecisionInfo {
            seq: self.seq,
            age_ms: now.since(self.at),
            times: self.times,
            policy: self.policy.to_owned(),
            direction: plan.direction.label().to_owned(),
            reason: plan.reason.label().to_owned(),
            limited_by: plan.limited_by.map(|reason| reason.label().to_owned()),
            near: self.near,
            wanted_bytes: plan.wanted_bytes,
            requested_bytes: plan.requested_bytes(),
            change_bytes: self
                .requests
                .iter()
                .fold(0, |sum: u64, request| sum.saturating_add(request.change_bytes())),
            available_bytes: self.report.as_ref().map(|report| report.available_bytes),
            dry_run: plan.dry_run,
            input: DecisionInput {
                report: self.report.clone(),
                pool_free_bytes: self.pool_free_bytes,
                storage: self.storage,
                zones: self
                    .before
                    .iter()
                    .enumerate()
                    .map(|(index, &(requested_bytes, plugged_bytes))| DecisionSizes {
                        zone: id(index),
                        requested_bytes,
                        plugged_bytes,
                    })
                    .collect(),
            },
            targets: plan
                .targets
                .iter()
                .enumerate()
                .map(|(index, target)| DecisionTarget {
                    zone: id(index),
                    requested_bytes: target.requested_bytes,
                })
                .collect(),
            outcome: self.end.clone().unwrap_or_else(|| {
                let plugged: Vec<u64> = zones.iter().map(|zone| zone.plugged_bytes).collect();
                let moved_bytes = self.moved_bytes(&plugged);
                let late = |request: &ZoneRequest| {
                    request.reached.is_none()
                        && zones.get(request.zone).is_some_and(|zone| zone.late)
                };
                if self.requests.iter().any(late) {
                    Outcome::Stuck { moved_bytes }
                } else {
                    Outcome::Pending { moved_bytes }
                }
            }),
        }
    }
}

fn digest(report: &Report, age_ms: u64) -> ReportDigest {
    let (memory, stall, counters) = (report.memory(), report.stall(), report.counters());
    ReportDigest {
        seq: report.seq(),
        age_ms,
        monotonic_ms: report.monotonic_ms(),
        total_bytes: memory.total_bytes,
        available_bytes: memory.available_bytes,
        free_bytes: memory.free_bytes,
        swap_used_bytes: memory.swap_total_bytes.saturating_sub(memory.swap_free_bytes),
        stall_some_us: stall.some_us,
        stall_full_us: stall.full_us,
        pswpin: counters.pswpin,
        pswpout: counters.pswpout,
    }
}

#[cfg(test)]
#[path = "audit_tests.rs"]
mod tests;
