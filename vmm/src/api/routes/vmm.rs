//! Calls about the VMM.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use foreshore_devices::events::{Events, WatcherItem};
use futures_util::stream;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::api::error::ApiError;
use crate::api::wire::PingAnswer;
use crate::vm::request::{VmHandle, VmRequest};

/// Maximum number of clients that follow events. Each occupies a connection. The limit leaves
/// enough connections for other calls.
pub(in crate::api) const MAX_FOLLOWERS: usize = 64;

pub(super) async fn ping() -> Json<PingAnswer> {
    Json(PingAnswer::of_this_process())
}

/// Streams every new event as a line of JSON, until the client disconnects or the VMM exits.
///
/// After each interval `quiet` without an event, the stream has a line that reports the interval.
/// Writing this line detects a client that has disconnected. Otherwise it would occupy its
/// connection forever.
pub(super) fn events(
    events: &Events,
    followers: &Arc<Semaphore>,
    quiet: Duration,
) -> Result<Response, ApiError> {
    let Ok(place) = Arc::clone(followers).try_acquire_owned() else {
        return Err(ApiError::TooManyFollowers { most: MAX_FOLLOWERS });
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

fn line_of(seen: WatcherItem) -> String {
    let json = match seen {
        WatcherItem::Event(event) => {
            serde_json::to_string(&*event).expect("texts and numbers are JSON")
        }
        WatcherItem::Lost(count) => json!({"lost": count}).to_string(),
    };
    json + "\n"
}

pub(super) async fn shutdown(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::ShutdownVmm).await?;
    Ok(StatusCode::NO_CONTENT)
}
