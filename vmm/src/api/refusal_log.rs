//! Log lines of refused calls and connections.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZero;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use foreshore_devices::log::Occasions;
use parking_lot::Mutex;
use tracing::{debug, warn};

use super::server::Limits;

/// Reason of a refusal, as in the body of the answer. `ApiError` attaches it to the answer as an
/// extension.
#[derive(Clone, Debug)]
pub(super) struct RefusalReason(pub String);

/// Refusals of each call that were logged or counted. A client that repeats a refused call must not
/// fill the disk of the host, and must not hide a refusal for another reason either.
#[derive(Default)]
pub(super) struct RefusalLog(Mutex<BTreeMap<Kind, Refusals>>);

/// Path of the call, and true for an error of the VMM (5xx), false for one of the client (4xx). All
/// unknown calls have the same path, so that the number of kinds is limited.
type Kind = (Option<String>, bool);

/// Number of reasons that are distinguished for each kind.
const MOST_REASONS: usize = 32;
/// Number of new reasons of a kind that are logged without a pause.
const NEW_REASONS: u32 = 8;
/// Time until another new reason may be logged.
const NEW_REASON_INTERVAL: Duration = Duration::from_secs(60);

/// Log line that is due.
#[derive(Debug, PartialEq)]
struct DueLine {
    /// Number of refusals for this reason.
    times: u64,
    /// Number of refusals of the same kind that were not logged since its last line.
    suppressed: Option<NonZero<u64>>,
}

/// Refusals of one kind.
struct Refusals {
    /// Number of refusals for each pair of a status and a reason's hash, ordered by the last
    /// refusal.
    reasons: VecDeque<((u16, u64), Occasions)>,
    /// Number of new reasons that may be logged, as of `since`.
    budget: u32,
    since: Instant,
    /// Number of refusals since the last log line.
    suppressed: u64,
}

impl Refusals {
    fn new(now: Instant) -> Self {
        Self { reasons: VecDeque::new(), budget: NEW_REASONS, since: now, suppressed: 0 }
    }

    /// Counts a refusal at `now`, and returns the log line if one is due.
    fn another(&mut self, reason: (u16, u64), now: Instant) -> Option<DueLine> {
        let Some(times) = self.count(reason, now) else {
            self.suppressed += 1;
            return None;
        };
        Some(DueLine { times, suppressed: NonZero::new(std::mem::take(&mut self.suppressed)) })
    }

    /// Counts a refusal at `now`. Returns the count if a log line is due: for a new reason while
    /// the budget lasts, and for a known reason at powers of two.
    fn count(&mut self, reason: (u16, u64), now: Instant) -> Option<u64> {
        if let Some(at) = self.reasons.iter().position(|(known, _)| *known == reason) {
            let known = self.reasons.remove(at)?;
            self.reasons.push_back(known);
            return self.reasons.back()?.1.another();
        }
        if !self.spend(now) {
            return None;
        }
        if self.reasons.len() == MOST_REASONS {
            self.reasons.pop_front();
        }
        self.reasons.push_back((reason, Occasions::new()));
        self.reasons.back()?.1.another()
    }

    fn spend(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.since);
        let intervals = elapsed.as_nanos() / NEW_REASON_INTERVAL.as_nanos();
        let earned = u32::try_from(intervals).unwrap_or(u32::MAX);
        if self.budget.saturating_add(earned) >= NEW_REASONS {
            (self.budget, self.since) = (NEW_REASONS, now);
        } else {
            self.budget += earned;
            self.since += NEW_REASON_INTERVAL * earned;
        }
        let may_log = self.budget > 0;
        self.budget = self.budget.saturating_sub(1);
        may_log
    }
}

impl RefusalLog {
    /// Counts a refusal at `now`. Returns the line if the refusal is due to be logged as a warning.
    fn another(
        &self,
        route: Option<String>,
        status: u16,
        reason: Option<&str>,
        now: Instant,
    ) -> Option<DueLine> {
        let mut hasher = DefaultHasher::new();
        reason.hash(&mut hasher);
        let mut kinds = self.0.lock();
        let refusals = kinds.entry((route, status >= 500)).or_insert_with(|| Refusals::new(now));
        refusals.another((status, hasher.finish()), now)
    }
}

/// Serves a call, and logs its refusal. With `-vv`, every refusal is logged.
pub(super) async fn log_refusals(
    State(log): State<Arc<RefusalLog>>,
    request: Request,
    next: Next,
) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let route = request.extensions().get().map(|route: &MatchedPath| route.as_str().to_owned());
    let answer = next.run(request).await;
    let status = answer.status().as_u16();
    if status >= 400 {
        let reason = answer.extensions().get().map(|RefusalReason(reason)| &**reason);
        match log.another(route, status, reason, Instant::now()) {
            Some(DueLine { times, suppressed }) => {
                let suppressed = suppressed.map(NonZero::get);
                warn!(times, suppressed, %method, path, status, reason, "Refused an API call")
            }
            None => debug!(%method, path, status, reason, "Refused an API call"),
        }
    }
    answer
}

/// Log lines about connections that a server has closed, with a count for each reason.
pub(super) struct ConnectionWarnings {
    /// Flag that describes the socket.
    flag: &'static str,
    no_room: Occasions,
    late_head: Occasions,
    unread: Occasions,
    invalid: Occasions,
}

impl ConnectionWarnings {
    pub(super) fn new(flag: &'static str) -> Self {
        let [no_room, late_head, unread, invalid] = Default::default();
        Self { flag, no_room, late_head, unread, invalid }
    }

