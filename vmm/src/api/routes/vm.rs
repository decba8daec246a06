//! Calls about the VM's life.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use crate::api::error::ApiError;
use crate::api::wire::VolumesAnswer;
use crate::vm::request::{VmHandle, VmInfo, VmRequest};

pub(super) async fn info(State(vm): State<VmHandle>) -> Result<Json<VmInfo>, ApiError> {
    Ok(Json(vm.ask(VmRequest::Info).await?))
}

pub(super) async fn boot(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::Boot).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn pause(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::Pause).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn resume(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::Resume).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn volumes(State(vm): State<VmHandle>) -> Result<Json<VolumesAnswer>, ApiError> {
    Ok(Json(VolumesAnswer { volumes: vm.ask(VmRequest::Volumes).await? }))
}

pub(super) async fn shutdown(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::Shutdown).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn reboot(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::Reboot).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn power_button(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::PowerButton).await?;
    Ok(StatusCode::NO_CONTENT)
}
