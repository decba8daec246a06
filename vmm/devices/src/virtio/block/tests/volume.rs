//! Tests of volumes that are attached as disks.

use std::io;
use std::sync::atomic::Ordering;

use tempfile::TempDir;
use virtio_bindings::virtio_blk::*;

use super::fake::geometry;
use super::*;
use crate::disk::Geometry;
use crate::pool::{LocalPool, PmPool, VolumeFormat, VolumeOptions};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const MIB: u64 = 1 << 20;

/// Creates a pool in `folder` that contains a volume named `data`.
pub(super) fn new_pool(folder: &TempDir) -> Arc<LocalPool> {
    let path = folder.path().join("pool");
    drop(pmem_volume::Pool::create(&path, 64 * MIB, 16 * MIB).unwrap());
    let pool = LocalPool::open(&path, None).unwrap();
    pool.create_volume("data", VolumeOptions::thick(20 * MIB, VolumeFormat::Btt)).unwrap();
    pool
}

/// Creates a pool with a volume and opens the volume as a disk.
pub(super) fn disk_of_new_volume(folder: &TempDir) -> Arc<dyn BlockDevice> {
    new_pool(folder).open_volume("data").unwrap().into_disk().unwrap().device
}

#[test]
fn volume_retains_written_data_as_a_disk() {
    let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
    let pool = new_pool(&folder);
    let disk = || Rig::new(pool.open_volume("data").unwrap().into_disk().unwrap().device);
    let mut rig = disk();
    let data = pattern(32 << 10, 8);
    assert_eq!(rig.write(16, &data), OK);
    assert_eq!(rig.read(16, 32 << 10), Ok(data.clone()));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
    assert_eq!(rig.write(1, &[1; 512]), IOERR, "a write smaller than the sector of 4096 bytes");
    rig.driver.write(DATA, &[&24u64.to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat());
    assert_eq!(rig.request(VIRTIO_BLK_T_DISCARD, 0, &[Buffer::Out(DATA, 16)]), (OK, 1));
    assert!(pool.open_volume("data").is_err(), "the disk uses the volume");
    let last = |rig: &Rig| rig.handle().size_bytes() / 512 - 8;
    let before = last(&rig);
    assert!(rig.handle().resize(18 * MIB).unwrap_err().to_string().contains("cannot shrink"));
    rig.handle().resize(40 * MIB).unwrap();
    let grown = last(&rig);
    assert!(grown > before + 2 * 18 * 1024, "{grown} after {before}");
    assert_eq!(rig.write(grown, &data[..4096]), OK);
    assert_eq!(rig.read(grown, 4096), Ok(data[..4096].to_vec()));
    drop(rig);
    let mut expected = data;
    expected[4096..8192].fill(0);
    assert_eq!(disk().read(16, 32 << 10), Ok(expected));
}

/// Sends a request for a range of 512-byte sectors.
fn erase(rig: &mut Rig, kind: u32, sectors: std::ops::Range<u64>, flags: u32) -> (u8, u32) {
    let count = (sectors.end - sectors.start) as u32;
    let words = [&sectors.start.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()];
    rig.driver.write(DATA, &words.concat());
    rig.request(kind, 0, &[Buffer::Out(DATA, 16)])
}

/// The driver must allow zeroing to deallocate (virtio 1.3, 5.2.6).
#[test]
fn thin_volume_releases_chunks_only_if_the_driver_allows_it() {
    let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
    let pool = new_pool(&folder);
    let thin = VolumeOptions { thin: true, ..VolumeOptions::thick(20 * MIB, VolumeFormat::Btt) };
    pool.create_volume("thin", thin).unwrap();
    let device = |name| pool.open_volume(name).unwrap().into_disk().unwrap().device;
    assert!(!device("data").geometry().unmap);
    let device = device("thin");
    assert!(device.geometry().unmap);
    let mut rig = Rig::new(device.clone());
    let [zeroes, unmap] = [VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP];
    let mut released = 0;
    for (kind, flags) in [(zeroes, 0), (zeroes, unmap), (VIRTIO_BLK_T_DISCARD, 0)] {
        for at in (0..8 * MIB).step_by(64 << 10) {
            device.write(at, &vec![7; 64 << 10]).unwrap();
        }
        let full = device.allocated_bytes().unwrap();
        assert_eq!(erase(&mut rig, kind, 0..8 * MIB / 512, flags), (OK, 1));
        let now = device.allocated_bytes().unwrap();
        assert_eq!(now < full, (kind, flags) != (zeroes, 0), "{kind} {flags}: {full} became {now}");
        assert_eq!(rig.read(MIB / 512, 4096), Ok(vec![0; 4096]));
        released += full - now;
        assert_eq!(device.released_bytes(), Some(released));
    }
}

#[test]
fn failed_write_is_an_error_and_failed_flush_is_recorded() {
    let device = Arc::new(Fake::with(64 * 4096, Geometry { block_bytes: 4096, ..geometry() }));
    let mut rig = Rig::new(device.clone());
    let failure = rig.handle().failure();
    assert_eq!(rig.write(0, &[1; 4096]), OK);
    device.set_hook(|_| {
        Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "arena 0 is read-only"))
    });
    assert_eq!(rig.write(0, &[1; 4096]), IOERR);
    assert!(failure.reason().is_none() && !rig.metrics().read_only.load(Ordering::Relaxed));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (IOERR, 1));
    assert!(failure.reason().unwrap().contains("arena 0 is read-only"));
    device.set_hook(|_| Ok(()));
    assert_eq!(rig.write(0, &[1; 4096]), IOERR, "the content of the media is unknown");
}

#[test]
fn read_only_volume_refuses_writes_and_discards() {
    let folder = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap();
    let shape = DiskShape { read_only: true, ..shape() };
    let device = Block::new(shape, disk_of_new_volume(&folder)).unwrap();
    let features = device.features();
    assert_ne!(features & 1 << VIRTIO_BLK_F_RO, 0);
    assert_eq!(features & (1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES), 0);
    let mut rig = Rig::with(device, features);
    assert_eq!(rig.write(0, &[1; 4096]), IOERR);
    assert_eq!(rig.read(0, 4096), Ok(vec![0; 4096]));
}
