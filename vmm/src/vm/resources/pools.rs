//! Open pools of a machine, and their state in `pool.info`.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use foreshore_devices::events::Events;
use foreshore_devices::file_id::{FileId, is_same};
use foreshore_devices::memory::lost_memory::{LostMemory, cut_to_bytes};
use foreshore_devices::pool::{LocalPool, PmPool, PoolError, PoolMetrics, UsageMonitor};
use foreshore_devices::volume::plan::{Step, plan};
use foreshore_types::chain;
use parking_lot::Mutex;
use pmem_volume::pool::DEFAULT_SCRUB_BYTES_PER_S;
use tracing::{info, warn};

use crate::config::{PmMemoryConfig, PmVolumeConfig};
use crate::vm::error::BuildError;
use crate::vm::request::{PoolInfo, PoolStatus, VmError};

/// Pool that contains memory or a volume of the machine.
#[derive(Clone)]
pub(in crate::vm) struct OpenPool {
    path: PathBuf,
    pool: Arc<dyn PmPool>,
}

impl OpenPool {
    pub(in crate::vm) fn new(path: &Path, pool: &Arc<dyn PmPool>) -> Self {
        Self { path: path.to_owned(), pool: Arc::clone(pool) }
    }

    pub(in crate::vm) fn path(&self) -> &Path {
        &self.path
    }

    /// Grows the pool to a size, or to that of its device. `lost` watches the length of its file.
    pub(in crate::vm) fn grow(
        &self,
        size_bytes: Option<u64>,
        force: bool,
        lost: &LostMemory,
    ) -> Result<(), VmError> {
        self.pool.grow(size_bytes, force).map_err(|error| match error {
            PoolError::File { .. } | PoolError::Media(_) | PoolError::Latched { .. } => {
                VmError::Failed(chain(&error))
            }
            error => VmError::BadRequest(error.to_string()),
        })?;
        let total_bytes = self.pool.info().total_bytes;
        lost.file_has_grown(self.pool.file(), total_bytes);
        info!(pool = %self.path.display(), total_bytes, "The pool has grown");
        Ok(())
    }

    pub(in crate::vm) fn metrics(&self) -> PoolMetrics {
        PoolMetrics::new(self.path.display().to_string(), &self.pool)
    }

    pub(in crate::vm) fn usage_monitor(&self, events: &Events) -> UsageMonitor {
        UsageMonitor::new(self.path.display().to_string(), &self.pool, events.clone())
    }

    /// State that `pool.info` reports. Reading it waits neither for the media nor for changes of
    /// the pool.
    pub(in crate::vm) fn info(&self) -> PoolInfo {
        let info = self.pool.info();
        PoolInfo {
            path: self.path.display().to_string(),
            uuid: info.uuid.to_string(),
            durability: info.durability.name().to_owned(),
            total_bytes: info.total_bytes,
            // `reserve_bytes` reports the part of the free bytes that is reserved for volumes.
            free_bytes: info.free_bytes,
            memory_bytes: info.memory_bytes,
            volume_bytes: info.volume_bytes,
            scrubbing_bytes: info.scrubbing_bytes,
            retired_bytes: info.retired_bytes,
            metadata_bytes: info.metadata_bytes,
            reserve_bytes: info.reserve_bytes,
            reserved_bytes: info.reserved_bytes,
            promised_bytes: info.promised_bytes,
            provisioned_bytes: info.provisioned_bytes,
            lendable_bytes: info.lendable_bytes,
            borrowable_bytes: info.borrowable_bytes,
            volumes: info.volumes,
            status: info.latched.map_or(PoolStatus::Ok, PoolStatus::ReadOnly),
        }
    }
}

/// Pools that remain open and locked until the VM is deleted. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Pools(Arc<Mutex<Shared>>);

#[derive(Default)]
struct Shared {
    pools: BTreeMap<PathBuf, Arc<dyn PmPool>>,
    /// Maps each path of a pool in the VM's configuration to the path by which the configuration
    /// first named the pool.
    first_paths: BTreeMap<PathBuf, PathBuf>,
}

