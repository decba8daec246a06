//! HTTP server for Prometheus, and metrics of the VMM process.

mod format;
mod host_check;
mod process;
#[cfg(test)]
mod tests;
mod vm;

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use flate2::Compression;
use flate2::write::GzEncoder;
use foreshore_confinement::seccomp::SeccompMode;
use foreshore_devices::metrics::{Expose, Exposition, Family, Metrics};

use self::format::Format;
use self::host_check::check_host;
use self::process::{ProcessMetrics, SeccompMetrics};
use self::vm::VmSource;
use crate::vm::request::VmHandle;

const INDEX: &str = "<!doctype html><title>Foreshore</title><p><a href=\"/metrics\">Metrics</a>\n";

/// Creates a router that serves `metrics`. For each scrape, the state and the zone sizes are
/// requested from the VM task, unless it is busy. If `host_names` is given, a request is refused
/// unless its host is one of these names, `localhost` or an IP address.
pub(crate) fn router(
    metrics: Arc<Metrics>,
    vm: VmHandle,
    host_names: Option<Vec<String>>,
) -> Router {
    let router = Router::new()
        .route("/", get(async || Html(INDEX)))
        .route("/metrics", get(scrape))
        .fallback(async || (StatusCode::NOT_FOUND, "No such page; the metrics are at /metrics.\n"))
        .with_state((Arc::clone(&metrics), Arc::new(VmSource::new(vm))));
    let refused_hosts = Arc::<RefusedHosts>::default();
    metrics.add(Arc::clone(&refused_hosts) as _);
    let Some(names) = host_names else { return router };
    let guard = (refused_hosts, Arc::<[String]>::from(names));
    router.layer(from_fn_with_state(guard, check_request))
}

async fn check_request(
    State((refused_hosts, names)): State<(Arc<RefusedHosts>, Arc<[String]>)>,
    request: Request,
    next: Next,
) -> Response {
    match check_host(request.version(), request.uri(), request.headers(), &names) {
        Ok(()) => next.run(request).await,
        Err(refused) => {
            refused_hosts.0.fetch_add(1, Ordering::Relaxed);
            refused.into_response()
        }
    }
}

async fn scrape(
    State((metrics, vm)): State<(Arc<Metrics>, Arc<VmSource>)>,
    headers: HeaderMap,
) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let format = Format::negotiate(&accepted.collect::<Vec<_>>().join(","));
    // If the VM is shut down, it has no zones. The VMM's own metrics are still served.
    let of_vm = vm.read().await;
    // The metrics of a machine may block, for example on the governor's thread, and compression
    // takes CPU time. Other requests to this server and to the API are not delayed.
    let answer = move || match metrics.encode(&of_vm) {
        Ok(text) => respond(format, &headers, format.convert(text)),
        Err(error) => fail(&error),
    };
    tokio::task::spawn_blocking(answer).await.unwrap_or_else(|error| fail(&error))
}

/// Answers with `text`, compressed if the client accepts gzip.
fn respond(format: Format, request: &HeaderMap, text: String) -> Response {
    let headers =
        [(header::CONTENT_TYPE, format.content_type()), (header::VARY, "Accept, Accept-Encoding")];
    if !format::accepts_gzip(request) {
        return (headers, text).into_response();
    }
    match gzip(&text) {
        Ok(bytes) => (headers, [(header::CONTENT_ENCODING, "gzip")], bytes).into_response(),
        Err(error) => fail(&error),
    }
}

fn gzip(text: &str) -> io::Result<Vec<u8>> {
    // Even the lowest compression level makes a scrape ten times smaller.
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes())?;
    encoder.finish()
}

fn fail(error: &dyn std::error::Error) -> Response {
    tracing::warn!(%error, "Cannot format the metrics");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

/// Registers the metrics of the process.
pub(crate) fn register_process(metrics: &Metrics, seccomp: SeccompMode) {
    metrics.add(Arc::new(ProcessMetrics));
    metrics.add(Arc::new(SeccompMetrics(seccomp)));
}

/// Number of scrapes refused because of their `Host` header.
#[derive(Debug, Default)]
struct RefusedHosts(AtomicU64);

impl Expose for RefusedHosts {
    fn expose(&self, out: &mut Exposition) {
        let family =
            Family("metrics_refused_hosts", "Scrapes refused because of their Host header.", None);
        out.counters(family, [(vec![], self.0.load(Ordering::Relaxed))]);
    }
}
