//! Pools: whose their bytes are.

use std::sync::{Arc, Weak};

use prometheus_client::registry::Unit;

use super::{PmPool, PoolInfo};
use crate::metrics::{Expose, Exposition, Family, and, one};

/// A pool that is open. It is not held open by being counted.
#[derive(Clone, Debug)]
pub struct PoolMetrics {
    /// The pool's name: its path.
    pub pool: String,
    /// The pool.
    pub source: Weak<dyn PmPool>,
}

impl PoolMetrics {
    /// The metrics of `source`, which is at `pool`.
    pub fn new(pool: String, source: &Arc<dyn PmPool>) -> Self {
        Self { pool, source: Arc::downgrade(source) }
    }
}

/// The pool without its own data, by state.
fn states(info: &PoolInfo) -> [(&'static str, u64); 5] {
    [
        ("free-storage", info.free_storage_bytes),
        ("free", info.free_migrate_bytes),
        ("memory", info.memory_bytes),
        ("scrubbing", info.scrubbing_bytes),
        ("volume", info.volume_bytes),
    ]
}

impl Expose for PoolMetrics {
    /// Adds nothing for a pool that is closed.
    fn expose(&self, out: &mut Exposition) {
        let Some(source) = self.source.upgrade() else { return };
        let (labels, info) = (one("pool", &self.pool), source.info());
        let with = |value| [(labels.clone(), value)];
        let family = Family("pool_info", "What a completed flush of a pool survives; always 1.", None);
        out.gauges(family, [(and(&labels, "durability", source.durability().name()), 1.0)]);
        let failed = Family("pool_failed", "1 when a write to a pool has failed.", None);
        out.flags(failed, [(labels.clone(), info.failed)]);
        let states = states(&info).map(|(state, bytes)| (and(&labels, "state", state), bytes));
        out.bytes("pool", "Bytes of a pool, by what they are used for.", states);
        let help = "What a pool lends if it is asked for, erased or not.";
        out.bytes("pool_lendable", help, with(info.lendable_bytes));
        let scrubbed = Family("pool_scrubbed", "Bytes of a pool erased so far.", Some(Unit::Bytes));
        out.counters(scrubbed, with(info.scrubbed_bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_add_up_to_the_pool_without_its_metadata() {
        let info = PoolInfo {
            total_bytes: 63,
            metadata_bytes: 1,
            free_storage_bytes: 2,
            free_migrate_bytes: 4,
            memory_bytes: 8,
            scrubbing_bytes: 16,
            volume_bytes: 32,
            ..PoolInfo::default()
        };
        let sum: u64 = states(&info).iter().map(|(_, bytes)| bytes).sum();
        assert_eq!(sum, info.total_bytes - info.metadata_bytes);
        assert!(states(&info).contains(&("scrubbing", 16)));
    }
}
