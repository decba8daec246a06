//! From calls to requests, one file per area.

mod devices;
mod disk;
mod memory;
mod pressure;
mod refused;
mod vm;
mod vmm;

#[cfg(test)]
pub(super) use self::refused::REFUSED;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, Uri};
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::{get, put};
use hyper::ext::ReasonPhrase;

use super::body::MAX_BODY_BYTES;
use super::error::ApiError;
use crate::events::Events;
use crate::vm::request::VmHandle;

/// Every call of the API, answered by the owner behind `vm`, and what is told by `events`.
pub fn router(vm: VmHandle, events: Events) -> Router {
    let calls = Router::new()
        .route("/api/v1/vmm.ping", get(vmm::ping))
        .route("/api/v1/vmm.shutdown", put(vmm::shutdown))
        .route("/api/v1/vmm.events", get(async move || vmm::events(&events)))
        .route("/api/v1/vm.create", put(vm::create))
        .route("/api/v1/vm.delete", put(vm::delete))
        .route("/api/v1/vm.info", get(vm::info))
        .route("/api/v1/vm.counters", get(vm::counters))
        .route("/api/v1/vm.boot", put(vm::boot))
        .route("/api/v1/vm.pause", put(vm::pause))
        .route("/api/v1/vm.resume", put(vm::resume))
        .route("/api/v1/vm.shutdown", put(vm::shutdown))
        .route("/api/v1/vm.reboot", put(vm::reboot))
        .route("/api/v1/vm.power-button", put(vm::power_button))
        .route("/api/v1/vm.nmi", put(vm::nmi))
        .route("/api/v1/vm.resize", put(memory::resize))
        .route("/api/v1/vm.resize-zone", put(memory::resize_zone))
        .route("/api/v1/vm.add-disk", put(devices::add_disk))
        .route("/api/v1/vm.add-pmem", put(devices::add_pmem))
        .route("/api/v1/vm.add-vsock", put(devices::add_vsock))
        .route("/api/v1/vm.remove-device", put(devices::remove))
        .route("/api/v1/vm.resize-disk", put(disk::resize))
        .route("/api/v1/vm.memory", get(memory::zones))
        .route("/api/v1/vm.volumes", get(vm::volumes))
        .route("/api/v1/vm.pressure", get(pressure::show).put(pressure::change));
    refused::with_refused(calls)
        .fallback(async |uri: Uri| ApiError::UnknownCall(uri.path().to_owned()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| ApiError::WrongMethod {
            method: method.to_string(),
            path: uri.path().to_owned(),
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(map_response(without_reason))
        .with_state(vm)
}

/// Cloud Hypervisor's server has nothing behind the status (RFC 9112, 4: the phrase may be empty), and its client takes all that
/// stands there for the number.
async fn without_reason<B>(mut response: Response<B>) -> Response<B> {
    response.extensions_mut().insert(ReasonPhrase::from_static(b""));
    response
}
