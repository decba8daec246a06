//! Metrics: a registry of sources, and their exposition as OpenMetrics text.
//!
//! Devices and other sources keep their counters in atomics or in their own state. Each source
//! implements [`Expose`] next to its counters, and the code that attaches a source registers it. A
//! scrape reads each source once, so that nothing is counted twice. Costly values, such as the
//! resident bytes of a zone, are computed only during a scrape. docs/reference/metrics.md lists
//! every metric, and a test compares this list with the code.

mod exposition;
mod latency;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

pub use self::exposition::{Expose, Exposition, Family, Labels, and, get, one};
pub use self::latency::{LATENCY_BOUNDS_NS, LatencyHistogram, LatencySample};

/// Registered sources, in the order of their registration.
#[derive(Default)]
struct Sources {
    registered: Mutex<BTreeMap<u64, Arc<dyn Expose>>>,
    registrations: AtomicU64,
}

impl Sources {
    fn add(&self, source: Arc<dyn Expose>) -> u64 {
        let id = self.registrations.fetch_add(1, Ordering::Relaxed);
        self.registered.lock().insert(id, source);
        id
    }

    /// Returns copies of the sources, so that they are read without the lock. A source may acquire
    /// its own locks.
    fn all(&self) -> Vec<Arc<dyn Expose>> {
        self.registered.lock().values().cloned().collect()
    }
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources").field("registered", &self.registered.lock().len()).finish()
    }
}

/// Registration of a source. Dropping it removes the source.
#[derive(Debug)]
#[must_use = "dropping this removes the source"]
pub struct Registration {
    id: u64,
    sources: Arc<Sources>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Drops the source after the lock is released, because dropping its last reference may
        // close files.
        let source = self.sources.registered.lock().remove(&self.id);
        drop(source);
    }
}

/// All metrics of the VMM.
#[derive(Debug)]
pub struct Metrics {
    vm: String,
    sources: Arc<Sources>,
}

impl Metrics {
    /// Creates metrics without sources, labeled with the name of the VM.
    pub fn new(vm: &str) -> Self {
        Self { vm: vm.to_owned(), sources: Arc::default() }
    }

    /// Name of the VM.
    pub fn vm(&self) -> &str {
        &self.vm
    }

    /// Adds a source for the lifetime of the process.
    pub fn add(&self, source: Arc<dyn Expose>) {
        self.sources.add(source);
    }

    /// Adds a source until its registration is dropped.
    pub fn register(&self, source: Arc<dyn Expose>) -> Registration {
        Registration { id: self.sources.add(source), sources: Arc::clone(&self.sources) }
    }

    /// Encodes all sources as OpenMetrics text. `once` is an additional source for this scrape
    /// only.
    pub fn encode(&self, once: &dyn Expose) -> Result<String, fmt::Error> {
        let mut exposition = Exposition::default();
        once.expose(&mut exposition);
        self.sources.all().iter().for_each(|source| source.expose(&mut exposition));
        let label = (Cow::Borrowed("vm"), Cow::Owned(self.vm.clone()));
        let mut registry = Registry::with_labels(std::iter::once(label));
        registry.register_collector(Box::new(exposition.take_without_prefix()));
        let prefixed = registry.sub_registry_with_prefix("foreshore");
        prefixed.register_collector(Box::new(exposition));
        let mut out = String::new();
        text::encode(&mut out, &registry)?;
        Ok(out)
    }
}
