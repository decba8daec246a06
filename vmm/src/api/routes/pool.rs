//! Calls about pools.

use axum::Json;
use axum::extract::State;

use crate::api::error::ApiError;
use crate::api::wire::PoolsAnswer;
use crate::vm::request::{VmHandle, VmRequest};

pub(super) async fn info(State(vm): State<VmHandle>) -> Result<Json<PoolsAnswer>, ApiError> {
    Ok(Json(PoolsAnswer { pools: vm.ask(VmRequest::Pools).await? }))
}
