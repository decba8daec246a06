//! What outlives one machine: a reboot builds a new machine on the same pools, and its metrics go on.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pmem_volume::pool::DEFAULT_SCRUB_BYTES_PER_S;
use tracing::info;

use super::error::BuildError;
use crate::config::{PmMemoryConfig, VmConfig};
use crate::host_console::FileStart;
use crate::metrics::{Metrics, PoolMetrics};
use crate::pool::{LocalPool, PmPool, PoolError};

/// What a VMM has beside its machine.
pub struct Resources {
    pools: BTreeMap<PathBuf, Arc<dyn PmPool>>,
    metrics: Arc<Metrics>,
    machines: u64,
}

impl Resources {
    /// Nothing is open yet.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { pools: BTreeMap::new(), metrics, machines: 0 }
    }

    /// Opens every pool that `config` names and that is not open yet. They stay open, and locked, as long as the
    /// VMM lives; but one of which a write has failed takes no more before it is opened anew, which the next machine
    /// does. A pool that could never lend what `--pm-memory` asks for is refused.
    pub fn open_pools(&mut self, config: &VmConfig) -> Result<(), BuildError> {
        self.pools.retain(|path, pool| {
            let failed = pool.info().failed;
            if failed {
                info!(pool = %path.display(), "A write to the pool had failed; it is opened anew");
            }
            !failed
        });
        let memory = config.pm_memory.iter().map(|pm| ("--pm-memory", &pm.pool));
        let volumes = config.pm_volumes.iter().map(|volume| ("--pm-volume", &volume.pool));
        for (flag, path) in memory.chain(volumes) {
            // Another machine on the same pool may have another bound.
            let bound = scrub_bound(config, path);
            if let Some(pool) = self.pools.get(path) {
                pool.set_scrub_bandwidth(bound);
            } else {
                let pool = LocalPool::open(path, bound)
                    .map_err(BuildError::device(format!("{flag} pool={}", path.display())))?;
                self.pools.insert(path.clone(), pool);
            }
        }
        config.pm_memory.as_ref().map_or(Ok(()), |pm| self.check_size(pm))
    }

    fn check_size(&self, pm: &PmMemoryConfig) -> Result<(), BuildError> {
        let info = self.pool(&pm.pool).info();
        if pm.size <= info.most_memory_bytes() {
            return Ok(());
        }
        let error = PoolError::TooSmall { wanted_bytes: pm.size, info };
        Err(BuildError::device(format!("--pm-memory pool={}", pm.pool.display()))(error))
    }

    /// A pool that [`Resources::open_pools`] has opened.
    ///
    /// # Panics
    /// If it has not: the same configuration is used for both.
    pub fn pool(&self, path: &Path) -> &Arc<dyn PmPool> {
        self.pools.get(path).expect("a pool that was opened")
    }

    /// All pools, for metrics.
    pub fn pool_metrics(&self) -> Vec<PoolMetrics> {
        self.pools.iter().map(|(path, pool)| PoolMetrics::new(path.display().to_string(), pool)).collect()
    }

    /// Where metrics are served from.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Counts a machine that was built; the first one's console files start empty, later ones' go on.
    pub fn file_start(&self) -> FileStart {
        if self.machines == 0 { FileStart::Empty } else { FileStart::Continue }
    }

    /// A machine has been built.
    pub fn machine_built(&mut self) {
        self.machines += 1;
    }
}

/// What erasing in a pool may take: `--pm-memory` says it, of its own pool.
fn scrub_bound(config: &VmConfig, pool: &Path) -> Option<NonZeroU64> {
    match &config.pm_memory {
        Some(pm) if pm.pool == pool => pm.scrub_bytes_per_s(),
        _ => Some(DEFAULT_SCRUB_BYTES_PER_S),
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::config::test_config;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_zone_is_no_larger_than_what_its_pool_can_lend() {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let pool = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&pool, 64 * MIB, 16 * MIB).unwrap());
        let open = |size| {
            let mut config = test_config();
            config.pm_memory =
                Some(PmMemoryConfig { pool: pool.clone(), size, guest_numa_node: 1, scrub_bandwidth: 0 });
            Resources::new(Arc::new(Metrics::new("vm"))).open_pools(&config)
        };
        let info = LocalPool::open(&pool, None).unwrap().info();
        let most = info.most_memory_bytes();
        assert_eq!(most, info.free_migrate_bytes, "nothing is used yet");
        open(most).unwrap();
        let message = crate::vm::chain(&open(most + 2 * MIB).unwrap_err());
        for part in ["--pm-memory", &pool.display().to_string(), "64 MiB", "16 MiB"] {
            assert!(message.contains(part), "nothing of {part} in: {message}");
        }
    }
}
