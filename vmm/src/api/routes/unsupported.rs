//! Calls of Cloud Hypervisor that Foreshore does not support. Each is refused with a reason,
//! whatever its body is, so that clients can distinguish it from an unknown call.

use axum::Router;
use axum::routing::put;

use crate::api::body::PassedOver;
use crate::api::error::ApiError;
use crate::api::routes::PREFIX;

pub(crate) const REFUSED: [(&str, &str); 10] = [
    ("vm.add-device", "device passthrough is not supported"),
    ("vm.add-fs", "virtio-fs is not implemented"),
    ("vm.add-generic-vhost-user", "vhost-user is not implemented"),
    ("vm.add-user-device", "device passthrough is not supported"),
    ("vm.add-vdpa", "vDPA is not implemented"),
    ("vm.coredump", "core dumps of a guest are not supported"),
    ("vm.receive-migration", "migration is not implemented"),
    ("vm.restore", "snapshots are not implemented"),
    ("vm.send-migration", "migration is not implemented"),
    ("vm.snapshot", "snapshots are not implemented"),
];

/// Adds the refused calls to `router`.
pub(super) fn with_refused<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    REFUSED.iter().fold(router, |router, &(call, why)| {
        let refuse = async move |_: PassedOver| ApiError::Unsupported { call, why };
        router.route(&format!("{PREFIX}{call}"), put(refuse))
    })
}
