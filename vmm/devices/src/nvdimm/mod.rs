//! NVDIMMs that the ACPI NFIT describes (ACPI 6.5, 5.2.26). The guest's drivers map them and
//! translate sectors.
//!
//! The guest flushes by a store to a flush hint address (5.2.26.9). The address is not backed by
//! memory, so the store causes an exit of the vCPU. The backing is durable before the guest
//! executes its next instruction. If a fence is enough, because the backing is volatile or mapped
//! with MAP_SYNC, the NFIT declares no hint, and no exits occur.

pub mod health;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use crate::bus::BusDevice;
use crate::log::rate_limited;
use crate::memory::layout::{
    FLUSH_HINT_LEN, FLUSH_HINT_START, NVDIMM_HEALTH_REGISTER_LEN, NVDIMM_HEALTH_START,
};
use crate::metrics::LatencyHistogram;
use crate::persist::Persist;

/// NVDIMM, as the ACPI tables describe it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nvdimm {
    pub start: u64,
    pub size_bytes: u64,
    pub node: u32,
    /// True if a flush requires a write to the flush hint page. Otherwise, a fence is enough.
    pub flush_hint: bool,
    /// True if the guest may only read the NVDIMM.
    pub read_only: bool,
}

impl Nvdimm {
    /// Address of the flush hint page of NVDIMM `index`. An 8-byte write anywhere in the page is a
    /// flush.
    pub fn flush_hint_address(index: usize) -> u64 {
        FLUSH_HINT_START + index as u64 * FLUSH_HINT_LEN
    }

    /// Address of the health register of NVDIMM `index`.
    pub fn health_address(index: usize) -> u64 {
        NVDIMM_HEALTH_START + index as u64 * NVDIMM_HEALTH_REGISTER_LEN
    }
}

/// Counters of a flush hint.
#[derive(Debug, Default)]
pub struct FlushHintMetrics {
    /// Flushes that made the backing durable.
    pub flushes: AtomicU64,
    /// Failed flushes. Each one pauses the VM.
    pub flush_failures: AtomicU64,
    /// Durations of all flushes.
    pub persists: LatencyHistogram,
}

/// Function that is called with the reason when a flush fails. It must prevent the guest from
/// continuing.
pub type OnFailure = Box<dyn Fn(String) + Send + Sync>;

/// Flush hint page of one NVDIMM.
pub struct FlushHint {
    name: String,
    backing: Arc<dyn Persist>,
    on_failure: OnFailure,
    /// Serializes flushes. Concurrent flushes would slow each other down, and the second of two
    /// consecutive flushes has less to do.
    flushing: Mutex<()>,
    metrics: Arc<FlushHintMetrics>,
}

impl FlushHint {
    /// Creates the flush hint page of the NVDIMM `name`.
    ///
    /// A store cannot report an error. A failed flush therefore always calls `on_failure` before
    /// the vCPU continues.
    pub fn new(name: String, backing: Arc<dyn Persist>, on_failure: OnFailure) -> Self {
        Self { name, backing, on_failure, flushing: Mutex::new(()), metrics: Arc::default() }
    }

    pub fn metrics(&self) -> Arc<FlushHintMetrics> {
        Arc::clone(&self.metrics)
    }
}

impl BusDevice for FlushHint {
    /// A flush hint reads as zero. Drivers do not read it.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    /// A store of any value anywhere in the page is a flush, as 5.2.26.9 requires.
    fn write(&self, _offset: u64, _data: &[u8]) {
        let _one = self.flushing.lock();
        let begin = Instant::now();
        let result = self.backing.persist();
        self.metrics.persists.observe(begin.elapsed());
        match result {
            Ok(()) => {
                self.metrics.flushes.fetch_add(1, Ordering::Relaxed);
            }
            Err(err) => {
                self.metrics.flush_failures.fetch_add(1, Ordering::Relaxed);
                rate_limited!(error, device = self.name, %err, "Flush failed; the VM is paused");
                (self.on_failure)(format!("flush of {} failed: {err}", self.name));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::persist::PersistError;

    #[derive(Default)]
    struct Backing(AtomicBool);

    impl Persist for Backing {
        fn persist(&self) -> Result<(), PersistError> {
            if self.0.load(Ordering::Relaxed) { Err(PersistError::ReadOnly) } else { Ok(()) }
        }
    }

    #[test]
    fn store_flushes_and_reports_a_failure_before_it_returns() {
        let backing = Arc::new(Backing::default());
        let reasons = Arc::new(Mutex::new(Vec::new()));
        let on_failure = Box::new({
            let reasons = Arc::clone(&reasons);
            move |reason| reasons.lock().push(reason)
        });
        let hint = FlushHint::new("data".to_owned(), backing.clone(), on_failure);
        hint.write(0, &1u64.to_le_bytes());
        assert_eq!(hint.metrics().flushes.load(Ordering::Relaxed), 1);
        assert_eq!(hint.metrics().persists.count(), 1);
        assert!(reasons.lock().is_empty());
        backing.0.store(true, Ordering::Relaxed);
        hint.write(0, &1u64.to_le_bytes());
        assert_eq!(reasons.lock().len(), 1);
        assert!(reasons.lock()[0].contains("flush of data failed"));
    }

    #[test]
    fn reading_the_page_does_not_flush() {
        let hint =
            FlushHint::new("data".to_owned(), Arc::new(Backing::default()), Box::new(|_| ()));
        let mut data = [1; 8];
        hint.read(0, &mut data);
        assert_eq!(data, [0; 8]);
        assert_eq!(hint.metrics().flushes.load(Ordering::Relaxed), 0);
    }
}