impl Pools {
    /// Returns the path by which the VM's configuration first named the pool at `path`. A path is
    /// resolved only once in the life of a VM, so later changes of a link have no effect.
    pub(in crate::vm) fn first_path(&self, path: &Path) -> PathBuf {
        let Shared { pools, first_paths } = &mut *self.0.lock();
        if let Some(known) = first_paths.get(path) {
            return known.clone();
        }
        let is_it = |known: &&PathBuf| match pools.get(*known) {
            Some(pool) => {
                FileId::of(path).is_some_and(|id| FileId::of_open(pool.file()) == Some(id))
            }
            None => is_same(known, path),
        };
        let known = first_paths.values().find(is_it).map_or(path, PathBuf::as_path).to_owned();
        first_paths.insert(path.to_owned(), known.clone());
        known
    }

    /// Closes pools that the next machine must open again. A pool refuses writes after a failed
    /// write until it is opened again.
    pub(in crate::vm) fn close_failed(&self) {
        self.0.lock().pools.retain(|path, pool| {
            let failed = pool.has_failed();
            if failed {
                warn!(pool = %path.display(), "A write to the pool has failed; opening it again");
            }
            let is_cut = is_cut_short(pool.file(), pool.info().total_bytes);
            if is_cut {
                warn!(pool = %path.display(), "The pool's file was truncated; opening it again");
            }
            !failed && !is_cut
        });
    }

    /// Opens the pool of a flag's key `pool`, unless it is open. `zones` are all zones of the VM.
    pub(in crate::vm) fn open(
        &self,
        flag: &str,
        path: &Path,
        zones: &[PmMemoryConfig],
    ) -> Result<Arc<dyn PmPool>, BuildError> {
        let zone = zones.iter().find(|zone| zone.pool == path);
        let bound = zone.map_or(Some(DEFAULT_SCRUB_BYTES_PER_S), PmMemoryConfig::scrub_bytes_per_s);
        let pools = &mut self.0.lock().pools;
        // An earlier machine may have opened the pool with another limit.
        let pool = if let Some(pool) = pools.get(path) {
            pool.set_scrub_bandwidth(bound);
            Arc::clone(pool)
        } else {
            let pool = LocalPool::open(path, bound)
                .map_err(BuildError::pool(format!("{flag} pool={}", path.display())))?;
            pools.insert(path.to_owned(), Arc::clone(&pool) as _);
            pool
        };
        let lending = zones.iter().find(|zone| zone.pool == path && zone.lends_promised());
        pool.lend_promised(lending.map(|zone| zone.storage_min));
        Ok(pool)
    }

    /// Returns the planned step for each of `volumes`, which are in the pool at `path`. The pool is
    /// refused if it is too small for them and for the memory that `zones` may need.
    pub(in crate::vm) fn plan(
        &self,
        path: &Path,
        volumes: &[&PmVolumeConfig],
        zones: &[PmMemoryConfig],
    ) -> Result<Vec<Step>, BuildError> {
        let pool = self.get(path);
        let memory_bytes = memory_bytes(zones, path);
        plan(volumes, &pool.volumes(), &pool.info(), memory_bytes).map_err(|error| {
            let flag = match error.volume() {
                Some(name) => format!("--pm-volume pool={},name={name}", path.display()),
                None => format!("--pm-memory pool={}", path.display()),
            };
            BuildError::device(flag)(error)
        })
    }

    /// Returns an open pool.
    ///
    /// # Panics
    /// Panics if the pool is not open.
    pub(in crate::vm) fn get(&self, path: &Path) -> Arc<dyn PmPool> {
        Arc::clone(self.0.lock().pools.get(path).expect("a pool that was opened"))
    }

    pub(in crate::vm) fn is_open(&self, path: &Path) -> bool {
        self.0.lock().pools.contains_key(path)
    }

    /// Closes a pool as soon as nothing uses it, and forgets the paths that lead to it.
    pub(in crate::vm) fn close(&self, path: &Path) {
        let Shared { pools, first_paths } = &mut *self.0.lock();
        pools.remove(path);
        first_paths.retain(|_, known| known != path);
    }

    /// All open pools, in the order of their paths.
    pub(in crate::vm) fn list(&self) -> Vec<OpenPool> {
        let shared = self.0.lock();
        shared.pools.iter().map(|(path, pool)| OpenPool::new(path, pool)).collect()
    }
}

/// Total size of the zones in the pool at `path`.
pub(in crate::vm) fn memory_bytes(zones: &[PmMemoryConfig], path: &Path) -> u64 {
    let zones = zones.iter().filter(|zone| zone.pool == path);
    zones.fold(0, |sum, zone| sum.saturating_add(zone.size))
}

