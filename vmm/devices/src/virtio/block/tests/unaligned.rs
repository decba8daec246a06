//! Tests of disks with 512-byte sectors on media with 4096-byte sectors, without io_uring and, if
//! the host supports it, with io_uring.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use virtio_bindings::virtio_blk::*;

use super::image::{WRITABLE, without_uring};
use super::*;
use crate::disk::image::{ImageOptions, RawImage};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const MIB: u64 = 1 << 20;
const DIRECT_512: ImageOptions =
    ImageOptions { direct: true, guest_block_bytes: Some(512), ..WRITABLE };

/// A loop device with 4096-byte sectors, optionally with a mounted file system.
struct Device {
    folder: TempDir,
    path: PathBuf,
    is_mounted: bool,
}

impl Device {
    /// Creates a loop device. Returns `None` if the host has no loop devices.
    fn new(len_bytes: u64) -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(len_bytes).unwrap();
        let output = Command::new("losetup")
            .args(["--show", "-f", "--sector-size", "4096"])
            .arg(&image)
            .output();
        let Some(output) = output.ok().filter(|output| output.status.success()) else {
            eprintln!(
                "skipped: cannot create a loop device with sectors of 4096 bytes (needs root)"
            );
            return None;
        };
        let path = String::from_utf8(output.stdout).unwrap().trim().into();
        Some(Self { folder, path, is_mounted: false })
    }

    /// Creates a loop device with a mounted file system. Returns `None` if the test may not mount
    /// it.
    fn mounted() -> Option<Self> {
        let mut device = Self::new(16 * MIB)?;
        let folder = device.folder.path().join("mounted");
        fs::create_dir(&folder).unwrap();
        let done =
            |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
        device.is_mounted = done(Command::new("mkfs.ext4").arg("-q").arg(&device.path))
            && done(Command::new("mount").arg(&device.path).arg(&folder));
        if !device.is_mounted {
            eprintln!("skipped: cannot create and mount an ext4 file system");
        }
        device.is_mounted.then_some(device)
    }

    fn file(&self, len_bytes: u64) -> PathBuf {
        let path = self.folder.path().join("mounted/disk");
        File::create(&path).unwrap().set_len(len_bytes).unwrap();
        path
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.is_mounted {
            assert!(Command::new("umount").arg(&self.path).status().unwrap().success());
        }
        assert!(Command::new("losetup").arg("-d").arg(&self.path).status().unwrap().success());
    }
}

fn block_bytes(path: &Path, options: ImageOptions) -> u32 {
    RawImage::open(path, options).unwrap().geometry().block_bytes
}

fn range(sector: u64, sectors: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
}

/// Writes to parts of the first 64 KiB and to the last sectors of a disk, and checks the content.
fn exercise(mut rig: Rig, sectors: u64) {
    let mut expected = pattern(64 << 10, 3);
    assert_eq!(rig.write(0, &expected), OK);
    for (seed, (sector, count)) in
        (10..).zip([(1, 1), (7, 2), (3, 9), (8, 8), (15, 17), (0, 1), (100, 27)])
    {
        let data = pattern(count * 512, seed);
        assert_eq!(rig.write(sector, &data), OK, "sector {sector}, {count} sectors");
        expected[sector as usize * 512..][..data.len()].copy_from_slice(&data);
        assert_eq!(
            rig.read(sector, data.len() as u32),
            Ok(data),
            "sector {sector}, {count} sectors"
        );
    }
    // Zeroing and discards should change exactly the requested bytes.
    for (sector, count) in [(33, 30), (65, 2), (72, 8)] {
        rig.driver.write(DATA, &range(sector, count));
        assert_eq!(rig.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[Buffer::Out(DATA, 16)]), (OK, 1));
        expected[sector as usize * 512..][..count as usize * 512].fill(0);
    }
    rig.driver.write(DATA, &range(113, 2));
    assert_eq!(rig.request(VIRTIO_BLK_T_DISCARD, 0, &[Buffer::Out(DATA, 16)]), (OK, 1));
    let remaining: Vec<_> = (0..128u64).filter(|sector| !(113..115).contains(sector)).collect();
    for sector in remaining {
        assert!(
            rig.read(sector, 512).as_deref() == Ok(&expected[sector as usize * 512..][..512]),
            "sector {sector}"
        );
    }
    assert_eq!(rig.write(sectors - 3, &pattern(1536, 99)), OK);
    assert_eq!(rig.read(sectors - 1, 512), Ok(pattern(1536, 99)[1024..].to_vec()));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
}

