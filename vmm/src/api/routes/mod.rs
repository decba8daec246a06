//! From calls to requests, one file per area.

mod disk;
mod memory;
mod pressure;
mod vm;
mod vmm;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, Uri};
use axum::routing::{get, put};

use super::body::MAX_BODY_BYTES;
use super::error::ApiError;
use crate::vm::request::VmHandle;

/// Every call of the API, answered by the owner behind `vm`.
pub fn router(vm: VmHandle) -> Router {
    Router::new()
        .route("/api/v1/vmm.ping", get(vmm::ping))
        .route("/api/v1/vmm.shutdown", put(vmm::shutdown))
        .route("/api/v1/vm.create", put(vm::create))
        .route("/api/v1/vm.delete", put(vm::delete))
        .route("/api/v1/vm.info", get(vm::info))
        .route("/api/v1/vm.boot", put(vm::boot))
        .route("/api/v1/vm.pause", put(vm::pause))
        .route("/api/v1/vm.resume", put(vm::resume))
        .route("/api/v1/vm.shutdown", put(vm::shutdown))
        .route("/api/v1/vm.reboot", put(vm::reboot))
        .route("/api/v1/vm.power-button", put(vm::power_button))
        .route("/api/v1/vm.nmi", put(vm::nmi))
        .route("/api/v1/vm.resize", put(memory::resize))
        .route("/api/v1/vm.resize-zone", put(memory::resize_zone))
        .route("/api/v1/vm.resize-disk", put(disk::resize))
        .route("/api/v1/vm.memory", get(memory::zones))
        .route("/api/v1/vm.volumes", get(vm::volumes))
        .route("/api/v1/vm.pressure", get(pressure::show).put(pressure::change))
        .fallback(async |uri: Uri| ApiError::UnknownCall(uri.path().to_owned()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| ApiError::WrongMethod {
            method: method.to_string(),
            path: uri.path().to_owned(),
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(vm)
}
