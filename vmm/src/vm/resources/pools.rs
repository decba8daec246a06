//! Open pools of a machine, and their state in `pool.info`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use foreshore_devices::pool::PmPool;

use crate::vm::request::{PoolInfo, PoolStatus};

/// Pool that contains memory or a volume of the machine.
pub(in crate::vm) struct OpenPool {
    path: PathBuf,
    pool: Arc<dyn PmPool>,
}

impl OpenPool {
    pub(in crate::vm) fn new(path: &Path, pool: &Arc<dyn PmPool>) -> Self {
        Self { path: path.to_owned(), pool: Arc::clone(pool) }
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
            lendable_bytes: info.lendable_bytes,
            borrowable_bytes: info.borrowable_bytes,
            volumes: info.volumes,
            status: info.latched.map_or(PoolStatus::Ok, PoolStatus::ReadOnly),
        }
    }
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
