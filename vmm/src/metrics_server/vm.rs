//! Metrics of the VM's state.

use std::time::UNIX_EPOCH;

use foreshore_devices::metrics::{Expose, Exposition, Family, one};
use prometheus_client::registry::Unit;

use crate::vm::request::{VmState, VmStatus};

/// State of the VM, or `None` without a VM.
#[derive(Debug, Default)]
pub(super) struct VmMetrics(pub Option<VmStatus>);

/// Value of the label `state` without a VM.
const ABSENT: &str = "absent";

fn label(state: VmState) -> &'static str {
    match state {
        VmState::Created => "created",
        VmState::Running => "running",
        VmState::Paused => "paused",
    }
}

impl Expose for VmMetrics {
    fn expose(&self, out: &mut Exposition) {
        let state = self.0.map(|status| status.state);
        let states = VmState::ALL.map(|of| (one("state", label(of)), state == Some(of)));
        let absent = (one("state", ABSENT), state.is_none());
        out.flags(
            Family("vm_state", "1 for the state of the VM, 0 for all others.", None),
            states.into_iter().chain([absent]),
        );
        let Some(started) = self.0.and_then(|status| status.started) else { return };
        // A clock before 1970 is not worth an error.
        let started_s = started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let family = Family(
            "vm_start_time",
            "Last boot or reboot of the VM, in seconds since 1970.",
            Some(Unit::Seconds),
        );
        out.gauges(family, [(vec![], started_s)]);
    }
}