/// Returns true if the file of a pool was truncated. If so, opening the pool again fails with an
/// error that names a remedy.
fn is_cut_short(file: BorrowedFd<'_>, pool_bytes: u64) -> bool {
    file.try_clone_to_owned()
        .is_ok_and(|file| cut_to_bytes(&File::from(file), pool_bytes).is_some())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use foreshore_devices::pool::{LocalPool, VolumeFormat, VolumeOptions};
    use pmem_volume::Pool;
    use serde_json::Value;
    use tempfile::TempDir;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Opens a pool of 64 MiB with 16 MiB reserved for volumes, on tmpfs if possible.
    fn open() -> (Arc<LocalPool>, OpenPool, TempDir) {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        drop(Pool::create(&path, 64 * MIB, 16 * MIB).unwrap());
        let local = LocalPool::open(&path, None).unwrap();
        let pool: Arc<dyn PmPool> = local.clone();
        let open = OpenPool::new(&path, &pool);
        (local, open, folder)
    }

    fn states(info: &PoolInfo) -> u64 {
        info.free_bytes
            + info.memory_bytes
            + info.volume_bytes
            + info.scrubbing_bytes
            + info.retired_bytes
            + info.metadata_bytes
    }

    #[test]
    fn byte_counts_follow_lending_and_add_up_to_the_pool() {
        let (pool, open, folder) = open();
        let before = open.info();
        assert_eq!(before.path, folder.path().join("pool").display().to_string());
        assert_eq!((before.memory_bytes, before.volumes, &before.status), (0, 0, &PoolStatus::Ok));
        pool.create_volume("data", VolumeOptions::thick(24 * MIB, VolumeFormat::Btt)).unwrap();
        let extents = pool.alloc_memory(16 * MIB).unwrap();
        let lent = open.info();
        assert_eq!((lent.memory_bytes, lent.volume_bytes, lent.volumes), (16 * MIB, 24 * MIB, 1));
        assert_eq!((before.reserved_bytes, before.promised_bytes), (16 * MIB, 0));
        assert_eq!((lent.reserved_bytes, lent.promised_bytes), (24 * MIB, 24 * MIB));
        assert_eq!(lent.free_bytes, before.free_bytes - 40 * MIB);
        pool.free_memory(&extents).unwrap();
        let back = open.info();
        assert_eq!(
            (back.memory_bytes, back.scrubbing_bytes + back.free_bytes),
            (0, lent.free_bytes + 16 * MIB)
        );
        for info in [before, lent, back] {
            assert_eq!(
                (states(&info), info.total_bytes, info.reserve_bytes),
                (64 * MIB, 64 * MIB, 16 * MIB)
            );
        }
    }

    /// `pool.info` and `pmvol info --json` use the same field names, so that users need to learn
    /// only one set.
    #[test]
    fn pool_info_and_pmvol_info_share_names_and_values() {
        let (pool, open, _folder) = open();
        pool.alloc_memory(16 * MIB).unwrap();
        let object = |value: Value| value.as_object().unwrap().clone();
        let ours = object(serde_json::to_value(open.info()).unwrap());
        let theirs = object(serde_json::to_value(pool.pool().info()).unwrap());
        for (name, number) in &ours {
            match name.as_str() {
                // pmvol adds `path`, and has `latched` in place of `status`.
                "path" | "status" => assert!(!theirs.contains_key(name)),
                _ => assert_eq!(theirs.get(name), Some(number), "{name}"),
            }
        }
        // `damaged_bytes` would always be 0 for a VM, because a damaged pool cannot be opened.
        let missing: Vec<_> = theirs.keys().filter(|name| !ours.contains_key(*name)).collect();
        assert_eq!(missing, ["damaged_bytes", "format_version", "latched", "thin"]);
        assert_eq!(theirs["damaged_bytes"], 0);
    }

    #[test]
    fn read_only_pool_shows_its_first_failure() {
        let (pool, open, folder) = open();
        // The next write changes the table of chunks, which is now beyond the end of the file.
        File::options().write(true).open(folder.path().join("pool")).unwrap().set_len(0).unwrap();
        pool.alloc_memory(2 * MIB).unwrap_err();
        let PoolStatus::ReadOnly(reason) = open.info().status else { panic!("it takes writes") };
        assert!(!reason.is_empty() && pool.has_failed());
        pool.alloc_memory(2 * MIB).unwrap_err();
        assert_eq!(open.info().status, PoolStatus::ReadOnly(reason));
    }
}
