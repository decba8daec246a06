//! Rate limit of events that a guest can repeat. This module only makes decisions and does no I/O.
//!
//! A guest may restart, reset its devices, and plug and unplug memory at any rate. Each event may
//! end up in a file on the host. Each source (a device, a zone, or the VM itself) therefore has an
//! allowance. A restart of the VM does not renew it. Only the last event that exceeds the allowance
//! is kept, because it shows the current state. It is sent as soon as the allowance permits.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Source of events. Each source has its own allowance.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// Restarts of the VM.
    Vm,
    /// Device, by its id. Its events report that the driver has activated or reset it.
    Device(String),
    /// Events of one kind, by source and name, that a guest can cause without a restart, such as
    /// reports of a panic.
    Kind(&'static str, &'static str),
    /// Memory zone, by its id. Its events report that the zone has reached the requested size or
    /// cannot reach it. An event that equals the last one sent is not sent again.
    Zone(String),
}

/// Allowance of each source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Number of events that may be sent without delay.
    pub burst: u32,
    /// After the burst, one event may be sent in each span.
    pub span: Duration,
}

impl Bounds {
    /// Bounds that the VMM uses. The burst suits groups of events: resizes by clients and by the
    /// governor, and driver activity while a guest is being installed. The bounds limit a source to
    /// about 350 kB a day.
    pub(super) const USUAL: Self = Self { burst: 32, span: Duration::from_secs(60) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Emit,
    /// The event equals the last one that was sent or withheld.
    Repeated,
    /// The allowance is used up. The event is sent later, unless another event replaces it.
    Withhold,
}

/// Allowances of all sources, and their withheld events.
#[derive(Debug)]
pub(super) struct Limiter<E> {
    bounds: Bounds,
    accounts: BTreeMap<Source, Account<E>>,
}

#[derive(Debug)]
struct Account<E> {
    /// Number of events that may still be sent.
    left: u32,
    /// The next event does not use the allowance, because a client requested the change.
    is_requested: bool,
    /// Start of the current span. At the end of the span, `left` increases by one.
    since: Instant,
    /// Last event that was sent. Stored only for zones.
    last: Option<E>,
    /// Last event that was withheld.
    withheld: Option<E>,
}

impl<E: Clone + PartialEq> Limiter<E> {
    /// Creates a limiter that has seen no events.
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { bounds, accounts: BTreeMap::new() }
    }

    /// Decides whether to send an event. If the verdict is `Emit`, the event counts as sent.
    pub(super) fn admit(&mut self, source: Source, event: &E, now: Instant) -> Verdict {
        let (bounds, is_zone) = (self.bounds, matches!(source, Source::Zone(_)));
        let account = self.account(source, now);
        if is_zone && !account.is_requested && account.repeats(event) {
            return Verdict::Repeated;
        }
        account.refill(bounds, now);
        if !std::mem::take(&mut account.is_requested) {
            let Some(left) = account.left.checked_sub(1) else {
                account.withheld = Some(event.clone());
                return Verdict::Withhold;
            };
            account.left = left;
        }
        account.withheld = None;
        account.last = is_zone.then(|| event.clone());
        Verdict::Emit
    }

    /// Records that a client made a request to a source. The next event is sent even if it repeats
    /// the last one.
    pub(super) fn record_request(&mut self, source: Source, now: Instant) {
        let account = self.account(source, now);
        (account.is_requested, account.last) = (true, None);
    }

    /// Time when the next withheld event may be sent. `None` if no event is withheld.
    pub(super) fn due(&self) -> Option<Instant> {
        let withheld = self.accounts.values().filter(|account| account.withheld.is_some());
        withheld.map(|account| account.since + self.bounds.span).min()
    }

    /// Removes and returns the withheld events that may be sent now. They count as sent.
    pub(super) fn release(&mut self, now: Instant) -> Vec<E> {
        let mut released = Vec::new();
        for (source, account) in &mut self.accounts {
            account.refill(self.bounds, now);
            if account.left > 0
                && let Some(event) = account.withheld.take()
            {
                account.left -= 1;
                account.last = matches!(source, Source::Zone(_)).then(|| event.clone());
                released.push(event);
            }
        }
        released
    }

    /// Removes and returns the withheld event of one source. It must be sent before the source's
    /// next event, which would be unintelligible without it.
    pub(super) fn release_of(&mut self, source: &Source) -> Option<E> {
        self.accounts.get_mut(source)?.withheld.take()
    }

    /// Removes and returns all withheld events. Called when no further event follows.
    pub(super) fn release_all(&mut self) -> Vec<E> {
        self.accounts.values_mut().filter_map(|account| account.withheld.take()).collect()
    }

    /// Records the end of a machine, which a reboot replaces with another. Events about the state
    /// of its devices and memory are dropped, because the next machine starts with new state.
    /// Allowances are not renewed.
    pub(super) fn end_machine(&mut self) {
        for (source, account) in &mut self.accounts {
            if !matches!(source, Source::Vm | Source::Kind(..)) {
                (account.last, account.withheld, account.is_requested) = (None, None, false);
            }
        }
    }

    fn account(&mut self, source: Source, now: Instant) -> &mut Account<E> {
        let bounds = self.bounds;
        if !self.accounts.contains_key(&source) {
            // Drops accounts without any state, because devices can be removed.
            self.accounts.retain(|_, account| !account.is_as_new(bounds, now));
        }
        self.accounts.entry(source).or_insert_with(|| Account {
            left: bounds.burst,
            is_requested: false,
            since: now,
            last: None,
            withheld: None,
        })
    }
}

impl<E: PartialEq> Account<E> {
    /// Returns true if the event repeats the last one that was or will be sent.
    fn repeats(&mut self, event: &E) -> bool {
        if self.withheld.as_ref() == Some(event) {
            return true;
        }
        let is_known = self.last.as_ref() == Some(event);
        if is_known {
            // The state has returned to that of the last event sent, so the withheld event is
            // obsolete.
            self.withheld = None;
        }
        is_known
    }

    fn refill(&mut self, bounds: Bounds, now: Instant) {
        let spans = now.saturating_duration_since(self.since).as_nanos() / bounds.span.as_nanos();
        let spans = u32::try_from(spans).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(spans).min(bounds.burst);
        // The current span continues, unless the allowance is full.
        self.since = if self.left == bounds.burst { now } else { self.since + bounds.span * spans };
    }

    fn is_as_new(&mut self, bounds: Bounds, now: Instant) -> bool {
        self.refill(bounds, now);
        self.left == bounds.burst
            && !self.is_requested
            && self.last.is_none()
            && self.withheld.is_none()
    }
}

#[cfg(test)]
#[path = "limiter_tests.rs"]
mod tests;
