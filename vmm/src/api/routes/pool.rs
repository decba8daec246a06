//! Calls about pools.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use crate::api::body::JsonBody;
use crate::api::error::ApiError;
use crate::api::wire::PoolsAnswer;
use crate::vm::request::{GrowPoolRequest, VmHandle, VmRequest};

pub(super) async fn info(State(vm): State<VmHandle>) -> Result<Json<PoolsAnswer>, ApiError> {
    Ok(Json(PoolsAnswer { pools: vm.ask(VmRequest::Pools).await? }))
}

/// Answers once the new space is available.
pub(super) async fn grow(
    State(vm): State<VmHandle>,
    JsonBody(growth): JsonBody<GrowPoolRequest>,
) -> Result<StatusCode, ApiError> {
    vm.ask(|reply| VmRequest::GrowPool(growth, reply)).await?;
    Ok(StatusCode::NO_CONTENT)
}
