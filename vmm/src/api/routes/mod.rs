//! Translation of API calls into requests to the VM task, with a file for each area.

mod devices;
mod disk;
mod memory;
mod pool;
mod pressure;
mod unsupported;
mod vm;
mod vmm;

pub(super) use self::unsupported::REFUSED;
#[cfg(test)]
pub(super) use self::vmm::MAX_FOLLOWERS;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, FromRequest, Request};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state, map_response};
use axum::response::Response;
use axum::routing::{MethodRouter, get, put};
use foreshore_devices::events::Events;
use hyper::ext::ReasonPhrase;
use tokio::sync::Semaphore;

use super::body::{MAX_BODY_BYTES, MAX_CONFIG_BYTES, PassedOver};
use super::error::ApiError;
use super::refusal_log::{RefusalLog, log_refusals};
use crate::vm::request::VmHandle;

/// Path of a call up to its name.
pub(super) const PREFIX: &str = "/api/v1/";

/// Longest time without a line in the stream of events.
const QUIET: Duration = Duration::from_secs(60);

/// Names and handlers of the implemented calls.
fn calls(events: Events, quiet: Duration) -> Vec<(&'static str, MethodRouter<VmHandle>)> {
    let followers = Arc::new(Semaphore::new(vmm::MAX_FOLLOWERS));
    vec![
        ("vmm.ping", bare(get(vmm::ping))),
        ("vmm.shutdown", bare(put(vmm::shutdown))),
        ("vmm.events", get(async move || vmm::events(&events, &followers, quiet))),
        ("vm.create", put(vm::create).layer(DefaultBodyLimit::max(MAX_CONFIG_BYTES))),
        ("vm.delete", bare(put(vm::delete))),
        ("vm.info", bare(get(vm::info))),
        ("vm.counters", bare(get(vm::counters))),
        ("vm.boot", bare(put(vm::boot))),
        ("vm.pause", bare(put(vm::pause))),
        ("vm.resume", bare(put(vm::resume))),
        ("vm.shutdown", bare(put(vm::shutdown))),
        ("vm.reboot", bare(put(vm::reboot))),
        ("vm.power-button", bare(put(vm::power_button))),
        ("vm.nmi", bare(put(vm::nmi))),
        // Name of the call in Cloud Hypervisor's API descriptions before 0.3.0, and in clients
        // generated from them.
        ("vmm.nmi", bare(put(vm::nmi))),
        ("vm.resize", put(memory::resize)),
        ("vm.resize-zone", put(memory::resize_zone)),
        ("vm.add-disk", put(devices::add_disk)),
        ("vm.add-net", put(devices::add_net)),
        ("vm.add-pmem", put(devices::add_pmem)),
        ("vm.add-pm-volume", put(devices::add_pm_volume)),
        ("vm.add-vsock", put(devices::add_vsock)),
        ("vm.remove-device", put(devices::remove)),
        ("vm.resize-disk", put(disk::resize)),
        ("vm.memory", bare(get(memory::zones))),
        ("vm.volumes", bare(get(vm::volumes))),
        ("pool.info", bare(get(pool::info))),
        ("pool.grow", put(pool::grow)),
        ("vm.pressure", get(pressure::show).put(pressure::change)),
    ]
}

/// Status codes of successful answers to each implemented call.
pub(super) fn successes() -> Vec<(&'static str, &'static [StatusCode])> {
    const READ: &[StatusCode] = &[StatusCode::OK];
    const DONE: &[StatusCode] = &[StatusCode::NO_CONTENT];
    const BOTH: &[StatusCode] = &[StatusCode::OK, StatusCode::NO_CONTENT];
    vec![
        ("vmm.ping", READ),
        ("vmm.shutdown", DONE),
        ("vmm.events", READ),
        ("vm.create", DONE),
        ("vm.delete", DONE),
        ("vm.info", READ),
        ("vm.counters", READ),
        ("vm.boot", DONE),
        ("vm.pause", DONE),
        ("vm.resume", DONE),
        ("vm.shutdown", DONE),
        ("vm.reboot", DONE),
        ("vm.power-button", DONE),
        ("vm.nmi", DONE),
        ("vmm.nmi", DONE),
        ("vm.resize", DONE),
        ("vm.resize-zone", DONE),
        ("vm.add-disk", BOTH),
        ("vm.add-net", BOTH),
        ("vm.add-pmem", BOTH),
        ("vm.add-pm-volume", BOTH),
        ("vm.add-vsock", BOTH),
        ("vm.remove-device", DONE),
        ("vm.resize-disk", DONE),
        ("vm.memory", READ),
        ("vm.volumes", READ),
        ("pool.info", READ),
        ("pool.grow", DONE),
        ("vm.pressure", BOTH),
    ]
}