#[test]
fn device_of_4096_serves_sectors_of_512() {
    let Some(device) = Device::new(8 * MIB) else { return };
    let device_own = ImageOptions { guest_block_bytes: None, ..DIRECT_512 };
    assert_eq!(block_bytes(&device.path, device_own), 4096);
    for options in [DIRECT_512, ImageOptions { direct: false, ..DIRECT_512 }] {
        let open = || RawImage::open(&device.path, options).unwrap();
        assert_eq!(open().geometry().block_bytes, 512);
        exercise(Rig::new(open()), 8 * MIB / 512);
        exercise(Rig::new(without_uring(open())), 8 * MIB / 512);
    }
}

#[test]
fn file_has_sectors_of_512_on_any_media() {
    let Some(device) = Device::mounted() else { return };
    let size = MIB + 1536;
    let path = device.file(size);
    let options = ImageOptions { guest_block_bytes: None, ..DIRECT_512 };
    let other_file = tempfile::NamedTempFile::new().unwrap();
    other_file.as_file().set_len(size).unwrap();
    let geometry = |path: &Path, direct| {
        let image = RawImage::open(path, ImageOptions { direct, ..options }).unwrap();
        (image.geometry(), image.size_bytes())
    };
    let shown = geometry(&path, true);
    assert_eq!(shown.0.block_bytes, 512);
    assert_eq!([geometry(&path, false), geometry(other_file.path(), true)], [shown; 2]);
    exercise(Rig::new(RawImage::open(&path, options).unwrap()), size / 512);
    exercise(Rig::new(without_uring(RawImage::open(&path, options).unwrap())), size / 512);
    assert_eq!(fs::metadata(&path).unwrap().len(), size);
}

#[test]
fn host_that_begins_to_refuse_sectors_causes_no_error() {
    let Some(device) = Device::new(8 * MIB) else { return };
    let image = RawImage::open(&device.path, DIRECT_512).unwrap();
    // Simulates a host that accepted I/O of 512 bytes when the image was opened but does not accept
    // it now.
    image.forget_unit();
    exercise(Rig::new(image.clone()), 8 * MIB / 512);
}

#[test]
fn requested_block_size_is_used() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(MIB + 512).unwrap();
    let options = ImageOptions { guest_block_bytes: Some(4096), ..WRITABLE };
    assert_eq!(block_bytes(file.path(), WRITABLE), 512);
    let image = RawImage::open(file.path(), options).unwrap();
    assert_eq!((image.geometry().block_bytes, image.size_bytes()), (4096, MIB));
    let mut rig = Rig::new(image);
    assert_eq!(rig.write(1, &[1; 512]), VIRTIO_BLK_S_IOERR as u8);
    assert_eq!(rig.write(8, &pattern(4096, 1)), OK);
}

/// Queues write adjacent sectors of shared blocks concurrently, while rings write whole blocks.
#[test]
fn queues_that_change_the_same_blocks_lose_nothing() {
    const QUEUES: usize = 4;
    let Some(device) = Device::new(8 * MIB) else { return };
    let backend = RawImage::open(&device.path, DIRECT_512).unwrap();
    let block = Block::new(DiskShape { queues: QUEUES as u16, ..shape() }, backend).unwrap();
    let features = block.features();
    let mut rig = Rig::with(block, features);
    for round in 0..50u8 {
        let sent = (0..QUEUES * 4).map(|nth| {
            // Every fourth write covers a whole block. The others write single sectors of shared
            // blocks.
            let (sector, sectors) =
                if nth % 4 == 3 { (64 + nth as u64 * 8, 8) } else { (nth as u64, 1) };
            let (header, data) = (HEADER + 0x200 + 0x10 * nth as u64, DATA + 0x1000 * nth as u64);
            let status = STATUS + nth as u64;
            let bytes =
                [&VIRTIO_BLK_T_OUT.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
            rig.driver.write(header, &bytes);
            rig.driver.write(data, &pattern(sectors * 512, round ^ nth as u8));
            rig.driver.write(status, &[UNTOUCHED]);
            let buffers = [
                Buffer::Out(header, 16),
                Buffer::Out(data, sectors as u32 * 512),
                Buffer::In(status, 1),
            ];
            rig.driver.add(nth % QUEUES, &buffers);
            (sector, sectors, nth)
        });
        let sent: Vec<_> = sent.collect();
        (0..QUEUES).for_each(|queue| rig.driver.kick(queue));
        for (_, _, nth) in &sent {
            rig.driver.wait_used(nth % QUEUES);
        }
        assert_eq!(rig.driver.read(STATUS, sent.len() as u32), vec![OK; sent.len()]);
        for (sector, sectors, nth) in sent {
            let expected = pattern(sectors * 512, round ^ nth as u8);
            assert_eq!(
                rig.read(sector, sectors as u32 * 512),
                Ok(expected),
                "round {round}, sector {sector}"
            );
        }
    }
}
