//! Calls about the VMM itself.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use crate::api::error::ApiError;
use crate::api::wire::PingAnswer;
use crate::vm::request::{VmHandle, VmRequest};

pub(super) async fn ping() -> Json<PingAnswer> {
    Json(PingAnswer::of_this_process())
}

pub(super) async fn shutdown(State(vm): State<VmHandle>) -> Result<StatusCode, ApiError> {
    vm.ask(VmRequest::ShutdownVmm).await?;
    Ok(StatusCode::NO_CONTENT)
}
