//! Volumes of a machine.

pub(super) mod attached_volumes;
pub(super) mod created_volumes;
pub(super) mod volumes;

use std::sync::Arc;

use foreshore_devices::volume::guest_btt::GuestBtt;

use self::attached_volumes::AttachedVolume;
use crate::vm::resources::pools::OpenPool;

pub(super) struct PmStorage {
    pub(super) volumes: Vec<AttachedVolume>,
    pub(super) pools: Vec<OpenPool>,
    /// Verdict on the BTT driver in the guest, if that driver is used for any volume.
    pub(super) guest_btt: Arc<GuestBtt>,
}

impl PmStorage {
    pub(super) fn new(
        volumes: Vec<AttachedVolume>,
        pools: Vec<OpenPool>,
        guest_btt: Arc<GuestBtt>,
    ) -> Self {
        Self { volumes, pools, guest_btt }
    }
}
