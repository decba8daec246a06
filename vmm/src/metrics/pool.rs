//! Pools: whose their bytes are.

use std::fmt;
use std::sync::{Arc, Weak};

use super::expose::{Exposer, Labels};
use crate::pool::PmPool;

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
        let states = [
            ("free-storage", info.free_storage_bytes),
            ("free", info.free_migrate_bytes),
            ("memory", info.memory_bytes),
            ("volume", info.volume_bytes),
        ];
        states
            .map(|(state, bytes)| (vec![("pool", self.pool.clone()), ("state", state.to_owned())], bytes))
            .to_vec()
    }
}

pub(super) fn expose(out: &mut Exposer<'_>, pools: &[PoolMetrics]) -> fmt::Result {
    let samples = pools.iter().flat_map(PoolMetrics::samples);
    out.bytes("pool", "Bytes of a pool, by what they are used for.", samples)
}
