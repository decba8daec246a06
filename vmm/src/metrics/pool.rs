//! Pools: whose their bytes are.

use std::fmt;
use std::sync::{Arc, Weak};

use super::expose::{Exposer, Labels};
use crate::pool::{PmPool, PoolInfo};

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

    fn samples(&self) -> Vec<(Labels, u64)> {
        let Some(info) = self.source.upgrade().map(|pool| pool.info()) else { return Vec::new() };
        states(&info)
            .map(|(state, bytes)| (vec![("pool", self.pool.clone()), ("state", state.to_owned())], bytes))
            .to_vec()
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

pub(super) fn expose(out: &mut Exposer<'_>, pools: &[PoolMetrics]) -> fmt::Result {
    let samples = pools.iter().flat_map(PoolMetrics::samples);
    out.bytes("pool", "Bytes of a pool, by what they are used for.", samples)
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