    pub(super) fn no_room(&self, Limits { connections, silent, .. }: Limits) {
        if let Some(times) = self.no_room.another() {
            warn!(
                times,
                flag = self.flag,
                connections,
                silent,
                "Closed the connection that waited longest for its client, to make room for another"
            );
        }
    }

    pub(super) fn late_head(&self, limits: Limits) {
        if let Some(times) = self.late_head.another() {
            warn!(
                times,
                flag = self.flag,
                limit = ?limits.head,
                "Closed a connection because the head of its request is incomplete"
            );
        }
    }

    pub(super) fn unread(&self, limits: Limits) {
        if let Some(times) = self.unread.another() {
            warn!(
                times,
                flag = self.flag,
                limit = ?limits.unread,
                "Closed a connection because its client does not read the answer"
            );
        }
    }

    /// Logs an error that has ended a connection. It is a warning if the request is not valid HTTP.
    pub(super) fn ended(&self, error: &hyper::Error) {
        let flag = self.flag;
        match error.is_parse().then(|| self.invalid.another()).flatten() {
            Some(times) => {
                let status = status_of(error);
                warn!(times, flag, status, %error, "Refused a request that is not valid HTTP/1.1")
            }
            None => debug!(flag, %error, "A connection has ended"),
        }
    }
}

/// Returns the status with which hyper answers a request that it cannot parse. hyper
/// closes HTTP/2 connections without an answer (`on_error` in src/proto/h1/role.rs).
fn status_of(error: &hyper::Error) -> Option<u16> {
    if error.is_parse_version_h2() {
        return None;
    }
    let status = match error.is_parse_too_large() {
        true => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        false => StatusCode::BAD_REQUEST,
    };
    Some(status.as_u16())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts a refusal of `vm.boot` `at_s` seconds after `start`.
    fn refuse(
        log: &RefusalLog,
        start: Instant,
        at_s: u64,
        status: u16,
        reason: &str,
    ) -> Option<u64> {
        due(log, start, at_s, status, reason).map(|line| line.times)
    }

    fn due(
        log: &RefusalLog,
        start: Instant,
        at_s: u64,
        status: u16,
        reason: &str,
    ) -> Option<DueLine> {
        let now = start + Duration::from_secs(at_s);
        log.another(Some("/api/v1/vm.boot".to_owned()), status, Some(reason), now)
    }

    #[test]
    fn new_reason_is_logged_although_the_call_was_refused_before() {
        let (log, start) = (RefusalLog::default(), Instant::now());
        let counts: Vec<_> = (0..5).map(|_| refuse(&log, start, 0, 405, "paused")).collect();
        assert_eq!(counts, [Some(1), Some(2), None, Some(4), None]);
        assert_eq!(refuse(&log, start, 0, 405, "not created"), Some(1));
        assert_eq!(refuse(&log, start, 0, 404, "not created"), Some(1));
        assert_eq!(refuse(&log, start, 0, 405, "paused"), None);
    }

    #[test]
    fn ever_new_reasons_cause_few_lines_and_memory() {
        let (log, start) = (RefusalLog::default(), Instant::now());
        let logged = |at_s: u64, count: usize| {
            let new = |nth| refuse(&log, start, at_s, 400, &format!("{at_s}: no zone {nth}"));
            (0..count).filter_map(new).count()
        };
        assert_eq!(logged(0, 1000), 8);
        assert_eq!(logged(59, 1000), 0);
        assert_eq!(logged(60, 1000), 1);
        assert_eq!(logged(119, 1000), 0);
        assert_eq!(logged(240, 1000), 3);
        assert_eq!(logged(86_400, 1000), 8);
        for minute in 2000..2100 {
            assert_eq!(logged(60 * minute, 2).min(1), 1);
        }
        let most = log.0.lock().values().map(|kind| kind.reasons.len()).max();
        assert_eq!(most, Some(MOST_REASONS));
    }

    #[test]
    fn line_after_suppressed_refusals_has_their_number() {
        let (log, start) = (RefusalLog::default(), Instant::now());
        let suppressed = |at_s, reason: &str| {
            let line = due(&log, start, at_s, 400, reason);
            line.map(|line| line.suppressed.map_or(0, NonZero::get))
        };
        for nth in 0..8 {
            assert_eq!(suppressed(0, &nth.to_string()), Some(0));
        }
        for nth in 8..100 {
            assert_eq!(suppressed(0, &nth.to_string()), None);
        }
        assert_eq!(suppressed(60, "after a pause"), Some(92));
        assert_eq!(suppressed(120, "another"), Some(0));
        let known: Vec<_> = (0..3).map(|_| suppressed(120, "another")).collect();
        assert_eq!(known, [Some(0), None, Some(1)]);
        // Failures are counted separately.
        assert_eq!(suppressed(120, "another"), None);
        let failure = due(&log, start, 120, 500, "no space left").unwrap();
        assert_eq!(failure, DueLine { times: 1, suppressed: None });
    }

    #[test]
    fn refusals_of_clients_do_not_use_the_budget_of_failures() {
        let (log, start) = (RefusalLog::default(), Instant::now());
        for nth in 0..1000 {
            refuse(&log, start, 0, 400, &nth.to_string());
        }
        assert_eq!(refuse(&log, start, 0, 400, "another"), None);
        assert_eq!(refuse(&log, start, 0, 500, "no space left"), Some(1));
    }
}
