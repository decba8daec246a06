//! Tests of disks on image files, without io_uring and, if the host supports it, with io_uring.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pmem_volume::{OpenMode, Pool};
use rustix::fs::{CWD, Mode, mkfifoat};
use tempfile::TempDir;
use virtio_bindings::virtio_blk::*;

use super::*;
use crate::disk::image::{ImageOptions, RawImage};
use crate::disk::range::{DiskRange, Unmap};
use crate::disk::uring::Uring;
use crate::disk::{Geometry, ResizeError};
use crate::volume::file::PmemFile;
use crate::volume::pmem_config::PmemConfig;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
pub(super) const WRITABLE: ImageOptions = ImageOptions {
    readonly: false,
    direct: false,
    sparse: true,
    is_called_raw: false,
    guest_block_bytes: None,
};
const READONLY: ImageOptions = ImageOptions { readonly: true, ..WRITABLE };

/// Creates an image that contains only zeros.
fn image(len: u64) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("image");
    File::create(&path).unwrap().set_len(len).unwrap();
    (folder, path)
}

pub(super) struct WithoutRing(Arc<RawImage>);

pub(super) fn without_uring(image: Arc<RawImage>) -> Arc<WithoutRing> {
    Arc::new(WithoutRing(image))
}

impl BlockDevice for WithoutRing {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }
    fn read(&self, offset_bytes: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read(offset_bytes, data)
    }
    fn write(&self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset_bytes, data)
    }
    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
    fn discard(&self, range: DiskRange) -> io::Result<()> {
        self.0.discard(range)
    }
    fn write_zeroes(&self, range: DiskRange, unmap: Unmap) -> io::Result<()> {
        self.0.write_zeroes(range, unmap)
    }
    fn resize(&self, wanted_bytes: u64) -> Result<(), ResizeError> {
        self.0.resize(wanted_bytes)
    }
}

fn exercise(mut rig: Rig, path: &Path) {
    let data = pattern(64 << 10, 6);
    assert_eq!(rig.write(8, &data), OK);
    assert_eq!(rig.read(8, 64 << 10), Ok(data.clone()));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
    assert_eq!(fs::read(path).unwrap()[4096..][..64 << 10], data);
    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    rig.driver.write(DATA, &range(8, 8, 0));
    assert_eq!(rig.request(VIRTIO_BLK_T_DISCARD, 0, &[Buffer::Out(DATA, 16)]), (OK, 1));
    for (sector, flags) in [(16, 0), (24, 1)] {
        rig.driver.write(DATA, &range(sector, 8, flags));
        assert_eq!(rig.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[Buffer::Out(DATA, 16)]), (OK, 1));
    }
    assert_eq!(rig.read(16, 8192), Ok(vec![0; 8192]));
    assert_eq!(rig.read(32, 4096), Ok(data[12288..16384].to_vec()));
}

#[test]
fn image_works_with_io_uring() {
    let (_folder, path) = image(1 << 20);
    let backend = RawImage::open(&path, WRITABLE).unwrap();
    if let Err(err) = Uring::new(Arc::clone(&backend), 8) {
        return eprintln!("skipped: io_uring is not available: {err}");
    }
    let rig = Rig::new(backend);
    assert!(rig.metrics().io_uring.load(Ordering::Relaxed), "io_uring is available but not used");
    exercise(rig, &path);
}

#[test]
fn image_works_without_io_uring() {
    let (_folder, path) = image(1 << 20);
    exercise(Rig::new(without_uring(RawImage::open(&path, WRITABLE).unwrap())), &path);
}

#[test]
fn discarded_ranges_release_space() {
    let (_folder, path) = image(1 << 20);
    fs::write(&path, vec![1; 1 << 20]).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let blocks = || fs::metadata(&path).unwrap().blocks();
    let before = blocks();
    let mut rig = Rig::new(RawImage::open(&path, WRITABLE).unwrap());
    rig.driver.write(DATA, &[&0u64.to_le_bytes()[..], &2048u32.to_le_bytes(), &[0; 4]].concat());
    assert_eq!(rig.request(VIRTIO_BLK_T_DISCARD, 0, &[Buffer::Out(DATA, 16)]), (OK, 1));
    assert!(before > 0 && blocks() == 0, "{before} blocks, then {}", blocks());
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
}

