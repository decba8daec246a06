//! Failed stores of instructions that KVM emulates.

use std::sync::Arc;

use super::{HoleMetrics, HoleSource, OnFailure};
use crate::bus::BusDevice;

/// Receives stores to a mapped volume that KVM executes for an instruction that it emulates, if
/// they fail. The instruction then ends without the store, so it cannot wait for space.
pub struct EmulatedStores {
    metrics: Arc<HoleMetrics>,
    on_failure: OnFailure,
}

impl EmulatedStores {
    pub fn new(holes: &HoleSource) -> Self {
        let (metrics, on_failure) = (Arc::clone(&holes.metrics), Arc::clone(&holes.on_failure));
        Self { metrics, on_failure }
    }
}

impl BusDevice for EmulatedStores {
    /// A hole can be read, so no memory is there.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {
        let reason = match self.metrics.has_space_for_waiting() {
            Some(false) => "the pool is full, and the store of an emulated instruction cannot wait",
            _ => "the store of an emulated instruction failed",
        };
        (self.on_failure)(reason.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn failed_store_is_attributed_to_the_pool_only_while_stores_wait() {
        let (sender, reasons) = mpsc::channel();
        let stores = EmulatedStores {
            metrics: Arc::default(),
            on_failure: Arc::new(move |reason| sender.send(reason).unwrap()),
        };
        for (waiting, expected) in
            [(0, "the store of"), (1, "the pool is full"), (0, "the store of")]
        {
            stores.metrics.waiting.store(waiting, Ordering::SeqCst);
            stores.write(0, &[1]);
            let reason = reasons.try_recv().unwrap();
            assert!(reason.starts_with(expected), "{reason}");
        }
        stores.read(0, &mut [0]);
        assert!(reasons.try_recv().is_err(), "reads lose nothing");
    }
}
