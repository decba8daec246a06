//! How often a guest is told of: decisions alone.
//!
//! A guest may restart, reset its devices, and plug and unplug memory as often as it likes, and
//! each event that is told may end up in a file of the host's. So each source, a device or a zone
//! or the VM itself, has an allowance, which lasts from machine to machine: a guest that restarts
//! has no more for it. What it has caused beyond that is withheld, but for the last: that is how it
//! is now, and it is told as soon as there is something left for it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Whose events are counted together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// The VM, which restarts.
    Vm,
    /// A device, by its id, whose driver comes and goes.
    Device(String),
    /// Events of one kind, by source and name, that a guest can cause without a restart, such as
    /// reports of a panic.
    Kind(&'static str, &'static str),
    /// A zone of memory, by its id, that has what was requested, or cannot have it. What was told
    /// last is not told again.
    Zone(String),
}

/// How much may be told of one source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// So much at once.
    pub burst: u32,
    /// Beyond that there is one in each such span.
    pub span: Duration,
}

impl Bounds {
    /// Of a VMM. Resizes by hand and by the governor come in groups, and so does what the drivers
    /// of a guest that is installed do; and in a day there is no more than some 300 kB of each
    /// source.
    pub(super) const USUAL: Self = Self { burst: 32, span: Duration::from_secs(60) };
}

/// Whether something is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Tell,
    /// It is how it was when something was told, or withheld, last.
    Known,
    /// There was too much. It will be told if nothing takes its place before.
    Withhold,
}

/// What has been told of every source, and what has not.
#[derive(Debug)]
pub(super) struct Limiter<E> {
    bounds: Bounds,
    accounts: BTreeMap<Source, Account<E>>,
}

#[derive(Debug)]
struct Account<E> {
    /// How many may be told at once.
    left: u32,
    /// One more may be told of what comes: somebody has asked for it.
    is_asked: bool,
    /// When `left` last grew, or could have.
    since: Instant,
    /// What was told last, of a zone.
    last: Option<E>,
    /// What was heard last, and not told.
    withheld: Option<E>,
}

impl<E: Clone + PartialEq> Limiter<E> {
    /// Nothing was told yet.
    pub(super) fn new(bounds: Bounds) -> Self {
        Self { bounds, accounts: BTreeMap::new() }
    }

    /// Hears of something. What is told counts as told.
    pub(super) fn hear(&mut self, source: Source, event: &E, now: Instant) -> Verdict {
        let (bounds, is_zone) = (self.bounds, matches!(source, Source::Zone(_)));
        let account = self.account(source, now);
        if is_zone && !account.is_asked && account.knows(event) {
            return Verdict::Known;
        }
        account.refill(bounds, now);
        if !std::mem::take(&mut account.is_asked) {
            let Some(left) = account.left.checked_sub(1) else {
                account.withheld = Some(event.clone());
                return Verdict::Withhold;
            };
            account.left = left;
        }
        account.withheld = None;
        account.last = is_zone.then(|| event.clone());
        Verdict::Tell
    }

    /// Somebody has asked for something of a source: what comes next is news whatever it is, and is
    /// told.
    pub(super) fn ask(&mut self, source: Source, now: Instant) {
        let account = self.account(source, now);
        (account.is_asked, account.last) = (true, None);
    }

    /// When something that was withheld is to be told, if there is something.
    pub(super) fn due(&self) -> Option<Instant> {
        let withheld = self.accounts.values().filter(|account| account.withheld.is_some());
        withheld.map(|account| account.since + self.bounds.span).min()
    }

    /// What was withheld and may be told now. It counts as told.
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

    /// What was withheld of one source: it is told now, for what comes next would not be understood
    /// without it.
    pub(super) fn release_of(&mut self, source: &Source) -> Option<E> {
        self.accounts.get_mut(source)?.withheld.take()
    }

    /// All that was withheld: nothing comes any more.
    pub(super) fn release_all(&mut self) -> Vec<E> {
        self.accounts.values_mut().filter_map(|account| account.withheld.take()).collect()
    }

    /// A machine has ended. How its devices and its memory are is nothing that anybody wants to
    /// know any more, and how the next one's are is news; but what was told has been told.
    pub(super) fn end_machine(&mut self) {
        for (source, account) in &mut self.accounts {
            if !matches!(source, Source::Vm | Source::Kind(..)) {
                (account.last, account.withheld, account.is_asked) = (None, None, false);
            }
        }
    }

    fn account(&mut self, source: Source, now: Instant) -> &mut Account<E> {
        let bounds = self.bounds;
        if !self.accounts.contains_key(&source) {
            // Devices come and go. One of which there is nothing to remember is as good as new.
            self.accounts.retain(|_, account| !account.is_as_new(bounds, now));
        }
        self.accounts.entry(source).or_insert_with(|| Account {
            left: bounds.burst,
            is_asked: false,
            since: now,
            last: None,
            withheld: None,
        })
    }
}

impl<E: PartialEq> Account<E> {
    /// Whether this is how it is as far as anybody knows, or will know.
    fn knows(&mut self, event: &E) -> bool {
        if self.withheld.as_ref() == Some(event) {
            return true;
        }
        let is_known = self.last.as_ref() == Some(event);
        if is_known {
            // What was withheld meanwhile is over.
            self.withheld = None;
        }
        is_known
    }

    fn refill(&mut self, bounds: Bounds, now: Instant) {
        let spans = now.saturating_duration_since(self.since).as_nanos() / bounds.span.as_nanos();
        let spans = u32::try_from(spans).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(spans).min(bounds.burst);
        // Of a span that has begun nothing is lost, unless there is nothing to be gained by it.
        self.since = if self.left == bounds.burst { now } else { self.since + bounds.span * spans };
    }

    fn is_as_new(&mut self, bounds: Bounds, now: Instant) -> bool {
        self.refill(bounds, now);
        self.left == bounds.burst
            && !self.is_asked
            && self.last.is_none()
            && self.withheld.is_none()
    }
}

#[cfg(test)]
#[path = "limiter_tests.rs"]
mod tests;