#[test]
fn truncated_file_is_an_error() {
    let (_folder, path) = image(1 << 20);
    let mut rig = Rig::new(RawImage::open(&path, WRITABLE).unwrap());
    assert_eq!(rig.write(0, &[1; 4096]), OK);
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2048).unwrap();
    assert_eq!(rig.read(0, 2048), Ok(vec![1; 2048]));
    assert_eq!(rig.read(0, 4096), Err(VIRTIO_BLK_S_IOERR as u8));
    assert_eq!(rig.read(1024, 512), Err(VIRTIO_BLK_S_IOERR as u8));
}

#[test]
fn image_has_one_writer_or_several_readers() {
    let (_folder, path) = image(1 << 20);
    let refused = |options| {
        let error = RawImage::open(&path, options).unwrap_err().to_string();
        assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
    };
    let first = RawImage::open(&path, READONLY).unwrap();
    let second = RawImage::open(&path, READONLY).unwrap();
    refused(WRITABLE);
    drop((first, second));
    let writer = RawImage::open(&path, WRITABLE).unwrap();
    refused(READONLY);
    refused(WRITABLE);
    drop(writer);
    RawImage::open(&path, WRITABLE).unwrap();
}

#[test]
fn pool_is_not_attached_as_a_writable_disk() {
    let (_folder, path) = image(1 << 20);
    let error = |options| RawImage::open(&path, options).unwrap_err().to_string();
    fs::remove_file(&path).unwrap();
    let pool = Pool::create(&path, 64 << 20, 16 << 20).unwrap();
    let called_raw = ImageOptions { is_called_raw: true, ..WRITABLE };
    for options in [WRITABLE, READONLY, called_raw] {
        assert!(error(options).contains("in use by process"), "{}", error(options));
    }
    drop(pool);
    let before = fs::read(&path).unwrap();
    for options in [WRITABLE, called_raw] {
        assert!(error(options).contains("is marked as a pool"), "{}", error(options));
    }
    // A pool's file can be attached read-only. While it is attached, no VM can open the pool.
    let image = RawImage::open(&path, READONLY).unwrap();
    assert!(Pool::open(&path, OpenMode::ReadWrite).unwrap_err().to_string().contains("in use"));
    drop(image);
    // A pool without superblocks can still be repaired, so a guest must not write to its file.
    let mut bytes = before.clone();
    bytes[..4096].fill(0);
    bytes[(2 << 20) - 4096..2 << 20].fill(0);
    fs::write(&path, bytes).unwrap();
    assert!(error(WRITABLE).contains("is marked as a pool"), "{}", error(WRITABLE));
    fs::write(&path, &before).unwrap();
    Pool::open(&path, OpenMode::ReadWrite).unwrap();
}

#[test]
fn file_of_a_pmem_device_is_not_attached_as_a_disk() {
    let (_folder, path) = image(2 << 20);
    let config =
        |options: &str| PmemConfig::parse(&format!("file={}{options}", path.display())).unwrap();
    let in_use = |options| {
        let error = RawImage::open(&path, options).unwrap_err().to_string();
        assert!(error.contains("in use by process"), "{error}");
    };
    let pmem = PmemFile::open(&config("")).unwrap();
    in_use(WRITABLE);
    in_use(READONLY);
    drop(pmem);
    let pmem = PmemFile::open(&config(",discard_writes=on")).unwrap();
    in_use(WRITABLE);
    drop(RawImage::open(&path, READONLY).unwrap());
    drop(pmem);
    let _disk = RawImage::open(&path, WRITABLE).unwrap();
    assert!(PmemFile::open(&config("")).err().unwrap().to_string().contains("in use by process"));
}

