//! Calls that add and remove devices.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value};

use crate::api::body::JsonBody;
use crate::api::error::ApiError;
use crate::api::fd_stream::Descriptors;
use crate::api::wire::RemoveDeviceBody;
use crate::config::DeviceConfig;
use crate::vm::request::{VmHandle, VmRequest};

/// Adds a device. The answer contains its PCI address. If the VM does not run, the answer is empty,
/// and the VM gets the device at its next boot.
async fn add(
    vm: VmHandle,
    (device, warnings): (DeviceConfig, Vec<String>),
) -> Result<Response, ApiError> {
    let added = vm.ask(|reply| VmRequest::AddDevice(Box::new(device), reply)).await?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    Ok(added
        .map_or_else(|| StatusCode::NO_CONTENT.into_response(), |info| Json(info).into_response()))
}

pub(super) async fn add_disk(
    State(vm): State<VmHandle>,
    JsonBody(json): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    add(vm, DeviceConfig::disk(json)?).await
}

/// The queues of the interface use the descriptors sent with the request. Descriptor numbers in the
/// body are ignored.
pub(super) async fn add_net(
    State(vm): State<VmHandle>,
    Extension(descriptors): Extension<Descriptors>,
    JsonBody(json): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    add(vm, DeviceConfig::net(json, descriptors.take())?).await
}

pub(super) async fn add_pmem(
    State(vm): State<VmHandle>,
    JsonBody(json): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    add(vm, DeviceConfig::pmem(json)?).await
}

pub(super) async fn add_pm_volume(
    State(vm): State<VmHandle>,
    JsonBody(json): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    add(vm, DeviceConfig::pm_volume(json)?).await
}

pub(super) async fn add_vsock(
    State(vm): State<VmHandle>,
    JsonBody(json): JsonBody<Map<String, Value>>,
) -> Result<Response, ApiError> {
    add(vm, DeviceConfig::vsock(json)?).await
}

/// Answers once the guest is notified. The device is removed when the guest releases it.
pub(super) async fn remove(
    State(vm): State<VmHandle>,
    JsonBody(body): JsonBody<RemoveDeviceBody>,
) -> Result<StatusCode, ApiError> {
    vm.ask(|reply| VmRequest::RemoveDevice(body.id, reply)).await?;
    Ok(StatusCode::NO_CONTENT)
}
