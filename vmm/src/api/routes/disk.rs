//! Calls about disks.

use axum::extract::State;
use axum::http::StatusCode;

use crate::api::body::JsonBody;
use crate::api::error::ApiError;
use crate::vm::request::{ResizeDiskRequest, VmHandle, VmRequest};

/// Answers once the disk is resized and the guest is notified.
pub(super) async fn resize(
    State(vm): State<VmHandle>,
    JsonBody(resize): JsonBody<ResizeDiskRequest>,
) -> Result<StatusCode, ApiError> {
    vm.ask(|reply| VmRequest::ResizeDisk(resize, reply)).await?;
    Ok(StatusCode::NO_CONTENT)
}
