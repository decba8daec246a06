//! Calls about memory.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use crate::api::body::JsonBody;
use crate::api::error::ApiError;
use crate::api::wire::MemoryAnswer;
use crate::vm::request::{Resize, ResizeRequest, ResizeZoneRequest, VmHandle, VmRequest};

/// Answers once the request is passed to the guest. `vm.memory` reports the progress.
pub(super) async fn resize(
    State(vm): State<VmHandle>,
    JsonBody(resize): JsonBody<ResizeRequest>,
) -> Result<StatusCode, ApiError> {
    vm.ask(|reply| VmRequest::Resize(Resize::Vm(resize), reply)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Resizes one zone, and answers once the request is passed to the guest.
pub(super) async fn resize_zone(
    State(vm): State<VmHandle>,
    JsonBody(resize): JsonBody<ResizeZoneRequest>,
) -> Result<StatusCode, ApiError> {
    vm.ask(|reply| VmRequest::Resize(Resize::Zone(resize), reply)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn zones(State(vm): State<VmHandle>) -> Result<Json<MemoryAnswer>, ApiError> {
    Ok(Json(MemoryAnswer { zones: vm.ask(VmRequest::Memory).await? }))
}