/// Status codes of refusals that only some calls have.
pub(super) const REFUSALS: &[(&str, &[StatusCode])] = {
    const CONFLICT: &[StatusCode] = &[StatusCode::CONFLICT];
    const LATER: &[StatusCode] = &[StatusCode::TOO_MANY_REQUESTS];
    const BOTH: &[StatusCode] = &[StatusCode::CONFLICT, StatusCode::TOO_MANY_REQUESTS];
    &[
        ("vmm.events", LATER),
        ("vm.create", CONFLICT),
        ("vm.boot", CONFLICT),
        ("vm.resume", CONFLICT),
        ("vm.resize", BOTH),
        ("vm.resize-zone", CONFLICT),
        ("vm.add-disk", BOTH),
        ("vm.add-net", BOTH),
        ("vm.add-pmem", BOTH),
        ("vm.add-pm-volume", BOTH),
        ("vm.add-vsock", BOTH),
    ]
};

/// Wraps a call that takes no body, so that any body is ignored.
fn bare(methods: MethodRouter<VmHandle>) -> MethodRouter<VmHandle> {
    methods.layer(from_fn(async |request: Request, next: Next| {
        let (head, body) = request.into_parts();
        let whole = Request::from_parts(head.clone(), body);
        let Ok(PassedOver) = PassedOver::from_request(whole, &()).await;
        next.run(Request::from_parts(head, Body::empty())).await
    }))
}

/// Names of all calls, including those that are refused.
pub fn call_names() -> Vec<&'static str> {
    let answered = calls(Events::start(), QUIET).into_iter().map(|(call, _)| call);
    answered.chain(REFUSED.iter().map(|(call, _)| *call)).collect()
}

/// Creates the router of the API. The VM task behind `vm` answers the calls. `vmm.events`
/// streams `events`.
pub fn router(vm: VmHandle, events: Events) -> Router {
    router_within(vm, events, QUIET)
}

/// Creates the router with another interval for lines in a silent stream of events.
pub(super) fn router_within(vm: VmHandle, events: Events, quiet: Duration) -> Router {
    let calls = calls(events, quiet).into_iter().fold(Router::new(), |router, (call, methods)| {
        router.route(&format!("{PREFIX}{call}"), methods)
    });
    unsupported::with_refused(calls)
        .fallback(async |uri: Uri| ApiError::UnknownCall(uri.path().to_owned()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| ApiError::WrongMethod {
            method: method.to_string(),
            path: uri.path().to_owned(),
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(map_response(without_reason))
        .layer(from_fn_with_state(Arc::<RefusalLog>::default(), log_refusals))
        .with_state(vm)
}

/// Removes the reason phrase from the status line. The phrase may be empty (RFC 9112, 4). Cloud
/// Hypervisor's server sends no reason phrase, and its client parses everything after the version
/// as the status.
async fn without_reason<B>(mut response: Response<B>) -> Response<B> {
    response.extensions_mut().insert(ReasonPhrase::from_static(b""));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_implemented_call_has_successes() {
        let calls = calls(Events::start(), QUIET);
        let names: Vec<_> = calls.into_iter().map(|(call, _)| call).collect();
        assert_eq!(successes().into_iter().map(|(call, _)| call).collect::<Vec<_>>(), names);
    }
}
