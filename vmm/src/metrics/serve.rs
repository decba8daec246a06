//! The page that a Prometheus scrapes.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;

use super::Metrics;
use super::format::Format;
use crate::vm::request::{VmHandle, VmRequest};

const INDEX: &str = "<!doctype html><title>Foreshore</title><p><a href=\"/metrics\">Metrics</a>\n";

/// Serves `metrics`; the zones' sizes are asked of the VM's owner at each scrape.
pub fn router(metrics: Arc<Metrics>, vm: VmHandle) -> Router {
    Router::new()
        .route("/", get(async || Html(INDEX)))
        .route("/metrics", get(scrape))
        .fallback(async || (StatusCode::NOT_FOUND, "There is /metrics, and nothing else.\n"))
        .with_state((metrics, vm))
}

async fn scrape(State((metrics, vm)): State<(Arc<Metrics>, VmHandle)>, headers: HeaderMap) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let format = Format::negotiate(&accepted.collect::<Vec<_>>().join(","));
    // A VM that is shut down has no zones; the VMM's own metrics go on.
    let zones = vm.ask(VmRequest::Memory).await.unwrap_or_default();
    match metrics.encode(zones) {
        Ok(text) => {
            let headers = [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "Accept")];
            (headers, format.convert(text)).into_response()
        }
        Err(error) => {
            tracing::warn!(%error, "Metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
