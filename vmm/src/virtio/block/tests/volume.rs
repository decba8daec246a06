//! Volumes as disks.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;
use virtio_bindings::virtio_blk::*;

use super::*;
use crate::config::VolumeFormat;
use crate::pool::{LocalPool, PmPool, StoredVolume};
use crate::virtio::block::backend::volume::VolumeDisk;
use crate::volume::sectors::{SectorError, Sectors};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const MIB: u64 = 1 << 20;

#[test]
fn a_volume_is_a_disk_that_keeps_what_was_written() {
    let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
    let path = folder.path().join("pool");
    drop(pmem_volume::Pool::create(&path, 64 * MIB, 16 * MIB).unwrap());
    let pool = LocalPool::open(&path, None).unwrap();
    let (name, format) = ("data".to_owned(), VolumeFormat::Btt);
    pool.create_volume(&StoredVolume { name, format, size_bytes: 20 * MIB }).unwrap();
    let disk = || {
        let sectors = pool.open_volume("data").unwrap().into_sectors().unwrap();
        Rig::new(VolumeDisk::new(sectors, false))
    };
    let mut rig = disk();
    let data = pattern(32 << 10, 8);
    assert_eq!(rig.write(16, &data), OK);
    assert_eq!(rig.read(16, 32 << 10), Ok(data.clone()));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
    assert_eq!(rig.write(1, &[1; 512]), IOERR, "sectors have 4096 bytes");
    rig.driver.write(DATA, &[&24u64.to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat());
    assert_eq!(rig.request(VIRTIO_BLK_T_DISCARD, 0, &[Buffer::Out(DATA, 16)]), (OK, 1));
    assert!(pool.open_volume("data").is_err(), "the disk has it");
    assert!(rig.handle().resize(32 * MIB).unwrap_err().to_string().contains("pmvol"));
    drop(rig);
    let mut expected = data;
    expected[4096..8192].fill(0);
    assert_eq!(disk().read(16, 32 << 10), Ok(expected));
}

/// Sectors that fail.
#[derive(Default)]
struct Failing(AtomicBool);

impl Failing {
    fn result(&self) -> Result<(), SectorError> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(SectorError::ReadOnly("arena 0 is read-only".to_owned())),
            false => Ok(()),
        }
    }
}

impl Sectors for Failing {
    fn sector_bytes(&self) -> u32 {
        4096
    }
    fn sectors(&self) -> u64 {
        64
    }
    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), SectorError> {
        Ok(())
    }
    fn write(&self, _: u64, _: &[u8]) -> Result<(), SectorError> {
        self.result()
    }
    fn discard(&self, _: Range<u64>) -> Result<(), SectorError> {
        self.result()
    }
    fn read_only_arenas(&self) -> usize {
        usize::from(self.result().is_err())
    }
    fn flush(&self) -> Result<(), SectorError> {
        self.result()
    }
}

#[test]
fn what_a_volume_cannot_do_is_an_error_and_a_failed_flush_is_remembered() {
    let sectors = Arc::new(Failing::default());
    let backend = VolumeDisk::new(Arc::clone(&sectors) as _, false);
    let failure = backend.failure();
    let mut rig = Rig::new(backend);
    assert_eq!(rig.write(0, &[1; 4096]), OK);
    sectors.0.store(true, Ordering::Relaxed);
    assert_eq!(rig.write(0, &[1; 4096]), IOERR);
    assert!(failure.reason().is_none() && !rig.metrics().read_only.load(Ordering::Relaxed));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (IOERR, 1));
    assert!(failure.reason().unwrap().contains("arena 0 is read-only"));
    sectors.0.store(false, Ordering::Relaxed);
    assert_eq!(rig.write(0, &[1; 4096]), IOERR, "nobody knows what the media has");
}
