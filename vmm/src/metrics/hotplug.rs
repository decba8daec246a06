//! Devices that come and go.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::expose::{Exposer, Family};

/// Kind, action, result.
type What = (&'static str, &'static str, &'static str);

/// Counters of the PCI bus.
#[derive(Debug, Default)]
pub struct HotplugMetrics {
    /// Devices that are on the bus.
    pub devices: AtomicU64,
    /// Devices that the guest was asked to let go, and has not.
    pub pending: AtomicU64,
    done: Mutex<BTreeMap<What, u64>>,
}

impl HotplugMetrics {
    /// Counts one.
    pub fn count(&self, kind: &'static str, action: &'static str, result: &'static str) {
        *self.done.lock().entry((kind, action, result)).or_default() += 1;
    }
}

pub(super) fn expose(out: &mut Exposer<'_>, metrics: &HotplugMetrics) -> fmt::Result {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
    let gauge = |value| std::iter::once((Vec::new(), value));
    let family = Family("pci_devices", "Virtio devices on the PCI bus.", None);
    out.gauges(family, gauge(read(&metrics.devices)))?;
    let family = Family("hotplug_pending", "Devices that the guest was asked to let go, and has not.", None);
    out.gauges(family, gauge(read(&metrics.pending)))?;
    let done = metrics.done.lock().clone();
    let samples = done.into_iter().map(|((kind, action, result), count)| {
        let labels = [("kind", kind), ("action", action), ("result", result)];
        (labels.map(|(name, value)| (name, value.to_owned())).to_vec(), count)
    });
    out.counters(Family("hotplug", "Devices added to the running guest, and removed.", None), samples)
}
