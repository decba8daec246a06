//! Calls of Cloud Hypervisor that foreshore does not have: each is refused with its reason,
//! whatever its body is, so that a client can tell them from a call that nobody knows.

use axum::Router;
use axum::routing::put;

use crate::api::body::PassedOver;
use crate::api::error::ApiError;

pub(crate) const REFUSED: [(&str, &str); 10] = [
    ("vm.add-device", "there is no device passthrough"),
    ("vm.add-fs", "virtio-fs is not implemented"),
    ("vm.add-generic-vhost-user", "vhost-user is not implemented"),
    ("vm.add-user-device", "there is no device passthrough"),
    ("vm.add-vdpa", "vDPA is not implemented"),
    ("vm.coredump", "there is no core dump of a guest"),
    ("vm.receive-migration", "migration is not implemented"),
    ("vm.restore", "snapshots are not implemented"),
    ("vm.send-migration", "migration is not implemented"),
    ("vm.snapshot", "snapshots are not implemented"),
];

/// `router` with all of them.
pub(super) fn with_refused<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    REFUSED.iter().fold(router, |router, &(call, why)| {
        let refuse = async move |_: PassedOver| ApiError::Unsupported { call, why };
        router.route(&format!("/api/v1/{call}"), put(refuse))
    })
}
