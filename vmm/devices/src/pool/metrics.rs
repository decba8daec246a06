//! Metrics of pools.

use std::sync::{Arc, Weak};

use prometheus_client::registry::Unit;

use super::{PmPool, PoolInfo};
use crate::metrics::{Expose, Exposition, Family, and, one};

/// Metrics of an open pool. They do not keep the pool open.
#[derive(Clone, Debug)]
pub struct PoolMetrics {
    /// Path of the pool, used as its name.
    pub pool: String,
    pub source: Weak<dyn PmPool>,
}

impl PoolMetrics {
    /// Creates the metrics of `source`, whose path is `pool`.
    pub fn new(pool: String, source: &Arc<dyn PmPool>) -> Self {
        Self { pool, source: Arc::downgrade(source) }
    }
}

/// Bytes of the pool in each state, without its metadata.
fn states(info: &PoolInfo) -> [(&'static str, u64); 5] {
    [
        ("free-storage", info.free_storage_bytes()),
        ("free", info.free_migrate_bytes()),
        ("memory", info.memory_bytes),
        ("scrubbing", info.scrubbing_bytes),
        ("volume", info.volume_bytes),
    ]
}

impl Expose for PoolMetrics {
    /// Adds no samples if the pool is closed.
    fn expose(&self, out: &mut Exposition) {
        let Some(source) = self.source.upgrade() else { return };
        let (labels, info) = (one("pool", &self.pool), source.info());
        let with = |value| [(labels.clone(), value)];
        let family =
            Family("pool_info", "Durability of completed flushes of the pool; always 1.", None);
        out.gauges(family, [(and(&labels, "durability", source.durability().name()), 1.0)]);
        let failed = Family(
            "pool_failed",
            "1 when a write to the pool has failed and it is read-only.",
            None,
        );
        out.flags(failed, [(labels.clone(), info.latched.is_some())]);
        let states = states(&info).map(|(state, bytes)| (and(&labels, "state", state), bytes));
        out.bytes(
            "pool",
            "Bytes of the pool by state, without metadata and damaged chunks.",
            states,
        );
        let help =
            "Bytes that the pool can lend as memory, including those that must be erased first.";
        out.bytes("pool_lendable", help, with(info.lendable_bytes));
        let help = "Lent bytes that the VMM can move to DRAM.";
        out.bytes("pool_recallable", help, with(info.recallable_bytes()));
        let help = "Bytes not available to memory: volumes, and the free part of the reserve.";
        out.bytes("pool_reserved", help, with(info.reserved_bytes));
        let help =
            "Guaranteed bytes of all volumes, or their allocated bytes where these are more.";
        out.bytes("pool_promised", help, with(info.promised_bytes));
        out.bytes("pool_provisioned", "Sizes of all volumes.", with(info.provisioned_bytes));
        let scrubbed =
            Family("pool_scrubbed", "Bytes erased since the pool was opened.", Some(Unit::Bytes));
        out.counters(scrubbed, with(source.scrubbed_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use pmem_volume::Pool;
    use tempfile::TempDir;

    use super::*;
    use crate::metrics::Metrics;
    use crate::pool::fake::empty_info;
    use crate::pool::{LocalPool, VolumeFormat, VolumeOptions};

    #[test]
    fn promised_and_reserved_bytes_are_exposed() {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        drop(Pool::create(&path, 64 << 20, 16 << 20).unwrap());
        let pool: Arc<dyn PmPool> = LocalPool::open(&path, None).unwrap();
        pool.create_volume("v", VolumeOptions::thick(8 << 20, VolumeFormat::Raw)).unwrap();
        let text = Metrics::new("db").encode(&PoolMetrics::new("p".to_owned(), &pool)).unwrap();
        for line in [
            "promised_bytes{vm=\"db\",pool=\"p\"} 8388608",
            "provisioned_bytes{vm=\"db\",pool=\"p\"} 8388608",
            "reserved_bytes{vm=\"db\",pool=\"p\"} 16777216",
        ] {
            assert!(text.contains(&format!("\nforeshore_pool_{line}\n")), "{line}: {text}");
        }
    }

    #[test]
    fn states_add_up_to_the_pool_without_its_metadata() {
        let info = PoolInfo {
            total_bytes: 63,
            metadata_bytes: 1,
            free_bytes: 6,
            reserve_bytes: 34,
            memory_bytes: 8,
            scrubbing_bytes: 16,
            volume_bytes: 32,
            ..empty_info()
        };
        let sum: u64 = states(&info).iter().map(|(_, bytes)| bytes).sum();
        assert_eq!(sum, info.total_bytes - info.metadata_bytes);
        for state in [("free-storage", 2), ("free", 4), ("scrubbing", 16)] {
            assert!(states(&info).contains(&state), "{state:?}");
        }
    }
}
