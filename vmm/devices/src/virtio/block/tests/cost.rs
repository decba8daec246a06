//! Workloads whose instructions are counted with callgrind (docs/design/benchmarks.md).

use std::fs::File;

use tempfile::TempDir;
use virtio_bindings::virtio_blk::VIRTIO_BLK_S_OK;

use super::image::without_uring;
use super::volume::{disk_of_new_volume, new_pool};
use super::*;
use crate::disk::image::{ImageOptions, RawImage};
use crate::pool::{PmPool, VolumeFormat, VolumeOptions};
use crate::virtio::testing::counted_requests;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const PAGE_BYTES: usize = 4096;
/// Number of positions on the disk that requests access in turn.
const PAGES: u64 = 256;

fn writes(mut rig: Rig) {
    let data = pattern(PAGE_BYTES, 1);
    for nth in 0..counted_requests(PAGES) {
        assert_eq!(rig.write(nth % PAGES * 8, &data), OK);
    }
    assert_eq!(rig.read(0, PAGE_BYTES as u32), Ok(data));
}

fn reads(mut rig: Rig) {
    let data = pattern(PAGE_BYTES, 2);
    assert_eq!(rig.write(0, &data), OK);
    for _ in 0..counted_requests(PAGES) {
        assert_eq!(rig.read(0, PAGE_BYTES as u32).as_deref(), Ok(&data[..]));
    }
}

fn with_volume(load: impl Fn(Rig)) {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    load(Rig::new(disk_of_new_volume(&folder)));
}

fn with_thin_volume(load: impl Fn(Rig)) {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let pool = new_pool(&folder);
    let options = VolumeOptions::thick(20 << 20, VolumeFormat::Btt);
    pool.create_volume("thin", VolumeOptions { thin: true, ..options }).unwrap();
    load(Rig::new(pool.open_volume("thin").unwrap().into_disk().unwrap().device));
}

fn with_image(load: impl Fn(Rig)) {
    let folder = TempDir::new_in("/dev/shm").unwrap();
    let path = folder.path().join("image");
    File::create(&path).unwrap().set_len(PAGES * PAGE_BYTES as u64).unwrap();
    load(Rig::new(without_uring(RawImage::open(&path, ImageOptions::default()).unwrap())));
}

#[test]
fn volume_returns_each_page_that_was_written() {
    with_volume(writes);
}

#[test]
fn volume_returns_the_same_page_to_each_read() {
    with_volume(reads);
}

#[test]
fn thin_volume_returns_each_page_that_was_written() {
    with_thin_volume(writes);
}

#[test]
fn thin_volume_returns_the_same_page_to_each_read() {
    with_thin_volume(reads);
}

#[test]
fn image_without_io_uring_returns_each_page_that_was_written() {
    with_image(writes);
}

#[test]
fn image_without_io_uring_returns_the_same_page_to_each_read() {
    with_image(reads);
}
