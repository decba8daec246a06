//! The page that a Prometheus scrapes.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;

use super::Metrics;
use crate::vm::request::{VmHandle, VmRequest};

/// What OpenMetrics 1.0 calls itself.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const INDEX: &str = "<!doctype html><title>Foreshore</title><p><a href=\"/metrics\">Metrics</a>\n";

/// Serves `metrics`; the zones' sizes are asked of the VM's owner at each scrape.
pub fn router(metrics: Arc<Metrics>, vm: VmHandle) -> Router {
    Router::new()
        .route("/", get(async || Html(INDEX)))
        .route("/metrics", get(scrape))
        .fallback(async || (StatusCode::NOT_FOUND, "There is /metrics, and nothing else.\n"))
        .with_state((metrics, vm))
}

async fn scrape(State((metrics, vm)): State<(Arc<Metrics>, VmHandle)>) -> Response {
    // A VM that is shut down has no zones; the VMM's own metrics go on.
    let zones = vm.ask(VmRequest::Memory).await.unwrap_or_default();
    match metrics.encode(zones) {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::warn!(%error, "Metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