#[test]
fn content_written_by_the_guest_does_not_prevent_opening() {
    let (folder, path) = image(16 << 20);
    let pool = folder.path().join("pool");
    drop(Pool::create(&pool, 16 << 20, 0).unwrap());
    let contents = [b"QFI\xfb\0\0\0\x03".to_vec(), b"conectix".to_vec(), fs::read(&pool).unwrap()];
    drop(RawImage::open(&path, WRITABLE).unwrap());
    for content in contents {
        File::options().write(true).open(&path).unwrap().write_all(&content).unwrap();
        for is_called_raw in [false, true] {
            RawImage::open(&path, ImageOptions { is_called_raw, ..WRITABLE }).unwrap();
        }
    }
}

#[test]
fn image_is_examined_for_other_formats_until_it_is_a_disk() {
    let (folder, path) = image(1 << 20);
    File::options().write(true).open(&path).unwrap().write_all(b"QFI\xfb\0\0\0\x03").unwrap();
    let log = folder.path().join("log");
    let subscriber =
        tracing_subscriber::fmt().with_writer(Arc::new(File::create(&log).unwrap())).finish();
    let warnings = |options| {
        let before = fs::read_to_string(&log).unwrap().len();
        drop(RawImage::open(&path, options).unwrap());
        fs::read_to_string(&log).unwrap()[before..].matches("a qcow2 image").count()
    };
    crate::log::with_subscriber(subscriber, || {
        // Attaching an image read-only does not mark it as a disk.
        assert_eq!(
            [READONLY, READONLY, WRITABLE, WRITABLE, READONLY].map(warnings),
            [1, 1, 1, 0, 0]
        );
    });
}

#[test]
fn copy_of_a_pool_becomes_a_disk_only_as_explicit_raw_image() {
    let (folder, path) = image(16 << 20);
    let copy = folder.path().join("copy");
    fs::remove_file(&path).unwrap();
    drop(Pool::create(&path, 16 << 20, 0).unwrap());
    fs::copy(&path, &copy).unwrap();
    let error = RawImage::open(&copy, WRITABLE).unwrap_err().to_string();
    assert!(error.contains("holds a pool") && error.contains("image_type=raw"), "{error}");
    RawImage::open(&copy, READONLY).unwrap();
    RawImage::open(&copy, WRITABLE).unwrap_err();
    RawImage::open(&copy, ImageOptions { is_called_raw: true, ..WRITABLE }).unwrap();
    // The copy is now marked as a disk, so any content in it is accepted.
    RawImage::open(&copy, WRITABLE).unwrap();
    PmemFile::open(&PmemConfig::parse(&format!("file={}", copy.display())).unwrap()).unwrap();
}

