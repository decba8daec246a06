//! Deletes the volumes that were created by a start or an addition that failed.

use std::path::PathBuf;
use std::sync::Arc;

use foreshore_devices::pool::{PmPool, PoolError, VolumeOptions, VolumeSize};
use tracing::{info, warn};

use crate::config::PmVolumeConfig;

/// Volumes that were created by this start. When dropped, deletes them unless [`Self::keep`] was
/// called.
///
/// Everything that uses these volumes must be dropped first.
#[derive(Default)]
pub(in crate::vm) struct CreatedVolumes(Vec<Created>);

struct Created {
    path: PathBuf,
    pool: Arc<dyn PmPool>,
    name: String,
}

impl CreatedVolumes {
    pub(in crate::vm) fn create(
        &mut self,
        config: &PmVolumeConfig,
        pool: &Arc<dyn PmPool>,
        size_bytes: u64,
    ) -> Result<(), PoolError> {
        let PmVolumeConfig { pool: path, name, format, reserve, .. } = config;
        let size = VolumeSize::Bytes(size_bytes);
        pool.create_volume(
            name,
            VolumeOptions {
                size,
                format: *format,
                thin: config.creates_thin(),
                reserve_bytes: *reserve,
            },
        )?;
        self.0.push(Created { path: path.clone(), pool: Arc::clone(pool), name: name.clone() });
        Ok(())
    }

    /// Keeps the volumes, because the start has succeeded.
    pub(in crate::vm) fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for CreatedVolumes {
    fn drop(&mut self) {
        for Created { path, pool, name } in self.0.drain(..) {
            let path = path.display();
            match pool.delete_volume(&name) {
                Ok(()) => {
                    info!(pool = %path, volume = name, "The start or addition has failed; deleted the volume that it had created")
                }
                Err(err) => {
                    let error = foreshore_types::chain(&err);
                    warn!(pool = %path, volume = name, error, "Cannot delete the volume that a failed start or addition has created");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use foreshore_devices::pool::{LocalPool, VolumeFormat};
    use tempfile::TempDir;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn volume_is_created_as_configured() {
        let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
        let path = folder.path().join("pool");
        drop(pmem_volume::Pool::create(&path, 128 * MIB, 16 * MIB).unwrap());
        let pool: Arc<dyn PmPool> = LocalPool::open(&path, None).unwrap();
        let mut created = CreatedVolumes::default();
        for (name, keys) in [
            ("indexed", "format=btt"),
            ("plain", "format=raw"),
            ("thick", "thin=off"),
            ("thin", "reserve=6M"),
        ] {
            let options = format!("pool={},name={name},create=on,size=20M,{keys}", path.display());
            let config = PmVolumeConfig::parse(&options).unwrap();
            created.create(&config, &pool, 20 * MIB).unwrap();
        }
        let volumes: Vec<_> = pool
            .volumes()
            .into_iter()
            .map(|volume| (volume.name, volume.format, volume.thin, volume.reserve_bytes / MIB))
            .collect();
        let indexed = ("indexed".to_owned(), VolumeFormat::Btt, true, 20);
        let plain = ("plain".to_owned(), VolumeFormat::Raw, false, 20);
        let thick = ("thick".to_owned(), VolumeFormat::Btt, false, 20);
        let thin = ("thin".to_owned(), VolumeFormat::Btt, true, 6);
        assert_eq!(volumes, [indexed, plain, thick, thin]);
    }
}
