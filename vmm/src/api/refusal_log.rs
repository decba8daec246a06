//! Log lines of refused calls and connections.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use foreshore_devices::log::Occasions;
use parking_lot::Mutex;
use tracing::{debug, warn};

use super::server::Limits;

/// Reason of a refusal, as in the body of the answer. An extension of the answer.
#[derive(Clone, Debug)]
pub(super) struct RefusalReason(pub String);

/// Number of refusals of each kind. A client that repeats a refused call must not fill the disk of
/// the host, and must not hide the first refusal of another kind either.
#[derive(Default)]
pub(super) struct RefusalLog(Mutex<BTreeMap<Kind, Occasions>>);

/// Path of the call and status of the answer. All unknown calls have the same path, so that the
/// number of kinds is limited.
type Kind = (Option<String>, u16);

impl RefusalLog {
    /// Counts a refusal. Returns the count if the refusal is due to be logged as a warning.
    fn another(&self, kind: Kind) -> Option<u64> {
        self.0.lock().entry(kind).or_default().another()
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
        match log.another((route, status)) {
            Some(times) => warn!(times, %method, path, status, reason, "Refused an API call"),
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
                warn!(times, flag, %error, "Refused a request that is not valid HTTP/1.1")
            }
            None => debug!(flag, %error, "A connection has ended"),
        }
    }
}
