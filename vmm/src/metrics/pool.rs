//! Pools: whose their bytes are.

use std::fmt;
use std::sync::{Arc, Weak};

use prometheus_client::registry::Unit;

use super::expose::{Exposer, Family, Labels};
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

    fn labels(&self) -> Labels {
        vec![("pool", self.pool.clone())]
    }

    fn states(&self, info: &PoolInfo) -> impl Iterator<Item = (Labels, u64)> {
        let labels = self.labels();
        states(info).into_iter().map(move |(state, bytes)| {
            (labels.iter().cloned().chain([("state", state.to_owned())]).collect(), bytes)
        })
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
    let open: Vec<_> = pools
        .iter()
        .filter_map(|pool| Some((pool, pool.source.upgrade()?)))
        .map(|(pool, source)| (pool, source.info(), source.durability()))
        .collect();
    let durabilities = open.iter().map(|(pool, _, durability)| {
        let durability = ("durability", durability.name().to_owned());
        (pool.labels().into_iter().chain([durability]).collect::<Labels>(), 1.0)
    });
    out.gauges(
        Family("pool_info", "What a completed flush of a pool survives; always 1.", None),
        durabilities,
    )?;
    let failed = open.iter().map(|(pool, info, _)| (pool.labels(), f64::from(u8::from(info.failed))));
    out.gauges(Family("pool_failed", "1 when a write to a pool has failed.", None), failed)?;
    let states = open.iter().flat_map(|(pool, info, _)| pool.states(info));
    out.bytes("pool", "Bytes of a pool, by what they are used for.", states)?;
    let lendable = open.iter().map(|(pool, info, _)| (pool.labels(), info.lendable_bytes));
    out.bytes("pool_lendable", "What a pool lends if it is asked for, erased or not.", lendable)?;
    let scrubbed = open.iter().map(|(pool, info, _)| (pool.labels(), info.scrubbed_bytes));
    out.counters(Family("pool_scrubbed", "Bytes of a pool erased so far.", Some(Unit::Bytes)), scrubbed)
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
