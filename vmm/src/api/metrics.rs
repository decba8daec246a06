//! Metrics of an HTTP server.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use foreshore_devices::metrics::{Expose, Exposition, Family, and, get, one};
use parking_lot::Mutex;

use super::ConnectionCounters;
use super::routes::{PREFIX, REFUSALS, successes};

#[derive(Debug)]
pub struct ServerMetrics {
    name: &'static str,
    counters: Arc<ConnectionCounters>,
}

impl ServerMetrics {
    pub fn new(name: &'static str, counters: Arc<ConnectionCounters>) -> Self {
        Self { name, counters }
    }
}

/// Answered calls of the API.
#[derive(Debug, Default)]
pub struct CallMetrics(Mutex<BTreeMap<(String, u16), u64>>);

/// Status codes of refusals and failures for which each call has a series from the start.
const USUAL_ERRORS: [StatusCode; 4] = [
    StatusCode::BAD_REQUEST,
    StatusCode::NOT_FOUND,
    StatusCode::METHOD_NOT_ALLOWED,
    StatusCode::INTERNAL_SERVER_ERROR,
];

/// Value of the label `call` for calls that do not exist. Labels with their paths would create any
/// number of series.
const UNKNOWN: &str = "unknown";

impl CallMetrics {
    /// Counts each answer of `router` by its call and status. The server makes the answer even if
    /// the client has disconnected (`half_close` in server.rs).
    pub fn count_calls(self: &Arc<Self>, router: Router) -> Router {
        self.create_series();
        router.layer(from_fn_with_state(Arc::clone(self), count))
    }

    /// Creates the usual series of each call with the value 0, because `increase()` would miss the
    /// first answer otherwise.
    fn create_series(&self) {
        let mut answers = self.0.lock();
        let mut create = |call: &str, code: StatusCode| {
            answers.entry((call.to_owned(), code.as_u16())).or_default();
        };
        for (call, successes) in successes() {
            successes.iter().chain(&USUAL_ERRORS).for_each(|code| create(call, *code));
        }
        for (call, refusals) in REFUSALS {
            refusals.iter().for_each(|code| create(call, *code));
        }
        create(UNKNOWN, StatusCode::NOT_FOUND);
    }

    /// Counts an answer.
    pub(crate) fn count(&self, call: &str, status: u16) {
        *self.0.lock().entry((call.to_owned(), status)).or_default() += 1;
    }

    /// Number of answers with `status` to calls of `call`.
    #[cfg(test)]
    pub(super) fn answers(&self, call: &str, status: u16) -> u64 {
        self.0.lock().get(&(call.to_owned(), status)).copied().unwrap_or(0)
    }
}

async fn count(State(calls): State<Arc<CallMetrics>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get().map(|route: &MatchedPath| route.as_str());
    let call =
        route.map_or(UNKNOWN, |route| route.strip_prefix(PREFIX).unwrap_or(route)).to_owned();
    let answer = next.run(request).await;
    calls.count(&call, answer.status().as_u16());
    answer
}

impl Expose for CallMetrics {
    fn expose(&self, out: &mut Exposition) {
        let answers = self.0.lock().clone();
        let samples = answers.into_iter().map(|((call, status), count)| {
            (and(&one("call", &call), "code", &status.to_string()), count)
        });
        let family =
            Family("api_requests", "Answered calls of the API, by call and status code.", None);
        out.counters(family, samples);
    }
}

impl Expose for ServerMetrics {
    fn expose(&self, out: &mut Exposition) {
        let labels = one("server", self.name);
        let closed = [
            ("silent", &self.counters.silent),
            ("idle", &self.counters.idle),
            ("timeout", &self.counters.timed_out),
        ];
        let closed = closed.map(|(reason, counter)| (and(&labels, "reason", reason), get(counter)));
        out.counters(
            Family("http_connections", "Connections accepted by the server.", None),
            [(labels, get(&self.counters.accepted))],
        );
        out.counters(
            Family(
                "http_closed_connections",
                "Connections closed by the server to make room or after a timeout.",
                None,
            ),
            closed,
        );
    }
}
