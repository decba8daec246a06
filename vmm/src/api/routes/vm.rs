//! Calls about the lifecycle of the VM.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Map, Value};

use crate::api::body::{JsonBody, MAX_CONFIG_BYTES};
use crate::api::error::ApiError;
use crate::api::wire::VolumesAnswer;
use crate::config::VmConfig;
use crate::vm::request::Counters;
use crate::vm::request::{VmHandle, VmInfo, VmRequest};

/// Validates the configuration. Missing files are detected only by `vm.boot`.
pub(super) async fn create(
    State(vm): State<VmHandle>,
    JsonBody(json): JsonBody<Map<String, Value>, MAX_CONFIG_BYTES>,
) -> Result<StatusCode, ApiError> {
    let (config, warnings) = VmConfig::from_json_warned(json)?;
    vm.ask(|reply| VmRequest::Create(Box::new(config), reply)).await?;
    for warning in warnings {
        tracing::warn!(call = "vm.create", "{warning}");
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Shuts down a running VM first. Also succeeds without a VM.
pub(super) async fn delete(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::Delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn info(State(vm): State<VmHandle>) -> Result<Json<VmInfo>, ApiError> {
    Ok(Json(vm.info().await?))
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

/// Sends an NMI to every vCPU, as a debugger or a watchdog would.
pub(super) async fn nmi(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::Nmi).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn counters(State(vm): State<VmHandle>) -> Result<Json<Counters>, ApiError> {
    Ok(Json(vm.ask(VmRequest::Counters).await?))
}
