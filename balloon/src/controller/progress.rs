//! Whether a zone's guest driver follows what is asked of it.

use super::Rules;
use crate::rise::Rise;
use crate::units::{round_down, round_up};
use crate::{TimeMs, ZoneSizes};

/// Follows one zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    requested_bytes: u64,
    plugged_bytes: u64,
    /// The last time that either of them moved, and that is not taken back any more.
    moved: TimeMs,
    rise: Rise,
    grow: Attempt,
    shrink: Attempt,
    /// Grows, for the host's sake.
    host: Attempt,
    /// What the guest does not follow is asked for all the same, for the floor's sake.
    kept: bool,
}

/// What has become of a zone since it was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// More is requested than was asked for.
    pub has_grown: bool,
    /// What was asked for and the host could not provide.
    pub lacks_bytes: u64,
}

/// How much may be asked at a time, after the guest has not followed, or the host could not provide it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Attempt {
    /// At most this may be outstanding; `None`: no limit.
    cap_bytes: Option<u64>,
    /// Nothing may be asked before this.
    retry_at: Option<TimeMs>,
    /// How long the zone is left alone after the next failure.
    pause_ms: u64,
}

impl Progress {
    /// Starts to follow a zone.
    pub fn new(zone: &ZoneSizes, now: TimeMs) -> Self {
        Progress {
            requested_bytes: zone.requested_bytes,
            plugged_bytes: zone.plugged_bytes,
            moved: now,
            rise: Rise::default(),
            grow: Attempt::default(),
            shrink: Attempt::default(),
            host: Attempt::default(),
            kept: false,
        }
    }

    /// Takes the zone's present sizes.
    pub fn observe(&mut self, zone: &ZoneSizes, now: TimeMs) -> Seen {
        let is_short = zone.shortfall.is_some();
        let has_grown = zone.requested_bytes > self.requested_bytes;
        let lacks_bytes =
            if is_short { self.requested_bytes.saturating_sub(zone.requested_bytes) } else { 0 };
        let asked_bytes = self.requested_bytes.min(zone.requested_bytes);
        // What goes without being asked back is no progress.
        let has_left = zone.plugged_bytes < self.plugged_bytes && asked_bytes < self.plugged_bytes;
        if zone.requested_bytes != self.requested_bytes || has_left {
            (self.moved, self.kept) = (now, false);
        }
        if has_left {
            self.shrink = Attempt::default();
        }
        if let Some(since) = self.rise.observe(asked_bytes, zone.plugged_bytes, now) {
            (self.moved, self.kept) = (self.moved.max(since), false);
            self.grow = Attempt::default();
            // What comes before the host is asked again is what it had left.
            if !is_short && self.host.allowed(since) != Some(0) {
                self.host = Attempt::default();
            }
        }
        self.requested_bytes = zone.requested_bytes;
        self.plugged_bytes = zone.plugged_bytes;
        Seen { has_grown, lacks_bytes }
    }

    /// The host could not provide what was asked for: not before the next try is it asked again.
    pub fn fell_short(&mut self, rules: &Rules, now: TimeMs) {
        self.host.pause(rules, now);
    }

    /// A plan asks for this.
    pub fn asked(&mut self, requested_bytes: u64, now: TimeMs) {
        if requested_bytes != self.requested_bytes {
            self.requested_bytes = requested_bytes;
            self.moved = now;
            self.kept = false;
        }
    }

    /// This is asked for after all, though [`Progress::fall_back`] has taken it.
    pub fn keep(&mut self, requested_bytes: u64) {
        self.requested_bytes = requested_bytes;
        self.kept = true;
    }

    /// Whether that is so, and nothing has happened on it since.
    pub fn is_kept(&self) -> bool {
        self.kept && self.rise.pending_since().is_none()
    }

    /// A driver has come: what another one, or none, did not follow says nothing about it.
    pub fn begin_anew(&mut self, now: TimeMs) {
        self.moved = now;
        self.rise = Rise::default();
        self.grow = Attempt::default();
        self.shrink = Attempt::default();
        self.kept = false;
    }

