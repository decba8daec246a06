//! Calls about the governor.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use crate::api::body::JsonBody;
use crate::api::error::ApiError;
use crate::config::{check_fixed_size, check_policy};
use crate::vm::request::{PressureChange, PressureInfo, VmHandle, VmRequest};

pub(super) async fn show(State(vm): State<VmHandle>) -> Result<Json<PressureInfo>, ApiError> {
    Ok(Json(vm.ask(VmRequest::Pressure).await?))
}

pub(super) async fn change(
    State(vm): State<VmHandle>,
    JsonBody(change): JsonBody<PressureChange>,
) -> Result<StatusCode, ApiError> {
    if let Some(policy) = &change.policy {
        check_policy("vm.pressure", policy)?;
    }
    check_fixed_size("vm.pressure", change.policy.as_deref().unwrap_or_default(), change.size)?;
    vm.ask(|reply| VmRequest::ChangePressure(change, reply)).await?;
    Ok(StatusCode::NO_CONTENT)
}