#[test]
fn files_that_are_not_images_are_refused() {
    let folder = TempDir::new().unwrap();
    let error = |path: &Path| RawImage::open(path, WRITABLE).unwrap_err().to_string();
    assert!(error(folder.path()).contains("neither a file nor a block device"));
    assert!(error(Path::new("/dev/null")).contains("neither a file nor a block device"));
    assert!(error(&folder.path().join("none")).contains("examined"));
    // The pipe should not be opened, because that would block until another process opens its other
    // end.
    let pipe = folder.path().join("pipe");
    mkfifoat(CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
    assert!(error(&pipe).contains("neither a file nor a block device"));
    let empty = folder.path().join("empty");
    File::create(&empty).unwrap().set_len(511).unwrap();
    assert!(error(&empty).contains("511 bytes"), "{}", error(&empty));
}

#[test]
fn partial_last_block_of_an_image_is_ignored() {
    let (_folder, path) = image((1 << 20) + 511);
    assert_eq!(RawImage::open(&path, WRITABLE).unwrap().size_bytes(), 1 << 20);
}

#[test]
fn image_grows_but_does_not_shrink() {
    let (_folder, path) = image(1 << 20);
    let image = RawImage::open(&path, WRITABLE).unwrap();
    assert!(matches!(image.resize(512), Err(ResizeError::Shrinks { .. })));
    assert!(matches!(image.resize((1 << 20) + 1), Err(ResizeError::PartOfBlock { .. })));
    image.resize(1 << 20).unwrap();
    image.resize(2 << 20).unwrap();
    assert_eq!((image.size_bytes(), fs::metadata(&path).unwrap().len()), (2 << 20, 2 << 20));
    drop(image);
    let image = RawImage::open(&path, READONLY).unwrap();
    assert!(matches!(image.resize(4 << 20), Err(ResizeError::Unsupported(_))));
}

#[test]
fn direct_transfers_are_aligned_by_the_device() {
    let (_folder, path) = image(1 << 20);
    let backend = match RawImage::open(&path, ImageOptions { direct: true, ..WRITABLE }) {
        Ok(backend) => backend,
        Err(err) => return eprintln!("skipped: the file system does not support O_DIRECT: {err}"),
    };
    let block = u64::from(backend.geometry().block_bytes);
    let mut rig = Rig::new(backend);
    let data = pattern(3 * block as usize, 7);
    // The driver's buffer is not aligned.
    rig.driver.write(DATA + 13, &data);
    let (len, sector) = (data.len() as u32, block / 512);
    assert_eq!(rig.request(VIRTIO_BLK_T_OUT, sector, &[Buffer::Out(DATA + 13, len)]), (OK, 1));
    assert_eq!(
        rig.request(VIRTIO_BLK_T_IN, sector, &[Buffer::In(DATA + 0x1_0001, len)]),
        (OK, len + 1)
    );
    assert_eq!(rig.driver.read(DATA + 0x1_0001, len), data);
}

#[test]
fn queues_continue_after_a_reset_during_their_requests() {
    const QUEUES: usize = 4;
    const LEN: u32 = 64 << 10;
    let (_folder, path) = image(16 << 20);
    let backend = RawImage::open(&path, WRITABLE).unwrap();
    let device = Block::new(DiskShape { queues: QUEUES as u16, ..shape() }, backend).unwrap();
    let features = device.features();
    let mut rig = Rig::with(device, features);
    let data = pattern(LEN as usize, 9);
    rig.driver.write(DATA, &data);
    // Each queue writes ten blocks in its own region of the disk.
    let sector = |queue: usize, nth: usize| (queue * 4096 + nth * 128) as u64;
    for round in 0..20 {
        let mut written = 0;
        for (queue, nth) in (0..QUEUES).flat_map(|queue| (0..10).map(move |nth| (queue, nth))) {
            let header = HEADER + 0x200 + 0x10 * (queue * 10 + nth) as u64;
            let kind = VIRTIO_BLK_T_OUT.to_le_bytes();
            rig.driver
                .write(header, &[&kind[..], &[0; 4], &sector(queue, nth).to_le_bytes()].concat());
            let status = STATUS + (queue * 10 + nth) as u64;
            rig.driver.write(status, &[UNTOUCHED]);
            rig.driver.add(
                queue,
                &[Buffer::Out(header, 16), Buffer::Out(DATA, LEN), Buffer::In(status, 1)],
            );
            written += 1;
        }
        (0..QUEUES).for_each(|queue| rig.driver.kick(queue));
        // In every second round, the test resets the device at an arbitrary moment.
        if round % 2 == 0 {
            rig.device.reset();
            let activation = rig.driver.activation(features);
            rig.device.activate(activation).unwrap();
            continue;
        }
        for queue in 0..QUEUES {
            (0..10).for_each(|_| assert_eq!(rig.driver.wait_used(queue).1, 1));
        }
        assert_eq!(rig.driver.read(STATUS, written), vec![OK; written as usize]);
    }
    for (queue, nth) in (0..QUEUES).flat_map(|queue| (0..10).map(move |nth| (queue, nth))) {
        assert_eq!(
            rig.read(sector(queue, nth), LEN),
            Ok(data.clone()),
            "queue {queue}, block {nth}"
        );
    }
}