    /// What to request instead, if the guest has not followed for too long: half of what is missing, so that the
    /// change itself makes the driver try again; at the end, what it has. A shrink is withdrawn at once, because
    /// memory that the guest uses is not worth fighting for, and the next one is smaller.
    ///
    /// A balloon's guest counts in pages: what it has may lie between two blocks, and what is requested never does. A
    /// withdrawn shrink leaves it the whole block; the last part of a block of a grow is as good as there.
    pub fn fall_back(&mut self, zone: &ZoneSizes, rules: &Rules, now: TimeMs) -> Option<u64> {
        if !self.has_failed(zone, rules, now) {
            return None;
        }
        let growing = zone.requested_bytes > zone.plugged_bytes;
        let missing = zone.requested_bytes.abs_diff(zone.plugged_bytes);
        let half = round_down(missing / 2, zone.block_bytes);
        let attempt = if growing { &mut self.grow } else { &mut self.shrink };
        attempt.failed(half, zone, rules, now, growing);
        // Nor does what came before it undo the failure by staying.
        self.rise.settle();
        self.moved = now;
        self.kept = false;
        Some(left_bytes(zone, half))
    }

    /// Whether the guest has not followed for too long.
    pub fn has_failed(&self, zone: &ZoneSizes, rules: &Rules, now: TimeMs) -> bool {
        let is_there = (0..zone.block_bytes).contains(&zone.outstanding_grow_bytes());
        self.is_stuck(zone, rules, now) && !(is_there && zone.requested_bytes > zone.plugged_bytes)
    }

    /// Whether nothing has happened for too long on what is requested.
    pub fn is_stuck(&self, zone: &ZoneSizes, rules: &Rules, now: TimeMs) -> bool {
        let moved = self.rise.pending_since().map_or(self.moved, |since| since.max(self.moved));
        zone.requested_bytes != zone.plugged_bytes && now.since(moved) >= rules.progress_ms
    }

    /// The most that may be requested of the zone, for the guest's driver's sake.
    pub fn ceiling_bytes(&self, zone: &ZoneSizes, now: TimeMs) -> u64 {
        match self.grow.allowed(now) {
            Some(cap) => self.rise.stayed_bytes(zone.plugged_bytes).saturating_add(cap),
            None => u64::MAX,
        }
    }

    /// The most that may be requested of the zone, for the host's sake.
    pub fn host_ceiling_bytes(&self, zone: &ZoneSizes, now: TimeMs) -> u64 {
        match self.host.allowed(now) {
            Some(cap) => zone.plugged_bytes.saturating_add(cap),
            None => u64::MAX,
        }
    }

    /// The most that may be taken back from the zone at a time, for the guest's driver's sake.
    pub fn shrink_cap_bytes(&self, now: TimeMs) -> u64 {
        self.shrink.allowed(now).unwrap_or(u64::MAX)
    }
}

/// What is requested of a zone after a request that was not followed: what is there, and so much of a grow.
pub(super) fn left_bytes(zone: &ZoneSizes, more_bytes: u64) -> u64 {
    let left = match zone.requested_bytes > zone.plugged_bytes {
        true => round_down(zone.plugged_bytes + more_bytes, zone.block_bytes),
        false => round_up(zone.plugged_bytes, zone.block_bytes),
    };
    let most = round_down(zone.max_bytes, zone.block_bytes);
    left.max(round_up(zone.floor_bytes, zone.block_bytes)).min(most)
}

impl Attempt {
    fn failed(&mut self, half_bytes: u64, zone: &ZoneSizes, rules: &Rules, now: TimeMs, at_once: bool) {
        self.cap_bytes = Some(half_bytes.max(zone.block_bytes));
        if at_once && half_bytes > 0 {
            return;
        }
        self.pause(rules, now);
    }

    fn pause(&mut self, rules: &Rules, now: TimeMs) {
        self.pause_ms = self.pause_ms.saturating_mul(2).clamp(rules.progress_ms, rules.max_retry_ms);
        self.retry_at = Some(now + self.pause_ms);
    }

    fn allowed(&self, now: TimeMs) -> Option<u64> {
        match self.retry_at {
            Some(at) if now < at => Some(0),
            _ => self.cap_bytes,
        }
    }
}
