//! vCPU metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use foreshore_devices::metrics::{Expose, Exposition, Family, one};

#[derive(Debug, Default)]
pub(crate) struct VcpuMetrics {
    /// vCPUs that are present in the guest, including added vCPUs that it has not brought online.
    pub present: AtomicU64,
    /// vCPUs whose ejection was requested and that the guest has not ejected yet.
    pub leaving: AtomicU64,
    /// vCPUs that the guest has ejected. Their threads wait until the vCPUs are added again.
    pub parked: AtomicU64,
}

impl Expose for VcpuMetrics {
    fn expose(&self, out: &mut Exposition) {
        let states =
            [("present", &self.present), ("leaving", &self.leaving), ("parked", &self.parked)];
        let samples = states
            .map(|(state, gauge)| (one("state", state), gauge.load(Ordering::Relaxed) as f64));
        out.gauges(Family("vcpus", "vCPUs by state.", None), samples);
    }
}
