//! Metrics of the VM's state.

use std::time::{SystemTime, UNIX_EPOCH};

use foreshore_devices::metrics::{Expose, Exposition, Family, one};
use parking_lot::Mutex;
use prometheus_client::registry::Unit;

use crate::vm::machine::zone_metrics::ZoneMetrics;
use crate::vm::request::{VmError, VmHandle, VmState, VmStatus, ZoneInfo};

/// Reads the metrics of the VM from the VM task, without waiting for its work.
#[derive(Debug)]
pub(super) struct VmSource {
    vm: VmHandle,
    /// Zones in the last scrape, and the start time of their machine.
    last_zones: Mutex<Option<(SystemTime, Vec<ZoneInfo>)>>,
}

impl VmSource {
    pub(super) fn new(vm: VmHandle) -> Self {
        Self { vm, last_zones: Mutex::default() }
    }

    pub(super) async fn read(&self) -> (VmMetrics, ZoneMetrics) {
        let metrics = match self.vm.status().await {
            Ok(status) => VmMetrics::Known(status),
            Err(VmError::NotCreated) => VmMetrics::Absent,
            Err(_) => VmMetrics::Unknown,
        };
        let zones = match metrics {
            VmMetrics::Known(VmStatus { started: Some(started), .. }) => self.zones(started).await,
            _ => Vec::new(),
        };
        (metrics, ZoneMetrics(zones))
    }

    /// Zones of the machine that was started at `started`. While the VM task is busy, returns the
    /// zones of the previous scrape, because a gap in their series would reset alerts.
    async fn zones(&self, started: SystemTime) -> Vec<ZoneInfo> {
        let answer = self.vm.zones_unless_busy().await;
        let mut last = self.last_zones.lock();
        if let Some(answer) = answer {
            *last = answer.ok().map(|zones| (started, zones));
        }
        let zones = last.as_ref().filter(|(of, _)| *of == started);
        zones.map(|(_, zones)| zones.clone()).unwrap_or_default()
    }
}

/// State of the VM.
#[derive(Debug)]
pub(super) enum VmMetrics {
    Known(VmStatus),
    /// There is no VM.
    Absent,
    /// The VM task has refused the request, for example because the VMM is ending.
    Unknown,
}

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
        let (state, started) = match self {
            Self::Known(VmStatus { state, started }) => (Some(*state), *started),
            Self::Absent => (None, None),
            Self::Unknown => return,
        };
        let states = VmState::ALL.map(|of| (one("state", label(of)), state == Some(of)));
        let absent = (one("state", ABSENT), state.is_none());
        out.flags(
            Family("vm_state", "1 for the state of the VM, 0 for all others.", None),
            states.into_iter().chain([absent]),
        );
        let Some(started) = started else { return };
        // If the host's clock is before 1970, the value is 0.
        let started_s = started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let family = Family(
            "vm_start_time",
            "Last boot or reboot of the VM, in seconds since 1970.",
            Some(Unit::Seconds),
        );
        out.gauges(family, [(vec![], started_s)]);
    }
}
