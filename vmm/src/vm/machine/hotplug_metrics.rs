//! Metrics of devices that are added to and removed from a running guest.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use foreshore_devices::metrics::{Expose, Exposition, Family};
use parking_lot::Mutex;

/// Kind, action and result.
type What = (&'static str, &'static str, &'static str);

/// Number of devices on the PCI bus, and numbers of hotplug actions.
#[derive(Debug, Default)]
pub(crate) struct HotplugMetrics {
    /// Virtio devices on the PCI bus.
    pub devices: AtomicU64,
    /// Devices whose ejection was requested and that the guest has not ejected yet.
    pub pending: AtomicU64,
    done: Mutex<BTreeMap<What, u64>>,
}

impl HotplugMetrics {
    pub(crate) fn count(&self, kind: &'static str, action: &'static str, result: &'static str) {
        *self.done.lock().entry((kind, action, result)).or_default() += 1;
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
