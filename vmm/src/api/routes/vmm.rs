//! Calls about the VMM itself.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use foreshore_devices::events::{Events, Seen};
use futures_util::stream;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::api::error::ApiError;
use crate::api::wire::PingAnswer;
use crate::vm::request::{VmHandle, VmRequest};

/// Who follows events keeps a connection for as long. So many leave enough of them for those who
/// have something to say.
pub(in crate::api) const MOST_FOLLOWERS: usize = 64;

pub(super) async fn ping() -> Json<PingAnswer> {
    Json(PingAnswer::of_this_process())
}

/// Every event from now on, one line of JSON each, until the client goes or the VMM ends. After
/// each `quiet` without one comes a line that says so: a client that has gone is found by writing
/// to it, and would have its place among the connections for ever.
pub(super) fn events(
    events: &Events,
    followers: &Arc<Semaphore>,
    quiet: Duration,
) -> Result<Response, ApiError> {
    let Ok(place) = Arc::clone(followers).try_acquire_owned() else {
        return Err(ApiError::TooManyFollowers { most: MOST_FOLLOWERS });
    };
    let lines = stream::unfold((events.watch(), place), move |(mut watcher, place)| async move {
        let line = match timeout(quiet, watcher.next()).await {
            Ok(seen) => line_of(seen?),
            Err(_) => json!({"quiet_s": quiet.as_secs()}).to_string() + "\n",
        };
        Some((Ok::<_, Infallible>(line), (watcher, place)))
    });
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response())
}

fn line_of(seen: Seen) -> String {
    let json = match seen {
        Seen::Event(told) => serde_json::to_string(&*told).expect("texts and numbers are JSON"),
        Seen::Lost(count) => json!({"lost": count}).to_string(),
    };
    json + "\n"
}

pub(super) async fn shutdown(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::ShutdownVmm).await?;
    Ok(StatusCode::NO_CONTENT)
}
