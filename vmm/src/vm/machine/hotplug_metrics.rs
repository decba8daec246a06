//! Metrics of devices that are added to and removed from a running guest.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use foreshore_devices::metrics::{Expose, Exposition, Family};
use parking_lot::Mutex;

use super::{dimms, vcpus};
use crate::config::DeviceConfig;

/// Kind, action and result.
type What = (&'static str, &'static str, &'static str);

/// Number of devices on the PCI bus, and numbers of hotplug actions.
#[derive(Debug)]
pub(crate) struct HotplugMetrics {
    /// Virtio devices on the PCI bus.
    pub devices: AtomicU64,
    /// Devices whose ejection was requested and that the guest has not ejected yet.
    pub pending: AtomicU64,
    done: Mutex<BTreeMap<What, u64>>,
}

/// Returns the series of all actions.
fn series() -> impl Iterator<Item = What> {
    let of_device = |kind| {
        [("add", "ok"), ("add", "error"), ("remove", "requested"), ("remove", "ok")]
            .map(|(action, result)| (kind, action, result))
    };
    let kinds = DeviceConfig::KINDS.iter().copied().chain([vcpus::KIND]);
    kinds.flat_map(of_device).chain([
        (vcpus::KIND, "resize", "pending"),
        (dimms::KIND, "add", "ok"),
        (dimms::KIND, "add", "error"),
    ])
}

impl Default for HotplugMetrics {
    /// Creates all series with the value 0, because `increase()` would miss the first action
    /// otherwise.
    fn default() -> Self {
        let done = Mutex::new(series().map(|series| (series, 0)).collect());
        Self { devices: AtomicU64::new(0), pending: AtomicU64::new(0), done }
    }
}

impl HotplugMetrics {
    pub(crate) fn count(&self, kind: &'static str, action: &'static str, result: &'static str) {
        let mut done = self.done.lock();
        debug_assert!(done.contains_key(&(kind, action, result)), "{kind} {action} {result}");
        *done.entry((kind, action, result)).or_default() += 1;
    }
}

impl Expose for HotplugMetrics {
    fn expose(&self, out: &mut Exposition) {
        let gauge = |counter: &AtomicU64| [(vec![], counter.load(Ordering::Relaxed) as f64)];
        let help = "Devices on the PCI bus, without the host bridge.";
        out.gauges(Family("pci_devices", help, None), gauge(&self.devices));
        let help = "Devices that the guest was requested to eject and has not ejected yet.";
        out.gauges(Family("hotplug_pending", help, None), gauge(&self.pending));
        let done = self.done.lock().clone();
        let samples = done.into_iter().map(|((kind, action, result), count)| {
            let labels = [("kind", kind), ("action", action), ("result", result)];
            (labels.map(|(name, value)| (name, value.to_owned())).to_vec(), count)
        });
        out.counters(
            Family("hotplug", "Devices added to and removed from the running guest.", None),
            samples,
        );
    }
}

#[cfg(test)]
mod tests {
    use foreshore_devices::metrics::Metrics;

    use super::*;

    #[test]
    fn series_of_all_kinds_exist_before_the_first_action() {
        let text = Metrics::new("a").encode(&HotplugMetrics::default()).unwrap();
        for kind in ["disk", "net", "pmem", "vsock", "volume", "vcpu", "dimm"] {
            let labels = format!(r#"vm="a",kind="{kind}",action="add",result="error""#);
            let series = format!("foreshore_hotplug_total{{{labels}}} 0");
            assert!(text.lines().any(|line| line == series), "{series} in {text}");
        }
    }
}
